"""What a stack of transformer blocks asks of its arrays before anything is launched."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..runtime.array import Array, View, library_of
from ..runtime.checks import integer_within, plain_real, require_eps
from ..runtime.config import ITEM_SIZE
from ..runtime.rows import is_contiguous
from ..runtime.structs import header
from .kernels import MAX_WIDTH

structs = header("transformer/params.cuh")

MAX_HEAD_DIM = 128


class StackShape(NamedTuple):
    """What the weights of a stack say; vocab and positions are 0 without a head."""

    dtype: str
    device: int
    layers: int
    width: int
    hidden: int
    heads: int
    eps: float
    vocab: int = 0
    positions: int = 0

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self.width // self.heads


def check_stack(
    function: str,
    library: Any,
    blocks: Sequence[Any],
    ends: Mapping[str, Array | None],
    heads: int,
    eps: float,
) -> StackShape:
    """Check all weights.

    Args:
        blocks: of `BlockWeights`.
        ends: final_weight, final_bias, head_weight, token_embedding and position_embedding; all or
            none of them.
    """
    if not 1 <= len(blocks) <= structs.MAX_LAYERS:
        raise ValueError(
            f"{function}: there must be 1 to {structs.MAX_LAYERS} blocks, got {len(blocks)}"
        )
    eps = plain_real(function, "eps", eps)
    require_eps(function, eps)
    heads = integer_within(function, "heads", heads, 1, 2**31 - 1)
    first = _view(function, library, "ln1_weight", blocks[0].ln1_weight)
    if len(first.shape) != 1:
        raise ValueError(f"{function}: ln1_weight must have shape (width,), got {first.shape}")
    (width,), hidden = first.shape, _view(function, library, "up_bias", blocks[0].up_bias).shape[0]
    _check_sizes(function, width, hidden, heads)
    shapes = _block_shapes(width, hidden)
    for number, block in enumerate(blocks):
        where = f"blocks[{number}]." if len(blocks) > 1 else ""
        for name, shape in shapes.items():
            _check_weight(function, library, where + name, getattr(block, name), shape, first)
    shape = StackShape(first.dtype, first.device, len(blocks), width, hidden, heads, eps)
    given = [name for name, x in ends.items() if x is not None]
    if not given:
        return shape
    if len(given) < len(ends):
        missing = ", ".join(name for name in ends if name not in given)
        raise ValueError(f"{function}: logits need {', '.join(ends)}, got no {missing}")
    tables = ("head_weight", "token_embedding", "position_embedding")
    rows = {name: _view(function, library, name, ends[name]).shape[0] for name in tables}
    if rows["head_weight"] != rows["token_embedding"]:
        fact = "head_weight and token_embedding must have the same number of rows"
        got = f"{rows['head_weight']} and {rows['token_embedding']}"
        raise ValueError(f"{function}: {fact}, got {got}")
    for name, x in ends.items():
        expected = (rows[name], width) if name in rows else (width,)
        _check_weight(function, library, name, x, expected, first)
    return shape._replace(vocab=rows["head_weight"], positions=rows["position_embedding"])


def check_call(
    function: str,
    library: Any,
    shape: StackShape,
    floats: Mapping[str, Array],
    integers: Mapping[str, Array],
    stacked: bool,
) -> dict[str, View]:
    """Check the arrays of a call: x, if there is one, k_cache and v_cache; and the int32 ones.

    Args:
        stacked: the caches have an axis of layers in front.
    """
    views = {name: _view(function, library, name, x) for name, x in (floats | integers).items()}
    for name, view in views.items():
        dtype = "int32" if name in integers else shape.dtype
        if view.dtype != dtype:
            raise TypeError(f"{function}: {name} must be {dtype}, got {view.dtype}")
        if view.device != shape.device:
            where = f"the weights on device {shape.device} and {name} on device {view.device}"
            raise ValueError(f"{function}: all arrays must be on the same device, got {where}")
    batch = _check_batch(function, views, shape)
    for name in integers:
        if views[name].shape != (batch,):
            raise ValueError(
                f"{function}: {name} must have shape ({batch},), got {views[name].shape}"
            )
        if not is_contiguous(views[name]):
            got = f"got strides {views[name].strides}"
            raise ValueError(f"{function}: {name} must be contiguous, {got}")
    for name in ("k_cache", "v_cache"):
        _check_cache(function, name, views[name], shape, batch, stacked)
    if views["k_cache"].shape != views["v_cache"].shape:
        fact = "k_cache and v_cache must have the same shape"
        got = f"{views['k_cache'].shape} and {views['v_cache'].shape}"
        raise ValueError(f"{function}: {fact}, got {got}")
    return views


def require_aligned(function: str, pointers: Mapping[str, int]) -> None:
    """What the kernel reads 16 bytes at a time must begin at a multiple of that."""
    for name, pointer in pointers.items():
        if pointer % 16:
            fact = f"{name} must begin at a multiple of 16 bytes"
            raise ValueError(f"{function}: {fact}, got address {pointer:#x}")


def _block_shapes(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        "ln1_weight": (width,),
        "ln1_bias": (width,),
        "qkv_weight": (3 * width, width),
        "qkv_bias": (3 * width,),
        "proj_weight": (width, width),
        "proj_bias": (width,),
        "ln2_weight": (width,),
        "ln2_bias": (width,),
        "up_weight": (hidden, width),
        "up_bias": (hidden,),
        "down_weight": (width, hidden),
        "down_bias": (width,),
    }


def _view(function: str, library: Any, name: str, x: Array) -> View:
    if library_of(x) is not library:
        got = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}".removeprefix("builtins.")
        raise TypeError(f"{function}: {name} must be a {library.name}, got {got}")
    view = library.view(x)
    if not view.shape:
        raise ValueError(f"{function}: {name} must have at least one dimension, got none")
    return view


def _check_weight(
    function: str, library: Any, name: str, x: Array, shape: tuple[int, ...], first: View
) -> None:
    view = _view(function, library, name, x)
    if view.dtype != first.dtype or view.dtype not in ITEM_SIZE:
        allowed = first.dtype if first.dtype in ITEM_SIZE else "float16, bfloat16 or float32"
        raise TypeError(f"{function}: {name} must be {allowed}, got {view.dtype}")
    if view.device != first.device:
        where = f"ln1_weight on device {first.device} and {name} on device {view.device}"
        raise ValueError(f"{function}: all weights must be on the same device, got {where}")
    if view.shape != shape:
        raise ValueError(f"{function}: {name} must have shape {shape}, got {view.shape}")
    if not is_contiguous(view):
        raise ValueError(f"{function}: {name} must be contiguous, got strides {view.strides}")


def _check_sizes(function: str, width: int, hidden: int, heads: int) -> None:
    if width % heads:
        fact = f"heads must be an integer that divides the width {width}"
        raise ValueError(f"{function}: {fact}, got {heads}")
    head_dim = width // heads
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        fact = f"head_dim (width / heads) must be a multiple of 8 up to {MAX_HEAD_DIM}"
        raise ValueError(f"{function}: {fact}, got {head_dim}")
    if width > MAX_WIDTH:
        raise NotImplementedError(f"{function}: width must be at most {MAX_WIDTH}, got {width}")
    if hidden % 8 or hidden < 8:
        fact = "rows of up_weight must be a multiple of 8"
        raise ValueError(f"{function}: {fact}, got {hidden}")


def _check_batch(function: str, views: Mapping[str, View], shape: StackShape) -> int:
    name = "x" if "x" in views else "tokens"
    view = views[name]
    expected = "(batch, width)" if name == "x" else "(batch,)"
    if len(view.shape) != expected.count(",") + (name == "x"):
        raise ValueError(f"{function}: {name} must have shape {expected}, got {view.shape}")
    batch = view.shape[0]
    if batch > structs.MAX_BATCH:
        raise ValueError(f"{function}: batch must be at most {structs.MAX_BATCH}, got {batch}")
    if name == "x":
        if view.shape[1] != shape.width:
            fact = f"x must have shape (batch, {shape.width})"
            raise ValueError(f"{function}: {fact}, got {view.shape}")
        if batch and view.strides[1] != 1:
            fact = "the last dimension of x must be contiguous"
            raise ValueError(f"{function}: {fact}, got strides {view.strides}")
    return batch


def _check_cache(
    function: str, name: str, view: View, shape: StackShape, batch: int, stacked: bool
) -> None:
    rows = view.shape[-3] if len(view.shape) == 4 + stacked else 0
    layers = (shape.layers,) if stacked else ()
    expected = (*layers, batch, rows, shape.heads, shape.head_dim)
    if view.shape != expected or rows < 1:
        text = f"({''.join(f'{x}, ' for x in layers)}{batch}, max_length, {shape.heads}, "
        fact = f"{name} must have shape {text}{shape.head_dim}), max_length at least 1"
        raise ValueError(f"{function}: {fact}, got {view.shape}")
    if view.strides[-1] != 1:
        fact = f"the last dimension of {name} must be contiguous"
        raise ValueError(f"{function}: {fact}, got strides {view.strides}")
    vector = 16 // ITEM_SIZE[shape.dtype]
    for size, stride in zip(view.shape[:-1], view.strides[:-1]):
        if size > 1 and (stride % vector or stride == 0):
            fact = f"strides of {name} must be multiples of {vector} elements, and not 0"
            raise ValueError(f"{function}: {fact}, got {view.strides}")
