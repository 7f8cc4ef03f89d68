"""The benchmarks on torch's CPU with the clock taken out."""

from types import SimpleNamespace

import pytest

from bench.lib import data, harness, report


class FakeTimer:
    """A Timer of calls on the CPU, each of which takes a millisecond."""

    sm_mhz = None

    def __init__(self, repeats):
        self.repeats = repeats

    def compare(self, calls):
        for call in calls.values():
            call()
        timing = {"ms": 1.0, "quartiles": (0.9, 1.1), "repeats": self.repeats, "late": 0}
        return {name: SimpleNamespace(**timing) for name in calls}

    def ceilings(self):
        return {"matmul_tflops": 784.0, "copy_gbps": 4290.0}


def without_gpu(monkeypatch, results):
    """Prepare for runs that write into the folder ``results``; returns torch."""
    torch = pytest.importorskip("torch")
    from bench.lib import timing

    monkeypatch.setattr(timing, "Timer", FakeTimer)
    monkeypatch.setattr(data, "DEVICE", "cpu")
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(harness, "machine_fields", lambda: {"gpu": "G", "versions": {}})
    return torch
