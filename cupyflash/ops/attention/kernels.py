"""The base classes of the kernels of attention and of their launches; kernels of every backend."""

import ctypes
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from ...runtime.config import KernelConfig
from ...runtime.launch import Launch
from ...runtime.structs import header
from .captures import size_of
from .kind import KEY_MASKS
from .problem import Problem

structs = header("attention/params.cuh")
# A tile holds the fields of a configuration that the problem leaves open, in their order: the rows
# of queries and of keys, and then the stages, warps and warpgroups that the kernel has.
Tile = tuple[int, ...]

TILES_BYTES = ctypes.sizeof(header("attention/text/tile_bits.cuh").MaskTileBits)
_preprocess = header("attention/flash_bwd_preprocess.cu")


def each_once(groups: Iterable[Iterable[KernelConfig]]) -> Iterator[KernelConfig]:
    """The configurations of all groups, each at its first place."""
    yield from dict.fromkeys(itertools.chain.from_iterable(groups))


@dataclasses.dataclass(frozen=True)
class AttentionKernel(KernelConfig):
    """A kernel of which a block computes a tile: ``tile_rows`` rows of one head.

    Attributes:
        tiles_of: "q" if these are rows of queries, "k" if they are keys.
        text: the `Text` of a score or a mask of the caller's own; None for kernels without scores.
        tiles: it skips the tiles that the mask of the text hides (masks.py).
    """

    tiles_of: ClassVar[str] = "q"

    text: Any = dataclasses.field(default=None, kw_only=True)
    tiles: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def header(self) -> str:
        """The text as C++, with exact functions where the scores are in float32."""
        if self.text is None:
            return ""
        exact = str(getattr(self, "dtype", "float32") == "float32").lower()
        pass_ = "bwd" if "_bwd_" in self.name else "fwd"
        tiles = "#define USER_TILES\n" if self.tiles else ""
        return f"{tiles}#define TEXT_IS_EXACT {exact}\n{self.text.header(pass_)}"

    @property
    def argument_size(self) -> int:
        return super().argument_size + self.captures_size

    @property
    def captures_size(self) -> int:
        """Bytes of what the text needs in front of the struct that has the other pointers."""
        return 0 if self.text is None else size_of(self.text) + TILES_BYTES * self.tiles

    @property
    def takes_key_mask(self) -> bool:
        """Whether ``params.bias`` points to the record of a key mask."""
        return getattr(self, "bias", 0) in KEY_MASKS

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_warps * 32

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return self.block_m if self.tiles_of == "q" else self.block_n

    def grid(self, shape: structs.AttentionShape) -> int:
        """Number of tiles."""
        of_keys = self.tiles_of == "k"
        rows = shape.seqlen_k if of_keys else shape.seqlen_q
        heads = shape.heads_kv * shape.group_shares if of_keys else shape.heads_q
        return -(-rows // self.tile_rows) * heads * shape.batch


class AttentionLaunch(Launch):
    """The launch of one kernel of a pass, with the captures of a text in front of its pointers.

    Args:
        grid: the number of blocks, if it does not follow from the configuration.

    Attributes:
        captures_at: where the captures stand in the argument, which is made without them: before
            the pointers, so behind tensor maps.
        captures_end: behind them; the same where the kernel takes none.
    """

    captures_at = captures_end = 0

    def __init__(
        self,
        config: AttentionKernel,
        problem: Problem,
        params: ctypes.Structure,
        grid: int | None = None,
    ) -> None:
        grid = config.grid(params.shape) if grid is None else grid
        super().__init__(config, problem.device, grid, params)
        if config.captures_size:
            base = getattr(config.params, "base", None)
            self.captures_at = base.offset if base else 0
            self.captures_end = self.captures_at + config.captures_size

    def plain_argument(self, packed: bytes, pointers: tuple[int, ...], stream: Any) -> bytes:
        """The argument of a call without optional arrays, whose pointers are packed already."""
        return packed + self.tail

    def with_captures(self, argument: bytes, captures: bytes) -> bytes:
        """The argument with the captures in their place, if the kernel takes any."""
        if self.captures_end == 0:
            return argument
        return argument[: self.captures_at] + captures + argument[self.captures_at :]

    def without_captures(self, argument: bytes) -> bytes:
        """The argument without its captures, for a kernel that takes none."""
        return argument[: self.captures_at] + argument[self.captures_end :]


@dataclasses.dataclass(frozen=True)
class FlashBwdPreprocess(AttentionKernel):
    """Backward, first: delta and lse_log2 of every query row; zeroes the accumulators.

    Attributes:
        dtype: of dout and out.
        accum_dim: columns of ``dq_accum``.
        clears: whether it zeroes ``dq_accum``.
    """

    source: ClassVar[str] = "attention/flash_bwd_preprocess.cu"
    threads: ClassVar[int] = _preprocess.WARPS * 32

    dtype: str
    accum_dim: int
    clears: bool = True

    def grid(self, shape: structs.AttentionShape) -> int:
        """Number of blocks; they also cover the padding rows of each sequence."""
        rows = -(-shape.seqlen_q // structs.ACCUM_ROW_ALIGN) * structs.ACCUM_ROW_ALIGN
        return rows // _preprocess.ROWS_PER_BLOCK * shape.heads_q * shape.batch


@dataclasses.dataclass(frozen=True)
class FlashBwdSinks(AttentionKernel):
    """The gradient of the sinks, where there are any: a block sums over the rows of one head."""

    source: ClassVar[str] = "attention/flash_bwd_sinks.cu"

    num_warps: int = 8

    def grid(self, shape: structs.AttentionShape) -> int:
        return shape.heads_q


@dataclasses.dataclass(frozen=True)
class FlashBwdCombine(AttentionKernel):
    """Backward, where blocks divide the work of a key head: dK and dV are sums of theirs.

    Attributes:
        dtype: of dk and dv.
        head_dim: columns of ``dkv_partial``.
        block_n: rows of k in a block.
    """

    source: ClassVar[str] = "attention/flash_bwd_combine.cu"
    tiles_of: ClassVar[str] = "k"

    dtype: str
    head_dim: int
    num_warps: int = 4
    block_n: int = 16

    def grid(self, shape: structs.AttentionShape) -> int:
        """Number of blocks; the shares of a key head are added in one of them."""
        return super().grid(shape) // shape.group_shares
