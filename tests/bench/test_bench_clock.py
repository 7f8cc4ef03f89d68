"""The clock of benchmarks and of the command line, on a simulated GPU."""

from types import SimpleNamespace

import pytest
from fakes import fake_facts, fake_modules
from tiny_kernel import needs_nvrtc

pytest.importorskip("torch", reason="the clock of bench is beside torch")

from bench.lib import timing as of_bench  # noqa: E402
from cupyflash.testing import timing  # noqa: E402


class SimulatedGPU:
    """The module cupy with a clock of its own in ms; the calls a and b take 2 and 400 of them."""

    def __init__(self):
        self.now, self.log, self.host_is_late = 0.0, [], False
        gpu = self

        class Event:
            def record(self):
                self.at = gpu.now

            def synchronize(self):
                pass

            @property
            def done(self):
                return gpu.host_is_late

        device = SimpleNamespace(id=0, synchronize=lambda: None)
        elapsed = lambda start, end: end.at - start.at
        self.cuda = SimpleNamespace(Event=Event, Device=lambda: device, get_elapsed_time=elapsed)
        self.calls = {"a": lambda: self.work("a", 2.0), "b": lambda: self.work("b", 400.0)}

    def zeros(self, shape, dtype):
        self.flushed = shape
        memory = SimpleNamespace(
            fill=lambda value: self.work("write", 3.0), max=lambda out: self.work("read", 3.0)
        )
        return (memory, memory) if shape else memory

    def RawKernel(self, source, name):
        return lambda grid, block, arguments: self.work("wait", 1e-6 * arguments[0])

    def work(self, name, ms):
        self.now += ms
        self.log.append(name)


@pytest.fixture
def gpu(monkeypatch):
    gpu = SimulatedGPU()
    fake_modules(monkeypatch, cupy=gpu)
    fake_facts(monkeypatch, timing, l2_bytes=200 << 20)
    timing._wait_kernel.cache_clear()
    yield gpu
    timing._wait_kernel.cache_clear()


def test_only_the_calls_are_timed(gpu):
    rounds = timing.Rounds(gpu.calls)
    assert gpu.log == ["a", "a", "a", "b", "b", "b"]  # to warm up
    del gpu.log[:]
    for names in ("ab", "ab", "a"):
        rounds.run(names)
    assert {name: (round(x.ms, 6), x.repeats, x.late) for name, x in rounds.timings().items()} == {
        "a": (2.0, 3, 0),
        "b": (400.0, 2, 0),
    }
    assert sorted(gpu.log[3::4]) == ["a", "a", "a", "b", "b"]
    assert all(gpu.log[i : i + 3] == ["write", "read", "wait"] for i in range(0, 20, 4))


def test_the_order_is_random(gpu):
    rounds = timing.Rounds(gpu.calls)
    del gpu.log[:]
    for _ in range(16):
        rounds.run()
    first = [x for x in gpu.log if x in "ab"][::2]
    assert 3 <= first.count("a") <= 13 and first not in (["a", "b"] * 8, ["b", "a"] * 8)


def test_the_l2_is_flushed(gpu):
    timing.Rounds({})
    assert gpu.flushed == ()  # the last one holds the maximum
    sizes = []
    gpu.zeros = lambda shape, dtype: sizes.append(shape) or (None, None)
    timing.Rounds({})
    assert sizes[0] == (2, 3 * (200 << 20) // 4)


def test_quartiles(gpu):
    samples = iter([1.0] * 3 + [5.0, 1.0, 2.0, 4.0, 3.0])
    rounds = timing.Rounds({"a": lambda: gpu.work("a", next(samples))})
    rounds.run()
    assert rounds.timings()["a"].quartiles == (5.0, 5.0)
    for _ in range(4):
        rounds.run()
    timed = rounds.timings()["a"]
    assert (timed.ms, *timed.quartiles) == pytest.approx((3.0, 2.0, 4.0))


def test_a_late_host_is_counted(gpu):
    rounds, seen = timing.Rounds(gpu.calls), []
    for number in range(5):
        gpu.host_is_late = number < 2
        rounds.run(meanwhile=lambda: seen.append(gpu.log[-1]))
    assert {x.late for x in rounds.timings().values()} == {2}
    assert len(seen) == 5 and set(seen) <= {"a", "b"}


@needs_nvrtc
def test_the_kernel_that_waits_compiles():
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    program = nvrtc.createProgram(timing.WAIT, "wait.cu", (), ())
    nvrtc.compileProgram(program, ("--gpu-architecture=sm_80",))
    assert b"wait" in nvrtc.getPTX(program)


def test_a_slow_provider_leaves(gpu, monkeypatch):
    mhz = iter(range(1000, 2000, 10))
    monkeypatch.setattr(of_bench.torch.cuda, "clock_rate", lambda: next(mhz))
    timer = of_bench.Timer(12)
    found = timer.compare(gpu.calls)
    assert {name: x.repeats for name, x in found.items()} == {"a": 12, "b": 5}
    assert timer.sm_mhz == 1055
    timer.least_repeats = 2
    assert timer.compare(gpu.calls)["b"].repeats == 3  # after a second
