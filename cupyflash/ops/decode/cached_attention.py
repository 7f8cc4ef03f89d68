"""Attention of new tokens to a cache of keys and values, which they enter: in one launch if few."""

from collections.abc import Mapping
from typing import Any, NoReturn

from ... import environment
from ...runtime.array import Array, ArrayT, View
from ...runtime.checks import plain_real
from ...runtime.operation import Operation, Plans, is_followed
from ...runtime.overlap import Written
from ...runtime.rows import is_contiguous
from ...runtime.scratch import array_operations
from ...runtime.specs import Spec, views_of
from ...runtime.structs import header
from ..attention.checks import MAX_HEAD_DIM
from ..attention.checks import check as check_attention
from ..attention.dispatch import forward
from ..attention.foreign import refuse, refuses_foreign
from ..attention.options import Extras, Options, plain_options
from . import cache_append, kernels, plans
from .cached import ARRAYS, CACHES, CachedOptions, CachedShape

attention_structs = header("attention/params.cuh")

FUNCTION = "attention_with_cache"
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

_plans = Plans(wide=5)


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


class OneLaunch:
    """A call that one launch computes.

    Attributes:
        written: for the check of the addresses, as in the other plans.
    """

    def __init__(self, plan: plans.DecodePlan, views: Mapping[str, View]) -> None:
        self.plan, self.written = plan, Written(FUNCTION, views, CACHES)

    def __call__(self, arrays: tuple[Array, ...], pointers: list[int]) -> Array:
        """The result; ``arrays`` and ``pointers`` are of q, k, v, k_cache, v_cache, positions."""
        absent = len(ARRAYS) - len(arrays)
        return self.plan((*arrays, *[None] * absent), (*pointers, *[0] * absent))[0]


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
            cache_append.run(FUNCTION, library, (*new, *caches, where, sequences), ())
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
) -> OneLaunch | SeparatePlan:
    batch, length = views["k_cache"].shape[:2]
    sizes = CachedShape(
        batch=batch,
        seqlen_q=shape.seqlen_q,
        total_q=batch * shape.seqlen_q,
        heads_q=shape.heads_q,
        heads_kv=shape.heads_kv,
        head_dim=shape.head_dim,
        num_pages=batch,
        page_size=length,
        max_pages=1,
        packed=False,
        appends=True,
        counted=True,
        aligned=aligned,
    )
    plan = plans.decode_plan(library, sizes, CachedOptions(shape.scale), views)
    return OneLaunch(plan, views) if plan else SeparatePlan(library, shape, views)


def _check(
    library: Any, arrays: tuple[Array, ...], scale: float | None
) -> tuple[attention_structs.AttentionShape, dict[str, View]]:
    """The shape, and views of all arrays."""
    head_dims = range(8, MAX_HEAD_DIM + 1, 8)
    views = views_of(FUNCTION, library, SPECS, arrays, plain=True, head_dim=head_dims)
    of_cache = {"q": views["q"], "k": views["k_cache"], "v": views["v_cache"]}
    options = Options(causal=True, scale=scale)
    return check_attention(FUNCTION, of_cache, options).shape, views
