"""Who does what bench.linear times: functions of a problem and its tensors, to one array."""

import functools
from collections.abc import Callable
from typing import Any

from bench.linear_problems import LinearProblem

EPS = 1e-5


def function_of(problem: LinearProblem, impl: str) -> Callable[..., Any]:
    """The operation on the tensors of a problem."""
    if impl == "torch-compile":
        import torch

        return torch.compile(function_of(problem, "torch-eager"), dynamic=False)
    of_impl = {"cupyflash": ours, "torch-eager": one_by_one, "cublaslt": cublaslt}[impl]
    return functools.partial(of_impl, problem)


def ours(problem: LinearProblem, x: Any, weight0: Any, bias0: Any, **others: Any) -> Any:
    """cupyflash's."""
    import cupyflash

    if problem.op == "mlp":
        return cupyflash.mlp(
            x,
            weight0,
            others["weight1"],
            bias0,
            others["bias1"],
            gate_weight=others.get("weight2"),
            activation=problem.activation,
            residual=others["residual"],
        )
    q, _, _ = projected(problem, x, weight0, bias0, **others)
    columns = weight0.shape[0]
    # q, k and v are views of one array.
    return q.as_strided((problem.rows, columns), (columns, 1))


def projected(problem: LinearProblem, x: Any, weight0: Any, bias0: Any, **others: Any) -> Any:
    """cupyflash's q, k and v; the rows are one sequence."""
    import cupyflash

    norm = rotary = None
    if problem.block:
        norm = cupyflash.Norm(others["norm_weight"], others["norm_bias"], EPS, problem.gated)
    if "cos" in others:
        rotary = cupyflash.Rotary(others["cos"], others["sin"])
    heads_q, heads_kv = problem.heads
    return cupyflash.qkv_projection(
        x[None], weight0, bias0, heads_q=heads_q, heads_kv=heads_kv, norm=norm, rotary=rotary
    )


def one_by_one(problem: LinearProblem, x: Any, weight0: Any, bias0: Any, **others: Any) -> Any:
    """One operation of torch after the other."""
    from torch.nn import functional

    if problem.block:
        weight, bias = others["norm_weight"], others["norm_bias"]
        if problem.gated:
            x = functional.rms_norm(x, x.shape[-1:], weight, EPS)
        else:
            x = functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    out = functional.linear(x, weight0, bias0)
    if "cos" in others:
        out = _turned(problem, out, others["cos"], others["sin"])
    if problem.op == "mlp":
        if problem.gated:
            out = _activate(problem, functional.linear(x, others["weight2"])) * out
        else:
            out = _activate(problem, out)
        out = functional.linear(out, others["weight1"], others["bias1"]) + others["residual"]
    return out


def cublaslt(problem: LinearProblem, x: Any, weight0: Any, bias0: Any, **others: Any) -> Any:
    """With the epilogues of cuBLASLt that torch reaches: bias, bias + GELU, residual.

    There is none for a gate, whose two products are one here.
    """
    import torch

    if problem.block:
        raise NotImplementedError("cuBLASLt has no norm")
    if problem.op == "qkv_projection":
        return x @ weight0.t() if bias0 is None else torch.addmm(bias0, x, weight0.t())
    if problem.gated:
        out = _activate(problem, x @ others["weight2"].t()) * (x @ weight0.t())
    else:
        out = torch._addmm_activation(bias0, x, weight0.t(), use_gelu=True)
    out = torch.addmm(others["residual"], out, others["weight1"].t())
    return out if others["bias1"] is None else out + others["bias1"]


def _turned(problem: LinearProblem, out: Any, cos: Any, sin: Any) -> Any:
    """q and k by their rotary embedding, in pairs half a head apart."""
    import torch

    heads_q, heads_kv = problem.heads
    q_and_k, v = out.unflatten(-1, (-1, problem.head_dim)).split((heads_q + heads_kv, heads_kv), 1)
    first, second = q_and_k.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((turned, v), 1).flatten(1)


def _activate(problem: LinearProblem, x: Any) -> Any:
    from torch.nn import functional

    if problem.activation == "silu":
        return functional.silu(x)
    approximate = "tanh" if problem.activation == "gelu_tanh" else "none"
    return functional.gelu(x, approximate=approximate)
