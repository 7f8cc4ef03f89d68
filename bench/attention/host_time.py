"""Host time of a call in microseconds: what the caller's thread spends to enqueue one attention.

    python -m bench host_time

Targets: cupyflash at most 15 us from CuPy arrays and 20 us from torch tensors, without autograd.
(SDPA measured 26 us and FlashAttention-3 110 to 160 us on an H200 machine.)

The problem is so small that the GPU is always done before the host: nothing waits for the queue.
One sample is the mean of 200 calls, after which the GPU is waited for outside the clock; the result
is the median sample, all implementations in turn. `grad` marks forwards that record a graph.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.lib import data, harness, report
from bench.lib.providers import PROVIDERS, Call, Provider
from cupyflash.testing.problem import Problem

CALLS, SAMPLES = 200, 50
PROTOCOL = f"median of {SAMPLES} samples, each the mean of {CALLS} calls; forward, enqueue only"
PROBLEM = Problem("float16", head_dim=64, batch=1, seqlen=128, heads=8, heads_kv=8, causal=True)
# SDPA as users call it: the backend of its choice, with no context manager around it.
SDPA = Provider("sdpa", PROVIDERS["sdpa-flash"].load, layout="bhsd")
TORCH = (
    PROVIDERS["cupyflash"],
    SDPA,
    *(PROVIDERS[f"flash-attn-{version}"] for version in (2, 3, 4)),
)


def sample(call: Callable[[], Any], synchronize: Callable[[], Any], calls: int) -> float:
    """Mean host time of so many calls in microseconds."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - begin
    synchronize()
    return 1e6 * seconds / calls


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
    call = Call(provider, data.of_problem(PROBLEM), PROBLEM.causal)
    q, k, v = (x.detach().requires_grad_(grad) for x in (call.q, call.k, call.v))
    return lambda: call.attention(q, k, v, PROBLEM.causal)


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("host_time", __doc__, repeats=None, output=False)
    options = parser.parse_args(arguments)
    import torch

    from bench.lib.timing import medians

    run = harness.Run("host_time", PROTOCOL, arguments, options, timed=False)
    makers = {("cupyflash-cupy", False): cupy_call}
    for provider in TORCH:
        for grad in (False, True):
            name = "cupyflash-torch" if provider.name == "cupyflash" else provider.name
            makers[name, grad] = functools.partial(torch_call, provider, grad)
    clocks = {}
    for key, make in makers.items():
        try:
            clock = functools.partial(sample, make(), torch.cuda.synchronize, CALLS)
            clock()
            clocks[key] = clock
        except Exception as error:  # whatever a library raises where it cannot do this
            run.notes.left_out(key[0], error, "the start")
    table = report.new_table("implementation", "autograd", right=("us per call",))
    for (impl, grad), median in medians(clocks, SAMPLES).items():
        us = round(median, 2)
        run.rows.append({"op": "host_time", "impl": impl, "us": us, "grad": grad, **PROBLEM.row()})
        table.add_row(impl, "yes" if grad else "no", f"{us:.1f}")
    return run.finish(table)
