"""The optional arrays of a call, and the checks of those that change the scores or the lengths."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from ..runtime.array import Array, View, device_name
from ..runtime.structs import header
from .names import caller_name

structs = header("attention/params.cuh")


class Extras(NamedTuple):
    """Optional arrays, None where there is none, in the order in which the kernels take them."""

    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    alibi_slopes: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None
    dropout_seed: Array | int | None = None
    seqused_q: Array | None = None
    seqused_k: Array | None = None

    @property
    def learned(self) -> list[Array]:
        """Those that can have a gradient."""
        return [x for x in (self.bias, self.sinks) if x is not None]


NO_EXTRAS = Extras()  # itself: of a call that has none of them, and no dropout
NO_POINTERS = (0,) * len(NO_EXTRAS)


class Gradients(NamedTuple):
    """Results of a backward pass, like q, k, v, bias and sinks; None of what is not asked for."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None = None
    dsinks: Array | None = None


@dataclasses.dataclass(frozen=True)
class ExtraFacts:
    """What a checked problem knows of its optional arrays, apart from cu_seqlens.

    Attributes:
        alibi_batch_stride: in elements, or None without slopes.
        bias: of rank 4, stride 0 on the axes of length 1.
        lengths: some sequence may have fewer rows than the tensors.
    """

    alibi_batch_stride: int | None = None
    bias: View | None = None
    sinks: bool = False
    lengths: bool = False

    def bias_kind(self, dtype: str) -> int:
        """As in `Features`, for q of this dtype."""
        if self.bias is None:
            return 0
        return 1 if self.bias.dtype == dtype else 2 if self.bias.dtype == "bool" else 3


def check_extras(
    function: str, extras: Mapping[str, View], q: View, sizes: tuple[int, int, int, int]
) -> ExtraFacts:
    """The facts of the optional arrays by name, for ``sizes`` (batch, heads_q, seqlen_q, seqlen_k).

    Raises:
        TypeError: dtypes.
        ValueError: shapes, strides, devices.
        NotImplementedError: a bias together with cu_seqlens.
    """
    batch, heads_q, _, _ = sizes
    for name, x in extras.items():
        if x.device != q.device:
            fact = f"{caller_name(function, name)} must be on the device of q"
            got = f"devices {device_name(x.device)} and {device_name(q.device)}"
            raise ValueError(f"{function}: {fact}, got {got}")
    if "bias" in extras and ("cu_seqlens_q" in extras or "cu_seqlens_k" in extras):
        raise NotImplementedError(f"{function}: bias is not built for packed sequences")
    for name in ("seqused_q", "seqused_k"):
        _dense(function, name, extras.get(name), ("int32",), [(batch,)])
    _dense(function, "dropout_seed", extras.get("dropout_seed"), ("int64",), [(1,), ()])
    _dense(function, "sinks", extras.get("sinks"), ("float32", q.dtype), [(heads_q,)])
    slopes = extras.get("alibi_slopes")
    _dense(function, "alibi_slopes", slopes, ("float32",), [(heads_q,), (batch, heads_q)])
    return ExtraFacts(
        alibi_batch_stride=None if slopes is None else _batch_stride(slopes),
        bias=_bias(function, extras["bias"], q.dtype, sizes) if "bias" in extras else None,
        sinks="sinks" in extras,
        lengths="seqused_q" in extras or "seqused_k" in extras,
    )


def bias_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> structs.BiasStrides:
    """Of up to four axes, aligned right; 0 on those of length 1 and on those that are missing."""
    steps = [0 if size == 1 else step for size, step in zip(shape, strides)]
    return structs.BiasStrides(*[0] * (4 - len(steps)), *steps)


def _dense(
    function: str,
    name: str,
    x: View | None,
    dtypes: tuple[str, ...],
    shapes: list[tuple[int, ...]],
) -> None:
    """That an optional array has one of the dtypes and shapes, its last axis contiguous."""
    if x is None:
        return
    name = caller_name(function, name)
    if x.dtype not in dtypes:
        allowed = " or ".join(dict.fromkeys(dtypes))
        raise TypeError(f"{function}: {name} must be {allowed}, got {x.dtype}")
    if x.shape not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{function}: {name} must be {allowed}, got {x.shape}")
    if x.shape and x.shape[-1] > 1 and x.strides[-1] != 1:
        raise ValueError(f"{function}: {name} must be contiguous, got {x.strides}")


def _batch_stride(slopes: View) -> int:
    return slopes.strides[0] if len(slopes.shape) == 2 else 0


def _bias(function: str, bias: View, dtype: str, sizes: tuple[int, int, int, int]) -> View:
    name = caller_name(function, "bias")
    if bias.dtype not in ("bool", dtype, "float32"):
        allowed = " or ".join(dict.fromkeys(("bool", dtype, "float32")))
        raise TypeError(f"{function}: {name} must be {allowed}, got {bias.dtype}")
    rank = len(bias.shape)
    fits = 2 <= rank <= 4 and all(
        size in (1, whole) for size, whole in zip(bias.shape, sizes[4 - rank :])
    )
    if not fits:
        axes = "(batch, heads_q, seqlen_q, seqlen_k)"
        fact = f"{name} must broadcast to {axes} = {sizes}, rank 2 to 4"
        raise ValueError(f"{function}: {fact}, got {bias.shape}")
    strides = bias_strides(bias.shape, bias.strides)
    shape = (1,) * (4 - rank) + tuple(bias.shape)
    return bias._replace(shape=shape, strides=tuple(strides))
