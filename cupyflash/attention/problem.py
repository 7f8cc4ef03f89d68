"""What an attention call asks for, checked: from views of the arrays and options to a `Problem`.

Every error of this module is raised before any launch, and its text is ``function: fact, allowed,
got``. The checks run once for each combination of shapes, strides, dtypes and options.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from ..runtime.array import View, device_name
from ..runtime.checks import require_device
from ..runtime.config import ITEM_SIZE
from ..runtime.philox import dropout_scale, dropout_threshold
from ..runtime.structs import header
from ..runtime.tensor_map import MAX_MAP_STRIDE
from .extras import ExtraFacts, check_extras
from .features import MAX_FAST_SOFTCAP, SHORT, Access, Features
from .names import caller_name
from .options import Options

structs = header("attention/params.cuh")

MAX_HEAD_DIM = 256
MAX_SEQLEN = 2**29  # so that sums of lengths and windows fit 32 bits in the kernels
MAX_BLOCKS = 2**31  # of a grid
MAX_BOX_SCALE = 2.0**20  # beyond, a bias in units of the score times 2^-104 is no normal float32
AXES = {
    "bshd": "(batch, seqlen, heads, head_dim)",
    "bhsd": "(batch, heads, seqlen, head_dim)",
    "thd": "(total, heads, head_dim)",
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A checked call.

    Attributes:
        shape: what the kernels get; its head_dim is the least that they take for ``head_dims``.
        head_dims: of q and k, and of v and out.
        strides: of each tensor, as (batch, row, head) in elements.
        extras: what is known of the optional arrays.
        total_q: rows of packed queries; None if not packed.
        total_k: rows of packed keys; None if not packed.
        bias_aligned: the address of the bias is a multiple of 16.
    """

    dtype: str
    device: int
    shape: structs.AttentionShape
    head_dims: tuple[int, int]
    strides: Mapping[str, structs.Strides]
    extras: ExtraFacts
    total_q: int | None
    total_k: int | None
    bias_aligned: bool = False

    @property
    def needs_padding(self) -> bool:
        """Whether the kernels take the tensors only with more columns."""
        return self.head_dims != (self.shape.head_dim, self.shape.head_dim)

    @property
    def has_own_lengths(self) -> bool:
        """Whether sequences may have fewer rows than the longest."""
        packed = self.total_q is not None or self.total_k is not None
        return packed or self.extras.lengths

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(batch, heads_q, seqlen_q), or (heads_q, total_q) when packed."""
        if self.total_q is not None:
            return (self.shape.heads_q, self.total_q)
        return (self.shape.batch, self.shape.heads_q, self.shape.seqlen_q)

    @property
    def lse_strides(self) -> tuple[int, int]:
        """(batch, head) in elements, of a dense LSE."""
        if self.total_q is not None:
            return (0, self.total_q)
        return (self.shape.heads_q * self.shape.seqlen_q, self.shape.seqlen_q)

    @property
    def features(self) -> Features:
        """What the kernels need beside plain attention."""
        shape = self.shape
        extras = self.extras
        masked = min(shape.window_left, shape.window_right) < shape.seqlen_q + shape.seqlen_k
        return Features(
            softcap=shape.softcap > 0,
            alibi=extras.alibi_batch_stride is not None,
            masked=masked,
            short=shape.seqlen_q <= SHORT,
            bias=extras.bias_kind(self.dtype),
            dropout=shape.dropout_threshold > 0,
            bias_boxes=self._bias_fits_map,
            wide_softcap=shape.softcap > MAX_FAST_SOFTCAP,
        )

    @property
    def bias_strides(self) -> structs.BiasStrides:
        """Of the bias; zeros without one."""
        bias = self.extras.bias
        return structs.BiasStrides() if bias is None else structs.BiasStrides(*bias.strides)

    @property
    def _bias_fits_map(self) -> bool:
        """Whether a tensor map can describe it, and is worth it: not where all rows share one."""
        if not self.bias_aligned or self.extras.bias_kind(self.dtype) != 1:
            return False
        *batch_and_head, row, col = self.bias_strides
        steps = [row, *(step for step in batch_and_head if step)]
        aligned = all(
            0 < step * ITEM_SIZE[self.dtype] < MAX_MAP_STRIDE and step % 8 == 0 for step in steps
        )
        scale = self.shape.softcap or self.shape.scale
        return aligned and col == 1 and scale <= MAX_BOX_SCALE

    @property
    def bias_is_broadcast(self) -> bool:
        """Whether several scores share an element of the bias."""
        shape = self.shape
        scores = shape.batch * shape.heads_q * shape.seqlen_q * shape.seqlen_k
        return math.prod(self.extras.bias.shape) < scores

    def access(self, pointers: int) -> Access:
        """How the tensors can be read; ``pointers`` is the OR of all pointers.

        That of ``out`` does not count: it is read once, by a kernel that takes any.
        """
        item = ITEM_SIZE[self.dtype]
        steps = []  # of the axes with more than one index: in bytes
        for name in self.strides.keys() - {"out"}:
            sizes = self.sizes(name)
            if 0 not in sizes:
                steps += [x * item for n, x in zip(sizes, self.strides[name]) if n > 1]
        if any(x % 16 for x in (pointers, *steps)):
            return Access.ELEMENT
        mappable = all(0 < step < MAX_MAP_STRIDE for step in steps)
        return Access.TENSOR_MAP if mappable else Access.VECTOR

    def sizes(self, name: str) -> tuple[int, int, int]:
        """(batch, rows, heads) of a tensor; packed sequences are a batch of one."""
        shape = self.shape
        of_keys = name in ("k", "v")
        heads = shape.heads_kv if of_keys else shape.heads_q
        total = self.total_k if of_keys else self.total_q
        if total is not None:
            return (1, total, heads)
        return (shape.batch, shape.seqlen_k if of_keys else shape.seqlen_q, heads)


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
    scale = 1 / math.sqrt(head_dim) if options.scale is None else options.scale
    if not (_is_real(scale) and 0 < scale < math.inf):
        raise ValueError(f"{function}: {say('scale')} must be positive and finite, got {scale}")
    if not (_is_real(options.softcap) and 0 <= options.softcap < math.inf):
        raise ValueError(f"{function}: softcap must be at least 0, got {options.softcap}")
    if not (_is_real(options.dropout_p) and 0 <= options.dropout_p < 1):
        fact = "dropout_p must be at least 0 and less than 1"
        raise ValueError(f"{function}: {fact}, got {options.dropout_p}")
    threshold = dropout_threshold(options.dropout_p)
    width = kernel_head_dim(head_dim, head_dim_v)
    shape = structs.AttentionShape(
        batch, heads_q, heads_kv, seqlen_q, seqlen_k, width, left, right, top_left, 1, scale,
        options.softcap, threshold, dropout_scale(threshold),
    )  # fmt: skip
    strides = {name: canonical_strides(name, x, options) for name, x in tensors.items()}
    facts = check_extras(function, extras, q, (batch, heads_q, seqlen_q, seqlen_k))
    head_dims = (head_dim, head_dim_v)
    return Problem(q.dtype, q.device, shape, head_dims, strides, facts, total_q, total_k)


def kernel_head_dim(head_dim: int, head_dim_v: int) -> int:
    """The least head_dim of the kernels for q and k of the one and v of the other."""
    return -(-max(head_dim, head_dim_v) // 8) * 8


def check_lse(function: str, problem: Problem, name: str, lse: View) -> None:
    """The LSE of the forward, an input of the backward, or its gradient, by their names."""
    if lse.dtype != "float32":
        raise TypeError(f"{function}: {name} must be float32, got {lse.dtype}")
    if lse.device != problem.device:
        where = f"devices {device_name(lse.device)} and {device_name(problem.device)}"
        raise ValueError(f"{function}: {name} must be on the device of q, got {where}")
    _require(lse.shape == problem.lse_shape, function, f"{name} must be {problem.lse_shape}", lse)


def canonical_strides(name: str, x: View, options: Options) -> structs.Strides:
    """(batch, row, head); an axis of length 1 or less has stride 0, whatever its library says."""
    layout = options.layout_of(name)
    steps = [step if size > 1 else 0 for size, step in zip(x.shape, x.strides)]
    if layout == "thd":
        return structs.Strides(0, steps[0], steps[1])
    if layout == "bhsd":
        return structs.Strides(steps[0], steps[2], steps[1])
    return structs.Strides(steps[0], steps[1], steps[2])


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


def check_cu_seqlens(function: str, name: str, values: list[int], total: int, longest: int) -> None:
    """The values of one cu_seqlens: they are only read where that costs no synchronisation."""
    name = caller_name(function, name)
    lengths = [b - a for a, b in zip(values, values[1:])]
    if values[0] != 0 or values[-1] != total or min(lengths, default=0) < 0:
        fact = f"{name} must start with 0, not decrease and end with the {total} rows"
        raise ValueError(f"{function}: {fact}, got {values}")
    if max(lengths, default=0) > longest:
        fact = f"{name} must have no sequence longer than the maximum {longest}"
        raise ValueError(f"{function}: {fact}, got {values}")


def check_seqused(
    function: str, name: str, values: list[int], rows: int, cu_seqlens: list[int] | None
) -> None:
    """The values of seqused_q or seqused_k; read as rarely as those of cu_seqlens.

    Args:
        rows: of each sequence, unless there are cu_seqlens.
    """
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
    if bias_grad and deterministic and problem.bias_is_broadcast:
        name = caller_name(function, "bias")
        fact = f"deterministic does not extend to the gradient of a {name} that is broadcast"
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
