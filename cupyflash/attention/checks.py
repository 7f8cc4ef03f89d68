"""The checks of an attention call: from views of the arrays and options to a `Problem`.

Every error of this module is raised before any launch, and its text is ``function: fact, allowed,
got``. The checks run once for each combination of shapes, strides, dtypes and options.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

from ..runtime.array import View, device_name
from ..runtime.checks import require_device
from ..runtime.config import ITEM_SIZE
from ..runtime.philox import dropout_scale, dropout_threshold
from ..runtime.structs import header
from .options import RULES, Options, caller_name
from .problem import ExtraFacts, Problem, bias_strides, canonical_strides, kernel_head_dim

structs = header("attention/params.cuh")

MAX_HEAD_DIM = 256
MAX_SEQLEN = 2**29  # so that sums of lengths and windows fit 32 bits in the kernels
MAX_BLOCKS = 2**31  # of a grid
AXES = {
    "bshd": "(batch, seqlen, heads, head_dim)",
    "bhsd": "(batch, heads, seqlen, head_dim)",
    "thd": "(total, heads, head_dim)",
}


def check(
    function: str,
    tensors: Mapping[str, View],
    options: Options,
    extras: Mapping[str, View] | None = None,
) -> Problem:
    """A `Problem` from views of q, k, v and, in the backward, of dout and out.

    Args:
        extras: views of the optional arrays that are there, by their names in `Extras`.

    Raises:
        TypeError: dtypes.
        ValueError: shapes, strides, devices, option values.
        NotImplementedError: optional arrays that packed sequences do not have.
    """
    extras = extras or {}
    if options.max_seqlens is None and options.layout not in ("bshd", "bhsd"):
        fact = "layout must be 'bshd' or 'bhsd'"
        raise ValueError(f"{function}: {fact}, got {options.layout!r}")
    q, k, v = (tensors[name] for name in "qkv")
    say = functools.partial(caller_name, function)
    for name, x in tensors.items():
        axes = AXES[options.layout_of(name)]
        if len(x.shape) != len(axes.split()):
            fact = f"{say(name)} must have {len(axes.split())} dimensions {axes}"
            raise ValueError(f"{function}: {fact}, got {len(x.shape)}: {x.shape}")
        if x.dtype not in ITEM_SIZE:
            allowed = "float16, bfloat16 or float32"
            raise TypeError(f"{function}: {say(name)} must be {allowed}, got {x.dtype}")
        require_device(function, say(name), x)
    for name, x in tensors.items():
        if x.dtype != q.dtype:
            fact = "all tensors must have the same dtype"
            got = f"{say('q')} {q.dtype} and {say(name)} {x.dtype}"
            raise TypeError(f"{function}: {fact}, got {got}")
        if x.device != q.device:
            here, there = device_name(q.device), device_name(x.device)
            where = f"{say('q')} on device {here} and {say(name)} on device {there}"
            raise ValueError(f"{function}: all tensors must be on the same device, got {where}")
        if x.shape[-1] > 1 and x.strides[-1] != 1 and 0 not in x.shape:
            fact = f"the last dimension of {say(name)} must be contiguous"
            raise ValueError(f"{function}: {fact}, got strides {x.strides}")

    batch_q, seqlen_q, heads_q, head_dim = _dimensions(q, options.layout_of("q"))
    batch_k, seqlen_k, heads_kv, head_dim_k = _dimensions(k, options.layout_of("k"))
    head_dim_v = v.shape[-1]
    shapes = ", ".join(f"{say(name)} {tensors[name].shape}" for name in "qkv")
    if k.shape[:-1] != v.shape[:-1] or head_dim_k != head_dim:
        fact = f"{say('k')} and {say('v')} must have the same axes before head_dim"
        fact += f", and {say('k')} the head_dim of {say('q')}"
        raise ValueError(f"{function}: {fact}, got {shapes}")
    out_shape = (*q.shape[:-1], head_dim_v)
    for name in ("dout", "out"):
        if name in tensors:
            fact = f"{name} must be like q, with the head_dim of v: {out_shape}"
            _require(tensors[name].shape == out_shape, function, fact, tensors[name])
    if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= head_dim_v <= MAX_HEAD_DIM):
        fact = f"head_dim must be from 1 to {MAX_HEAD_DIM}"
        raise ValueError(f"{function}: {fact}, got {shapes}")
    if heads_q != heads_kv and (heads_kv == 0 or heads_q % heads_kv):
        fact = f"the heads of {say('q')} must be a multiple of those of {say('k')} and {say('v')}"
        raise ValueError(f"{function}: {fact}, got {heads_q} and {heads_kv}")

    total_q = total_k = None
    if options.max_seqlens is not None:
        longest = _max_seqlens(function, options.max_seqlens)
        if options.layout_of("q") == "thd":
            total_q, seqlen_q = seqlen_q, longest[0]
            batch_q = _packed_batch(function, "cu_seqlens_q", extras)
        if options.layout_of("k") == "thd":
            total_k, seqlen_k = seqlen_k, longest[1]
            batch_k = _packed_batch(function, "cu_seqlens_k", extras)
    batch = batch_q
    if batch_q != batch_k:
        ends = [say(x) for x in ("cu_seqlens_q", "cu_seqlens_k") if x in extras]
        of = " and ".join(ends) or "batch"
        fact = f"{say('q')} and {say('k')} must have the same number of sequences ({of})"
        raise ValueError(f"{function}: {fact}, got {batch_q} and {batch_k}: {shapes}")
    if max(seqlen_q, seqlen_k) >= MAX_SEQLEN:
        fact = f"sequences must be shorter than {MAX_SEQLEN}"
        raise ValueError(f"{function}: {fact}, got {seqlen_q} and {seqlen_k}")
    if -(-max(seqlen_q, seqlen_k) // 16) * max(1, heads_q) * max(1, batch) >= MAX_BLOCKS:
        raise ValueError(
            f"{function}: batch x heads x seqlen is too large for a grid, got {shapes}"
        )

    left, right, top_left = _visible_keys(function, options, seqlen_q + seqlen_k)
    for name, rule in RULES.items():
        x = getattr(options, name)
        if rule.valid is None or x is None:
            continue
        if not ((isinstance(x, str) or _is_real(x)) and rule.valid(x)):
            raise ValueError(f"{function}: {say(name)} must be {rule.allowed}, got {x}")
    scale = 1 / math.sqrt(head_dim) if options.scale is None else options.scale
    threshold = dropout_threshold(options.dropout_p)
    width = kernel_head_dim(head_dim, head_dim_v)
    shape = structs.AttentionShape(
        batch, heads_q, heads_kv, seqlen_q, seqlen_k, width, left, right, top_left, 1, 1, scale,
        options.softcap, threshold, dropout_scale(threshold),
    )  # fmt: skip
    strides = {name: canonical_strides(name, x, options) for name, x in tensors.items()}
    facts = check_extras(function, extras, q, (batch, heads_q, seqlen_q, seqlen_k))
    tf32 = options.precision == "tf32"
    if tf32 and q.dtype != "float32":
        fact = f"precision 'tf32' is for float32 {say('q')}, {say('k')} and {say('v')}"
        raise ValueError(f"{function}: {fact}, got {q.dtype}")
    return Problem(
        q.dtype, q.device, shape, (head_dim, head_dim_v), strides, facts, total_q, total_k,
        tf32=tf32,
    )  # fmt: skip


def check_lse(function: str, problem: Problem, name: str, lse: View) -> None:
    """The LSE of the forward, an input of the backward, or its gradient, by their names."""
    if lse.dtype != "float32":
        raise TypeError(f"{function}: {name} must be float32, got {lse.dtype}")
    if lse.device != problem.device:
        where = f"devices {device_name(lse.device)} and {device_name(problem.device)}"
        raise ValueError(f"{function}: {name} must be on the device of q, got {where}")
    _require(lse.shape == problem.lse_shape, function, f"{name} must be {problem.lse_shape}", lse)


def _dimensions(x: View, layout: str) -> tuple[int, int, int, int]:
    """(batch, rows, heads, head_dim); packed tensors have no batch axis: 1."""
    if layout == "thd":
        return (1, *x.shape)
    if layout == "bhsd":
        return (x.shape[0], x.shape[2], x.shape[1], x.shape[3])
    return x.shape


def _visible_keys(function: str, options: Options, unlimited: int) -> tuple[int, int, bool]:
    """(keys left of the diagonal, keys right of it, whether it starts at the top left)."""
    causal, window = options.causal, options.window
    if causal not in (False, True, "bottom-right", "top-left"):
        allowed = "False, True, 'bottom-right' or 'top-left'"
        name = caller_name(function, "causal")
        raise ValueError(f"{function}: {name} must be {allowed}, got {causal!r}")
    if window is None:
        window = (None, None)
    valid = isinstance(window, tuple) and len(window) == 2
    if not valid or not all(x is None or (_is_integer(x) and x >= -1) for x in window):
        allowed = "None or (left, right), each at least 0, or None or -1 for unlimited"
        name = caller_name(function, "window")
        raise ValueError(f"{function}: {name} must be {allowed}, got {window}")
    left, right = (unlimited if x in (None, -1) else min(int(x), unlimited) for x in window)
    return left, 0 if causal else right, causal == "top-left"


def _packed_batch(function: str, name: str, extras: Mapping[str, View]) -> int:
    """How many sequences there are, by their cu_seqlens of this name."""
    x, name = extras.get(name), caller_name(function, name)
    if x is None:
        raise TypeError(f"{function}: {name} must be an int32 array (batch + 1), got None")
    if x.dtype != "int32":
        raise TypeError(f"{function}: {name} must be int32, got {x.dtype}")
    fact = f"{name} must have one dimension (batch + 1) and be contiguous"
    _require(len(x.shape) == 1 and x.shape[0] >= 1 and x.strides[0] == 1, function, fact, x)
    return x.shape[0] - 1


def check_lengths(function: str, problem: Problem, values: Mapping[str, list[int]]) -> None:
    """The values of cu_seqlens and seqused: they are only read where that waits for no GPU."""
    shape = problem.shape
    for side, total, longest in (
        ("q", problem.total_q, shape.seqlen_q),
        ("k", problem.total_k, shape.seqlen_k),
    ):
        ends, used = values.get(f"cu_seqlens_{side}"), values.get(f"seqused_{side}")
        if ends is not None:
            _check_cu_seqlens(function, f"cu_seqlens_{side}", ends, total, longest)
        if used is not None:
            _check_seqused(function, f"seqused_{side}", used, longest, ends)


def _check_cu_seqlens(
    function: str, name: str, values: list[int], total: int, longest: int
) -> None:
    name = caller_name(function, name)
    lengths = [b - a for a, b in zip(values, values[1:])]
    if values[0] != 0 or values[-1] != total or min(lengths, default=0) < 0:
        fact = f"{name} must start with 0, not decrease and end with the {total} rows"
        raise ValueError(f"{function}: {fact}, got {values}")
    if max(lengths, default=0) > longest:
        fact = f"{name} must have no sequence longer than the maximum {longest}"
        raise ValueError(f"{function}: {fact}, got {values}")


def _check_seqused(
    function: str, name: str, values: list[int], rows: int, cu_seqlens: list[int] | None
) -> None:
    """``rows`` are those of each sequence, unless there are cu_seqlens."""
    if cu_seqlens is None:
        if values and not 0 <= min(values) <= max(values) <= rows:
            raise ValueError(f"{function}: {name} must be from 0 to {rows}, got {values}")
        return
    lengths = [b - a for a, b in zip(cu_seqlens, cu_seqlens[1:])]
    if not all(0 <= value <= length for value, length in zip(values, lengths)):
        fact = f"{name} must be from 0 to the lengths {lengths} of the sequences"
        raise ValueError(f"{function}: {fact}, got {values}")


def check_bias_gradient(
    function: str, problem: Problem, bias_grad: bool, deterministic: bool
) -> None:
    """Whether the bias can have a gradient, if it is to have one, and that in a fixed order.

    On a CPU every order is fixed; but it takes and refuses what a GPU does.
    """
    bias = problem.extras.bias
    if bias_grad and (bias is None or bias.dtype == "bool"):
        got = "none" if bias is None else bias.dtype
        raise ValueError(f"{function}: bias_grad needs a bias of a floating dtype, got {got}")
    atomic = bias_grad and problem.bias_is_broadcast and not problem.bias_gradient_fits_registers
    if atomic and deterministic:
        name = caller_name(function, "bias")
        fact = f"deterministic does not extend to the gradient of a {name} that is broadcast, "
        fact += "but over the batch or the heads alone, without softcap, ALiBi, dropout and "
        fact += "seqused, in float16 or bfloat16 with a head_dim up to 64"
        raise NotImplementedError(f"{function}: {fact}, got {name} {bias.shape}")


def _max_seqlens(function: str, lengths: tuple[Any, Any]) -> tuple[int, int]:
    for name, length in zip(("max_seqlen_q", "max_seqlen_k"), lengths):
        if not _is_integer(length) or length < 0:
            name = caller_name(function, name)
            raise ValueError(f"{function}: {name} must be an integer of at least 0, got {length}")
    return int(lengths[0]), int(lengths[1])


def _require(condition: bool, function: str, fact: str, got: View) -> None:
    if not condition:
        raise ValueError(f"{function}: {fact}, got {got.shape}")


def _is_integer(x: Any) -> bool:
    return hasattr(x, "__index__") and not isinstance(x, bool)


def _is_real(x: Any) -> bool:
    return hasattr(x, "__float__") and not isinstance(x, bool)


def check_extras(
    function: str, extras: Mapping[str, View], q: View, sizes: tuple[int, int, int, int]
) -> ExtraFacts:
    """The facts of the optional arrays by name, for ``sizes`` (batch, heads_q, seqlen_q, seqlen_k).

    Raises:
        TypeError: dtypes.
        ValueError: shapes, strides, devices.
        NotImplementedError: a bias or key mask together with cu_seqlens; both, if both are bool.
    """
    batch, heads_q, _, seqlen_k = sizes
    for name, x in extras.items():
        if x.device != q.device:
            fact = f"{caller_name(function, name)} must be on the device of q"
            got = f"devices {device_name(x.device)} and {device_name(q.device)}"
            raise ValueError(f"{function}: {fact}, got {got}")
    for name in ("bias", "key_mask"):
        if name in extras and ("cu_seqlens_q" in extras or "cu_seqlens_k" in extras):
            name = caller_name(function, name)
            raise NotImplementedError(f"{function}: {name} is not built for packed sequences")
    for name in ("seqused_q", "seqused_k"):
        _dense(function, name, extras.get(name), ("int32",), [(batch,)])
    _dense(function, "dropout_seed", extras.get("dropout_seed"), ("int64",), [(1,), ()])
    _dense(function, "sinks", extras.get("sinks"), ("float32", q.dtype), [(heads_q,)])
    bias = _bias(function, extras["bias"], q.dtype, sizes) if "bias" in extras else None
    key_mask = extras.get("key_mask")
    if key_mask is not None:
        _check_key_mask(function, key_mask, (batch, seqlen_k), bias)
    elif bias is not None and bias.dtype == "bool" and not any(bias.strides[1:3]):
        key_mask = bias._replace(shape=(batch, seqlen_k), strides=bias.strides[::3])
    slopes = extras.get("alibi_slopes")
    _dense(function, "alibi_slopes", slopes, ("float32",), [(heads_q,), (batch, heads_q)])
    return ExtraFacts(
        alibi_batch_stride=None if slopes is None else _batch_stride(slopes),
        bias=bias,
        key_mask=key_mask,
        sinks="sinks" in extras,
        lengths="seqused_q" in extras or "seqused_k" in extras,
    )


def _dense(
    function: str,
    name: str,
    x: View | None,
    dtypes: tuple[str, ...],
    shapes: list[tuple[int, ...]],
) -> None:
    """Requires one of the dtypes and shapes, and a contiguous last axis, of an optional array."""
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


def _check_key_mask(function: str, mask: View, shape: tuple[int, int], bias: View | None) -> None:
    name = caller_name(function, "key_mask")
    if mask.dtype != "bool":
        raise TypeError(f"{function}: {name} must be bool, got {mask.dtype}")
    fact = f"{name} must be (batch, seqlen_k) = {shape}"
    _require(mask.shape == shape, function, fact, mask)
    if bias is not None and bias.dtype == "bool":
        fact = f"{caller_name(function, 'bias')} must be of a floating dtype beside a {name}"
        raise NotImplementedError(f"{function}: {fact}, got bool")


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
