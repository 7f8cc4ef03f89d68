"""Attention of new tokens to a cache of keys and values, which they enter: in one launch if few."""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from ... import environment
from ...runtime.array import Array, ArrayT, View
from ...runtime.checks import plain_real, require_grid
from ...runtime.config import ITEM_SIZE
from ...runtime.gpu import capability_of, multiprocessors
from ...runtime.launch import Launch, clusters_at_once
from ...runtime.operation import Operation, Plan, Plans, is_followed
from ...runtime.overlap import Written
from ...runtime.rows import is_contiguous
from ...runtime.scratch import array_operations, tile_counters
from ...runtime.specs import Spec, views_of
from ...runtime.structs import header
from ..attention.checks import MAX_HEAD_DIM
from ..attention.checks import check as check_attention
from ..attention.dispatch import forward
from ..attention.foreign import refuse, refuses_foreign
from ..attention.options import Extras, Options, plain_options
from . import kernels, kv_cache
from .kv_cache import CACHES

attention_structs = header("attention/params.cuh")
structs = header("decode/params.cuh")

FUNCTION = "attention_with_cache"
MAX_STEP = 2**31  # elements from key to key
NEW = Spec(("batch", "seqlen", "heads_kv", "head_dim"), strides=1)
CACHE = Spec(("batch", "max_length", "heads_kv", "head_dim"), strides=1)
SPECS = {
    "q": Spec(("batch", "seqlen", "heads_q", "head_dim"), strides=1),
    "k": NEW,
    "v": NEW,
    "k_cache": CACHE,
    "v_cache": CACHE,
    "positions": Spec(("batch",), "int32"),
}
TENSORS = tuple(SPECS)[:-1]

_plans = Plans(wide=len(TENSORS))


@refuses_foreign
def attention_with_cache(
    q: ArrayT,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    positions: Array,
    *,
    scale: float | None = None,
    **foreign: NoReturn,
) -> ArrayT:
    """Put k and v into the cache, then attend from q to all that is in it, causally; no gradients.

    Up to eight float16 or bfloat16 tokens of a sequence take one launch. The lengths are read on
    the GPU only, so the call can be part of a CUDA graph; with CuPy the graph needs a memory pool
    of its own, as long caches of few heads take scratch memory. torch.compile breaks its graph at
    the call.

    Args:
        q: (batch, seqlen, heads_q, head_dim), float16, bfloat16 or float32; head_dim a multiple of
            8 up to 256. NumPy or CuPy arrays or torch tensors, strides are free but for the last.
        k: (batch, seqlen, heads_kv, head_dim), dtype of q; heads_q a multiple of heads_kv.
        v: like k.
        k_cache: (batch, max_length, heads_kv, head_dim), dtype of q; written, so it shares memory
            with no other argument.
        v_cache: like k_cache.
        positions: int32 (batch,): token i of a sequence goes to positions + i, what lies before it
            is its past. What lies on a GPU is not checked, as that would wait for it: outside of
            the cache nothing is written, and out of such a sequence means nothing.
        scale: of the scores; default ``1 / sqrt(head_dim)``.

    Returns:
        out like q.

    Raises:
        TypeError: dtypes, libraries, no number.
        ValueError: shapes, strides, devices, scale, memory that is shared; on the CPU a place that
            does not exist.
        NotImplementedError: inputs that require a gradient, or are within a transform of
            torch.func; more or wider tokens than one launch takes, and the cache is not
            contiguous; a GPU, or a forced backend, that cannot compute this.

    Source: Flash-Decoding, pytorch.org/blog/flash-decoding.
    """
    if foreign:
        refuse(attention_with_cache, foreign)
    if scale is not None and type(scale) is not float:
        scale = plain_real(FUNCTION, "scale", scale)
    return ATTENTION(FUNCTION, (q, k, v, k_cache, v_cache, positions), (scale,))[0]


def run(
    function: str, library: Any, arrays: tuple[Array, ...], options: tuple[float | None]
) -> tuple[Array]:
    """The call on arrays of one library."""
    (scale,) = options
    if library.on_cpu(arrays[0]):
        plan = SeparatePlan(library, *_check(library, arrays, scale))
        plan.written.check([library.pointer(x) for x in arrays])
        return (plan(arrays),)
    if is_followed(library, arrays):
        _check(library, arrays, scale)
    key, pointers = _plans.key(library, arrays, (scale, environment.current().backend))
    plan = _plans.get(key)
    if plan is None:
        checked = _check(library, arrays, scale)
        plan = _plans.add(key, _plan(library, *checked, key[-1]))
    plan.written.check(pointers)
    out = plan(arrays, pointers)
    library.wrote(*arrays[3:5])
    return (out,)


ATTENTION = Operation(run, native="q")


class DecodePlan(Plan):
    """Attention with a cache in one launch.

    Attributes:
        written: for the check of the addresses, as in the other plans.
    """

    def __init__(
        self,
        library: Any,
        config: kernels.FlashDecode | kernels.FlashDecodeCluster,
        shape: attention_structs.AttentionShape,
        views: Mapping[str, View],
    ) -> None:
        q = views["q"]
        super().__init__(q.device)
        self.written = Written(FUNCTION, views, CACHES)
        self.library, self.shape = library, q.shape
        self.strides = library.strides_of_empty(q.shape, q)
        self.empty = math.prod(q.shape) == 0
        if self.empty:
            return
        splits = kernels.splits(config, shape, clusters_at_once(config, q.device))
        params = structs.FlashDecodeParams(
            **{
                f"{name}_strides": attention_structs.Strides(*views[name].strides[:3])
                for name in TENSORS
            },
            out_strides=attention_structs.Strides(*self.strides[:3]),
            seqlen=shape.seqlen_q,
            heads_kv=shape.heads_kv,
            group=shape.heads_q // shape.heads_kv,
            head_dim=shape.head_dim,
            max_length=shape.seqlen_k,
            splits=splits,
            scale_log2=math.log2(math.e) * shape.scale,
        )
        parts = kernels.decode_units(shape) * splits
        grid = require_grid(FUNCTION, parts * config.cluster, q.shape)
        self.launch = Launch(config, q.device, grid, params)
        self.parts_size = parts * kernels.part_size(config.head_dim) if splits > 1 else 0
        self.launch.has_scratch = splits > 1
        self.counters = tile_counters(q.device)

    def run(self, arrays: tuple[Array, ...], pointers: list[int]) -> Array:
        """The result; ``arrays`` and ``pointers`` are of q, k, v, k_cache, v_cache, positions."""
        out = self.library.empty(self.shape, self.strides, arrays[0])
        if not self.empty:
            library, (*tensors, positions) = self.library, pointers
            stream = library.stream(self.device_id)
            scratch = 0, 0
            if self.parts_size:
                parts = library.empty_float32((self.parts_size,), arrays[0])
                counters, _own = self.counters.address(stream, library, arrays[0])
                scratch = library.pointer(parts), counters
            values = (*tensors, library.pointer(out), positions, *scratch)
            self.launch.start(stream, self.launch.argument(*values))
        return out


class SeparatePlan:
    """A call that one launch does not take: `cache_append`, then `attention`.

    Attributes:
        written: for the check of the addresses.
    """

    def __init__(
        self, library: Any, shape: attention_structs.AttentionShape, views: Mapping[str, View]
    ) -> None:
        self.written = Written(FUNCTION, views, CACHES)
        for name in CACHES:
            if not is_contiguous(views[name]):
                fact = f"{name} must be contiguous unless up to {kernels.MAX_TOKENS} aligned tokens"
                fact += " of 16 bits on a GPU of sm_75 or later attend"
                got = f"strides {views[name].strides}"
                raise NotImplementedError(f"{FUNCTION}: {fact}, got {got}")
        self.library, self.seqlen, self.scale = library, shape.seqlen_q, shape.scale
        self.last = shape.seqlen_k - shape.seqlen_q
        self.rows = (shape.batch * shape.seqlen_q, shape.heads_kv * shape.head_dim)

    def __call__(self, arrays: tuple[Array, ...], pointers: object = None) -> Array:
        """The result; ``arrays`` are q, k, v, k_cache, v_cache and positions."""
        library, seqlen, (q, k, v, *caches, positions) = self.library, self.seqlen, arrays
        if library.on_cpu(q):
            self._check_positions(positions)
        with array_operations(q):
            where, sequences = positions, None
            if seqlen != 1:
                where = (positions[:, None] + library.arange(seqlen, positions)).reshape(-1)
                sequences = library.arange(self.rows[0], positions) // seqlen
            # This reshapes to whole rows, which copies heads that do not lie side by side.
            new = (x.reshape(self.rows).reshape(self.rows[0], *x.shape[2:]) for x in (k, v))
            kv_cache.run(FUNCTION, library, (*new, *caches, where, sequences), ())
            options = plain_options(FUNCTION, causal=seqlen > 1, scale=self.scale)
            arrays = (q, *caches, *Extras(seqused_k=positions + seqlen))
            return forward(FUNCTION, library, arrays, (options, False))[0]

    def _check_positions(self, positions: Array) -> None:
        places = self.library.to_list(positions)
        if places and not 0 <= min(places) <= max(places) <= self.last:
            fact = f"positions must be from 0 to {self.last}, so that all tokens are in the cache"
            raise ValueError(f"{FUNCTION}: {fact}, got {min(places)} to {max(places)}")


def _plan(
    library: Any, shape: attention_structs.AttentionShape, views: dict[str, View], aligned: bool
) -> DecodePlan | SeparatePlan:
    config = _config(shape, views, aligned)
    if config is None:
        return SeparatePlan(library, shape, views)
    return DecodePlan(library, config, shape, views)


def _config(
    shape: attention_structs.AttentionShape, views: dict[str, View], aligned: bool
) -> kernels.FlashDecode | kernels.FlashDecodeCluster | None:
    """The kernel that takes this in one launch, if there is one."""
    device, backend = views["q"].device, environment.current().backend
    steps = {
        name: [step for n, step in zip(views[name].shape[:3], views[name].strides) if n > 1]
        for name in TENSORS
    }
    item = ITEM_SIZE[views["q"].dtype]
    if not aligned or backend == "simt" or any(n * item % 16 for x in steps.values() for n in x):
        return None
    rows = [(views[name].shape[1], views[name].strides[1]) for name in TENSORS[1:]]
    if any(n > 1 and abs(step) >= MAX_STEP for n, step in rows):
        return None
    capability = min(capability_of(device), (8, 9) if backend == "sm80" else (99, 0))
    return kernels.flash_decode(views["q"].dtype, shape, capability, multiprocessors(device))


def _check(
    library: Any, arrays: tuple[Array, ...], scale: float | None
) -> tuple[attention_structs.AttentionShape, dict[str, View]]:
    """The shape, and views of all arrays."""
    head_dims = range(8, MAX_HEAD_DIM + 1, 8)
    views = views_of(FUNCTION, library, SPECS, arrays, plain=True, head_dim=head_dims)
    of_cache = {"q": views["q"], "k": views["k_cache"], "v": views["v_cache"]}
    options = Options(causal=True, scale=scale)
    return check_attention(FUNCTION, of_cache, options).shape, views
