"""The `target` fixture, the number of processes, the folder of compiled kernels, and
`pytest --gpu-report FILE`, which writes what a GPU run found.
"""

import datetime
import gc
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import pytest
from matrix import select
from places import ROOT
from targets import EMULATED, FORCED, TARGETS, Target, compute_capability, has, large_tiles

from cupyflash import environment

EMULATED_TESTS = [  # of results, whose tensors may come from the CPU
    *("attention", "attention_backward", "bias", "dropout", "group_shares", "head_dims"),
    *("huge_scores", "key_parts", "lengths", "lse_gradient", "moving_maximum"),
    *("short_sequences", "sinks"),
    *("triangle", "turns", "varlen", "whole_heads"),
]
# Folders of which a forced backend changes nothing; .ci/gpu_report.py has them too.
NO_BACKEND = ("baselines", "bench", "block", "diffusion", "group_norm", "jit", "norm", "repository")
LARGE_POOL = 2**30  # bytes that nobody uses
MOST_WORKERS = 16  # each has torch in memory, and more have no tests left
# Tests of ten seconds to two minutes.
LONGEST = (
    *("emulator", "compiled_calls", "types", "turns", "paged_decode", "paged_prefill", "sanitizer"),
    *("compile", "docs", "operations_at_once", "score_texts", "unknown_sizes", "compiled_sdpa"),
)
GPU_REPORT_SCRIPT = ROOT / ".ci" / "gpu_report.py"


# Benchmarks need torch and rich, and groups of processes torch.
NEEDS = {"bench/test_*.py": ("torch", "rich"), "parallel/test_*.py": ("torch",)}
collect_ignore_glob = [x for x in NEEDS if not all(map(importlib.util.find_spec, NEEDS[x]))]


@pytest.fixture
def benchmarks(monkeypatch, tmp_path):
    """Runs small benchmarks on the CPU; see small_benchmarks.py."""
    from small_benchmarks import Benchmarks

    return Benchmarks(monkeypatch, tmp_path)


@pytest.fixture(scope="session")
def groups():
    """Groups of processes by their size, which all tests of a run share; see parallel/ranks.py."""
    from ranks import Groups

    with Groups() as groups:
        yield groups


@pytest.fixture
def two(groups):
    return groups(2)


@pytest.fixture
def four(groups):
    return groups(4)


@pytest.fixture
def target(request):
    """The target of the test, its backend forced; every other test has large tiles on Hopper."""
    large = request.param.gpu and zlib.crc32(request.node.nodeid.encode()) % 2
    with environment.override(backend=request.param.backend or FORCED), large_tiles(large):
        yield request.param


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Under CUPYFLASH_BACKEND a test of what that backend does not compute is skipped.

    That is as documented: the error names the backend and the variable. The targets of fp16x3 meet
    what it leaves to simt (wide heads, say), which other targets run.
    """
    try:
        return (yield)
    except (NotImplementedError, AssertionError) as error:  # the latter from another process
        if f"the backend {FORCED or 'fp16x3'} (CUPYFLASH_BACKEND) does not" in str(error):
            pytest.skip(str(error).strip().splitlines()[-1])
        raise


@pytest.fixture(autouse=True, scope="session")
def emulated():
    """Under EMULATED_KERNELS, calls with tensors of torch launch emulated kernels."""
    if not EMULATED:
        yield
        return
    from emulator import hopper

    with hopper(Path(EMULATED)):
        yield


@pytest.fixture(scope="session")
def emulated_kernels():
    """The folder of compiled kernels that all processes of a run share."""
    return Path(os.environ["XDG_CACHE_HOME"]) / "emulated"


@pytest.fixture(autouse=True)
def small_memory_pools():
    """Gives large cached blocks back to the GPU, which other processes of the run share.

    The current device is the first one again after each test; JAX leaves the last one when it
    begins.
    """
    yield
    if "cupy" in sys.modules and compute_capability()[0]:
        runtime = sys.modules["cupy"].cuda.runtime
        if "jax" in sys.modules:
            runtime.setDevice(0)
        assert runtime.getDevice() == 0
    for name, shrink in (("cupy", _shrink_cupy), ("torch", _shrink_torch)):
        if name in sys.modules and compute_capability()[0]:
            shrink(sys.modules[name])


def _shrink_cupy(cupy):
    pool = cupy.get_default_memory_pool()
    if pool.free_bytes() > LARGE_POOL:
        pool.free_all_blocks()


def _shrink_torch(torch):
    cuda = torch.cuda
    if cuda.is_initialized() and cuda.memory_reserved() - cuda.memory_allocated() > LARGE_POOL:
        cuda.empty_cache()


def pytest_collection_modifyitems(config, items):
    """Leave out what cannot run here; the summary says so in one line for each reason.

    A run of a forced backend leaves out what the run without one has found, see `_same_if_forced`.
    A run with emulated kernels leaves out all but `EMULATED_TESTS`. The longest begin first, or one
    core would wait for them at the end.
    """
    left_out = [item for item in items if _left_out(item)]
    items[:] = [item for item in items if not _left_out(item)]
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = _longest_first(items, workers)
    config.hook.pytest_deselected(items=left_out)


def _longest_first(items, workers):
    """The longest tests first in each of the equal stretches that workers of pytest-xdist get."""
    others = [item for item in items if item.path.stem[5:] not in LONGEST]
    longest = [item for item in items if item.path.stem[5:] in LONGEST]
    found = []
    for number in range(workers):
        found += longest[number::workers]
        room = max((number + 1) * len(items) // workers - len(found), 0)
        found += others[:room]
        del others[:room]
    return found


def pytest_collection_finish():
    """Collections of garbage pass over the modules and the tests, which are a million objects."""
    gc.collect()
    gc.freeze()


def _left_out(item):
    callspec = getattr(item, "callspec", None)
    target = callspec.params.get("target") if callspec else None
    if not isinstance(target, Target):  # no such parameter, or one that has no value here
        target = None
    if EMULATED and not (target and target.backend and item.path.stem[5:] in EMULATED_TESTS):
        return True
    if FORCED and (_same_if_forced(item) or (target and (target.backend or not target.gpu))):
        return True
    return bool(target and target.missing)


def _same_if_forced(item):
    """Whether a test does the same under CUPYFLASH_BACKEND as without it.

    So do tests of the CPU, and those of a target with a backend: the fixture `target` forces it in
    each run, and that without CUPYFLASH_BACKEND has the targets of all backends.
    """
    emulated = "emulated_kernels" in item.fixturenames  # by processes without the variable
    marked = item.get_closest_marker("no_backend") is not None
    return emulated or marked or item.path.parent.name in NO_BACKEND


def pytest_terminal_summary(terminalreporter):
    targets = [*TARGETS, *select("torch", "cuda")]
    for reason in sorted({target.missing for target in targets} - {""}):
        terminalreporter.write_line(f"left out: {reason}")


def pytest_addoption(parser):
    parser.addoption("--gpu-report", metavar="FILE", help="write what test files found on a GPU")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config):
    """Without a GPU, all tests run on all cores, if no option says how or which.

    On a GPU they run in one process, as many measure its memory or time.
    """
    option = config.option
    some = config.args_source is config.ArgsSource.ARGS or option.keyword or option.markexpr
    absent = not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput")
    if absent or some or option.capture == "no" or compute_capability()[0]:
        return
    if option.numprocesses is None and not option.tx:
        option.numprocesses = "auto"  # which is none with --pdb
        option.maxprocesses = option.maxprocesses or MOST_WORKERS
        option.dist = "worksteal" if option.dist == "no" else option.dist


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        # The user's own folder keeps nothing of a run, whose processes share this one. Kernels that
        # the next run shall find, too, go where CUPYFLASH_CACHE_DIR says.
        folder = tempfile.TemporaryDirectory(prefix="cupyflash-tests-")
        os.environ["XDG_CACHE_HOME"] = folder.name
        config.add_cleanup(folder.cleanup)
    if config.getoption("numprocesses", None):
        # The workers of pytest-xdist, which start after this, share the cores: with a pool of
        # threads for each, most of the time would go into threads that wait for each other.
        for library in ("OMP", "OPENBLAS", "MKL"):
            os.environ.setdefault(f"{library}_NUM_THREADS", "1")
        # So would those of Inductor, up to 32 for each process that compiles.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Inductor does not ask the C++ compiler about each set of instructions of the CPU, which takes
    # a process longer than the code that it then compiles.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    config.addinivalue_line("markers", "large: needs 40 GB of free GPU memory, skipped without")
    config.addinivalue_line("markers", "no_backend: the same whatever CUPYFLASH_BACKEND says")
    path = config.getoption("--gpu-report")
    if not path or hasattr(config, "workerinput"):  # a worker of pytest-xdist reports to its parent
        return
    capability, reason = compute_capability()
    if not capability:
        raise pytest.UsageError(f"--gpu-report: {reason}")
    selected = config.getoption("keyword") or config.getoption("markexpr")
    if selected or any("::" in arg for arg in config.args):
        raise pytest.UsageError("--gpu-report: needs whole test files, got a selection of tests")
    files_alone = all(arg.endswith(".py") for arg in config.args)
    names = {Path(arg).name for arg in config.args} if files_alone else set()
    config.pluginmanager.register(GpuReport(Path(path), machine(), names), "gpu-report")


class GpuReport:
    """Writes the results of each test file when its last test has ended.

    Args:
        names: of the test files that run; none for all.
    """

    def __init__(self, path: Path, machine: dict[str, str], names: set[str]) -> None:
        self.path = path.absolute()
        self.machine = machine
        self.script = gpu_report_module()
        self.sources = self.script.sources()
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        new = {"date": date, "passed": 0, "skipped": 0, "seconds": 0.0}  # seconds of all processes
        self.results = {
            file: {"digest": digest, **new, "failed": []}
            for file, digest in self.script.test_files().items()
            if not names or Path(file).name in names
        }
        self.sanitizer: dict[str, str] = {}
        self.unfinished: dict[str, set[str]] = {}  # the tests of a file that have not ended

    def pytest_sessionstart(self, session):
        self.terminal = session.config.pluginmanager.get_plugin("terminalreporter")

    def pytest_collection_finish(self, session):
        self.pytest_xdist_node_collection_finished([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        if not self.unfinished:  # all workers have the same tests
            for test in ids:
                self.unfinished.setdefault(test.partition("::")[0], set()).add(test)

    def pytest_collectreport(self, report):
        file = report.nodeid.partition("::")[0]
        if report.failed and file in self.results:
            self.results[file]["failed"].append(report.nodeid)

    def pytest_runtest_logreport(self, report):
        """Tests record ("sanitizer", "tool kernel: result") with `record_property`."""
        file = report.nodeid.partition("::")[0]
        result = self.results[file]
        result["seconds"] = round(result["seconds"] + report.duration, 3)
        result["passed"] += report.passed and report.when == "call"
        result["skipped"] += report.skipped
        if report.failed:
            result["failed"].append(report.nodeid)
            crash = getattr(report.longrepr, "reprcrash", None)
            message = (crash.message if crash else report.longreprtext).partition("\n")[0]
            self.terminal.write_line(f"\nfailed: {report.nodeid}: {message}")
        if report.when in ("setup", "call"):
            return  # a test ends with its teardown, or with its worker ("???")
        for name, value in report.user_properties:
            if name == "sanitizer":
                run, _, found = value.partition(": ")
                self.sanitizer[run] = found
        self.unfinished[file].remove(report.nodeid)
        if not self.unfinished[file]:
            self.write([file])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus):
        """Comes before xdist waits for its workers to end, in which a time limit may strike."""
        code = pytest.ExitCode  # the last of these where all tests were left out
        if exitstatus in (code.OK, code.TESTS_FAILED, code.NO_TESTS_COLLECTED):
            self.write([file for file in self.results if file not in self.unfinished])  # no tests
        for file, tests in sorted(self.unfinished.items()):
            if tests:
                some = ", ".join(sorted(test.partition("::")[2] for test in tests)[:5])
                left = f"{len(tests)} tests are left, {some}"
                self.terminal.write_line(f"not in the report: {file}, {left}")
        self.terminal.write_line(f"\nwrote {self.path}")

    def write(self, files: list[str]) -> None:
        """Put the results of these test files into the report."""
        report = self.script.with_results(
            self.script.load(self.path),
            self.machine,
            self.sources,
            FORCED or self.script.RUNS[0],
            {file: self.results[file] for file in files},
            self.sanitizer,
        )
        self.path.write_text(json.dumps(report, indent=1) + "\n")


def gpu_report_module():
    """The script .ci/gpu_report.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("gpu_report", GPU_REPORT_SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def machine() -> dict[str, str]:
    """GPU, driver and versions."""
    import cupy

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    cuda = cupy.cuda.runtime.runtimeGetVersion()
    return {
        "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": driver,
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "torch": importlib.metadata.version("torch") if has("torch") else "absent",
        "cupy": cupy.__version__,
    }
