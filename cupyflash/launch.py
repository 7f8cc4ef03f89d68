"""From a checked problem to launches: a plan is everything that equal-shaped calls share.

A plan holds the loaded kernels, the grids and the bytes of the parameter struct behind its leading
pointers. A call then allocates its results, puts the pointers in front and launches.
"""

import ctypes
import functools
import operator
import struct
from typing import Any

import numpy

from . import environment, families, jit
from .array import Array, View
from .families.sm90 import SEQUENCE_MAPS
from .jit import compiler
from .kernel_config import Access, KernelConfig
from .params import ACCUM_ROW_ALIGN, FlashBwdParams, FlashFwdParams, TensorMap
from .problem import Options, Problem, canonical_strides
from .tensor_map import TensorMaps, tensor_map
from .tile_counter import NULL, pack_pointer, tile_counters

# Of the L2 cache, for the keys and values of the heads that run together (tile_order.cuh); the rest
# is left to queries and outputs.
SECTION_L2_FRACTION = 0.6
# Where blocks take turns, at least so many heads side by side: fewer, and they wait for each other.
TURN_HEADS = 8


class Plan:
    """A plan runs with the device of its arrays as the current one, whatever is current outside."""

    def __init__(self, device: int) -> None:
        compiler.nvrtc()  # the error that names the pip line, where CuPy or NVRTC is missing
        import cupy

        self.device_id, self.device = device, cupy.cuda.Device(device)
        self.current_device = cupy.cuda.runtime.getDevice

    def __call__(self, *arguments: Any) -> tuple:
        if self.current_device() == self.device_id:
            return self.run(*arguments)
        with self.device:
            return self.run(*arguments)

    def run(self, *arguments: Any) -> tuple:
        raise NotImplementedError


class ForwardPlan(Plan):
    """The forward kernel for one problem; ``library`` allocates out and LSE."""

    def __init__(
        self,
        function: str,
        problem: Problem,
        access: Access,
        library: Any,
        q: View,
        options: Options,
    ) -> None:
        super().__init__(problem.device)
        self.library = library
        shape = problem.shape
        self.out_shape, self.lse_shape = q.shape, problem.lse_shape
        self.out_strides = library.strides_of_empty(q.shape, q)
        out = View(q.shape, self.out_strides, q.dtype, q.device)
        self.empty = 0 in (shape.batch, shape.heads_q, shape.seqlen_q)
        if self.empty:
            return
        family, arguments = _family(function, problem, access, backward=False)
        config = family.forward(*arguments)
        shape.heads_per_section = _heads_per_section(problem, shape.seqlen_k, 2)
        params = FlashFwdParams(
            **{f"{name}_strides": strides for name, strides in problem.strides.items()},
            out_strides=canonical_strides(out, options),
            lse_batch_stride=problem.lse_strides[0],
            lse_head_stride=problem.lse_strides[1],
            alibi_batch_stride=problem.alibi_batch_stride or 0,
            shape=shape,
        )
        self.launch = _launch(config, problem, params)

    def run(
        self, like: Array, q: int, k: int, v: int, cu_seqlens_q: int, cu_seqlens_k: int, alibi: int,
        need_lse: bool,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """Pointers, 0 where there is none; the results are allocated as ``like`` is."""
        library = self.library
        out = library.empty(self.out_shape, self.out_strides, like)
        lse = library.empty_float32(self.lse_shape, like) if need_lse else None
        if not self.empty:
            workspace = _workspace(self.launch, library, like)
            self.launch(
                library.stream(self.device_id),
                q, k, v, library.pointer(out), library.pointer(lse) if need_lse else 0,
                cu_seqlens_q, cu_seqlens_k, alibi,
                workspace=0 if workspace is None else library.pointer(workspace),
            )  # fmt: skip
        return out, lse


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
        deterministic: bool,
    ) -> None:
        super().__init__(problem.device)
        self.library = library
        shape = problem.shape
        self.gradients = []
        strides = dict(problem.strides)
        for name in "qkv":
            x = views[name]
            dense = library.strides_of_empty(x.shape, x)
            self.gradients.append((x.shape, dense))
            strides[f"d{name}"] = canonical_strides(
                View(x.shape, dense, x.dtype, x.device), options
            )
        # Keys that no query sees get a gradient of zero from the kernel; without queries or keys
        # there is nothing to launch.
        self.empty = 0 in (shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k)
        if self.empty:
            return
        family, arguments = _family(function, problem, access, backward=True)
        configs = family.backward(*arguments)
        accum_dim = configs[0].accum_dim
        rows = _accum_rows(problem)
        # One allocation for lse_log2 and delta [heads_q, rows] and dq_accum [heads_q, rows, dim].
        self.rows_bytes = shape.heads_q * rows * 4
        self.scratch_size = shape.heads_q * rows * (2 + accum_dim)
        self.semaphores = 1 + shape.heads_q * rows // 16 if deterministic and accum_dim else 0
        per_query = 2 + (2 if accum_dim else 0)  # q, dout; the accumulator counts twice
        shape.heads_per_section = _heads_per_section(
            problem, shape.seqlen_q, per_query, side_by_side=deterministic
        )
        params = FlashBwdParams(
            **{f"{name}_strides": x for name, x in strides.items()},
            lse_batch_stride=problem.lse_strides[0],
            lse_head_stride=problem.lse_strides[1],
            alibi_batch_stride=problem.alibi_batch_stride or 0,
            accum_rows=rows,
            shape=shape,
        )
        self.launches = [_launch(config, problem, params) for config in configs]

    def run(
        self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array,
        cu_seqlens_q: int, cu_seqlens_k: int, alibi: int,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        library, pointer = self.library, self.library.pointer
        if self.empty:
            return tuple(library.zeros_like(x) for x in (q, k, v))
        gradients = tuple(library.empty(*shape, x) for shape, x in zip(self.gradients, (q, k, v)))
        scratch = library.empty_float32((self.scratch_size,), q)
        lse_log2 = pointer(scratch)
        semaphores = library.zeros_int32(self.semaphores, q) if self.semaphores else None
        inputs = (pointer(x) for x in (dout, q, k, v, out, lse, *gradients))
        pointers = (
            *inputs,
            lse_log2,
            lse_log2 + self.rows_bytes,
            lse_log2 + 2 * self.rows_bytes,
            0 if semaphores is None else pointer(semaphores),
            cu_seqlens_q,
            cu_seqlens_k,
            alibi,
        )
        stream = library.stream(self.device_id)
        for launch in self.launches:
            workspace = _workspace(launch, library, q)
            launch(stream, *pointers, workspace=0 if workspace is None else pointer(workspace))
        return gradients


class Launch:
    """One kernel with its grid and all of its parameters but the leading ones of each call.

    Attributes:
        workspace_size: floats of memory that a call needs besides.
    """

    workspace_size = 0

    def __init__(
        self, config: KernelConfig, device: int, grid: int, params: ctypes.Structure
    ) -> None:
        self.function = jit.load(config, device)
        self.grid = (grid,)
        self.block = (config.threads,)
        self.shared_memory = config.shared_memory
        num_pointers = len(_call_fields(params))
        self.pack = struct.Struct(f"{num_pointers}Q").pack
        self.tail = bytes(params)[8 * num_pointers :]
        self.dtype = numpy.dtype((numpy.void, ctypes.sizeof(config.params)))

    def __call__(self, stream: Any, *pointers: int, workspace: int = 0) -> None:
        self.start(stream, self.pack(*pointers) + self.tail)

    def start(self, stream: Any, params: bytes) -> None:
        """Launch with these bytes as the kernel's argument."""
        argument = numpy.frombuffer(params, self.dtype)
        self.function(self.grid, self.block, (argument,), self.shared_memory, stream)


class TensorMapLaunch(Launch):
    """A `Launch` with tensor maps in front of the pointers; usually they are at hand.

    Packed sequences need a map each: another kernel makes them in the workspace first.
    """

    def __init__(self, config: KernelConfig, problem: Problem, params: ctypes.Structure) -> None:
        super().__init__(config, problem.device, config.grid(problem.shape), params)
        names = _call_fields(params)
        self.mapped = operator.itemgetter(*(names.index(name) for name in config.boxes))
        maps = [
            tensor_map(problem, name, getattr(params, f"{name}_strides"), rows)
            for name, rows in config.boxes.items()
        ]
        self.maps = TensorMaps(maps, problem.device)
        base, size = config.params.base, ctypes.sizeof(config.params)
        self.end = bytes(size - base.offset - base.size - len(NULL))  # after sequence_maps
        if problem.total_q is not None:
            blocks = SEQUENCE_MAPS.grid(problem.shape)
            self.sequence_maps = Launch(SEQUENCE_MAPS, problem.device, blocks, params)
            size = ctypes.sizeof(SEQUENCE_MAPS.params) - len(maps) * ctypes.sizeof(TensorMap)
            self.pack_sequences = struct.Struct(f"3Q{size - 24}x").pack
            self.cu_seqlens = operator.itemgetter(
                names.index("cu_seqlens_q"), names.index("cu_seqlens_k")
            )
            self.workspace_size = len(maps) * problem.shape.batch * ctypes.sizeof(TensorMap) // 4

    def __call__(self, stream: Any, *pointers: int, workspace: int = 0) -> None:
        maps = self.maps[self.mapped(pointers)]
        if workspace:
            packed = self.pack_sequences(*self.cu_seqlens(pointers), workspace)
            self.sequence_maps.start(stream, maps + packed)
        base = self.pack(*pointers) + self.tail
        self.start(stream, maps + base + pack_pointer(workspace) + self.rest(stream))

    def rest(self, stream: Any) -> bytes:
        """What follows ``sequence_maps`` in the argument."""
        return self.end


class PersistentLaunch(TensorMapLaunch):
    """A block for each multiprocessor, and a counter from which they take their tiles."""

    def __init__(self, config: KernelConfig, problem: Problem, params: ctypes.Structure) -> None:
        super().__init__(config, problem, params)
        (tiles,) = self.grid
        at_once = multiprocessors(problem.device)
        self.grid = (min(tiles, at_once),)
        self.counters = tile_counters(problem.device) if tiles > at_once else None
        self.end = self.end[len(NULL) :]

    def rest(self, stream: Any) -> bytes:
        """The counter, null where every block has one tile, and padding."""
        return (self.counters(stream) if self.counters else NULL) + self.end


def _launch(config: KernelConfig, problem: Problem, params: ctypes.Structure) -> Launch:
    if config.persistent:
        return PersistentLaunch(config, problem, params)
    if config.boxes:
        return TensorMapLaunch(config, problem, params)
    return Launch(config, problem.device, config.grid(problem.shape), params)


def _workspace(launch: Launch, library: Any, like: Array) -> Array | None:
    size = launch.workspace_size
    return library.empty_float32((size,), like) if size else None


def _call_fields(params: ctypes.Structure) -> list[str]:
    """The leading fields, which a call fills in: pointers, and numbers that change with it."""
    return [name for name, kind in params._fields_ if kind in (ctypes.c_void_p, ctypes.c_uint64)]


def _family(
    function: str, problem: Problem, access: Access, *, backward: bool
) -> tuple[Any, tuple]:
    """The family of a pass, and the arguments of its ``forward`` or ``backward``."""
    capability = _capability(problem.device)
    head_dim = problem.shape.head_dim
    forced = environment.current().family
    family = families.choose(
        function, forced, problem.dtype, head_dim, access, capability, backward=backward
    )
    return family, (problem.dtype, head_dim, problem.features, capability)


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    import cupy

    return divmod(int(cupy.cuda.Device(device).compute_capability), 10)


@functools.cache
def multiprocessors(device: int) -> int:
    import cupy

    return cupy.cuda.Device(device).attributes["MultiProcessorCount"]


@functools.cache
def _l2_bytes(device: int) -> int:
    import cupy

    return cupy.cuda.Device(device).attributes["L2CacheSize"]


def _heads_per_section(
    problem: Problem, rows: int, tensors: int, side_by_side: bool = False
) -> int:
    """How many of all heads run side by side, longest tiles first: see tile_order.cuh.

    Only tiles of unequal length need it, under a causal mask without a window to the left; and
    blocks that take turns (``side_by_side``), where those of one head wait for each other.

    Args:
        rows: of one head in each of so many ``tensors``, which its blocks read again and again.
    """
    shape = problem.shape
    heads = shape.heads_q * shape.batch
    causal = shape.window_right < shape.seqlen_k and shape.window_left >= shape.seqlen_k
    if not (causal or side_by_side):
        return 1
    head_bytes = max(1, rows * shape.head_dim * tensors * 2)
    fitting = max(1, min(heads, int(SECTION_L2_FRACTION * _l2_bytes(problem.device) / head_bytes)))
    if side_by_side:
        fitting = max(fitting, min(heads, TURN_HEADS))
    # A power of two, so that sections of the usual head counts come out even: 7 % (bench/NOTES.md).
    return 1 << (fitting.bit_length() - 1)


def _accum_rows(problem: Problem) -> int:
    """Rows of the accumulators of one head, every sequence padded: see block_info.cuh."""
    shape = problem.shape
    if problem.total_q is not None:
        return (problem.total_q // ACCUM_ROW_ALIGN + shape.batch) * ACCUM_ROW_ALIGN
    return -(-shape.seqlen_q // ACCUM_ROW_ALIGN) * ACCUM_ROW_ALIGN * shape.batch
