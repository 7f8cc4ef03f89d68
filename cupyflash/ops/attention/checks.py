"""The checks of an attention call: from views of the arrays and options to a `Problem`.

Every error of this module is raised before any launch, and its text is ``function: fact, allowed,
got``. The checks run once for each combination of shapes, strides, dtypes and options.
"""

import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any

from ...runtime.array import View
from ...runtime.checks import callers_level
from ...runtime.philox import SEED_ARRAY, dropout_scale, dropout_threshold
from ...runtime.specs import Spec, check_views
from ...runtime.structs import header
from .names import caller_name
from .options import CAUSAL, LAYOUTS, RULES, Options
from .problem import ExtraFacts, Problem, bias_strides, canonical_strides, kernel_head_dim
from .score_text.checks import check_text

structs = header("attention/params.cuh")

MAX_HEAD_DIM = 256
MOST_HEADS = 256  # the most of known models (Falcon 180B: 232); more may be the tokens
HEADS_FIRST = (
    "where the heads come first, swap axes 1 and 2 or call cupyflash.attention with layout='bhsd'"
)
MAX_SEQLEN = 2**29  # so that sums of lengths and windows fit 32 bits in the kernels
MAX_BLOCKS = 2**31  # the most of a grid
HEAD_DIMS = range(1, MAX_HEAD_DIM + 1)
PLACES, LENGTHS = Spec(("batch + 1",), "int32"), Spec(("batch",), "int32")
EXTRAS = {  # the optional arrays; the shape of a bias is one that broadcasts
    "cu_seqlens_q": PLACES,
    "cu_seqlens_k": PLACES,
    "alibi_slopes": Spec([("heads_q",), ("batch", "heads_q")], "float32", 1),
    "bias": Spec((...,), "bool or like q or float32", "free"),
    "sinks": Spec(("heads_q",), "float32 or like q"),
    "dropout_seed": SEED_ARRAY,
    "seqused_q": LENGTHS,
    "seqused_k": LENGTHS,
    "key_mask": Spec(("batch", "seqlen_k"), "bool", "free"),
}


def check(
    function: str,
    tensors: Mapping[str, View],
    options: Options,
    extras: Mapping[str, View] | None = None,
    captures: tuple[View | None, ...] = (),
) -> Problem:
    """A `Problem` from views of q, k, v and, in the backward, of dout and out.

    Args:
        extras: views of the optional arrays that are there, by their names in `Extras`.
        captures: views of those of the text of the options, None for numbers.

    Raises:
        TypeError: dtypes.
        ValueError: shapes, strides, devices, option values.
        NotImplementedError: optional arrays that packed sequences do not have.
    """
    extras = extras or {}
    if options.max_seqlens is None and options.layout not in LAYOUTS:
        fact = "layout must be 'bshd' or 'bhsd'"
        raise ValueError(f"{function}: {fact}, got {options.layout!r}")
    q, say = tensors["q"], functools.partial(caller_name, function)
    names = dict.fromkeys((*"qkv", *tensors))  # q first: errors compare the others with it
    specs = {name: _spec(name, options.layout_of(name)) for name in names}
    head_dims = dict.fromkeys(("head_dim", "head_dim_v"), HEAD_DIMS)
    sizes = check_views(function, specs, tensors, say=say, **head_dims)
    _check_heads(function, tensors, options, sizes)
    if options.max_seqlens is not None:
        longest = _max_seqlens(function, options.max_seqlens)
        sizes = dict(zip(("seqlen_q", "seqlen_k"), longest)) | sizes
        sizes["batch"] = _packed_batch(function, options, extras, q, sizes.get("batch"))
    _check_grid(function, tensors, sizes)
    batch, seqlen_q, seqlen_k = sizes["batch"], sizes["seqlen_q"], sizes["seqlen_k"]
    left, right, top_left = _visible_keys(function, options, seqlen_q + seqlen_k)
    _check_values(function, options, q.dtype)
    head_dim, head_dim_v = sizes["head_dim"], sizes["head_dim_v"]
    scale = 1 / math.sqrt(head_dim) if options.scale is None else options.scale
    threshold = dropout_threshold(options.dropout_p)
    shape = structs.AttentionShape(
        batch, sizes["heads_q"], sizes["heads_kv"], seqlen_q, seqlen_k,
        kernel_head_dim(head_dim, head_dim_v), left, right, top_left, 1, 1, scale,
        options.softcap, threshold, dropout_scale(threshold),
    )  # fmt: skip
    strides = {name: canonical_strides(name, x, options) for name, x in tensors.items()}
    facts = _check_extras(function, extras, q, sizes)
    if options.text is not None:
        check_text(function, options, extras, captures, q, _places(options, extras, sizes))
    return Problem(
        q.dtype, q.device, shape, (head_dim, head_dim_v), strides, facts,
        sizes.get("total_q"), sizes.get("total_k"), tf32=options.precision == "tf32",
        text=options.text, captures=captures,
    )  # fmt: skip


def _places(
    options: Options, extras: Mapping[str, View], sizes: Mapping[str, int]
) -> dict[str, int]:
    """How many batches, heads, queries and keys a text meets, unless the GPU alone knows them."""
    found = {"batch": sizes["batch"], "head": sizes["heads_q"]}
    for name, axis in (("query", "q"), ("key", "k")):
        if options.max_seqlens is None and f"seqused_{axis}" not in extras:
            found[name] = sizes[f"seqlen_{axis}"]
    return found


def _check_heads(
    function: str, tensors: Mapping[str, View], options: Options, sizes: Mapping[str, int]
) -> None:
    """The numbers of heads; warns of so many that they may be the tokens."""
    q, say = tensors["q"], functools.partial(caller_name, function)
    heads_q, heads_kv = sizes["heads_q"], sizes["heads_kv"]
    if heads_q != heads_kv and (heads_kv == 0 or heads_q % heads_kv):
        fact = f"the heads of {say('q')} must be a multiple of those of {say('k')} and {say('v')}"
        note = _spec("q", options.layout_of("q")).note
        got = f"{heads_q} and {heads_kv} {note}, {say('q')} {q.shape}"
        got += f" and {say('k')} {tensors['k'].shape}"
        if options.layout == "bshd" and sizes["seqlen_q"] % max(1, sizes["seqlen_k"]) == 0:
            got += f"; {HEADS_FIRST}"
        raise ValueError(f"{function}: {fact}, got {got}")
    suspicious = options.layout == "bshd" and heads_q > max(MOST_HEADS, sizes["seqlen_q"])
    if suspicious and "dout" not in tensors:
        text = f"{function}: {say('q')} {q.shape} is read as (batch, seqlen, heads, head_dim), "
        text += f"with {heads_q} heads; {HEADS_FIRST}"
        warnings.warn(text, UserWarning, stacklevel=callers_level())


def _check_grid(function: str, tensors: Mapping[str, View], sizes: Mapping[str, int]) -> None:
    """Raise ValueError for sizes that the integers of a kernel or a grid cannot count."""
    seqlen_q, seqlen_k = sizes["seqlen_q"], sizes["seqlen_k"]
    if max(seqlen_q, seqlen_k) >= MAX_SEQLEN:
        fact = f"sequences must be shorter than {MAX_SEQLEN}"
        raise ValueError(f"{function}: {fact}, got {seqlen_q} and {seqlen_k}")
    heads = max(1, sizes["heads_q"]) * max(1, sizes["batch"])
    if -(-max(seqlen_q, seqlen_k) // 16) * heads >= MAX_BLOCKS:
        shapes = (f"{caller_name(function, name)} {tensors[name].shape}" for name in "qk")
        fact = "batch x heads x seqlen is too large for a grid"
        raise ValueError(f"{function}: {fact}, got {', '.join(shapes)}")


def _check_values(function: str, options: Options, dtype: str) -> None:
    """The options that have a range."""
    say = functools.partial(caller_name, function)
    for name, rule in RULES.items():
        x = getattr(options, name)
        if rule.valid is None or x is None:
            continue
        if not ((isinstance(x, str) or _is_real(x)) and rule.valid(x)):
            raise ValueError(f"{function}: {say(name)} must be {rule.allowed}, got {x}")
    if options.precision == "tf32" and dtype != "float32":
        fact = f"precision 'tf32' is for float32 {say('q')}, {say('k')} and {say('v')}"
        raise ValueError(f"{function}: {fact}, got {dtype}")


def check_lse(function: str, problem: Problem, lses: Mapping[str, View]) -> None:
    """The LSE of the forward, an input of the backward, and its gradient, by their names."""
    specs = dict.fromkeys(lses, Spec(problem.lse_shape, "float32", "free"))
    first = "q", View((), (), problem.dtype, problem.device)
    check_views(function, specs, lses, first=first, say=functools.partial(caller_name, function))


@functools.cache
def _spec(name: str, layout: str) -> Spec:
    """One of q, k, v, dout and out."""
    side, heads = ("k", "heads_kv") if name in ("k", "v") else ("q", "heads_q")
    head_dim = "head_dim" if name in ("q", "k") else "head_dim_v"
    axes = {
        "bshd": ("batch", f"seqlen_{side}", heads, head_dim),
        "bhsd": ("batch", heads, f"seqlen_{side}", head_dim),
        "thd": (f"total_{side}", heads, head_dim),
    }
    return Spec(axes[layout], strides=1, note=f"in layout {layout!r}")


def _visible_keys(function: str, options: Options, unlimited: int) -> tuple[int, int, bool]:
    """(keys left of the diagonal, keys right of it, whether it starts at the top left)."""
    causal, window = options.causal, options.window
    if causal not in CAUSAL:
        allowed = "False, True, 'bottom-right' or 'top-left'"
        name = caller_name(function, "causal")
        raise ValueError(f"{function}: {name} must be {allowed}, got {causal!r}")
    if window is None:
        window = (None, None)
    valid = isinstance(window, tuple) and len(window) == 2
    if not valid or not all(x is None or (_is_integer(x) and x >= -1) for x in window):
        allowed = "None or (left, right), each at least 0, or None or -1 for unlimited"
        name = caller_name(function, "window")
        raise ValueError(f"{function}: {name} must be {allowed}, got {window}")
    left, right = (unlimited if x in (None, -1) else min(int(x), unlimited) for x in window)
    return left, 0 if causal else right, causal == "top-left"


def _packed_batch(
    function: str, options: Options, extras: Mapping[str, View], q: View, batch: int | None
) -> int:
    """The number of sequences; ``batch`` of a tensor that is not packed, if there is one."""
    views, say = {}, functools.partial(caller_name, function)
    for name, side in (("cu_seqlens_q", "q"), ("cu_seqlens_k", "k")):
        if options.layout_of(side) == "thd":
            if name not in extras:
                fact = f"{say(name)} must be an int32 array (batch + 1)"
                raise TypeError(f"{function}: {fact}, got None")
            views[name] = extras[name]
    lengths = {"batch + 1": range(1, MAX_BLOCKS) if batch is None else batch + 1}
    return check_views(function, EXTRAS, views, first=("q", q), say=say, **lengths)["batch + 1"] - 1


def check_bias_gradient(
    function: str, problem: Problem, bias_grad: bool, deterministic: bool
) -> None:
    """Whether the bias can have a gradient, if it is to have one, and that in a fixed order.

    On a CPU every order is fixed; but it takes and refuses what a GPU does.
    """
    bias = problem.extras.bias
    if bias_grad and (bias is None or bias.dtype == "bool"):
        got = "none" if bias is None else bias.dtype
        raise ValueError(f"{function}: bias_grad needs a bias of a floating dtype, got {got}")
    atomic = bias_grad and problem.bias_is_broadcast and not problem.bias_gradient_fits_registers
    if atomic and deterministic:
        name = caller_name(function, "bias")
        fact = f"deterministic does not extend to the gradient of a {name} that is broadcast, "
        fact += "but over the batch, and perhaps the heads, without softcap, ALiBi, dropout and "
        fact += "seqused, in float16 or bfloat16 with a head_dim up to 64"
        raise NotImplementedError(f"{function}: {fact}, got {name} {bias.shape}")


def _max_seqlens(function: str, lengths: tuple[Any, Any]) -> tuple[int, int]:
    for name, length in zip(("max_seqlen_q", "max_seqlen_k"), lengths):
        if not _is_integer(length) or length < 0:
            name = caller_name(function, name)
            raise ValueError(f"{function}: {name} must be an integer of at least 0, got {length}")
    return int(lengths[0]), int(lengths[1])


def _is_integer(x: Any) -> bool:
    return hasattr(x, "__index__") and not isinstance(x, bool)


def _is_real(x: Any) -> bool:
    return hasattr(x, "__float__") and not isinstance(x, bool)


def _check_extras(
    function: str, extras: Mapping[str, View], q: View, sizes: Mapping[str, int]
) -> ExtraFacts:
    """The facts of the optional arrays by name, for these lengths of axes.

    Raises:
        TypeError: dtypes.
        ValueError: shapes, strides, devices.
        NotImplementedError: a bias or key mask together with cu_seqlens; both, if both are bool.
    """
    say = functools.partial(caller_name, function)
    for name in ("bias", "key_mask"):
        if name in extras and ("cu_seqlens_q" in extras or "cu_seqlens_k" in extras):
            raise NotImplementedError(f"{function}: {say(name)} is not built for packed sequences")
    sizes = {**sizes, "batch + 1": sizes["batch"] + 1}
    check_views(function, EXTRAS, extras, first=("q", q), say=say, **sizes)
    bias = _bias(function, extras["bias"], sizes) if "bias" in extras else None
    key_mask, slopes = extras.get("key_mask"), extras.get("alibi_slopes")
    if bias is not None and bias.dtype == "bool":
        if key_mask is not None:
            fact = f"{say('bias')} must be of a floating dtype beside a {say('key_mask')}"
            raise NotImplementedError(f"{function}: {fact}, got bool")
        if not any(bias.strides[1:3]):
            shape = sizes["batch"], sizes["seqlen_k"]
            key_mask = bias._replace(shape=shape, strides=bias.strides[::3])
    return ExtraFacts(
        alibi_batch_stride=None if slopes is None else _batch_stride(slopes),
        bias=bias,
        key_mask=key_mask,
        sinks="sinks" in extras,
        lengths="seqused_q" in extras or "seqused_k" in extras,
    )


def _batch_stride(slopes: View) -> int:
    return slopes.strides[0] if len(slopes.shape) == 2 else 0


def _bias(function: str, bias: View, sizes: Mapping[str, int]) -> View:
    """The bias with four axes, (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k or 1)."""
    axes = "batch", "heads_q", "seqlen_q", "seqlen_k"
    wanted, rank = tuple(sizes[axis] for axis in axes), len(bias.shape)
    fits = 2 <= rank <= 4 and all(
        size in (1, whole) for size, whole in zip(bias.shape, wanted[4 - rank :])
    )
    if not fits:
        fact = f"{caller_name(function, 'bias')} must broadcast to ({', '.join(axes)}) = {wanted}"
        raise ValueError(f"{function}: {fact}, rank 2 to 4, got {bias.shape}")
    strides = bias_strides(bias.shape, bias.strides)
    shape = (1,) * (4 - rank) + tuple(bias.shape)
    return bias._replace(shape=shape, strides=tuple(strides))
