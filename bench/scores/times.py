"""What a function costs beside its kernels: first calls, tiles of a mask, host time of a call."""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from bench.attention.host_time import sample
from bench.lib import data
from bench.lib.harness import Run
from bench.scores.problems import DOCUMENT
from cupyflash.testing.problem import Problem

TILES = (8192, 131072)  # tokens
SMALL = Problem("bfloat16", head_dim=64, batch=1, seqlen=128, heads=8, heads_kv=8, causal=False)
CALLS, SAMPLES = 200, 31
FIRST_CALLS = ("empty cache", "second process")
HOST_PASSES = ("fwd", "fwd+bwd")
FACTOR = 0.5  # that a function captures
FINDS, HAS = "cupyflash-finds-tiles", "cupyflash-has-tiles"


def tiles(run: Run, tokens: int) -> None:
    """Rows of a forward that finds the tiles of its mask, and of one that has them already."""

    def row(impl: str, ms: float) -> dict[str, Any]:
        what = f"tiles of {tokens} x {tokens}"
        return {"op": "tiles", "what": what, "impl": impl, "pass": "fwd", "ms": round(ms, 5)}

    calls = tiles_calls(tokens)
    run.compare(f"tiles {tokens}", list(calls), calls.__getitem__, row)


def tiles_calls(tokens: int) -> dict[str, Callable[[], Any]]:
    import torch

    import cupyflash

    problem = Problem("bfloat16", 64, 1, tokens, 1, 1, False)
    tensors = data.of_problem(problem)
    document = torch.arange(tokens, device=data.DEVICE, dtype=torch.int32) // DOCUMENT
    mask = cupyflash.Mask(lambda b, h, q, k: (document[q] == document[k]) & (k <= q))
    masks = {FINDS: mask, HAS: mask.tiles()}
    return {
        impl: functools.partial(cupyflash.attention, *tensors[:3], mask=x)
        for impl, x in masks.items()
    }


def host(run: Run) -> None:
    """Rows of the host time of a small call, with and without a function."""
    from bench.lib.timing import medians

    for direction in HOST_PASSES:
        calls = host_calls(direction)
        calls = run.right(f"host {direction}", list(calls), calls.__getitem__)
        clocks = {
            name: functools.partial(sample, call, _synchronize, CALLS)
            for name, call in calls.items()
        }
        for name, us in medians(clocks, SAMPLES).items():
            row = {"op": "host", "what": "host time", "impl": f"cupyflash-{name}"}
            run.rows.append({**row, "pass": direction, "us": round(us, 2)})


def host_calls(direction: str) -> dict[str, Callable[[], Any]]:
    import torch

    import cupyflash

    *inputs, dout = data.of_problem(SMALL)
    inputs = tuple(x.requires_grad_(direction != "fwd") for x in inputs)
    slopes, factor = data.random((SMALL.heads,), "float32", 1), FACTOR
    score = lambda s, b, h, q, k: s - factor * slopes[h] * abs(q - k)  # noqa: E731
    mask = lambda b, h, q, k: k <= q  # noqa: E731

    def call(**options: Any) -> Any:
        out = cupyflash.attention(*inputs, **options)
        return torch.autograd.grad(out, inputs, dout) if direction != "fwd" else out

    return {
        "plain": call,
        "Score": functools.partial(call, score=cupyflash.Score(score)),
        "score-function": functools.partial(call, score=score),
        "Mask-tiles": functools.partial(call, mask=cupyflash.Mask(mask).tiles()),
        "mask-function": functools.partial(call, mask=mask),
    }


def _synchronize() -> None:
    if data.DEVICE == "cuda":
        import torch

        torch.cuda.synchronize()


def first(run: Run) -> None:
    """Rows of the first calls of a new text, in a process with an empty cache and in a second.

    The process has called attention without a function before, in both passes.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CUPYFLASH_CACHE_DIR": folder}
        for what in FIRST_CALLS:
            command = [sys.executable, "-m", "bench.scores.times", data.DEVICE]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                error = RuntimeError((done.stderr.strip() or "no message").splitlines()[-1])
                run.notes.left_out("cupyflash", error, f"first call, {what}")
                return
            for direction, ms in json.loads(done.stdout.splitlines()[-1]).items():
                row = {"op": "first call", "what": f"first call, {what}", "impl": "cupyflash"}
                run.rows.append({**row, "pass": direction, "ms": round(ms, 2)})


def child(device: str) -> None:
    """Print the milliseconds of the first calls with a function as JSON."""
    import torch

    import cupyflash

    data.DEVICE = device
    problem = Problem("bfloat16", 128, 1, 1024, 4, 4, False)
    q, k, v, dout = data.of_problem(problem)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    slopes = data.random((problem.heads,), "float32", 1)
    score = lambda s, b, h, q, k: s - slopes[h] * abs(q - k) + 1e-3 * k  # noqa: E731
    torch.autograd.grad(cupyflash.attention(*inputs), inputs, dout)
    _synchronize()
    found, out = {}, None
    for direction in ("fwd", "bwd"):
        begin = time.perf_counter()
        if direction == "fwd":
            out = cupyflash.attention(*inputs, score=score)
        else:
            torch.autograd.grad(out, inputs, dout)
        _synchronize()
        found[direction] = 1e3 * (time.perf_counter() - begin)
    print(json.dumps(found))


if __name__ == "__main__":
    child(sys.argv[1])
