"""The `target` fixture, and `pytest --gpu-report FILE`, which writes what a GPU run found."""

import datetime
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

# The workers of pytest-xdist share the cores: with a pool of threads for each, most of the time
# would go into threads of OpenMP that wait for each other. Set before anything imports NumPy.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from matrix import select
from targets import EMULATED, FORCED, TARGETS, Target, compute_capability, has

from cupyflash import environment

EMULATED_TESTS = [  # of results, whose tensors may come from the CPU
    *("attention", "attention_backward", "bias", "dropout", "group_shares", "head_dims"),
    *("huge_scores", "lengths", "lse_gradient", "moving_maximum", "short_sequences", "sinks"),
    *("triangle", "varlen"),
]
LARGE_POOL = 2**30  # bytes that nobody uses
GPU_REPORT_SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "gpu_report.py"


@pytest.fixture
def target(request):
    """The target of the test, its backend forced."""
    with environment.override(backend=request.param.backend or FORCED):
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


@pytest.fixture(autouse=True)
def small_memory_pools():
    """Gives large cached blocks back to the GPU, which other processes of the run share."""
    yield
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

    A run of a forced backend leaves out the CPU too, and the compilation of all kernels. A run with
    emulated kernels leaves out all but `EMULATED_TESTS`.
    """
    left_out = [item for item in items if _left_out(item)]
    items[:] = [item for item in items if not _left_out(item)]
    config.hook.pytest_deselected(items=left_out)


def _left_out(item):
    callspec = getattr(item, "callspec", None)
    target = callspec.params.get("target") if callspec else None
    if not isinstance(target, Target):  # no such parameter, or one that has no value here
        target = None
    if EMULATED and not (target and target.backend and item.path.stem[5:] in EMULATED_TESTS):
        return True
    if FORCED and (item.path.stem == "test_compile" or (target and not target.gpu)):
        return True
    return bool(target and target.missing)


def pytest_terminal_summary(terminalreporter):
    targets = [*TARGETS, *select("torch", "cuda")]
    for reason in sorted({target.missing for target in targets} - {""}):
        terminalreporter.write_line(f"left out: {reason}")


def pytest_addoption(parser):
    parser.addoption("--gpu-report", metavar="FILE", help="write the outcome of a whole GPU run")


def pytest_configure(config):
    config.addinivalue_line("markers", "large: needs 40 GB of free GPU memory, skipped without")
    path = config.getoption("--gpu-report")
    if not path or hasattr(config, "workerinput"):  # a worker of pytest-xdist reports to its parent
        return
    capability, reason = compute_capability()
    if not capability:
        raise pytest.UsageError(f"--gpu-report: {reason}")
    selected = config.getoption("keyword") or config.getoption("markexpr")
    if selected or any("::" in arg or arg.endswith(".py") for arg in config.args):
        raise pytest.UsageError("--gpu-report: needs the whole suite, got a selection")
    config.pluginmanager.register(GpuReport(Path(path)), "gpu-report")


class GpuReport:
    """Collects the results of a run and writes them at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.sanitizer: dict[str, str] = {}
        self.seconds: dict[str, float] = {}  # of the tests of a file, in all processes

    def pytest_runtest_logreport(self, report):
        """Tests record ("sanitizer", "tool kernel: result") with `record_property`."""
        file = report.nodeid.partition("::")[0]
        self.seconds[file] = self.seconds.get(file, 0.0) + report.duration
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == "sanitizer":
                    run, _, result = value.partition(": ")
                    self.sanitizer[run] = result

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        """Comes before xdist waits for its workers to end, in which a time limit may strike."""
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        gpu_report = gpu_report_module()
        files = gpu_report.file_digests()
        stats = terminal.stats
        failed = len(stats.get("failed", [])) + len(stats.get("error", []))
        run = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "passed": len(stats.get("passed", [])),
            "failed": failed,
            "skipped": len(stats.get("skipped", [])),
            "seconds": {file: round(x, 1) for file, x in sorted(self.seconds.items())},
        }
        report = gpu_report.merged(
            json.loads(self.path.read_text()) if self.path.is_file() else {},
            FORCED,
            machine(),
            run,
            dict(sorted(self.sanitizer.items())),
            files,
        )
        self.path.write_text(json.dumps(report, indent=1) + "\n")
        terminal.write_line(f"\nwrote {self.path}")


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
