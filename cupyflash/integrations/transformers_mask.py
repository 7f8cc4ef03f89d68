"""The mask function of cupyflash in transformers, whose result every layer of a forward gets.

A `Mask` says which keys each query sees without a matrix of scores in memory: it has the pattern of
the mask function and the padding. The attention function reads both; a model that takes its mask
apart gets the bool tensor which it stands for, and one that adds its mask to scores gets an error.

The values of a padding mask are read once in a forward of more than one token, for all layers
together, which makes the host wait for the GPU: only they say whether there is padding, and where.
Nothing is read while torch compiles or a CUDA graph is captured.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .transformers_pattern import Pattern, packed_pattern, pattern_of

FUNCTION = "cupyflash.integrations.transformers"
# transformers.masking_utils, once `register` has found it: torch.compile cannot trace its import.
masks: Any = None
# Functions that a model may call on a mask, besides indexing it. A model that does arithmetic with
# its mask adds it to scores, and so needs one of another kind.
TAKES_A_MASK = {
    "cat", "concat", "concatenate", "logical_and", "logical_not", "logical_or", "masked_fill",
    "pad", "repeat_interleave", "scaled_dot_product_attention", "where", "zeros_like",
    "__and__", "__or__", "__rand__", "__ror__",
}  # fmt: skip


@dataclasses.dataclass(eq=False)
class Mask:
    """The mask of a forward, by its pattern and its padding.

    Attributes:
        shape: (batch, 1, seqlen_q, seqlen_k), of the bool tensor which it stands for.
        build: makes that tensor.
        pattern: which keys a query sees, or None: only `dense` knows.
        packed: the pattern inside each sequence, where ``cu_seqlens`` say which these are.
        lengths: int32 (batch,), the keys of each sequence that count, or None.
        keys: bool (batch, 1, 1, seqlen_k), False for padding, or None.
        built: what `build` made.
        copies: this mask on other devices, where a model has layers that got it.
    """

    shape: tuple[int, int, int, int]
    device: torch.device
    build: Callable[[], Tensor]
    pattern: Pattern | None = None
    packed: Pattern | None = None
    lengths: Tensor | None = None
    keys: Tensor | None = None
    built: Tensor | None = None
    copies: dict[torch.device, "Mask"] = dataclasses.field(default_factory=dict)

    ndim = 4
    dtype = torch.bool

    def dense(self) -> Tensor:
        """The bool tensor of `shape`, built at the first call."""
        if self.built is None:
            self.built = self.build()
        return self.built

    def on(self, device: torch.device) -> "Mask":
        """The mask on the device of a layer, which is copied for the first layer there."""
        if device == self.device:
            return self
        if device not in self.copies:
            # The copy builds its tensor by itself. If it held this mask, the two would keep each
            # other, and memory of both GPUs, until Python looks for cycles.
            self.copies[device] = dataclasses.replace(
                self,
                device=device,
                build=functools.partial(_build_on, device, self.build),
                lengths=None if self.lengths is None else self.lengths.to(device),
                keys=None if self.keys is None else self.keys.to(device),
                built=None,
                copies={},
            )
        return self.copies[device]

    def options(self, query: Tensor, key: Tensor) -> dict[str, Any]:
        """Options of `cupyflash.attention` for q and k of (batch, heads, seqlen, head_dim)."""
        if (query.shape[2], key.shape[2]) != self.shape[2:]:
            raise ValueError(
                f"{FUNCTION}: attention_mask must be of the {query.shape[2]} queries and "
                f"{key.shape[2]} keys of the layer, got {self.shape[2]} and {self.shape[3]}"
            )
        mask = self.on(query.device)
        if mask.pattern is None:
            return {"bias": mask.dense()}
        left, right = mask.pattern
        causal = right == 0
        options: dict[str, Any] = {"causal": causal, "bias": mask.keys}
        if left is not None or not causal and right is not None:
            options["window"] = (left, right)
        if mask.lengths is not None:
            lengths = mask.lengths
            if lengths.shape[0] != query.shape[0]:
                lengths = lengths.expand(query.shape[0]).contiguous()
            options["seqused_k"] = lengths
            if causal and query.shape[2] == key.shape[2]:  # queries and keys are the same tokens
                options["seqused_q"] = lengths
        return options

    def dim(self) -> int:
        return self.ndim

    def to(self, *target: Any, **named_target: Any) -> "Mask | Tensor":
        """The mask on another device, as `accelerate` asks; its tensor, if that is converted."""
        device, dtype, *_ = torch._C._nn._parse_to(*target, **named_target)
        mask = self if device is None else self.on(device)
        if dtype in (None, torch.bool):
            return mask
        return mask.dense().to(*target, **named_target)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_"):  # special methods, and those that write
            raise AttributeError(f"{FUNCTION}: a mask cannot be written to, got {name}")
        return getattr(self.dense(), name)

    def __eq__(self, other: object) -> Any:
        return self.dense() == other

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple = (), options: dict | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name not in TAKES_A_MASK:
            raise NotImplementedError(
                f"{FUNCTION}: a mask is handed to the attention function, combined or taken apart, "
                f"got {name}: this model computes its scores itself, so take "
                'attn_implementation="eager"'
            )
        tensors = functools.partial(torch.utils._pytree.tree_map_only, cls, cls.dense)
        return function(*tensors(arguments), **tensors(options or {}))


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: "Tensor | Mask | None" = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Mask | Tensor:
    """The mask of a forward: a `Mask`, or a bool tensor where a layer needs that anyway.

    Args:
        q_offset, kv_offset: positions of the first query and key; a tensor with a static cache.
        mask_function: (batch, head, query, key) -> visible, of indices; causal by default.
        attention_mask: padding, bool (batch, keys up to now), True where there is a token; or what
            this function returned for the same forward.
        allow_is_causal_skip, allow_is_bidirectional_skip: either says that the mask is handed to
            the layers as it is.
        use_vmap: whether a part of the mask function is the model's own.
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    if mask_function is None:
        mask_function = masks.causal_mask_function
    if isinstance(q_offset, Tensor):  # the cache moves it on before a layer may take a mask apart
        q_offset = q_offset.clone()
    build = functools.partial(
        masks.sdpa_mask,
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=use_vmap,
        device=device, **others,
    )  # fmt: skip
    shape, device = (batch_size, 1, q_length, kv_length), torch.device(device)
    counted = isinstance(q_offset, int) and isinstance(kv_offset, int)
    as_it_is = allow_is_causal_skip or allow_is_bidirectional_skip
    plain = mask_function in (masks.causal_mask_function, masks.bidirectional_mask_function)
    pattern = pattern_of(mask_function) if as_it_is or plain else None
    if pattern is None:
        if attention_mask is None and counted and q_length == kv_length:
            packed = None if use_vmap else packed_pattern(mask_function)
            return Mask(shape, device, build, packed=packed)
        return build()
    whole = pattern == Pattern()
    ends_at_last_key = counted and q_offset + q_length == kv_offset + kv_length
    if whole or ends_at_last_key:
        if attention_mask is None:
            return Mask(shape, device, build, pattern)
        if counted:
            visible = masks.prepare_padding_mask(attention_mask, kv_length, kv_offset)
            visible = visible[:, kv_offset : kv_offset + kv_length]
            by_length = whole or pattern.right == 0 and q_length == kv_length
            return Mask(shape, device, build, pattern, **_padding(visible, q_length, by_length))
    # A static cache has room behind the last token, so the last query is not that of the last key.
    if attention_mask is None and pattern.right == 0:
        lengths = torch.full((batch_size,), q_length, dtype=torch.int32, device=device)
        lengths = (lengths + (q_offset - kv_offset)).int()
        return Mask(shape, device, build, pattern, lengths=lengths)
    return build()


def _build_on(device: torch.device, build: Callable[[], Tensor]) -> Tensor:
    return build().to(device)


def _padding(visible: Tensor, q_length: int, by_length: bool) -> dict[str, Tensor]:
    """The fields of `Mask` for a padding mask, bool (batch, seqlen_k): lengths, keys, or none."""
    if q_length > 1 and not _unreadable(visible.device):
        gaps = (visible[:, 1:] > visible[:, :-1]).any()
        padded, gaps = torch.stack((~visible.all(), gaps)).tolist()
        if not padded:
            return {}
        if not gaps and by_length:
            return {"lengths": visible.sum(1, dtype=torch.int32)}
    return {"keys": visible[:, None, None]}


def _unreadable(device: torch.device) -> bool:
    """Whether torch compiles or captures, so that values cannot steer what is done."""
    on_gpu = device.type == "cuda"
    return torch.compiler.is_compiling() or (on_gpu and torch.cuda.is_current_stream_capturing())
