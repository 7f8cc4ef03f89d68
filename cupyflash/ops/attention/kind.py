"""What decides which kernels compute a problem: a `Kind`, and how its tensors can be read."""

import enum
import re
from typing import Any, NamedTuple

from ...runtime.gpu import Capability
from ...runtime.structs import header

BIAS_KINDS = header("attention/bias.cuh").BiasKind  # their names, by number
BOOL = BIAS_KINDS.index("BOOL")
KEY_MASK = BIAS_KINDS.index("KEY_MASK")
# The kinds with a key mask, alone or beside a bias.
KEY_MASKS = tuple(i for i, name in enumerate(BIAS_KINDS) if name.startswith("KEY_MASK"))

SHORT = (768, 1536, 3072, 6144)  # queries
# For fewer rows, splitting the inputs takes longer than the products on CUDA cores (an H200).
TINY = 256
FEW_KEYS = 80
ONE_TILE = 64  # queries, and keys, of the kernels for short sequences
# The tensor-core kernels compute tanh with an absolute error near 1e-7, which the softcap
# multiplies; beyond this one the error of a score would show in the weights of 16-bit results.
MAX_FAST_SOFTCAP = 4096.0


class Access(enum.IntEnum):
    """The ways in which kernels can read tensors of a problem; each includes those before it."""

    ELEMENT = 0
    VECTOR = 1  # every pointer and stride is a multiple of 16 bytes
    TENSOR_MAP = 2  # and no stride is zero, negative or too large for a tensor map


class Features(NamedTuple):
    """The features that a problem needs beside plain attention.

    Attributes:
        masked: some query does not see every key, because of a causal mask or a window.
        short: the number of lengths in `SHORT` that no sequence exceeds with its queries.
        bias: 0 for none, 1 in the dtype of q, 2 bool, 3 float32; `KEY_MASK` for a key mask alone,
            and the next two numbers for one beside a bias in the dtype of q or in float32.
        bias_by_tma: a tensor map can describe the bias, which is in the dtype of q.
        wide_softcap: the softcap is above `MAX_FAST_SOFTCAP`.
        tiny: no sequence has as many as `TINY` queries, or as many keys.
        tf32: products of float32 may have the accuracy of TF32.
        fits_128: tiles of 128 queries have less padding than tiles of 192, by 5 % or more.
        few_keys: no sequence has more than `FEW_KEYS` keys.
        one_tile: no sequence has more than `ONE_TILE` queries or keys.
        one_pass: one_tile, no query heads share a key head, and there are no sinks: one kernel can
            compute the backward.
        head_dim_v: columns of v and out if these have fewer than q and k, which need no padding;
            else 0.
        text: the `Text` of a score or a mask of the caller's own, or None.
        paged: keys and values lie in pages of a cache.
    """

    softcap: bool = False
    alibi: bool = False
    masked: bool = False
    short: int = 0
    bias: int = 0
    dropout: bool = False
    bias_by_tma: bool = False
    wide_softcap: bool = False
    tiny: bool = False
    tf32: bool = False
    fits_128: bool = False
    few_keys: bool = False
    one_tile: bool = False
    one_pass: bool = False
    head_dim_v: int = 0
    text: Any = None
    paged: bool = False

    @property
    def mask_has_tiles(self) -> bool:
        """Whether the same tiles of a text's mask are empty for all heads."""
        mask = self.text.mask if self.text else ""
        return bool(mask) and not re.search(r"\bhead\b", mask)

    @property
    def writes_scores(self) -> bool:
        """Whether the text has a score or a mask, beside places of dropout."""
        return bool(self.text and (self.text.score or self.text.mask))

    @property
    def bends_scores(self) -> bool:
        """Whether the text has a score that takes registers in the backward."""
        return bool(self.text and self.text.score and not self.text.is_light)

    @property
    def changes_scores(self) -> bool:
        """Whether the scores have an option beside a bias, or a text."""
        return bool(self.softcap or self.alibi or self.dropout or self.text)

    @property
    def with_bool_mask(self) -> "Features":
        """These features, in which a key mask without a bias counts as a bool bias."""
        return self._replace(bias=BOOL) if self.bias == KEY_MASK else self

    @property
    def switches(self) -> tuple[bool, bool, int, bool]:
        """The features that are template parameters of most kernels, in their order."""
        return (self.softcap, self.alibi, self.bias, self.dropout)


class Kind(NamedTuple):
    """The facts about a problem and a GPU that decide which kernels compute it.

    Attributes:
        head_dim: the least that kernels take, a multiple of 8.
    """

    dtype: str
    head_dim: int
    features: Features
    capability: Capability

    @property
    def with_bool_mask(self) -> "Kind":
        """The same with `Features.with_bool_mask`."""
        return self._replace(features=self.features.with_bool_mask)
