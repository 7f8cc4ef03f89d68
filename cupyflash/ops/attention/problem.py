"""A checked attention call: what the kernels need to know of it.

`cupyflash.ops.attention.checks` makes a `Problem` of the arrays and options of a call.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ...runtime.array import View
from ...runtime.config import ITEM_SIZE
from ...runtime.gpu import HALF, Capability
from ...runtime.structs import header
from ...runtime.tensor_map import MAX_MAP_STRIDE
from .kind import (
    FEW_KEYS,
    KEY_MASK,
    MAX_FAST_SOFTCAP,
    ONE_TILE,
    SHORT,
    TINY,
    Access,
    Features,
    Kind,
)
from .options import Options

structs = header("attention/params.cuh")

# Beyond it, a bias in units of the score times 2^-104 is no normal float32.
MAX_TMA_BIAS_SCALE = 2.0**20


@dataclasses.dataclass(frozen=True)
class ExtraFacts:
    """The facts of a checked problem about its optional arrays, apart from cu_seqlens.

    Attributes:
        alibi_batch_stride: in elements, or None without slopes.
        bias: of rank 4, stride 0 on the axes of length 1.
        key_mask: (batch, seqlen_k); that of the extras, or a bool bias that all queries share.
        lengths: some sequence may have fewer rows than the tensors.
    """

    alibi_batch_stride: int | None = None
    bias: View | None = None
    key_mask: View | None = None
    sinks: bool = False
    lengths: bool = False

    def bias_kind(self, dtype: str) -> int:
        """Returns the kind of the bias as in `Features`, for q of this dtype."""
        if self.key_mask is not None:
            alone = self.bias is None or self.bias.dtype == "bool"
            return KEY_MASK + (0 if alone else 1 if self.bias.dtype == dtype else 2)
        if self.bias is None:
            return 0
        return 1 if self.bias.dtype == dtype else 2 if self.bias.dtype == "bool" else 3


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
        aligned: the addresses of all tensors but out are multiples of 16.
        bias_aligned: that of the bias is.
        tf32: products may have the accuracy of TF32.
        text: the `Text` of a score or a mask of the caller's own, or None.
        captures: the views of its captures; what stands for a number is not read.
        pages: the `PagedRows` of decode/paged_rows.cuh of keys and values in a cache, whose strides
            those of k and v are, or None. The table takes the place of a bias.
    """

    dtype: str
    device: int
    shape: structs.AttentionShape
    head_dims: tuple[int, int]
    strides: Mapping[str, structs.Strides]
    extras: ExtraFacts
    total_q: int | None
    total_k: int | None
    aligned: bool = True
    bias_aligned: bool = False
    tf32: bool = False
    text: Any = None
    captures: tuple[View | None, ...] = ()
    pages: Any = None

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
    def learned(self) -> tuple[View | None, ...]:
        """The views of the captures that learn, None for the others; () if none learns."""
        captures = self.text.captures if self.text else ()
        views = tuple(view if x.learns else None for x, view in zip(captures, self.captures))
        return views if any(views) else ()

    @property
    def mask_is_shared(self) -> bool:
        """Whether the mask of the text hides the same keys in all sequences."""
        from .score_text.change import changed  # imported when a call has a text
        from .score_text.write import nodes

        views = {x.name: view for x, view in zip(self.text.captures, self.captures)}

        def same_for_all(x: Any) -> Any:
            """The node without an index that changes no address."""
            view = views[x.value.name] if x.op == "capture" else None
            if view is None or not view.shape or view.strides[0]:
                return x
            return type(x)(x.op, x.kind, x.args[1:], x.value)

        mask = changed(self.text.mask_tree, same_for_all)
        return not (self.has_own_lengths or any(x.value == "batch" for x in nodes(mask)))

    @property
    def is_causal(self) -> bool:
        """Whether a mask hides keys on the right of each query, and none on its left."""
        shape = self.shape
        return shape.window_right < shape.seqlen_k <= shape.window_left

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
        """The features that the kernels need beside plain attention."""
        shape = self.shape
        extras = self.extras
        masked = min(shape.window_left, shape.window_right) < shape.seqlen_q + shape.seqlen_k
        padded_to_128, padded_to_192 = (-(-shape.seqlen_q // n) * n for n in (128, 192))
        one_tile = max(shape.seqlen_q, shape.seqlen_k) <= ONE_TILE
        return Features(
            softcap=shape.softcap > 0,
            alibi=extras.alibi_batch_stride is not None,
            masked=masked,
            short=sum(shape.seqlen_q <= length for length in SHORT),
            bias=extras.bias_kind(self.dtype),
            dropout=shape.dropout_threshold > 0,
            bias_by_tma=self._bias_fits_map,
            wide_softcap=shape.softcap > MAX_FAST_SOFTCAP,
            tiny=min(shape.seqlen_q, shape.seqlen_k) < TINY,
            tf32=self.tf32,
            fits_128=padded_to_128 < 0.95 * padded_to_192,
            few_keys=shape.seqlen_k <= FEW_KEYS,
            one_tile=one_tile,
            head_dim_v=self._head_dim_v,
            one_pass=one_tile and shape.heads_q == shape.heads_kv and not extras.sinks,
            text=self.text,
            paged=self.pages is not None,
        )

    def kind(self, capability: Capability) -> Kind:
        """The facts that decide which kernels compute the problem on such a GPU."""
        return Kind(self.dtype, self.shape.head_dim, self.features, capability)

    @property
    def _head_dim_v(self) -> int:
        head_dim, head_dim_v = self.head_dims
        return head_dim_v if head_dim_v < head_dim == self.shape.head_dim else 0

    @property
    def bias_strides(self) -> structs.BiasStrides:
        """The strides of the bias, or of a key mask alone; zeros without either."""
        bias, mask = self.extras.bias, self.extras.key_mask
        if bias is None and mask is not None:
            return structs.BiasStrides(mask.strides[0], 0, 0, mask.strides[1])
        return structs.BiasStrides() if bias is None else structs.BiasStrides(*bias.strides)

    @property
    def _bias_fits_map(self) -> bool:
        """Whether a tensor map can describe it, and is worth it: not where all rows share one."""
        if not self.bias_aligned or self.extras.bias_kind(self.dtype) not in (1, KEY_MASK + 1):
            return False
        *batch_and_head, row, col = self.bias_strides
        steps = [row, *(step for step in batch_and_head if step)]
        aligned = all(
            0 < step * ITEM_SIZE[self.dtype] < MAX_MAP_STRIDE and step % 8 == 0 for step in steps
        )
        scale = self.shape.softcap or self.shape.scale
        return aligned and col == 1 and scale <= MAX_TMA_BIAS_SCALE

    @property
    def bias_is_broadcast(self) -> bool:
        """Whether several scores share an element of the bias."""
        shape = self.shape
        scores = shape.batch * shape.heads_q * shape.seqlen_q * shape.seqlen_k
        return math.prod(self.extras.bias.shape) < scores

    @property
    def bias_gradient_is_ds(self) -> bool:
        """Whether a kernel may store dS as the gradient of the bias, in rows of whole 16 bytes."""
        broadcast = self.extras.bias is None or self.bias_is_broadcast
        return not (broadcast or self.has_own_lengths or self.shape.seqlen_k % 8)

    @property
    def bias_gradient_fits_registers(self) -> bool:
        """Whether a kernel for tensor cores can sum the gradient of the bias in its registers.

        That is so if all sequences, and perhaps all heads, share the bias, and queries and keys do
        not.
        """
        shape, bias, features = self.shape, self.extras.bias, self.features
        return (
            bias.shape[0] == 1
            and bias.shape[2:] == (shape.seqlen_q, shape.seqlen_k)
            and self.dtype in HALF
            and shape.head_dim <= 64
            and not (self.has_own_lengths or features.changes_scores)
        )

    @property
    def access(self) -> Access:
        """The way in which all tensors but out can be read; one kernel reads out, in any way."""
        item = ITEM_SIZE[self.dtype]
        steps = []  # bytes between neighbours of each axis with more than one index
        for name in self.strides.keys() - {"out"}:
            sizes = self.sizes(name)
            if 0 not in sizes:
                steps += [x * item for n, x in zip(sizes, self.strides[name]) if n > 1]
        if not self.aligned or any(x % 16 for x in steps):
            return Access.ELEMENT
        mappable = all(0 < step < MAX_MAP_STRIDE for step in steps)
        return Access.TENSOR_MAP if mappable else Access.VECTOR

    def sizes(self, name: str) -> tuple[int, int, int]:
        """(batch, rows, heads) of a tensor; packed sequences are a batch of one, pages a batch."""
        shape = self.shape
        of_keys = name in ("k", "v")
        if of_keys and self.pages is not None:
            return (self.pages.num_pages, self.pages.page_size, shape.heads_kv)
        heads = shape.heads_kv if of_keys else shape.heads_q
        total = self.total_k if of_keys else self.total_q
        if total is not None:
            return (1, total, heads)
        return (shape.batch, shape.seqlen_k if of_keys else shape.seqlen_q, heads)


def kernel_head_dim(head_dim: int, head_dim_v: int) -> int:
    """The least head_dim of the kernels for q and k of the one and v of the other."""
    return -(-max(head_dim, head_dim_v) // 8) * 8


def canonical_strides(name: str, x: View, options: Options) -> structs.Strides:
    """(batch, row, head); an axis of length 1 or less has stride 0, whatever its library says."""
    layout = options.layout_of(name)
    steps = [step if size > 1 else 0 for size, step in zip(x.shape, x.strides)]
    if layout == "thd":
        return structs.Strides(0, steps[0], steps[1])
    if layout == "bhsd":
        return structs.Strides(steps[0], steps[2], steps[1])
    return structs.Strides(steps[0], steps[1], steps[2])


def bias_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> structs.BiasStrides:
    """Aligns the strides of up to four axes right; axes of length 1, or missing, have stride 0."""
    steps = [0 if size == 1 else step for size, step in zip(shape, strides)]
    return structs.BiasStrides(*[0] * (4 - len(steps)), *steps)
