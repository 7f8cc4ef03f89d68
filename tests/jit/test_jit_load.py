"""Architectures, loading on a device (a fake one), and filling the cache in processes."""

import ctypes
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_kernel
from fakes import fake_facts, fake_modules
from tiny_kernel import Scale, needs_nvrtc, run_python

from cupyflash import environment, jit
from cupyflash.jit import compiler, messages, pool
from cupyflash.jit.function import INVALID_CONTEXT, Function
from cupyflash.ops.attention import backends
from cupyflash.precompile import TOPICS


@pytest.fixture
def folder(tmp_path):
    with tiny_kernel.workspace(tmp_path) as path:
        yield path


@pytest.fixture
def compilations(monkeypatch):
    return tiny_kernel.record_compilations(monkeypatch)


@pytest.mark.parametrize(
    "capability, name",
    [((9, 0), "sm_90a"), ((7, 5), "sm_75"), ((8, 6), "sm_86"), ((10, 0), "sm_100")],
)
def test_arch_of(capability, name):
    assert jit.arch_of(capability) == name


@pytest.mark.parametrize(
    "capability, name",
    [
        ((9, 0), "sm_90a"),  # known
        ((12, 1), "sm_120"),  # too new for NVRTC: its cubins run on a higher minor number
        ((10, 3), "sm_100"),  # not sm_101, an integrated GPU
        ((8, 8), "sm_86"),  # not sm_87, and not sm_89, which is newer
        ((13, 0), r"12.9 compiles .* 9.0, 10.0.* has 13.0; pip .*nvidia-cuda-nvrtc>=13,<14"),
        ((7, 0), r"12.9 compiles .* has 7.0; pip .*nvidia-cuda-nvrtc-cu12"),
    ],
)
def test_target_arch(monkeypatch, capability, name):
    known = (75, 80, 86, 87, 89, 90, 100, 101, 120)
    fake_facts(monkeypatch, compiler, supported_archs=known, version="12.9")
    if name.startswith("sm_"):
        assert compiler.target_arch(capability) == name
    else:
        with pytest.raises(RuntimeError, match=name):
            compiler.target_arch(capability)


class FakeDevice:
    """Stands for a Hopper GPU; counts who is inside its context."""

    entered = 0
    compute_capability = "90"

    def __init__(self, device_id):
        self.id = device_id

    def __enter__(self):
        FakeDevice.entered += 1

    def __exit__(self, *_):
        FakeDevice.entered -= 1


class FakeModule:
    """Stands for cupy.RawModule, and for the RawKernel that it returns."""

    loaded: list[str] = []
    max_dynamic_shared_size_bytes = 0

    def __init__(self, *, path):
        assert FakeDevice.entered == 1
        assert Path(path).read_bytes()[:4] == b"\x7fELF"
        self.loaded.append(path)

    def get_function(self, name):
        assert name.encode() in Path(self.loaded[-1]).read_bytes()
        return self

    @property
    def kernel(self):
        assert FakeDevice.entered == 1 and self.max_dynamic_shared_size_bytes == 65536
        return SimpleNamespace(ptr=77)


@needs_nvrtc
def test_eight_threads_load_one_kernel(folder, compilations, monkeypatch):
    import cupy

    monkeypatch.setattr(cupy, "RawModule", FakeModule)
    monkeypatch.setattr(cupy.cuda, "Device", FakeDevice)
    monkeypatch.setattr(FakeModule, "loaded", [])
    barrier, functions = threading.Barrier(8), []

    def work():
        barrier.wait()
        functions.append(jit.load(Scale(), 0))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(functions) == 8 and len(set(functions)) == 1
    assert compilations == [(Scale(), "sm_90a")] and len(FakeModule.loaded) == 1
    assert jit.load(Scale(), 1) not in functions  # another device: its own function,
    assert len(compilations) == 1 and len(FakeModule.loaded) == 2  # but the same cubin


# Launches -------------------------------------------------------------------------------------


class FakeLaunches:
    """Stands for the launches of CuPy's driver: notes the sizes and the bytes of the argument.

    Attributes:
        raises: what the next launch raises.
        within: what the next launch calls before it reads its argument.
    """

    def __init__(self, monkeypatch, size):
        import cupy

        self.size, self.seen, self.freed = size, [], []
        self.raises = self.within = None
        monkeypatch.setattr(cupy.cuda.driver, "launchKernel", self.launch)
        monkeypatch.setattr(cupy.cuda.driver, "launchCooperativeKernel", self.together)
        monkeypatch.setattr(cupy.cuda.runtime, "free", self.freed.append)

    def launch(self, ptr, *sizes_and_place, together=False):
        *sizes, place = sizes_and_place if together else sizes_and_place[:-1]
        if self.within is not None:
            within, self.within = self.within, None
            within()
        at = ctypes.c_void_p.from_address(place).value
        self.seen.append((ptr, tuple(sizes), together, ctypes.string_at(at, self.size)))
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error

    def together(self, *arguments):
        self.launch(*arguments, together=True)


class DriverError(RuntimeError):
    """Stands for CuPy's CUDADriverError."""

    def __init__(self, status):
        self.status = status


@pytest.fixture
def launches(monkeypatch):
    pytest.importorskip("cupy")
    return FakeLaunches(monkeypatch, 3)


def test_what_a_launch_hands_to_the_driver(launches):
    function = Function(SimpleNamespace(ptr=77), 3)
    function(5, 128, b"abc", 2**17, 2**33)
    function(6, 64, b"def", 0, 9, cooperative=True)
    first, second = (5, 1, 1, 128, 1, 1, 2**17, 2**33), (6, 1, 1, 64, 1, 1, 0, 9)
    assert launches.seen == [(77, first, False, b"abc"), (77, second, True, b"def")]
    for wrong in (b"ab", b"abcd"):
        with pytest.raises(ValueError):
            function(5, 128, wrong, 0, 9)
    function(5, 128, b"ghi", 0, 9)
    assert launches.seen[-1][-1] == b"ghi" and len(launches.seen) == 3


def test_launches_of_other_threads_keep_their_argument(launches):
    """CuPy lets other threads run while the driver reads the argument."""
    function = Function(SimpleNamespace(ptr=77), 3)

    def other():
        thread = threading.Thread(target=function, args=(1, 32, b"two", 0, 9))
        thread.start()
        thread.join()

    launches.within = other
    function(1, 32, b"one", 0, 9)
    assert [x[-1] for x in launches.seen] == [b"two", b"one"]


@pytest.mark.parametrize("together", [False, True])
def test_a_thread_without_a_context_gets_one(launches, together):
    function = Function(SimpleNamespace(ptr=77), 3)
    launches.raises = DriverError(INVALID_CONTEXT)
    function(1, 32, b"abc", 0, 9, together)
    assert launches.freed == [0] and launches.seen[0] == launches.seen[1]
    launches.raises = DriverError(720)
    with pytest.raises(DriverError):
        function(1, 32, b"abc", 0, 9, together)
    assert launches.freed == [0] and len(launches.seen) == 3


# In processes ---------------------------------------------------------------------------------

WARMUP = """
from tiny_kernel import Scale
from cupyflash import environment, jit
if __name__ == "__main__":
    configs = [Scale(factor=int(factor)) for factor in sys.argv[1:]]
    with environment.override(cache_dir=environment.current().cache_dir / "inner"):
        tasks = [(config, arch) for config in configs for arch in ("sm_80", "sm_90a")]
        for built in jit.build_all(tasks, jobs=2):
            print(built.path)
"""


@needs_nvrtc
def test_warmup_in_processes(folder, compilations):
    status, output, error = run_python(WARMUP, folder, "3", "4")
    lines = error.splitlines()
    assert status == 0, error
    assert re.match(r"cupyflash: 4 kernels to compile, about \d seconds in 2 processes", lines[0])
    assert re.match(r"\[4/4\] scale sm_\w+, in \d+ seconds?$", lines[-1])
    tasks = [(Scale(factor=f), a) for f in (3, 4) for a in ("sm_80", "sm_90a")]
    with environment.override(cache_dir=folder / "cache" / "inner"):  # workers followed it
        found = jit.build_all(tasks, jobs=1, progress=False)
    assert output.split() == [str(built.path) for built in found]
    assert compilations == []


@needs_nvrtc
def test_warmup_in_processes_reports_errors(folder):
    (folder / "cuda_src/common/offset.cuh").write_text("broken\n")
    status, _, error = run_python(WARMUP, folder, "3", "4")
    assert status == 1
    assert "CompileError: scale: NVRTC" in error and "offset.cuh(1): error" in error


@needs_nvrtc
def test_warmup_without_main_guard_says_so(folder):
    script = WARMUP.replace('if __name__ == "__main__"', "if True")
    status, _, error = run_python(script, folder, "3")
    assert status == 1 and 'under `if __name__ == "__main__"`' in error


@needs_nvrtc
def test_warmup_shows_progress_where_there_is_no_terminal(folder, monkeypatch, capsys):
    """Lines every few seconds with the time that is left; those in the cache do not count."""
    monkeypatch.setattr(messages, "_LINE_SECONDS", 0)
    jit.build(Scale(factor=7), "sm_80")
    tasks = [
        (Scale(), "sm_80"),
        (Scale(), "sm_90a"),
        (Scale(factor=7), "sm_80"),
        (Scale(), "sm_80"),
    ]
    assert len(jit.build_all(tasks, jobs=1)) == 3
    lines = re.sub(r"\d+ seconds?", "1 second", capsys.readouterr().err).splitlines()
    assert lines == [
        "cupyflash: 2 kernels to compile (1 more is in the cache), about 1 second in 1 process",
        "[1/2] scale sm_80, about 1 second left",
        "[2/2] scale sm_90a, in 1 second",
    ]
    jit.build_all(tasks)
    assert capsys.readouterr().err == "cupyflash: 0 kernels to compile (3 more are in the cache)\n"


@needs_nvrtc
@pytest.mark.parametrize("rich", [True, False])
def test_warmup_on_a_terminal(folder, monkeypatch, capsys, rich):
    if not rich:
        fake_modules(monkeypatch, rich=None)
    fake_facts(monkeypatch, sys.stderr, isatty=True)
    jit.build_all([(Scale(), "sm_80")], jobs=1)
    error = capsys.readouterr().err
    assert error.startswith("cupyflash: 1 kernel to compile, about ")
    assert ("━" in error and "1/1" in error) if rich else "[1/1] scale sm_80, in " in error


def test_forecast():
    tasks = [(config, "sm_80") for config in backends.BACKENDS["sm80"].configurations((8, 0))]
    assert pool.forecast(tasks, 1) == pytest.approx(pool.SECONDS["attention"] * len(tasks))
    assert pool.forecast(tasks, 4) < pool.forecast(tasks, 2) < pool.forecast(tasks, 1)
    topics = {
        config.source.split("/")[0] for t in TOPICS.values() for config in t.configurations((9, 0))
    }
    assert topics | {"attention"} == set(pool.SECONDS)
