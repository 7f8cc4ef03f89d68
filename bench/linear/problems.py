"""Projections of real models for bench linear and bench linear_training, and who does them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.lib import data

OPS = ("qkv_projection", "mlp")
HEAD_DIM = {768: 64, 4096: 128}

# d_in, hidden, gated, activation, many rows.
GPT2 = (768, 3072, False, "gelu_tanh", 4096)
LLAMA = (4096, 14336, True, "silu", 8192)
MODELS = (GPT2, LLAMA)
SMALL_M_ROWS = (1, 4, 16, 32)
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class LinearProblem:
    """One operation on a number of rows. Those of GPT-2 have biases, the others a gate and GQA.

    With ``block`` the projection is that of a block: in GPT-2 after a LayerNorm, in Llama after an
    RMSNorm and with rotary embedding of q and k.
    """

    op: str
    dtype: str
    rows: int
    depth: int
    hidden: int
    gated: bool
    activation: str
    block: bool = False

    def __str__(self) -> str:
        sizes = f"{self.depth}/{self.hidden}" if self.op == "mlp" else str(self.depth)
        extra = " gated" if self.gated and self.op == "mlp" else ""
        if self.block:
            extra = " RMSNorm, rotary" if self.gated else " LayerNorm"
        return f"{self.op} {self.dtype} {self.rows}x{sizes}{extra}"

    @property
    def head_dim(self) -> int:
        """The head dim of q, k and v."""
        return HEAD_DIM.get(self.depth, 8)

    @property
    def heads(self) -> tuple[int, int]:
        """The number of heads of q, and of k."""
        heads_q = self.depth // self.head_dim
        return heads_q, max(1, heads_q // 4) if self.gated else heads_q

    @property
    def weights(self) -> list[tuple[int, int]]:
        """Shapes of the weights: of q, k and v together, or up, down and perhaps gate."""
        if self.op == "mlp":
            up = (self.hidden, self.depth)
            return [up, (self.depth, self.hidden), *([up] if self.gated else [])]
        heads_q, heads_kv = self.heads
        return [((heads_q + 2 * heads_kv) * self.head_dim, self.depth)]

    @property
    def numbers(self) -> int:
        """The number of elements of all weights."""
        return sum(rows * columns for rows, columns in self.weights)

    @property
    def bytes(self) -> int:
        """The bytes of all weights, which must be read once."""
        return self.numbers * (4 if self.dtype == "float32" else 2)

    @property
    def flops(self) -> int:
        """The floating-point operations of the products."""
        return 2 * self.rows * self.numbers

    def row(self, **fields: Any) -> dict[str, Any]:
        """A row of a results file."""
        return {"problem": str(self), **dataclasses.asdict(self), **fields}

    def tensors(self) -> dict[str, Any]:
        """The arguments by name: weights of variance 1 / columns, everything else standard normal.

        Biases and the residual are in GPT-2's, a residual in all MLPs.
        """
        random = lambda shape, seed: data.random(shape, self.dtype, seed)  # noqa: E731
        weights = self.weights
        tensors = {"x": random((self.rows, self.depth), 0)}
        for number, shape in enumerate(weights):
            tensors[f"weight{number}"] = random(shape, 1 + number) * shape[1] ** -0.5
            bias = None if self.gated else random(shape[:1], 10 + number)
            tensors[f"bias{number}"] = bias
        tensors["residual"] = random((self.rows, self.depth), 20) if self.op == "mlp" else None
        if self.block:
            tensors["norm_weight"] = random((self.depth,), 30)
            tensors["norm_bias"] = None if self.gated else random((self.depth,), 31)
            if self.gated:
                angles = random((self.rows, self.head_dim // 2), 32)
                tensors["cos"], tensors["sin"] = angles.cos(), angles.sin()
        return tensors


def problems(
    ops: Sequence[str], dtypes: Sequence[str], rows: Sequence[int] | None = None
) -> Iterator[LinearProblem]:
    """Every op x dtype x model x number of rows, the many of the model first.

    The QKV projection stands alone first, then as in a block.
    """
    for op, dtype in itertools.product(ops, dtypes):
        for block in (False, True) if op == "qkv_projection" else (False,):
            for *sizes, many in MODELS:
                for count in rows or (many, *SMALL_M_ROWS):
                    yield LinearProblem(op, dtype, count, *sizes, block)


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
