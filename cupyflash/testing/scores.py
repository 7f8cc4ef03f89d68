"""The tolerance rule for scores and masks of the caller's own: the function itself, under torch.

The function gets whole arrays of scores and of places, which broadcast; torch's autograd has the
derivatives. So this shares nothing with the text that the library makes of it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.attention.attention import attention
from .inputs import Inputs
from .tolerance import Expected, Result, dtype_name


def expected_scores(
    inputs: Inputs,
    score: Callable | None = None,
    mask: Callable | None = None,
    arrays: tuple[Tensor, ...] = (),
) -> Expected:
    """Both passes in float64, and in the dtype of the inputs as the yardstick.

    Args:
        inputs: torch tensors (batch, seqlen, heads, head_dim).
        score: called with the arrays, returns a function of (score, batch, head, query, key); None:
            the score is ``scale * q k^T``.
        mask: the same of (batch, head, query, key), None: all keys are seen.
        arrays: what the functions read; the gradients of floating ones are "d0", "d1", ….
    """
    exact, terms = _dense(inputs, score, mask, arrays, torch.float64)
    yardstick, _ = _dense(inputs, score, mask, arrays, inputs.q.dtype)
    results = {}
    for name, x in exact.items():
        dtype = "float32" if name == "lse" else dtype_name(inputs.q)
        if name.removeprefix("d").isdigit():
            dtype = dtype_name(arrays[int(name[1:])])
        rounded = None if name == "lse" else dtype_name(inputs.q)
        results[name] = Result(x, yardstick[name], dtype, terms[name], rounded)
    return Expected(results)


def _dense(
    inputs: Inputs,
    score: Callable | None,
    mask: Callable | None,
    arrays: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The results, and the largest sums of magnitudes behind them, by name."""
    q, k, v, dout = (x.detach().to(dtype).requires_grad_() for x in _tensors(inputs))
    learned = {
        i: x.detach().to(dtype).requires_grad_()
        for i, x in enumerate(arrays)
        if x.is_floating_point()
    }
    given = [learned.get(i, x) for i, x in enumerate(arrays)]
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, wide_k) / math.sqrt(q.shape[3])
    places = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    scores = scores if score is None else score(*given)(scores, *places).to(dtype)
    if mask is not None:
        seen = mask(*arrays)(*places)
        scores = torch.where(seen, scores, -math.inf)
    wide = scores.double() if dtype == torch.float64 else scores.float()
    lse = torch.logsumexp(wide, -1)
    weights = torch.where(wide == -math.inf, 0, torch.exp(wide - lse[..., None].nan_to_num(0)))
    out = torch.einsum("bhqk,bkhd->bqhd", weights.to(dtype), wide_v)
    wanted = {"dq": q, "dk": k, "dv": v} | {f"d{i}": x for i, x in learned.items()}
    found = torch.autograd.grad(out, list(wanted.values()), dout, allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted.values())]
    results = {"out": out, "lse": lse} | dict(zip(wanted, gradients))
    results = {name: x.detach() for name, x in results.items()}
    if dtype != torch.float64:
        return results, {}
    return results, _terms(results, (dout, q, wide_k, wide_v), scores, weights)


def _terms(
    results: dict[str, Tensor], tensors: tuple[Tensor, ...], scores: Tensor, weights: Tensor
) -> dict[str, float]:
    """The largest sum of magnitudes behind each result; a weight has the rounding of its score."""
    lse, (dout, q, k, v) = results["lse"], (x.detach() for x in tensors)
    scores, weights = scores.detach(), weights.detach()
    of_score = torch.where(scores.isfinite(), scores.abs(), 0) + lse[..., None].abs().nan_to_num()
    weights = weights * (1 + of_score)
    dp = torch.einsum("bqhd,bkhd->bhqk", dout.abs(), v.abs())
    ds = weights * (dp + (weights * dp).sum(-1, keepdim=True))
    sums = {
        "out": torch.einsum("bhqk,bkhd->bqhd", weights, v.abs()),
        "lse": of_score,
        "dq": torch.einsum("bhqk,bkhd->bqhd", ds, k.abs()),
        "dk": torch.einsum("bhqk,bqhd->bkhd", ds, q.abs()),
        "dv": torch.einsum("bhqk,bqhd->bkhd", weights, dout.abs()),
    }
    return {name: float(sums[name].max()) if name in sums else float(ds.sum()) for name in results}


def _tensors(inputs: Inputs) -> list[Any]:
    tensors = [inputs.q, inputs.k, inputs.v, inputs.dout]
    return [x.transpose(1, 2) for x in tensors] if inputs.layout == "bhsd" else tensors


def results(
    inputs: Inputs,
    arrays: tuple[Tensor, ...],
    score: Callable | None = None,
    mask: Callable | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Both passes of `cupyflash.attention` by autograd, named as in `expected_scores`.

    Args:
        options: of `cupyflash.attention`.
    """
    qkv = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    arrays = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in arrays)
    learned = {f"d{i}": x for i, x in enumerate(arrays) if x.requires_grad}
    given = {"score": score and score(*arrays), "mask": mask and mask(*arrays)}
    out, lse = attention(*qkv, layout=inputs.layout, return_lse=True, **given, **options)
    gradients = torch.autograd.grad(out, (*qkv, *learned.values()), inputs.dout)
    return dict(zip(("out", "lse", "dq", "dk", "dv", *learned), (out, lse, *gradients)))
