"""From a checked problem to launches: a plan is everything that equal-shaped calls share.

A plan holds the loaded kernels, the grids and the bytes of the parameter struct behind its leading
pointers. A call then allocates its results, puts the pointers in front and launches.
"""

import math
from types import ModuleType
from typing import Any, NamedTuple

from .. import environment
from ..runtime.array import Array, View, dense_strides
from ..runtime.config import KernelConfig
from ..runtime.gpu import capability_of, l2_bytes, multiprocessors
from ..runtime.launch import Launch
from ..runtime.operation import Plan
from ..runtime.structs import header
from . import backends
from .backends.config import FlashBwdCombine, FlashBwdPreprocess, FlashBwdSinks, Tile
from .bias import KeyMaskLaunch, bias_gradient
from .launch import (
    PersistentLaunch,
    group_shares,
    least_side_by_side,
    num_blocks,
    num_tiles,
    prepare,
    takes_heads,
    walks_up,
)
from .options import BIAS, KEY_MASK, Gradients, Options
from .problem import Access, Problem, bias_strides, canonical_strides
from .tuning import Choice, kernels

structs = header("attention/params.cuh")

NO_POINTERS = (0,) * KEY_MASK  # of the optional arrays that the kernels take
# Of the L2 cache, for the keys and values of the heads that run together (tile_order.cuh); the rest
# is left to queries and outputs.
SECTION_L2_FRACTION = 0.6
# No more tiles of queries, or of keys, in a section than these for each multiprocessor: enough for
# an even end of the launch, and the fewer, the more of what they share stays in the L2 cache.
SECTION_TILES = {"q": 2.7, "k": 1.6}
# Where blocks that add in turns all begin with the last queries, at least so many heads side by
# side: fewer, and they wait for each other.
TURN_HEADS = 8


class ForwardPlan(Plan):
    """The forward kernel for one problem; ``library`` allocates out and LSE.

    With ``tile``, that one of its candidates.
    """

    def __init__(
        self,
        function: str,
        problem: Problem,
        access: Access,
        library: Any,
        q: View,
        options: Options,
        tile: Tile | None = None,
    ) -> None:
        super().__init__(problem.device)
        self.library = library
        shape = problem.shape
        # Where v has fewer columns than q, out lies in memory of as many, like that of a v that is
        # padded. So its strides do not depend on the kernel.
        self.columns_v = problem.head_dims[1] if problem.needs_padding else None
        self.out_shape, self.lse_shape = q.shape, problem.lse_shape
        self.out_strides = library.strides_of_empty(q.shape, q)
        out = View(q.shape, self.out_strides, q.dtype, q.device)
        self.lengths = problem.extras.lengths
        self.empty = 0 in (shape.batch, shape.heads_q, shape.seqlen_q)
        if self.empty:
            return
        backend, choice = choose(function, problem, access, backward=False)
        (config,) = kernels(backend, choice, problem.device, backward=False, tile=tile)
        shape.heads_per_section = _heads_per_section(
            problem, config, shape.heads_q * shape.batch, shape.seqlen_k, 2
        )
        params = structs.FlashFwdParams(
            **{f"{name}_strides": strides for name, strides in problem.strides.items()},
            out_strides=canonical_strides("out", out, options),
            lse_batch_stride=problem.lse_strides[0],
            lse_head_stride=problem.lse_strides[1],
            alibi_batch_stride=problem.extras.alibi_batch_stride or 0,
            bias_strides=problem.bias_strides,
            shape=shape,
        )
        self.launch, self.key_mask = prepare(config, problem, params), None
        if config.takes_key_mask:
            features = problem.features
            whole = not (features.masked or features.alibi or self.lengths)
            self.key_mask = KeyMaskLaunch(problem, trim=whole)

    def run(self, like: Array, pointers: list[int], need_lse: bool) -> tuple[Array, Array | None]:
        """Out and LSE, allocated as ``like`` is; pointers of q, k, v and perhaps of `Extras`."""
        library = self.library
        out = library.empty(self.out_shape, self.out_strides, like)
        lse = library.empty_float32(self.lse_shape, like) if need_lse else None
        if self.lengths:  # rows that the kernels leave alone
            library.fill(out, 0)
            if need_lse:
                library.fill(lse, -math.inf)
        if not self.empty:
            q, k, v, *extras = pointers
            size = self.launch.workspace_size
            workspace = library.empty_float32((size,), like) if size else None
            stream = library.stream(self.device_id)
            record, mapped = None, {}
            if self.key_mask:
                record, bias = self.key_mask(library, stream, like, extras)
                mapped = _mapped(self.launch, bias)
            elif extras:
                _mask_as_bias(extras)
            argument = self.launch.argument(
                q, k, v, library.pointer(out), library.pointer(lse) if need_lse else 0,
                *(extras[:KEY_MASK] or NO_POINTERS),
                stream=stream,
                workspace=0 if workspace is None else library.pointer(workspace),
                **mapped,
            )  # fmt: skip
            self.launch.start(stream, argument)
            del record  # the kernels that read it have been launched
        return out if self.columns_v is None else out[..., : self.columns_v], lse


class BackwardPlan(Plan):
    """The backward kernels for one problem; the gradients are like q, k and v."""

    def __init__(
        self,
        function: str,
        problem: Problem,
        access: Access,
        library: Any,
        views: dict[str, View],
        options: Options,
        deterministic: str,
        bias_grad: bool,
        tile: Tile | None = None,
    ) -> None:
        """``deterministic`` is "error" or "warn" where a fixed order is asked for, else ""."""
        super().__init__(problem.device)
        self.library, self.dbias, self.stores_dbias = library, None, False
        self.dbias_has_no_order = False
        shape, extras = problem.shape, problem.extras
        self.lengths = extras.lengths
        self.dsinks_shape = (shape.heads_q,) if extras.sinks else None
        self.dbias_shape = extras.bias.shape if bias_grad else None
        dbias_strides = structs.BiasStrides()
        if bias_grad:
            dense = dense_strides(self.dbias_shape, range(4))
            self.dbias_strides = dense
            dbias_strides = bias_strides(self.dbias_shape, dense)
        self.gradients = []
        strides = dict(problem.strides)
        # Where v has fewer columns than q and k, its gradient lies in memory of as many, like that
        # of a v that is padded. So its strides do not depend on the kernel, and the one that adds
        # up shares may write all columns.
        self.columns_v = problem.head_dims[1] if problem.needs_padding else None
        for name in "qkv":
            x = views[name]
            wide = (*x.shape[:-1], shape.head_dim)
            dense = result_strides(library, x.shape, shape.head_dim, x)
            self.gradients.append((wide, dense))
            like = View(wide, dense, x.dtype, x.device)
            strides[f"d{name}"] = canonical_strides(name, like, options)
        # Keys that no query sees get a gradient of zero from the kernel; without queries there is
        # nothing to launch, and without keys only what finds the gradient of the sinks.
        self.no_keys = shape.seqlen_k == 0
        self.empty = 0 in (shape.batch, shape.heads_q, shape.seqlen_q)
        self.empty |= self.no_keys and not extras.sinks
        self.deterministic = bool(deterministic)
        if self.empty:
            return
        backend, choice = choose(function, problem, access, backward=True)
        if bias_grad and deterministic:  # the one kernel of a pass adds to it by atomics
            choice = choice._replace(features=choice.features._replace(one_pass=False))
        configs = list(kernels(backend, choice, problem.device, backward=True, tile=tile))
        if bias_grad and problem.bias_gradient_is_ds:
            configs = [config.storing_dbias() for config in configs]
            self.stores_dbias = any(config.stores_dbias for config in configs)
        self.skips_tiles = problem.features.masked  # which a stored gradient must have as zeros
        main = configs[:2][-1]  # the second, or the only one
        if bias_grad and not self.no_keys:
            self.dbias = bias_gradient(function, problem, backend, choice, deterministic)
            self.dbias_has_no_order = self.dbias is None and problem.bias_is_broadcast
        deterministic = self.deterministic
        partial_floats, least = 0, 1
        if isinstance(configs[-1], FlashBwdCombine):
            shape.group_shares = group_shares(main, problem, deterministic)
            if shape.group_shares == 1:
                configs.pop()
            else:
                columns = shape.heads_kv * configs[-1].head_dim
                partial_floats = 2 * shape.group_shares * _rows_k(problem) * columns
            least = least_side_by_side(main, problem)
        if takes_heads(main, problem):  # each block adds up dq alone, in the order of keys
            configs = [taking for x in configs if (taking := x.taking_heads())]
            deterministic = False
        elif deterministic and walks_up(main, problem):
            configs = [config.walking_up() for config in configs]
        main = configs[:2][-1]
        if self.dbias is not None:  # after what is above has been read
            partial_floats = max(partial_floats, self.dbias.partial_floats)
        if extras.sinks:
            configs.insert(1, FlashBwdSinks())
        if self.no_keys:
            del configs[2:]
        accum_dim = configs[0].accum_dim
        rows = _accum_rows(problem)
        # One allocation for lse_log2 and delta [heads_q, rows], dq_accum and dkv_partial.
        self.rows_bytes = shape.heads_q * rows * 4
        self.partial_offset = 2 * self.rows_bytes + 4 * accum_dim * _accum_places(problem, main)
        self.scratch_size = self.partial_offset // 4 + partial_floats
        self.semaphores = 1 + shape.heads_q * rows // 16 if deterministic and accum_dim else 0
        per_query = 2 + (2 if accum_dim else 0)  # q, dout; the accumulator counts twice
        shape.heads_per_section = _heads_per_section(
            problem,
            main,
            shape.heads_kv * shape.group_shares * shape.batch,
            shape.seqlen_q,
            per_query,
            least,
            in_turns=deterministic,
        )
        params = structs.FlashBwdParams(
            **{f"{name}_strides": x for name, x in strides.items()},
            lse_batch_stride=problem.lse_strides[0],
            lse_head_stride=problem.lse_strides[1],
            alibi_batch_stride=extras.alibi_batch_stride or 0,
            bias_strides=problem.bias_strides,
            dbias_strides=dbias_strides,
            accum_rows=rows,
            rows_k=_rows_k(problem),
            shape=shape,
        )
        of_out = structs.FlashBwdParams.from_buffer_copy(params)  # for the kernel that reads out
        of_out.shape.head_dim = problem.head_dims[1]
        self.launches = [
            prepare(config, problem, of_out if isinstance(config, FlashBwdPreprocess) else params)
            for config in configs
        ]
        if self.dbias is not None:
            self.dbias.prepare(params)
        masked = any(config.takes_key_mask for config in configs)
        self.key_mask = KeyMaskLaunch(problem) if masked else None

    def run(self, q: Array, k: Array, v: Array, pointers: list[int]) -> tuple[Array | None, ...]:
        """(dq, dk, dv, dbias, dsinks), the last two in float32 or None.

        Args:
            pointers: of dout, q, k, v, out, lse, dlse or 0, and perhaps of `Extras`.
        """
        library, pointer = self.library, self.library.pointer
        in_registers = self.dbias is not None
        dbias = self._allocate_dbias(q)
        dsinks = _zeros_float32(library, self.dsinks_shape, q)
        if self.empty:
            return *(library.zeros_like(x) for x in (q, k, v)), dbias, dsinks
        gradients = tuple(library.empty(*shape, x) for shape, x in zip(self.gradients, (q, k, v)))
        if self.lengths or self.no_keys:  # rows that the kernels leave alone
            for gradient in gradients:
                library.fill(gradient, 0)
        scratch = library.empty_float32((self.scratch_size,), q)
        lse_log2 = pointer(scratch)
        semaphores = library.zeros_int32(self.semaphores, q) if self.semaphores else None
        stream = library.stream(self.device_id)
        (*inputs, dlse), extras = pointers[:7], pointers[7:]
        record = None
        if self.key_mask:
            record, bias = self.key_mask(library, stream, q, extras)
        elif extras:
            _mask_as_bias(extras)
        arguments = (
            *inputs,
            *map(pointer, gradients),
            dlse,
            lse_log2,
            lse_log2 + self.rows_bytes,
            lse_log2 + 2 * self.rows_bytes,
            lse_log2 + self.partial_offset,
            0 if semaphores is None else pointer(semaphores),
            *(extras[:KEY_MASK] or NO_POINTERS),
        )
        to_dbias = 0 if dbias is None else pointer(dbias)
        to_dsinks = 0 if dsinks is None else pointer(dsinks)
        added = (0 if in_registers else to_dbias, to_dsinks)  # by atomics
        for launch in self.launches:
            size = launch.workspace_size
            workspace = library.empty_float32((size,), q) if size else None
            argument = launch.argument(
                *arguments, *added,
                stream=stream,
                workspace=0 if workspace is None else pointer(workspace),
                **({} if record is None else _mapped(launch, bias)),
            )  # fmt: skip
            launch.start(stream, argument)
        if in_registers:
            self.dbias(stream, *arguments, to_dbias, to_dsinks)
        if self.columns_v is not None:
            dq, dk, dv = gradients
            gradients = (dq, dk, dv[..., : self.columns_v])
        return *gradients, dbias, dsinks

    def _allocate_dbias(self, q: Array) -> Array | None:
        """Memory for the gradient of the bias, if it is wanted; zeros unless all is written."""
        library = self.library
        if self.stores_dbias:
            dbias = library.empty(self.dbias_shape, self.dbias_strides, q)
            if self.skips_tiles:
                library.fill(dbias, 0)
            return dbias
        if self.dbias is not None:
            return library.empty_float32(self.dbias_shape, q)
        return _zeros_float32(library, self.dbias_shape, q)


def _mapped(launch: Launch, bias: int) -> dict[str, int]:
    """The address of the bias for a launch that may have a tensor map of it."""
    return {"mapped_bias": bias} if isinstance(launch, PersistentLaunch) else {}


def _mask_as_bias(extras: list[int]) -> None:
    """Puts a key mask alone where kernels without kinds of their own for it read a bool bias."""
    extras[BIAS] = extras[BIAS] or extras[KEY_MASK]


def _zeros_float32(library: Any, shape: tuple[int, ...] | None, like: Array) -> Array | None:
    if shape is None:
        return None
    zeros = library.empty_float32(shape, like)
    library.fill(zeros, 0)
    return zeros


def choose(
    function: str, problem: Problem, access: Access, *, backward: bool
) -> tuple[ModuleType, Choice]:
    """The backend of a pass, and the arguments of its ``forward`` or ``backward``."""
    capability = capability_of(problem.device)
    dtype, head_dim, features = problem.dtype, problem.shape.head_dim, problem.features
    forced = environment.current().backend
    backend = backends.choose(
        function, forced, dtype, head_dim, access, features, capability, backward=backward
    )
    return backend, Choice(dtype, head_dim, features, capability)


def keeps_v(problem: Problem, access: Access, *, backward: bool) -> bool:
    """Whether the kernels take v and out of fewer columns than q and k without padding."""
    shape, features = problem.shape, problem.features
    empty = 0 in (shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k)
    if empty or not features.head_dim_v:
        return False
    forced, capability = environment.current().backend, capability_of(problem.device)
    return backends.keeps_v(
        forced, problem.dtype, shape.head_dim, access, features, capability, backward=backward
    )


def _heads_per_section(
    problem: Problem,
    config: KernelConfig,
    heads: int,
    rows: int,
    tensors: int,
    least: int = 1,
    *,
    in_turns: bool = False,
) -> int:
    """How many of all heads run side by side, longest tiles first: see tile_order.cuh.

    Only tiles of unequal length need it, under a causal mask without a window to the left; and
    blocks that add in turns (``in_turns``), where those of one head wait for each other.

    Args:
        config: the kernel of the tiles.
        heads: of all sequences; a share of the query heads of a key head counts as one.
        rows: of one head in each of so many ``tensors``, which its blocks read again and again.
        least: so many side by side even if the L2 cache has no room for them.
    """
    shape = problem.shape
    if config.whole_heads or not (problem.is_causal or in_turns):
        return 1
    head_bytes = max(1, rows * shape.head_dim * tensors * 2)
    fitting = max(1, min(heads, int(SECTION_L2_FRACTION * l2_bytes(problem.device) / head_bytes)))
    if config.persistent and problem.total_q is None and not in_turns:
        most = SECTION_TILES[config.tiles_of] * multiprocessors(problem.device)
        if config.tiles_of == "q":
            most *= shape.heads_q // shape.heads_kv  # their heads share keys and values
        fitting = max(1, min(fitting, int(most * heads / num_tiles(config, problem))))
    if in_turns and not config.walks_up:
        least = max(least, min(heads, TURN_HEADS))
    fitting = max(fitting, least)
    # A power of two, so that sections of the usual head counts come out even, which is worth 7 %.
    power = 1 << (fitting.bit_length() - 1)
    if heads % power and heads % (power // 2) == 0:
        power //= 2
    return power if power >= least else -(-heads // -(-heads // fitting))


def _rows_k(problem: Problem) -> int:
    """Rows of k of all sequences."""
    shape = problem.shape
    return shape.batch * shape.seqlen_k if problem.total_k is None else problem.total_k


def _accum_rows(problem: Problem) -> int:
    """Rows of the accumulators of one head, every sequence padded: see block_info.cuh."""
    shape = problem.shape
    if problem.total_q is not None:
        return (problem.total_q // structs.ACCUM_ROW_ALIGN + shape.batch) * structs.ACCUM_ROW_ALIGN
    return -(-shape.seqlen_q // structs.ACCUM_ROW_ALIGN) * structs.ACCUM_ROW_ALIGN * shape.batch


def _accum_places(problem: Problem, main: KernelConfig) -> int:
    """Rows of dq_accum, of all heads together."""
    shape = problem.shape
    if not main.whole_heads:
        return shape.heads_q * _accum_rows(problem)
    if shape.seqlen_k <= main.tile_rows:
        return 0
    heads = -(-shape.heads_q // (shape.heads_kv * shape.group_shares))  # of a block
    return num_blocks(main, problem) * heads * (_accum_rows(problem) // shape.batch)


class Padding(NamedTuple):
    """Stands for the plan of a head dim that the kernels do not take: copies with more columns.

    Kernels have one head_dim, a multiple of 8, for q, k, v and out, but for those of `keeps_v`.
    Columns of zeros in q and k change no score, and those of v only give columns of zeros in out:
    attention of the wider arrays, at the scale of the true head_dim, is attention of the arrays in
    its first columns. So are the gradients.

    Attributes:
        width: head_dim of the kernels.
        head_dim: of q and k.
        head_dim_v: of v and out.
        options: with the scale of the true head_dim.
    """

    width: int
    head_dim: int
    head_dim_v: int
    options: Options

    @classmethod
    def of(cls, problem: Problem, options: Options) -> "Padding":
        """Makes the padding of a problem which `needs_padding`."""
        options = options._replace(scale=problem.shape.scale)
        return cls(problem.shape.head_dim, *problem.head_dims, options)

    def widen(self, library: Any, *arrays: Array) -> list[Array]:
        """Copies of ``width`` columns; arrays that have them are taken as they are."""
        return [
            x if x.shape[-1] == self.width else library.with_columns(self.width, x) for x in arrays
        ]

    def narrow(self, out: Array) -> Array:
        """View of the columns of a result that v has."""
        return out[..., : self.head_dim_v]

    def narrow_gradients(self, gradients: Gradients) -> Gradients:
        """Views of the columns that q, k and v have."""
        dq, dk, dv, *others = gradients
        return Gradients(
            dq[..., : self.head_dim], dk[..., : self.head_dim], self.narrow(dv), *others
        )


def result_strides(library: Any, shape: tuple[int, ...], width: int, like: View) -> tuple[int, ...]:
    """The strides of a result in memory of ``width`` columns that is allocated like an input."""
    wide = (*shape[:-1], width)
    strides = like.strides
    if like.shape[-1] != width:  # the input itself is copied first
        strides = library.strides_of_empty(wide, like)
    return library.strides_of_empty(wide, like._replace(shape=wide, strides=strides))
