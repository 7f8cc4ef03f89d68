"""Checks of the stack of transformer blocks: its weights, and the arrays of a call."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.array import Array, View
from ...runtime.checks import integer_within, require_eps, short
from ...runtime.config import ITEM_SIZE
from ...runtime.lookup import library_of
from ...runtime.specs import Spec, views_of
from ..decode.cached import CACHES
from .plan import MAX_HEAD_DIM, MAX_WIDTH, StackShape, structs

MAX_ROWS = 2**31 - 1  # of a cache or a table, which the kernel counts in 32 bits
TABLES = ("head_weight", "token_embedding", "position_embedding")
# The weights of a stack beside those of its blocks: all of them or none.
ENDS = ("final_weight", "final_bias", *TABLES)


def block_specs(width: int, hidden: int) -> dict[str, Spec]:
    """The weights of a block, in the order of `BlockWeights`."""
    shapes = {
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
    return {name: Spec(shape) for name, shape in shapes.items()}


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
        ends: the weights named in `ENDS`; all or none of them.
    """
    if not 1 <= len(blocks) <= structs.MAX_LAYERS:
        fact = f"there must be 1 to {structs.MAX_LAYERS} blocks"
        raise ValueError(f"{function}: {fact}, got {len(blocks)}")
    eps = require_eps(function, eps)
    heads = integer_within(function, "heads", heads, 1, 2**31 - 1)
    weights = [y for block in blocks for y in block]
    sizes = {"ln1_weight": Spec(("width",)), "up_bias": Spec(("hidden",))}
    views = views_of(function, library, sizes, [getattr(blocks[0], name) for name in sizes])
    first, (width,), (hidden,) = views["ln1_weight"], *(x.shape for x in views.values())
    _check_sizes(function, width, hidden, heads)
    for number, block in enumerate(blocks):
        where = f"blocks[{number}]." if len(blocks) > 1 else ""
        specs = {where + name: spec for name, spec in block_specs(width, hidden).items()}
        views_of(function, library, specs, tuple(block), first=("ln1_weight", first))
    shape = StackShape(first.dtype, first.device, len(blocks), width, hidden, heads, eps)
    given = [name for name in ENDS if ends[name] is not None]
    if given and len(given) < len(ENDS):
        missing = ", ".join(name for name in ENDS if name not in given)
        raise ValueError(f"{function}: logits need {', '.join(ENDS)}, got no {missing}")
    if given:
        rows = dict(zip(TABLES, ("vocab", "vocab", "positions")))
        specs = {x: Spec((rows[x], width) if x in rows else (width,)) for x in ENDS}
        tables = [ends[name] for name in ENDS]
        views = views_of(function, library, specs, tables, first=("ln1_weight", first))
        for name in TABLES:
            integer_within(function, f"rows of {name}", views[name].shape[0], 0, MAX_ROWS)
        vocab, _, positions = (views[name].shape[0] for name in TABLES)
        shape = shape._replace(vocab=vocab, positions=positions)
        weights += tables
    if got := library.what_follows(*weights, gradients=False):
        fact = "weights must be arrays with memory of their own"
        raise NotImplementedError(f"{function}: {fact}, got {got}")
    return shape


def check_call(
    function: str,
    library: Any,
    shape: StackShape,
    arrays: Mapping[str, Array],
    stacked: bool,
) -> dict[str, View]:
    """Views of the arrays of a call, in their order: x or tokens, the caches, lengths, maybe out.

    Args:
        stacked: the caches have an axis of layers in front.
    """
    first = "the weights", View((), (), shape.dtype, shape.device)
    checked = lambda specs, **known: views_of(  # noqa: E731
        function, library, specs, [arrays[x] for x in specs], first=first, plain=True, **known
    )
    places, layers = Spec(("batch",), "int32"), (shape.layers,) if stacked else ()
    cache = Spec((*layers, "batch", "max_length", shape.heads, shape.head_dim), strides=1)
    specs = {"x": Spec(("batch", shape.width), strides=1), "tokens": places}
    views = checked({name: spec for name, spec in specs.items() if name in arrays})
    ((batch, *_),) = (x.shape for x in views.values())
    if batch > structs.MAX_BATCH:
        raise ValueError(f"{function}: batch must be at most {structs.MAX_BATCH}, got {batch}")
    specs = {name: cache if name in CACHES else places for name in arrays if name not in views}
    views |= checked(specs, batch=batch)
    max_length = views["k_cache"].shape[-3]
    integer_within(function, "max_length of k_cache", max_length, 1, MAX_ROWS)
    vector = 16 // ITEM_SIZE[shape.dtype]
    for name in CACHES:
        view = views[name]
        for size, stride in zip(view.shape[:-1], view.strides[:-1]):
            if size > 1 and (stride % vector or stride == 0):
                fact = f"strides of {name} must be multiples of {vector} elements, and not 0"
                raise ValueError(f"{function}: {fact}, got {view.strides}")
    return {name: views[name] for name in arrays}


def require_aligned(function: str, pointers: Mapping[str, int]) -> None:
    """Raise ValueError unless arrays that are read 16 bytes at a time begin at such a multiple."""
    for name, pointer in pointers.items():
        if pointer % 16:
            fact = f"{name} must begin at a multiple of 16 bytes"
            raise ValueError(f"{function}: {fact}, got address {pointer:#x}")


def require_blocks(function: str, blocks: Any) -> list[Any]:
    """The blocks as a list, if they are `BlockWeights`, one at least."""
    if not hasattr(blocks, "__iter__") or isinstance(blocks, str | bytes | dict):
        fact = "blocks must be a sequence of BlockWeights"
        raise TypeError(f"{function}: {fact}, got {short(blocks)}")
    blocks = list(blocks)
    if not blocks:
        raise ValueError(f"{function}: there must be at least one block, got none")
    for block in blocks:
        if not hasattr(block, "ln1_weight") or isinstance(block, type):
            fact = "weights must be BlockWeights"
            raise TypeError(f"{function}: {fact}, got {type(block).__name__}")
    return blocks


def weights_library(function: str, blocks: Sequence[Any]) -> Any:
    """The library of the weights; a TypeError where there is none."""
    library = library_of(blocks[0].ln1_weight)
    if library is None:
        kind = type(blocks[0].ln1_weight).__name__
        fact = "weights must be NumPy, CuPy or torch arrays"
        raise TypeError(f"{function}: {fact}, got {kind} as ln1_weight")
    return library


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
