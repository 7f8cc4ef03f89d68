"""Host time of a call in microseconds: what the caller's thread spends to enqueue one attention.

    python -m bench host_time
    python -m bench host_time --modes eager --passes fwd+bwd

Targets: cupyflash at most 15 us from CuPy arrays and 20 us from torch tensors, without autograd;
forward and backward at most 1.25 times SDPA and 1.6 times "empty", an autograd.Function that only
allocates; a forward called by a compiled function at most 1.3 times SDPA called by one.

The problems are so small that the GPU is always done before the host: nothing waits for the queue.
One sample is the mean of 200 calls, after which the GPU is waited for outside the clock; the result
is the median sample, all implementations of a problem in turn, in a random order.

| pass | what a call is |
|---|---|
| fwd | a forward of tensors without gradient |
| fwd grad | a forward that records a graph |
| fwd+bwd | a forward, and the gradients of q, k and v by ``torch.autograd.grad`` |

| mode | who calls |
|---|---|
| eager | Python |
| compiled | a function that ``torch.compile`` has compiled |
| graph | the replay of a CUDA graph |
"""

import functools
import itertools
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

from bench.lib import data, harness, report
from bench.lib.providers import PROVIDERS, Call, Provider
from bench.lib.report import Row, Table
from cupyflash.testing.problem import Problem

CALLS, SAMPLES = 200, 50
PROTOCOL = f"median of {SAMPLES} samples, each the mean of {CALLS} calls; enqueue only"
PROBLEMS = (
    Problem("float16", head_dim=64, batch=1, seqlen=128, heads=8, heads_kv=8, causal=True),
    Problem("bfloat16", head_dim=64, batch=2, seqlen=256, heads=8, heads_kv=8, causal=True),
)
PASSES, MODES = ("fwd", "fwd grad", "fwd+bwd"), ("eager", "compiled", "graph")
# SDPA as users call it: the backend of its choice, with no context manager around it.
SDPA = Provider("sdpa", PROVIDERS["sdpa-flash"].load, layout="bhsd")
TORCH = {
    "cupyflash-torch": PROVIDERS["cupyflash"],
    "sdpa": SDPA,
    "empty": Provider("empty", lambda: empty_attention()),
    **{name: PROVIDERS[name] for name in (f"flash-attn-{version}" for version in (2, 3, 4))},
}


def sample(call: Callable[[], Any], synchronize: Callable[[], Any], calls: int) -> float:
    """Mean host time of so many calls in microseconds."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - begin
    synchronize()
    return 1e6 * seconds / calls


def empty_attention() -> Callable:
    """An attention that allocates its results and its gradients, and saves its inputs."""
    import torch

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            ctx.save_for_backward(q, k, v)
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            return tuple(torch.empty_like(x) for x in ctx.saved_tensors)

    return lambda q, k, v, causal: Empty.apply(q, k, v)


def torch_call(provider: Provider, problem: Problem, pass_: str, mode: str) -> Callable[[], Any]:
    """A provider on torch tensors, bare: the context of a forced backend is no part of a call."""
    import torch

    if mode == "graph" and data.DEVICE == "cpu":
        raise NotImplementedError("a CPU has no graphs")
    call = Call(provider, data.of_problem(problem), problem.causal)
    grad = pass_ != "fwd"
    inputs = tuple(x.detach().requires_grad_(grad) for x in (call.q, call.k, call.v))

    def attention(q: Any, k: Any, v: Any) -> Any:
        return call.attention(q, k, v, problem.causal)

    if mode == "compiled":
        # Dynamo keeps what it has compiled, eight times at most, with the code of a function.
        attention = types.FunctionType(
            attention.__code__.replace(), globals(), closure=attention.__closure__
        )
        attention = torch.compile(attention, fullgraph=True, dynamic=False)

    def run() -> Any:
        out = attention(*inputs)
        return torch.autograd.grad(out, inputs, call.dout) if pass_ == "fwd+bwd" else out

    return torch_graph(run) if mode == "graph" else run


def torch_graph(run: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a CUDA graph of a call, after calls on the stream that it is captured from."""
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def cupy_call(problem: Problem, pass_: str, mode: str) -> Callable[[], Any]:
    """cupyflash on CuPy arrays; the backward is `attention_backward`, as there is no autograd."""
    import cupyflash
    from cupyflash.testing import make_inputs

    if pass_ == "fwd grad" or mode == "compiled":
        raise NotImplementedError("CuPy has no autograd and no compiler")
    if data.DEVICE == "cpu":
        raise NotImplementedError("CuPy needs a GPU")
    inputs = make_inputs(
        "cupy",
        problem.dtype,
        batch=problem.batch,
        seqlen_q=problem.seqlen,
        heads_q=problem.heads,
        head_dim=problem.head_dim,
    )
    qkv, options = (inputs.q, inputs.k, inputs.v), {"causal": problem.causal}

    def run() -> Any:
        if pass_ == "fwd":
            return cupyflash.attention(*qkv, **options)
        out, lse = cupyflash.attention(*qkv, **options, return_lse=True)
        return cupyflash.attention_backward(inputs.dout, *qkv, out, lse, **options)

    return cupy_graph(run) if mode == "graph" else run


def cupy_graph(run: Callable[[], Any]) -> Callable[[], Any]:
    """The launch of a CUDA graph of a call."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        run()
        stream.synchronize()
        stream.begin_capture()
        run()
        graph = stream.end_capture()
    return functools.partial(graph.launch, stream)


def measure(run: harness.Run, problem: Problem, cells: Sequence[tuple[str, str]]) -> None:
    """Adds a row for each call that works.

    Args:
        cells: passes with modes.
    """
    import torch

    from bench.lib.timing import medians

    makers = {"cupyflash-cupy": cupy_call}
    makers |= {name: functools.partial(torch_call, provider) for name, provider in TORCH.items()}
    clocks = {}
    for name, (pass_, mode) in itertools.product(makers, cells):
        try:
            call = makers[name](problem, pass_, mode)
            clock = functools.partial(sample, call, torch.cuda.synchronize, CALLS)
            clock()
            clocks[name, pass_, mode] = clock
        except Exception as error:  # whatever a library raises where it cannot do this
            run.notes.left_out(name, error, f"{pass_} {mode}")
    for (name, pass_, mode), median in medians(clocks, SAMPLES).items():
        of_call = {"impl": name, "pass": pass_, "mode": mode, "us": round(median, 2)}
        run.rows.append({"op": "host_time", **of_call, **problem.row()})


def table(rows: list[Row]) -> Table:
    """One line for each call, with its ratios to SDPA and to an empty function."""
    found = report.new_table(
        "problem", "pass", "mode", "implementation", right=("us per call", "/ sdpa", "/ empty")
    )
    times = {_key(row, row["impl"]): row["us"] for row in rows}
    for row in rows:
        peers = (times.get(_key(row, name)) for name in ("sdpa", "empty"))
        ratios = ("-" if peer is None else f"{row['us'] / peer:.2f}" for peer in peers)
        problem = f"{row['batch']} x {row['seqlen_q']}"
        found.add_row(problem, row["pass"], row["mode"], row["impl"], f"{row['us']:.1f}", *ratios)
    return found


def _key(row: Row, impl: str) -> tuple:
    return impl, row["pass"], row["mode"], row["batch"], row["seqlen_q"]


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("host_time", __doc__, repeats=None, output=False)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    options = parser.parse_args(arguments)
    run = harness.Run("host_time", PROTOCOL, arguments, options, timed=False)
    cells = list(itertools.product(options.passes, options.modes))
    for problem in PROBLEMS:
        measure(run, problem, cells)
    return run.finish(table(run.rows))
