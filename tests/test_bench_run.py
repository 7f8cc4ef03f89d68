"""Whole runs of bench attention on the CPU with the clock taken out, and the clock itself."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("rich", reason="the benchmarks print with rich (pip install rich)")

from bench_on_cpu import without_gpu  # noqa: E402

from bench.attention import attention  # noqa: E402
from bench.lib import providers  # noqa: E402

ROW_FIELDS = "op pass dtype head_dim batch seqlen_q seqlen_k heads heads_kv causal impl ms tflops"


class SimulatedGPU:
    """torch.cuda on a clock of its own in ms; the calls a and b take 2 and 400 of them."""

    def __init__(self, monkeypatch, torch):
        self.now, self.log, self.host_is_late = 0.0, [], False
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = gpu.now

            def query(self):
                return gpu.host_is_late

            def elapsed_time(self, end):
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.work("sleep", 7.0))
        self.calls = {"a": lambda: self.work("a", 2.0), "b": lambda: self.work("b", 400.0)}

    def work(self, name, ms):
        self.now += ms
        self.log.append(name)


@pytest.fixture
def simulation(monkeypatch):
    """A simulated GPU, and a Timer of twelve rounds on it."""
    torch = pytest.importorskip("torch")
    from bench.lib.timing import Timer

    gpu, timer = SimulatedGPU(monkeypatch, torch), Timer.__new__(Timer)
    timer.repeats, timer.least_repeats = 12, 5
    timer.flush = [SimpleNamespace(zero_=lambda: gpu.work("write", 3.0)), None]
    timer.largest = None
    monkeypatch.setattr(torch, "amax", lambda x, axis, out: gpu.work("read", 3.0))
    return gpu, timer


def test_timer(simulation):
    gpu, timer = simulation
    timings = timer.compare(gpu.calls)
    # Neither the L2 nor the sleep is in the time; what is slow leaves after five repeats.
    measured = {name: (x.ms, x.quartiles, x.repeats) for name, x in timings.items()}
    assert measured == {"a": (2.0, (2.0, 2.0), 12), "b": (400.0, (400.0, 400.0), 5)}
    rounds = gpu.log[6:]  # after three runs of each to warm up
    before = ["write", "read", "sleep"]
    assert rounds[:8] == [*before, "b", *before, "a"]
    assert rounds[8:16] == [*before, "a", *before, "b"]
    assert [timing.late for timing in timings.values()] == [0, 0]


def test_quartiles(simulation):
    gpu, timer = simulation
    timer.repeats, samples = 5, iter([1.0] * 3 + [5.0, 1.0, 2.0, 4.0, 3.0])
    (timing,) = timer.compare({"a": lambda: gpu.work("a", next(samples))}).values()
    assert (timing.ms, timing.quartiles) == (3.0, (2.0, 4.0))
    timer.repeats = 1
    (timing,) = timer.compare({"a": lambda: gpu.work("a", 2.0)}).values()
    assert timing.quartiles == (2.0, 2.0)


def test_timer_counts_a_late_host(simulation):
    gpu, timer = simulation
    gpu.host_is_late = True
    late = {name: timing.late for name, timing in timer.compare(gpu.calls).items()}
    assert late == {"a": 12, "b": 5}


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """bench attention on torch's CPU with the clock taken out; returns its status and its file."""
    torch = without_gpu(monkeypatch, tmp_path)
    attention_math = providers.PROVIDERS["sdpa-math"].load()

    def wrong_forward(q, k, v, causal):
        return attention_math(q, k, v, causal) * 1.2

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.roll(1, dims=-1)

    def wrong_backward(q, k, v, causal):
        return attention_math(q, WrongGradient.apply(k), v, causal)

    for name, function in {
        "sdpa-efficient": wrong_forward,
        "cupyflash-simt": wrong_backward,
    }.items():
        fake = providers.Provider(name, lambda function=function: function, layout="bhsd")
        monkeypatch.setitem(providers.PROVIDERS, name, fake)

    def run(*arguments):
        status = attention.main([*arguments, "--output", "dry"])
        return status, json.loads((tmp_path / "dry.json").read_text())

    return run


def test_dry_run(dry_run, capsys):
    text = "--head-dim 16 --heads 4 --heads-kv 2 --seqlen 200 --batch-tokens 400 --repeats 3"
    names = ["sdpa-math", "sdpa-efficient", "cupyflash-simt", "flash-attn-4"]
    status, results = dry_run(*text.split(), "--providers", *names)
    assert status == 1  # one of ours was wrong
    assert [list(x)[:13] for x in results["rows"]] == [ROW_FIELDS.split()] * len(results["rows"])
    timed = {(x["pass"], x["impl"]) for x in results["rows"]}
    # A wrong forward is in no table; a wrong backward, in none of the backward.
    assert timed == {("fwd", "sdpa-math"), ("fwd", "cupyflash-simt"), ("bwd", "sdpa-math")}
    assert results["command"].startswith("python -m bench attention --head-dim 16")
    printed = capsys.readouterr().out
    assert "sdpa-efficient left out from fwd" in printed and "WRONG RESULT: out" in printed
    assert "cupyflash-simt left out from bwd" in printed and "WRONG RESULT: dk" in printed
    assert "flash-attn-4 left out" in printed and "No module named" in printed


def test_dry_run_of_peers_only_succeeds(dry_run):
    text = "--head-dim 16 --heads 2 --seqlen 130 --batch-tokens 130 --dtype float32 --causal yes"
    status, results = dry_run(*text.split(), "--providers", "sdpa-math")
    assert status == 0 and len(results["rows"]) == 2
