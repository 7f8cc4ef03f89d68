"""The rotary embedding of `flash_attn_with_kvcache`, by array operations of the library.

Source: RoFormer, arXiv:2104.09864.
"""

from typing import NamedTuple

from ..runtime.array import Array, array_namespace, compiling


class Angles(NamedTuple):
    """The arguments of the rotary embedding.

    Attributes:
        cos, sin: (positions, rotary_dim / 2).
        interleaved: pairs are (0, 1), (2, 3), …, not (0, rotary_dim / 2), …
    """

    cos: Array | None
    sin: Array | None
    interleaved: bool


def rotated(
    function: str,
    q: Array,
    k: Array | None,
    angles: Angles,
    lengths: Array,
    cu_seqlens_q: Array | None,
    moves: bool,
) -> tuple[Array, Array]:
    """q and k, rotated at the places from ``lengths`` on; copies.

    Args:
        moves: each query has a place of its own; else all have the first.

    Raises:
        TypeError: no k, one of cos and sin alone.
        ValueError: shapes, rotary_dim, on the CPU places beyond the angles.
    """
    cos, sin, _ = angles
    if k is None or cos is None or sin is None:
        fact = "rotary_cos and rotary_sin must both be given, and beside k and v"
        raise TypeError(f"{function}: {fact}, got None")
    shape = tuple(cos.shape)
    if len(shape) != 2 or tuple(sin.shape) != shape or 2 * shape[1] > q.shape[-1]:
        fact = "rotary_cos and rotary_sin must be (positions, rotary_dim / 2) with rotary_dim up to"
        got = f"{shape}, {tuple(sin.shape)}"
        raise ValueError(f"{function}: {fact} head_dim = {q.shape[-1]}, got {got}")
    results = []
    for x, own in ((q, moves), (k, True)):
        places = _places(x, lengths, cu_seqlens_q, own)
        _check(function, x, places, shape[0])
        results.append(_rotate(x, places.clip(0, shape[0] - 1), angles))
    return results[0], results[1]


def _places(x: Array, lengths: Array, ends: Array | None, own: bool) -> Array:
    """The place of each row, (batch, seqlen) or (total,)."""
    count = x.shape[0] if ends is not None else x.shape[1]
    row = counted(x, count)
    if ends is None:
        return lengths[:, None] + (row if own else row * 0)
    of = (row[:, None] >= ends[1:]).sum(1)
    return lengths[of] + ((row - ends[of]) if own else 0)


def _check(function: str, x: Array, places: Array, count: int) -> None:
    on_gpu = getattr(x, "is_cuda", type(x).__module__.partition(".")[0] == "cupy")
    if compiling() or on_gpu or 0 in places.shape:
        return
    if not 0 <= int(places.min()) <= int(places.max()) < count:
        fact = f"rotary_cos must have the places of all tokens, {count} rows are there"
        got = f"{int(places.min())} to {int(places.max())}"
        raise ValueError(f"{function}: {fact}, got places from {got}")


def _rotate(x: Array, places: Array, angles: Angles) -> Array:
    """A copy of x, computed in float32 and rounded once."""
    single = lambda y: y.float() if hasattr(y, "float") else y.astype("float32")  # noqa: E731
    cos, sin = (single(y[places])[..., None, :] for y in angles[:2])
    half = angles.cos.shape[1]
    first, second = slice(0, half), slice(half, 2 * half)
    if angles.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = single(x[..., first]), single(x[..., second])
    result = x.clone() if hasattr(x, "clone") else x.copy()
    result[..., first] = a * cos - b * sin
    result[..., second] = a * sin + b * cos
    return result


def filled(like: Array, count: int, value: int) -> Array:
    """int32 (count,) of one value, in the library and on the device of ``like``."""
    if hasattr(like, "new_full"):  # a tensor of torch
        import torch

        return like.new_full((count,), value, dtype=torch.int32)
    return array_namespace(like).full(count, value, "int32")


def counted(like: Array, count: int) -> Array:
    """int32 (count,): 0, 1, 2, …, in the library and on the device of ``like``."""
    row = filled(like, count, 1).cumsum(0) - 1
    return row.astype("int32") if hasattr(row, "astype") else row.int()
