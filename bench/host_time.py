"""Host time of a call in microseconds: what the caller's thread spends to enqueue one attention.

    python -m bench.host_time

Targets: cupyflash at most 15 us from CuPy arrays and 20 us from torch tensors, without autograd.
(SDPA measured 26 us and FlashAttention-3 110 to 160 us on an H200 machine.)

The problem is so small that the GPU is always done before the host: nothing waits for the queue.
One sample is the mean of 200 calls, after which the GPU is waited for outside the clock; the result
is the median sample, all implementations in turn. `grad` marks forwards that record a graph.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.box import MARKDOWN
from rich.table import Table

from bench.problem import Problem
from bench.providers import PROVIDERS, Call, Provider
from bench.report import command_line, console, machine_fields, write_results

CALLS, SAMPLES = 200, 50
PROBLEM = Problem("float16", head_dim=64, batch=1, seqlen=128, heads=8, heads_kv=8, causal=True)
# SDPA as users call it: the backend of its choice, with no context manager around it.
SDPA = Provider("sdpa", PROVIDERS["sdpa-flash"].load, layout="bhsd")
TORCH = (
    PROVIDERS["cupyflash"],
    SDPA,
    *(PROVIDERS[f"flash-attn-{version}"] for version in (2, 3, 4)),
)


def sample(call: Callable[[], Any], synchronize: Callable[[], Any]) -> float:
    """Mean host time of CALLS calls in microseconds."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    seconds = time.perf_counter() - begin
    synchronize()
    return 1e6 * seconds / CALLS


def cupy_call() -> Callable[[], Any]:
    """cupyflash on CuPy arrays."""
    import cupyflash
    from cupyflash.testing import make_inputs

    inputs = make_inputs(
        "cupy",
        PROBLEM.dtype,
        batch=PROBLEM.batch,
        seqlen_q=PROBLEM.seqlen,
        heads_q=PROBLEM.heads,
        head_dim=PROBLEM.head_dim,
    )
    q, k, v = inputs.q, inputs.k, inputs.v
    return lambda: cupyflash.attention(q, k, v, causal=PROBLEM.causal)


def torch_call(provider: Provider, grad: bool) -> Callable[[], Any]:
    """A provider on torch tensors, bare: the context of a forced backend is no part of a call."""
    call = Call(provider, PROBLEM.tensors(), PROBLEM.causal)
    q, k, v = (x.detach().requires_grad_(grad) for x in (call.q, call.k, call.v))
    return lambda: call.attention(q, k, v, PROBLEM.causal)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.host_time", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.parse_args(arguments)
    import torch

    out = console()
    makers = {("cupyflash-cupy", False): cupy_call}
    for provider in TORCH:
        for grad in (False, True):
            name = "cupyflash-torch" if provider.name == "cupyflash" else provider.name
            makers[name, grad] = lambda provider=provider, grad=grad: torch_call(provider, grad)
    calls = {}
    for key, make in makers.items():
        try:
            call = make()
            sample(call, torch.cuda.synchronize)
            calls[key] = call
        except Exception as error:  # whatever a library raises where it cannot do this
            out.print(f"{key[0]} left out: {type(error).__name__}: {error}", markup=False)
    samples: dict[tuple[str, bool], list[float]] = {key: [] for key in calls}
    for _ in range(SAMPLES):
        for key, call in calls.items():
            samples[key].append(sample(call, torch.cuda.synchronize))
    table = Table("implementation", "autograd", "us per call", box=MARKDOWN)
    rows = []
    for (impl, grad), times in samples.items():
        us = round(statistics.median(times), 2)
        rows.append({"op": "host_time", "impl": impl, "us": us, "grad": grad, **PROBLEM.row()})
        table.add_row(impl, "yes" if grad else "no", f"{us:.1f}")
    out.print(table)
    protocol = f"median of {SAMPLES} samples, each the mean of {CALLS} calls; forward, enqueue only"
    command = command_line("bench.host_time", arguments)
    out.print(f"wrote {write_results('host_time', rows, protocol, command, **machine_fields())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
