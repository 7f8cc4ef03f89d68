"""Attention of new tokens to a cache of keys and values, which they enter: in one launch if few."""

from typing import Any

from .. import environment
from ..attention.problem import MAX_HEAD_DIM, Options, check
from ..runtime.array import Array, View, compiling, library_of
from ..runtime.checks import plain_real, require_arrays, require_int32, require_like, views_of
from ..runtime.config import ITEM_SIZE
from ..runtime.gpu import capability_of, multiprocessors
from ..runtime.operation import Plans
from ..runtime.structs import header
from . import kernels
from .cached_plans import FUNCTION, TENSORS, DecodePlan, SeparatePlan

structs = header("attention/params.cuh")

MAX_STEP = 2**31  # elements from key to key

_plans = Plans(wide=len(TENSORS), plain=True)


def attention_with_cache(
    q: Array,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    positions: Array,
    *,
    scale: float | None = None,
) -> Array:
    """k and v into the cache, then causal attention of q to all that is in it; no gradients.

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
    arrays = (q, k, v, k_cache, v_cache, positions)
    if compiling():
        from ..runtime.torch_calls import eagerly

        return eagerly(_run, arrays, scale)
    return _run(arrays, scale)


def _run(arrays: tuple[Array, ...], scale: Any) -> Array:
    """The call on the arrays of `TENSORS` and the positions."""
    q, _, _, k_cache, v_cache, _ = arrays
    library = library_of(q)
    if library is None:
        got = type(q).__name__
        raise TypeError(f"{FUNCTION}: q must be a NumPy, CuPy or torch array, got {got}")
    if scale is not None and type(scale) is not float:
        scale = plain_real(FUNCTION, "scale", scale)
    if library.on_cpu(q):
        shape, views = _check(library, arrays, scale)
        plan = SeparatePlan(library, shape, views)
        plan.written.check([library.pointer(x) for x in arrays])
        return plan(arrays)
    plan, pointers = _plans.find(
        library,
        arrays,
        (scale, environment.current().backend),
        lambda: _check(library, arrays, scale),
        lambda found, aligned: _plan(library, *found, aligned),
    )
    plan.written.check(pointers)
    out = plan(arrays, pointers)
    library.wrote(k_cache, v_cache)
    return out


def _plan(
    library: Any, shape: structs.AttentionShape, views: dict[str, View], aligned: bool
) -> DecodePlan | SeparatePlan:
    config = _config(shape, views, aligned)
    if config is None:
        return SeparatePlan(library, shape, views)
    return DecodePlan(library, config, shape, views)


def _config(
    shape: structs.AttentionShape, views: dict[str, View], aligned: bool
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
) -> tuple[structs.AttentionShape, dict[str, View]]:
    """The shape, and views of all arrays."""
    *tensors, positions = arrays
    named = dict(zip(TENSORS, tensors))
    require_arrays(FUNCTION, library, {**named, "positions": positions})
    views = views_of(FUNCTION, library, named)
    for name, view in views.items():
        if len(view.shape) != 4:
            fact = f"{name} must have 4 dimensions (batch, seqlen, heads, head_dim)"
            raise ValueError(f"{FUNCTION}: {fact}, got {len(view.shape)}: {view.shape}")
    q, new, cache = views["q"], views["k"], views["k_cache"]
    head_dim = q.shape[3]
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        fact = f"head_dim must be a multiple of 8 from 8 to {MAX_HEAD_DIM}"
        raise ValueError(f"{FUNCTION}: {fact}, got {head_dim}")
    if cache.shape[::3] != q.shape[::3]:
        fact = "k_cache must have the batch and head_dim of q"
        raise ValueError(f"{FUNCTION}: {fact}, got {cache.shape} and {q.shape}")
    if cache.dtype != q.dtype:
        raise TypeError(f"{FUNCTION}: k_cache must be {q.dtype} like q, got {cache.dtype}")
    require_like(FUNCTION, views, "v_cache", "k_cache")
    wanted = (*q.shape[:2], cache.shape[2], head_dim)
    if new.shape != wanted or new.dtype != cache.dtype:
        fact = f"k must be {wanted} of {cache.dtype}, as q and k_cache say"
        raise ValueError(f"{FUNCTION}: {fact}, got {new.shape} of {new.dtype}")
    require_like(FUNCTION, views, "v", "k")
    for name, view in views.items():
        if view.shape[-1] > 1 and view.strides[-1] != 1 and 0 not in view.shape:
            fact = f"the last dimension of {name} must be contiguous"
            raise ValueError(f"{FUNCTION}: {fact}, got strides {view.strides}")
    of_cache = {"q": q, "k": cache, "v": views["v_cache"]}
    shape = check(FUNCTION, of_cache, Options(True, scale, None, 0.0, "bshd", None, 0.0)).shape
    require_int32(FUNCTION, library, "positions", positions, (shape.batch,), cache.device)
    return shape, views | {"positions": library.view(positions)}
