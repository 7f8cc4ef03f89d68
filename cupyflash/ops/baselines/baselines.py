"""The steps from a first kernel to attention, as small as they can be: begin to read here.

1. `vector_add`: one number a thread (``cuda_src/baselines/vector_add.cu``).
2. `naive_attention`: the matrix of scores in memory (``naive_attention.cu``).
3. `fused_attention`: one pass over the keys, no matrix, no tiles (``fused_attention.cu``).

4. `flash_attention_1`: in tiles, in the order of the first paper (``flash_attention_1.cu``).

The fifth step is `cupyflash.attention`, whose blocks own queries. All of them run alike: a
configuration (at the end of this file) names the template, NVRTC compiles it at the first use
(``jit/``), and it is launched with one struct of arguments (``cuda_src/baselines/params.cuh``).
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ...jit import compiler
from ...runtime.array import Array, View
from ...runtime.checks import LEAST_FLOAT32, MOST_FLOAT32, plain_flag, plain_real, require_grid
from ...runtime.config import ITEM_SIZE, KernelConfig
from ...runtime.launch import Launch, call_fields
from ...runtime.lookup import library_of
from ...runtime.specs import Spec, views_of
from ...runtime.structs import header

structs = header("baselines/params.cuh")

THREADS = 256
STEPS = header("baselines/naive_attention.cu").Step
LANE_COLUMNS = 1, 2, 4, 8  # template values of fused_attention, whose warps compute a row each
MAX_HEAD_DIM = 32 * LANE_COLUMNS[-1]
FLASH_KEYS = {64: 32, 128: 32, 256: 16}  # keys of a tile of flash_attention_1, by HEAD_DIM
ADD = {"a": Spec((...,)), "b": Spec((...,))}  # contiguous, of one shape and dtype
KEYS = Spec(("batch", "seqlen_k", "heads", "head_dim"))
ATTENTION = {"q": Spec(("batch", "seqlen_q", "heads", "head_dim")), "k": KEYS, "v": KEYS}


def vector_add(a: Array, b: Array) -> Array:
    """a + b.

    Args:
        a: of any shape, contiguous, float16, bfloat16 or float32; CuPy array or torch tensor.
        b: like a.

    Raises:
        TypeError: dtypes, libraries.
        ValueError: shapes, strides, devices.
        NotImplementedError: not on a GPU, or a gradient would be recorded.
    """
    library, views = _checked("vector_add", ADD, (a, b))
    _require_gpu("vector_add", library, a, b)
    view = views["a"]
    with _device_of(view):
        out = library.empty(view.shape, view.strides, a)
        size = math.prod(view.shape)
        config, params = VectorAdd(view.dtype), structs.VectorAddParams(size=size)
        _launch("vector_add", library, view, config, size, params, a, b, out)
    return out


def naive_attention(
    q: Array, k: Array, v: Array, *, scale: float | None = None, causal: bool = False
) -> Array:
    """softmax(scale * q k^T) v in three launches, with all scores in memory.

    Args:
        q: (batch, seqlen_q, heads, head_dim), contiguous, float16, bfloat16 or float32; CuPy array
            or torch tensor.
        k: (batch, seqlen_k, heads, head_dim), like q.
        v: like k.
        scale: a positive number; default ``1 / sqrt(head_dim)``.
        causal: query i sees the keys up to i + seqlen_k - seqlen_q, as in `cupyflash.attention`.

    Returns:
        out like q; 0 for a query that sees no key.

    Raises:
        As `vector_add`; TypeError and ValueError of the options.
    """
    library, view, params = _prepared("naive_attention", q, k, v, scale, causal)
    with _device_of(view):
        out = library.empty(view.shape, view.strides, q)
        scores = library.empty_float32((*view.shape[:3], params.seqlen_k), q)
        threads = {
            "scores": params.rows * params.seqlen_k,  # one a score
            "softmax": params.rows * 32,  # a warp a row
            "output": params.rows * params.head_dim,  # one a number
        }
        for step in STEPS:
            config = NaiveAttention(view.dtype, step)
            arrays = (q, k, v, out, scores)
            _launch("naive_attention", library, view, config, threads[step], params, *arrays)
    return out


def fused_attention(
    q: Array, k: Array, v: Array, *, scale: float | None = None, causal: bool = False
) -> Array:
    """`naive_attention` in one launch and without scores in memory; head_dim up to 256."""
    library, view, params = _prepared("fused_attention", q, k, v, scale, causal)
    _require_head_dim("fused_attention", view)
    with _device_of(view):
        out = library.empty(view.shape, view.strides, q)
        columns = next(n for n in LANE_COLUMNS if view.shape[3] <= 32 * n)
        config, threads = FusedAttention(view.dtype, columns), params.rows * 32
        _launch("fused_attention", library, view, config, threads, params, q, k, v, out)
    return out


def flash_attention_1(
    q: Array, k: Array, v: Array, *, scale: float | None = None, causal: bool = False
) -> Array:
    """`naive_attention` as in the first FlashAttention paper, one block a head; head_dim up to 256.

    The output between two tiles of keys and the statistics of each row take float32 scratch memory:
    head_dim + 2 numbers for each row of out, 2 for float32 arrays.
    """
    function = "flash_attention_1"
    library, view, params = _prepared(function, q, k, v, scale, causal)
    _require_head_dim(function, view)
    with _device_of(view):
        out = library.empty(view.shape, view.strides, q)
        acc = out if view.dtype == "float32" else library.empty_float32(view.shape, q)
        statistics = (library.empty_float32(view.shape[:3], q) for _ in range(2))
        head_dim = next(n for n in FLASH_KEYS if view.shape[3] <= n)
        config = FlashAttention1(view.dtype, head_dim, FLASH_KEYS[head_dim])
        blocks = view.shape[0] * view.shape[2] if params.seqlen_q else 0
        arrays = (q, k, v, out, None, acc, *statistics)
        _launch(function, library, view, config, blocks * config.threads, params, *arrays)
    return out


def _require_head_dim(function: str, view: View) -> None:
    if view.shape[3] > MAX_HEAD_DIM:
        fact = f"head_dim must be at most {MAX_HEAD_DIM}"
        raise ValueError(f"{function}: {fact}, got {view.shape[3]}")


def _prepared(
    function: str, q: Array, k: Array, v: Array, scale: float | None, causal: bool
) -> tuple[Any, View, structs.BaselineAttentionParams]:
    """The library, the view of q and the kernel's numbers, for both kinds of attention."""
    library, views = _checked(function, ATTENTION, (q, k, v))
    batch, seqlen_q, heads, head_dim = views["q"].shape
    seqlen_k = views["k"].shape[1]
    causal = plain_flag(function, "causal", causal)
    scale = 1 / math.sqrt(max(1, head_dim)) if scale is None else _factor(function, scale)
    _require_gpu(function, library, q, k, v)
    params = structs.BaselineAttentionParams(
        rows=batch * seqlen_q * heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        head_dim=head_dim,
        causal=causal,
        scale=scale,
    )
    return library, views["q"], params


def _factor(function: str, scale: Any) -> float:
    scale = plain_real(function, "scale", scale)
    if not LEAST_FLOAT32 <= scale <= MOST_FLOAT32:
        fact = "scale must be positive and finite in float32"
        raise ValueError(f"{function}: {fact}, got {scale!r}")
    return scale


def _checked(
    function: str, specs: Mapping[str, Spec], arrays: tuple[Array, ...]
) -> tuple[Any, dict[str, View]]:
    """The library of the arrays, and their views."""
    library = library_of(arrays[0])
    if library is None:
        fact = f"{next(iter(specs))} must be a CuPy array or a torch tensor"
        raise TypeError(f"{function}: {fact}, got {type(arrays[0]).__name__}")
    return library, views_of(function, library, specs, arrays)


def _require_gpu(function: str, library: Any, *arrays: Array) -> None:
    if library.on_cpu(arrays[0]):
        got = f"a {library.name} on the CPU"
        raise NotImplementedError(f"{function}: arrays must be on a GPU, got {got}")
    if library.wants_gradient(*arrays):
        raise NotImplementedError(f"{function}: has no backward, call it under torch.no_grad()")


def _launch(
    function: str, library: Any, view: View, config: KernelConfig, threads: int, params: Any,
    *arrays: Array | None,
) -> None:  # fmt: skip
    """Run ``threads`` threads of a kernel; its arguments are the arrays and then ``params``.

    Pointers behind the last array are null.
    """
    if not threads:
        return
    blocks = require_grid(function, -(-threads // config.threads), view.shape)
    pointers = [0 if x is None else library.pointer(x) for x in arrays]
    pointers += [0] * (len(call_fields(params)) - len(pointers))
    launch = Launch(config, view.device, blocks, params)
    launch.start(library.stream(view.device), launch.argument(*pointers))


def _device_of(view: View) -> Any:
    """The device of an array, to make it the current one."""
    compiler.nvrtc()  # the error that names the pip line, where CuPy or NVRTC is missing
    import cupy

    return cupy.cuda.Device(view.device)


@dataclasses.dataclass(frozen=True)
class Baseline(KernelConfig):
    """A kernel of one dtype."""

    threads: ClassVar[int] = THREADS

    dtype: str


class VectorAdd(Baseline):
    """out = a + b."""

    source: ClassVar[str] = "baselines/vector_add.cu"


@dataclasses.dataclass(frozen=True)
class NaiveAttention(Baseline):
    """One of the `STEPS`."""

    source: ClassVar[str] = "baselines/naive_attention.cu"

    step: str


@dataclasses.dataclass(frozen=True)
class FusedAttention(Baseline):
    """All of attention; each lane of a warp has ``lane_columns`` columns of a row."""

    source: ClassVar[str] = "baselines/fused_attention.cu"

    lane_columns: int


@dataclasses.dataclass(frozen=True)
class FlashAttention1(Baseline):
    """Attention in tiles of ``keys`` keys; ``head_dim`` is the next of `FLASH_KEYS`."""

    source: ClassVar[str] = "baselines/flash_attention_1.cu"

    head_dim: int
    keys: int


def configurations(capability: tuple[int, int]) -> Iterator[Baseline]:
    """All kernels, for warm-up and tests."""
    for dtype in ITEM_SIZE:
        yield VectorAdd(dtype)
        yield from (NaiveAttention(dtype, step) for step in STEPS)
        yield from (FusedAttention(dtype, columns) for columns in LANE_COLUMNS)
        yield from (FlashAttention1(dtype, *tile) for tile in FLASH_KEYS.items())
