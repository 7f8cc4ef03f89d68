"""The result of a backend for a pass of attention: launches, ready but for the pointers of a call.

Every backend makes its backward `Pass` with `backward_pass`, which adds the kernel that all of them
may need: that of the gradient of the sinks, after the one that prepares each query row.
"""

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...runtime.array import Array, View
from ...runtime.config import KernelConfig
from ...runtime.gpu import Card
from ...runtime.launch import Launch
from ...runtime.structs import header
from . import sharing
from .captures import PackedCaptures
from .kernels import AttentionLaunch, FlashBwdPreprocess, FlashBwdSinks
from .masks import KeyMaskLaunch, MaskTilesLaunch
from .options import BIAS, NO_EXTRAS
from .problem import Problem
from .score_text.tiles import FoundTiles

structs = header("attention/params.cuh")


class Scratch(NamedTuple):
    """The bytes of the parts of a backward pass's memory, which lie in it in this order.

    Attributes:
        lse_log2, delta: a float32 for each row of each query head.
        dq_accum: dq in float32, to which blocks add.
        dkv_partial: sums in float32 of blocks that divide the work of a key head, or of those that
            divide the sum of a bias gradient.
        semaphores: in memory of its own, which begins as zeros.
    """

    lse_log2: int
    delta: int
    dq_accum: int
    dkv_partial: int
    semaphores: int = 0


class Wanted(NamedTuple):
    """The results that a backward pass must give.

    Attributes:
        strides: of dq, dk and dv, by the names of the fields of the argument.
        bias: the strides of the gradient of the bias, if there is to be one.
        in_order: every sum has a fixed order, as far as the backend has one for it.
    """

    strides: dict[str, structs.Strides]
    bias: structs.BiasStrides | None = None
    in_order: bool = False


class BiasGradient(NamedTuple):
    """Kernels behind all others of a pass, which write the gradient of the bias in a fixed order.

    Attributes:
        partial_floats: the size of their sums, in ``dkv_partial``.
        launches: makes their launches from the parameters of the pass.
    """

    partial_floats: int
    launches: Callable[[ctypes.Structure], tuple[Launch, ...]]


MakeLaunch = Callable[[KernelConfig, Problem, ctypes.Structure], AttentionLaunch]


@dataclasses.dataclass(frozen=True)
class Pass:
    """The launches of a pass, in their order.

    Attributes:
        key_mask: the launch before all others, where they take a key mask.
        scratch: of a backward pass.
        bias_gradient: launches behind all others that alone get the address of the gradient of the
            bias, and write all of it.
        stores_dbias: the main kernel stores the gradient of the bias, in the dtype of q, and leaves
            alone what belongs to no visible score; else it adds to one in float32.
        captures: packs the captures of a call, for a text that has any.
        mask_tiles: the launch before all others where the main kernel skips tiles of the mask.
        capture_gradients: the `CaptureGradients` behind all others where captures learn.
    """

    launches: tuple[AttentionLaunch, ...]
    key_mask: KeyMaskLaunch | None = None
    scratch: Scratch = Scratch(0, 0, 0, 0)
    bias_gradient: tuple[Launch, ...] = ()
    stores_dbias: bool = False
    captures: PackedCaptures | None = None
    mask_tiles: MaskTilesLaunch | None = None
    capture_gradients: Any = None

    def of_text(
        self, library: Any, stream: Any, like: Array, extras: list[Any]
    ) -> tuple[bytes, Array | None]:
        """What the kernels with a text get in front of their pointers, and the memory behind it.

        Args:
            extras: the addresses of `Extras`, the captures of the text, and perhaps `FoundTiles`.
        """
        if self.captures is None and self.mask_tiles is None:
            return b"", None
        values = extras[len(NO_EXTRAS) :]
        found = values.pop() if values and isinstance(values[-1], FoundTiles) else None
        # A text that comes without captures is that of a Boolean bias (sm90/boolean_bias.py).
        captures = self.captures(values or extras[BIAS : BIAS + 1]) if self.captures else b""
        if self.mask_tiles is None:
            return captures, None
        tiles, bits = self.mask_tiles(library, stream, like, extras, captures, found)
        return bits + captures, tiles


def forward_pass(
    problem: Problem,
    card: Card,
    config: KernelConfig,
    launch: MakeLaunch = AttentionLaunch,
    *,
    even_end: bool = False,
) -> Pass:
    """The forward pass of one main kernel; ``even_end`` is that of `sharing.heads_per_section`."""
    shape = structs.AttentionShape.from_buffer_copy(problem.shape)
    shape.heads_per_section = sharing.heads_per_section(
        config, problem, card, tensors=2, even_end=even_end
    )
    params = structs.FlashFwdParams(
        **_strides_of(problem),
        lse_batch_stride=problem.lse_strides[0],
        lse_head_stride=problem.lse_strides[1],
        alibi_batch_stride=problem.extras.alibi_batch_stride or 0,
        bias_strides=problem.bias_strides,
        shape=shape,
    )
    key_mask = None
    if config.takes_key_mask:
        features = problem.features
        whole = not (features.masked or features.alibi or problem.extras.lengths)
        key_mask = KeyMaskLaunch(problem, trim=whole)
    launches = (launch(config, problem, params),)
    captures, tiles = _packed_captures(problem), _mask_tiles(problem, config)
    return Pass(launches, key_mask, captures=captures, mask_tiles=tiles)


class Sharing(NamedTuple):
    """The way in which the blocks of a backward pass share the work.

    Attributes:
        shares: blocks that divide the work of a key head.
        heads_per_section: as `sharing.heads_per_section` returns it.
        in_turns: blocks add to dq one after the other, in a fixed order.
        accum_rows: rows of ``dq_accum``, of all heads together; None for those of every query.
    """

    shares: int = 1
    heads_per_section: int = 1
    in_turns: bool = False
    accum_rows: int | None = None


def backward_pass(
    problem: Problem,
    wanted: Wanted,
    configs: Sequence[KernelConfig],
    shared: Sharing,
    *,
    accum_dim: int = 0,
    launch: MakeLaunch = AttentionLaunch,
    bias_gradient: BiasGradient | None = None,
    stores_dbias: bool = False,
    capture_gradients: Any = None,
) -> Pass:
    """The backward pass of these kernels, of which the first one is no main kernel.

    Args:
        accum_dim: columns of ``dq_accum``; 0 for a single kernel, which needs no scratch.
        launch: makes the launch of the main kernel, the second one.
    """
    rows = padded_rows(problem)
    row_bytes = 4 * problem.shape.heads_q * rows
    accum_rows = shared.accum_rows
    if accum_rows is None:
        accum_rows = problem.shape.heads_q * rows
    partial = 2 * shared.shares * rows_k(problem) * problem.shape.heads_kv * accum_dim
    partial = 0 if shared.shares == 1 else partial
    if bias_gradient is not None:
        partial = max(partial, bias_gradient.partial_floats)
    semaphores = 1 + problem.shape.heads_q * rows // 16 if shared.in_turns and accum_dim else 0
    scratch = Scratch(row_bytes, row_bytes, 4 * accum_dim * accum_rows, 4 * partial, semaphores)
    params = backward_params(problem, wanted, shared)
    main, configs = configs[:2][-1], list(configs)
    if problem.extras.sinks:
        configs.insert(1, FlashBwdSinks())
    if problem.shape.seqlen_k == 0:  # only the sinks have a gradient
        del configs[2:]
    of_out = structs.FlashBwdParams.from_buffer_copy(params)  # for the kernel that reads out
    of_out.shape.head_dim = problem.head_dims[1]
    launches = []
    for config in configs:
        make = launch if config is main else AttentionLaunch
        read = of_out if isinstance(config, FlashBwdPreprocess) else params
        launches.append(make(config, problem, read))
    masked = any(config.takes_key_mask for config in configs)
    return Pass(
        tuple(launches),
        KeyMaskLaunch(problem) if masked else None,
        scratch,
        () if bias_gradient is None else bias_gradient.launches(params),
        stores_dbias,
        _packed_captures(problem),
        _mask_tiles(problem, main),
        capture_gradients,
    )


def unshared_backward_pass(
    problem: Problem,
    card: Card,
    wanted: Wanted,
    configs: Sequence[KernelConfig],
    launch: MakeLaunch = AttentionLaunch,
    capture_gradients: Any = None,
) -> Pass:
    """`backward_pass` where one block does all the work of a tile of a key head."""
    preprocess, main, *_ = configs
    in_turns = wanted.in_order
    sections = sharing.heads_per_section(main, problem, card, tensors=4, in_turns=in_turns)
    shared, accum_dim = Sharing(1, sections, in_turns), preprocess.accum_dim
    return backward_pass(
        problem, wanted, configs, shared,
        accum_dim=accum_dim, launch=launch, capture_gradients=capture_gradients,
    )  # fmt: skip


def backward_params(problem: Problem, wanted: Wanted, shared: Sharing) -> structs.FlashBwdParams:
    shape = structs.AttentionShape.from_buffer_copy(problem.shape)
    shape.group_shares = shared.shares
    shape.heads_per_section = shared.heads_per_section
    return structs.FlashBwdParams(
        **_strides_of(problem),
        **wanted.strides,
        lse_batch_stride=problem.lse_strides[0],
        lse_head_stride=problem.lse_strides[1],
        alibi_batch_stride=problem.extras.alibi_batch_stride or 0,
        bias_strides=problem.bias_strides,
        dbias_strides=wanted.bias or structs.BiasStrides(),
        accum_rows=padded_rows(problem),
        rows_k=rows_k(problem),
        shape=shape,
    )


def zeros_for(library: Any, views: Sequence[View | None], like: Array) -> tuple[Array | None, ...]:
    """Float32 zeros of the shapes of these views, for kernels that add to them; None for None."""
    found = [library.empty_float32(tuple(view.shape), like) if view else None for view in views]
    for x in found:
        if x is not None:
            library.fill(x, 0)
    return tuple(found)


def _packed_captures(problem: Problem) -> PackedCaptures | None:
    if problem.text is None or not problem.text.captures:
        return None
    return PackedCaptures(problem.text, problem.captures)


def _mask_tiles(problem: Problem, main: KernelConfig) -> MaskTilesLaunch | None:
    wanted = main.tiles and 0 not in (problem.shape.seqlen_q, problem.shape.seqlen_k)
    return MaskTilesLaunch(problem, main) if wanted else None


def _strides_of(problem: Problem) -> dict[str, structs.Strides]:
    return {f"{name}_strides": strides for name, strides in problem.strides.items()}


def rows_k(problem: Problem) -> int:
    """Rows of k of all sequences."""
    shape = problem.shape
    return shape.batch * shape.seqlen_k if problem.total_k is None else problem.total_k


def padded_rows(problem: Problem) -> int:
    """Rows of the accumulators of one head, every sequence padded: see block_info.cuh."""
    shape, align = problem.shape, structs.ACCUM_ROW_ALIGN
    if problem.total_q is not None:
        return (problem.total_q // align + shape.batch) * align
    return -(-shape.seqlen_q // align) * align * shape.batch
