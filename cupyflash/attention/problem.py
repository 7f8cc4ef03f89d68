"""What an attention call asks for, checked: from views of the arrays and options to a `Problem`.

Every error of this module is raised before any launch, and its text is ``function: fact, allowed,
got``. The checks run once for each combination of shapes, strides, dtypes and options.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from ..array import View, device_name
from ..checks import require_device
from ..kernel_config import ITEM_SIZE, SHORT, Access, Features
from .extras import ExtraFacts, check_extras, dropout_scale, dropout_threshold
from .names import caller_name
from .options import Options
from .params import AttentionShape, BiasStrides, Strides

MAX_HEAD_DIM = 256
MAX_SEQLEN = 2**29  # so that sums of lengths and windows fit 32 bits in the kernels
MAX_BLOCKS = 2**31  # of a grid
MAX_MAP_STRIDE = 2**40  # bytes, of a tensor map
MAX_BOX_SCALE = 2.0**20  # beyond, a bias in units of the score times 2^-104 is no normal float32


@dataclasses.dataclass(frozen=True)
class Problem:
    """A checked call.

    Attributes:
        shape: what the kernels get.
        strides: of each tensor, as (batch, row, head) in elements.
        extras: what is known of the optional arrays.
        total_q: rows of packed queries; None if not packed.
        total_k: rows of packed keys; None if not packed.
        bias_aligned: the address of the bias is a multiple of 16.
    """

    dtype: str
    device: int
    shape: AttentionShape
    strides: Mapping[str, Strides]
    extras: ExtraFacts
    total_q: int | None
    total_k: int | None
    bias_aligned: bool = False

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
        )

    @property
    def bias_strides(self) -> BiasStrides:
        """Of the bias; zeros without one."""
        bias = self.extras.bias
        return BiasStrides() if bias is None else BiasStrides(*bias.strides)

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
    """A `Problem` from views of q, k, v and, in the backward, of dout and out (like q).

    Args:
        extras: views of the optional arrays that are there, by their names in `Extras`.

    Raises:
        TypeError: dtypes.
        ValueError: shapes, strides, devices, option values.
        NotImplementedError: optional arrays that packed sequences do not have.
    """
    extras = extras or {}
    q, k, v = (tensors[name] for name in "qkv")
    say = functools.partial(caller_name, function)
    packed = options.max_seqlens is not None
    rank, names = (3, "(total, heads, head_dim)") if packed else (4, _axes(function, options))
    for name, x in tensors.items():
        if len(x.shape) != rank:
            fact = f"{say(name)} must have {rank} dimensions {names}"
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

    batch, seqlen_q, heads_q, head_dim = _dimensions(q, options)
    _, seqlen_k, heads_kv, _ = _dimensions(k, options)
    shapes = ", ".join(f"{say(name)} {tensors[name].shape}" for name in "qkv")
    if k.shape != v.shape or _dimensions(k, options)[::3] != (batch, head_dim):
        like = f"the batch and head_dim of {say('q')}"
        fact = f"{say('k')} and {say('v')} must have the same shape, and {like}"
        raise ValueError(f"{function}: {fact}, got {shapes}")
    for name in ("dout", "out"):
        if name in tensors:
            _require(
                tensors[name].shape == q.shape, function, f"{name} must be like q", tensors[name]
            )
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        fact = f"head_dim must be a multiple of 8 from 8 to {MAX_HEAD_DIM}"
        raise ValueError(f"{function}: {fact}, got {head_dim}")
    if heads_q != heads_kv and (heads_kv == 0 or heads_q % heads_kv):
        fact = f"the heads of {say('q')} must be a multiple of those of {say('k')} and {say('v')}"
        raise ValueError(f"{function}: {fact}, got {heads_q} and {heads_kv}")

    total_q = total_k = None
    if packed:
        total_q, total_k = seqlen_q, seqlen_k
        batch = _packed_batch(
            function, {name: extras.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        )
        seqlen_q, seqlen_k = _max_seqlens(function, options.max_seqlens)
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
    shape = AttentionShape(
        batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, left, right, top_left, 1, scale,
        options.softcap, threshold, dropout_scale(threshold),
    )  # fmt: skip
    strides = {name: canonical_strides(x, options) for name, x in tensors.items()}
    facts = check_extras(function, extras, q, (batch, heads_q, seqlen_q, seqlen_k))
    return Problem(q.dtype, q.device, shape, strides, facts, total_q, total_k)


def check_lse(function: str, problem: Problem, lse: View) -> None:
    """The LSE of the forward, an input of the backward."""
    if lse.dtype != "float32":
        raise TypeError(f"{function}: lse must be float32, got {lse.dtype}")
    if lse.device != problem.device:
        where = f"devices {device_name(lse.device)} and {device_name(problem.device)}"
        raise ValueError(f"{function}: lse must be on the device of q, got {where}")
    _require(lse.shape == problem.lse_shape, function, f"lse must be {problem.lse_shape}", lse)


def canonical_strides(x: View, options: Options) -> Strides:
    """(batch, row, head); an axis of length 1 or less has stride 0, whatever its library says."""
    steps = [step if size > 1 else 0 for size, step in zip(x.shape, x.strides)]
    if options.layout == "thd":
        return Strides(0, steps[0], steps[1])
    if options.layout == "bhsd":
        return Strides(steps[0], steps[2], steps[1])
    return Strides(steps[0], steps[1], steps[2])


def _axes(function: str, options: Options) -> str:
    axes = {
        "bshd": "(batch, seqlen, heads, head_dim)",
        "bhsd": "(batch, heads, seqlen, head_dim)",
    }
    if options.layout not in axes:
        raise ValueError(f"{function}: layout must be 'bshd' or 'bhsd', got {options.layout!r}")
    return axes[options.layout]


def _dimensions(x: View, options: Options) -> tuple[int, int, int, int]:
    """(batch, rows, heads, head_dim); packed tensors have no batch axis: 1."""
    if options.layout == "thd":
        return (1, *x.shape)
    if options.layout == "bhsd":
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


def _packed_batch(function: str, cu_seqlens: Mapping[str, View | None]) -> int:
    for name, x in cu_seqlens.items():
        name = caller_name(function, name)
        if x is None:
            raise TypeError(f"{function}: {name} must be an int32 array, got None")
        if x.dtype != "int32":
            raise TypeError(f"{function}: {name} must be int32, got {x.dtype}")
        fact = f"{name} must have one dimension (batch + 1) and be contiguous"
        _require(len(x.shape) == 1 and x.shape[0] >= 1 and x.strides[0] == 1, function, fact, x)
    sizes = {name: x.shape for name, x in cu_seqlens.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{function}: the cu_seqlens must have the same length, got {sizes}")
    return next(iter(sizes.values()))[0] - 1


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


def check_seqused(function: str, name: str, values: list[int], problem: Problem) -> None:
    """The values of seqused_q or seqused_k; read as rarely as those of cu_seqlens."""
    rows = problem.shape.seqlen_q if name == "seqused_q" else problem.shape.seqlen_k
    if values and not 0 <= min(values) <= max(values) <= rows:
        raise ValueError(f"{function}: {name} must be from 0 to {rows}, got {values}")


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
