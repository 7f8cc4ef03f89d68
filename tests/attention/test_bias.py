"""A bias on the scores: every broadcast, dtype and stride, masks, its gradient."""

import contextlib
import itertools

import numpy
import pytest
from matrix import each, select
from passes import forward_backward
from targets import boolean_texts

import cupyflash
from cupyflash.ops.attention import dispatch
from cupyflash.ops.attention.checks import check
from cupyflash.ops.attention.options import Options
from cupyflash.testing import expected, poison_free_memory, to_float64

BATCH, HEADS, ROWS, COLS = 2, 4, 70, 90
WHOLE = (BATCH, HEADS, ROWS, COLS)
SHAPES = [
    shape
    for rank in (2, 3, 4)
    for shape in itertools.product(*((1, size) for size in WHOLE[4 - rank :]))
]
DTYPES = ("q", "float32", "bool")
PLANS = (dispatch._forward_plans, dispatch._backward_plans)


def problem(target, dtype=None, **shape):
    sizes = {"batch": BATCH, "heads_q": HEADS, "seqlen_q": ROWS, "seqlen_k": COLS}
    return target.inputs(dtype or target.dtypes[0], **sizes | {"heads_kv": 2} | shape)


def make_bias(target, shape=WHOLE, dtype="q", inputs=None):
    values = numpy.random.default_rng(5).standard_normal(shape, dtype="float32")
    if dtype == "bool":
        return target.array(values > -0.7)
    return target.array(values, target.dtypes[0] if dtype == "q" else dtype)


@each()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_broadcast(target, shape, dtype):
    inputs, bias = problem(target, head_dim=32), make_bias(target, shape, dtype)
    results = forward_backward(inputs, bias=bias)
    expected(inputs, bias=bias).check(**results)
    if dtype != "bool":
        assert results["dbias"].shape == bias.shape


@each()
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": "top-left", "softcap": 3.0},
        {"window": (20, 3), "scale": 0.3},
        {"softcap": 2.0, "layout": "bhsd"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_with_other_options(target, dtype, options):
    """The bias keeps its order of axes in either layout."""
    options = dict(options)
    inputs = problem(target, head_dim=128, layout=options.pop("layout", "bshd"))
    bias = make_bias(target, dtype=dtype)
    expected(inputs, bias=bias, **options).check(**forward_backward(inputs, bias=bias, **options))


@each()
@pytest.mark.parametrize("dtype", ["q", "float32"])
@pytest.mark.parametrize("storage", ["transposed", "odd", "every other", "reversed heads"])
def test_strides(target, storage, dtype):
    """Any strides, also of the last axis, and rows that start at any address."""
    inputs = problem(target)
    if storage == "transposed":
        bias = make_bias(target, (BATCH, HEADS, COLS, ROWS), dtype).swapaxes(2, 3)
    elif storage == "odd":
        bias = make_bias(target, (BATCH, HEADS, ROWS + 1, COLS + 3), dtype)[:, :, 1:, 3:]
    elif storage == "every other":
        bias = make_bias(target, (BATCH, HEADS, ROWS, 2 * COLS), dtype)[..., ::2]
    else:
        bias = make_bias(target, (HEADS, BATCH, ROWS, COLS), dtype).swapaxes(0, 1)
    expected(inputs, bias=bias).check(**forward_backward(inputs, bias=bias))


@each(device="cuda")
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, head_dim, dtype, broadcast, options",
    [
        (2, 16, 64, 0, (), {}),
        (64, 128, 128, 1, (0,), {}),
        (65, 131, 64, 1, (1,), {"causal": True}),
        (127, 97, 192, 1, (0, 1), {}),
        (129, 257, 128, 0, (), {"causal": "top-left"}),
        (200, 400, 256, 1, (1,), {}),
        (193, 130, 96, 1, (0,), {"softcap": 4.0}),
        (70, 1100, 128, 1, (1,), {"window": (150, None)}),
        (1, 700, 128, 1, (), {}),
        (300, 304, 64, 0, (0, 1), {}),
    ],
    ids=str,
)
def test_box_edges(target, seqlen_q, seqlen_k, head_dim, dtype, broadcast, options):
    """Rows that start at multiples of 16 bytes, with NaN between them: sm_90 reads it in boxes."""
    dtype = target.dtypes[min(dtype, len(target.dtypes) - 1)]
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    inputs = problem(target, dtype, head_dim=head_dim, **lengths)
    shape = [1 if axis in broadcast else size for axis, size in enumerate((BATCH, HEADS))]
    values = numpy.full((*shape, seqlen_q, seqlen_k // 8 * 8 + 16), numpy.nan, "float32")
    rng = numpy.random.default_rng(seqlen_q)
    values[..., :seqlen_k] = rng.standard_normal((*shape, seqlen_q, seqlen_k), "float32")
    bias = target.array(values, dtype)[..., :seqlen_k]
    results = forward_backward(inputs, bias=bias, **options)
    expected(inputs, bias=bias, **options).check(**results)


@each(device="cuda")
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, head_dim, dtype, shape, options",
    [
        (300, 304, 64, 1, {}, {}),
        (1, 8, 64, 0, {}, {}),
        (130, 264, 128, 1, {"batch": 1}, {"causal": True}),
        (264, 130, 128, 1, {}, {"causal": True}),
        (257, 520, 96, 0, {}, {"window": (40, 9)}),
        (520, 72, 40, 1, {"batch": 1}, {"causal": "top-left"}),
        (200, 136, 32, 1, {}, {}),
        (136, 200, 64, 1, {}, {"alibi": True}),
        (190, 200, 96, 1, {}, {"dropout_p": 0.3}),
        (190, 328, 64, 0, {}, {"dropout_p": 0.3, "alibi": True, "window": (None, 30)}),
        (300, 264, 64, 1, {"heads_q": 12, "heads_kv": 1, "batch": 1}, {}),
        (4200, 64, 128, 1, {"heads_q": 2, "batch": 1}, {}),
    ],
    ids=str,
)
def test_gradient_of_each_score(target, seqlen_q, seqlen_k, head_dim, dtype, shape, options):
    """A bias in the dtype of q that is not broadcast: sm_90 stores dS, and zeros elsewhere."""
    options, dtype = dict(options), target.dtypes[min(dtype, len(target.dtypes) - 1)]
    inputs = problem(
        target, dtype, head_dim=head_dim, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **shape
    )
    heads = shape.get("heads_q", HEADS)
    if options.pop("alibi", False):
        options["alibi_slopes"] = target.array(2.0 ** -numpy.arange(1, heads + 1), "float32")
    if "dropout_p" in options:
        options["dropout_seed"] = 7
    sizes = (shape.get("batch", BATCH), heads, seqlen_q, seqlen_k)
    values = numpy.random.default_rng(seqlen_q).standard_normal(sizes, "float32")
    bias = target.array(values, dtype)
    poison_free_memory(target.library, target.device, [bias.nbytes, 4 * values.size])
    results = forward_backward(inputs, bias=bias, **options)
    assert results["dbias"].dtype == bias.dtype
    expected(inputs, bias=bias, **options).check(**results)


@each(library="torch")
def test_expanded_bias_has_a_gradient_for_each_element(target):
    """Stride 0 without length 1; torch sums over the expanded axis by itself."""
    inputs = problem(target)
    narrow = make_bias(target, (1, HEADS, ROWS, 1), "float32")
    bias = narrow.expand(BATCH, HEADS, ROWS, COLS)
    results = forward_backward(inputs, bias=bias)
    assert results["dbias"].shape == WHOLE
    expected(inputs, bias=bias).check(**results)


@each()
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_key(target, dtype):
    """All of a row masked: 0, LSE -inf and gradients of 0; in tiles with and without others."""
    inputs = problem(target, seqlen_q=200, seqlen_k=150)
    values = numpy.zeros((200, 150), "float32")
    values[[0, 17, 199]] = values[64:128] = values[:, 20:40] = -numpy.inf
    if dtype == "bool":
        bias = target.array(values == 0)
    else:
        bias = target.array(values, target.dtypes[0] if dtype == "q" else dtype)
    poison_free_memory(target.library, target.device, [inputs.q.nbytes, 2 * inputs.q.nbytes])
    results = forward_backward(inputs, bias=bias)
    hidden = (values == -numpy.inf).all(axis=1)
    assert (to_float64(results["out"])[:, hidden] == 0).all()
    assert (to_float64(results["lse"])[..., hidden] == -numpy.inf).all()
    assert (to_float64(results["dq"])[:, hidden] == 0).all()
    assert (to_float64(results["dk"])[:, 20:40] == 0).all()
    expected(inputs, bias=bias).check(**results)


@each()
@pytest.mark.parametrize("value", [-1e9, float(numpy.finfo("float32").min)], ids=str)
def test_large_negative_numbers_mask(target, value):
    inputs = problem(target)
    seen = numpy.random.default_rng(6).random(WHOLE) < 0.5
    seen[:, :, 5] = False
    mask = target.array(seen)
    bias = target.array(numpy.where(seen, 0.0, value), "float32")
    results = forward_backward(inputs, bias=bias)
    expected(inputs, bias=mask).check(**{x: results[x] for x in ("out", "lse", "dq", "dk", "dv")})


@each()
@pytest.mark.parametrize(
    "dtype, value", [(0, -6e4), (0, -numpy.inf), (1, -1e9), (1, -3.38e38), (1, -numpy.inf)]
)
def test_large_negative_numbers_mask_in_the_dtype_of_q(target, value, dtype):
    """Whole rows too, unless float16 holds the value; beside numbers of either sign."""
    dtype = target.dtypes[min(dtype, len(target.dtypes) - 1)]
    inputs = problem(target, dtype, head_dim=64, seqlen_q=72, seqlen_k=136)
    rng = numpy.random.default_rng(7)
    shape = (BATCH, HEADS, 72, 136)
    seen = rng.random(shape) < 0.5
    seen[:, :, :, 5] = seen[:, :, 8:16, 64:] = False
    if value != -6e4:
        seen[:, :, 70] = False
    plain = rng.choice([-900.0, -3.0, 0.0, 2.0, 900.0], shape)
    large, infinite = (
        target.array(numpy.where(seen, plain, x).astype("float32"), dtype)
        for x in (value, -numpy.inf)
    )
    results = forward_backward(inputs, bias=large)
    check = expected(inputs, bias=infinite).check
    check(**{name: results[name] for name in ("out", "lse", "dq", "dk", "dv")})


@each()
@pytest.mark.parametrize("dtype", [0, 1])
def test_nan_stays_in_its_row(target, dtype):
    dtype = target.dtypes[min(dtype, len(target.dtypes) - 1)]
    inputs = problem(target, dtype, head_dim=64, seqlen_q=130, seqlen_k=200)
    values = numpy.zeros((130, 200), "float32")
    values[[3, 129], [150, 0]] = numpy.nan
    out, lse = cupyflash.attention(
        inputs.q, inputs.k, inputs.v, bias=target.array(values, dtype), return_lse=True
    )
    rows = numpy.isnan(values).any(axis=1)
    for found in (to_float64(out).swapaxes(1, 2)[..., 0], to_float64(lse)):
        assert (numpy.isnan(numpy.asarray(found.tolist())) == rows).all()


@each()
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(0, 5), (5, 0), (0, 0)])
def test_empty(target, seqlen_q, seqlen_k):
    inputs = problem(target, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    bias = make_bias(target, (HEADS, seqlen_q, 1))
    results = forward_backward(inputs, bias=bias)
    assert results["dbias"].shape == bias.shape and (to_float64(results["dbias"]) == 0).all()
    assert (to_float64(results["out"]) == 0).all()


@each()
def test_view_without_keys(target):
    inputs = problem(target, seqlen_q=40, seqlen_k=0)
    bias = make_bias(target, (HEADS, 40, 72))[..., :0]
    results = forward_backward(inputs, bias=bias)
    assert tuple(results["dbias"].shape) == tuple(bias.shape)
    assert (to_float64(results["out"]) == 0).all() and (to_float64(results["dq"]) == 0).all()


@each(library="torch")
def test_only_the_bias_has_a_gradient(target):
    import torch

    inputs, bias = problem(target), make_bias(target, (1, HEADS, ROWS, COLS), "float32")
    bias.requires_grad_()
    out = cupyflash.attention(inputs.q, inputs.k, inputs.v, bias=bias)
    (dbias,) = torch.autograd.grad(out, [bias], inputs.dout)
    expected(inputs, bias=bias.detach()).check(dbias=dbias)


@each(device="cuda")
def test_deterministic(target):
    """A bias of full shape gets one addend an element; one that is broadcast has no fixed order."""
    inputs = problem(target, seqlen_q=600, seqlen_k=600)
    qkv = inputs.q, inputs.k, inputs.v
    shapes = (BATCH, HEADS, 600, 600), (HEADS, 600, 1)
    whole, shared = (make_bias(target, shape) for shape in shapes)

    def gradients(bias):
        out, lse = cupyflash.attention(*qkv, bias=bias, return_lse=True)
        return cupyflash.attention_backward(
            inputs.dout, *qkv, out, lse, bias=bias, bias_grad=True, deterministic=True
        )

    first = gradients(whole)
    for a, b in zip(first[:4], gradients(whole)):
        assert (a == b).all()
    expected(inputs, bias=whole).check(**dict(zip(("dq", "dk", "dv", "dbias"), first)))
    with pytest.raises(NotImplementedError, match="^attention_backward: .*bias .*broadcast"):
        gradients(shared)


# A Boolean bias as a text on Hopper --------------------------------------------------------------


@contextlib.contextmanager
def texts(target):
    """A Boolean bias that all heads share is a text, as far as the backend has that."""
    with boolean_texts():
        yield
        made = [x for plans in PLANS for x in plans.values()]
        assert made and {bool(x.work.mask_tiles) for x in made} == {target.backend == "sm90"}


def storages():
    """Boolean arrays of (queries, keys), by the way in which they lie in memory."""
    seen = numpy.random.default_rng(8).random((2, 1, 150, 330)) < 0.4
    seen[:, :, 20:37], seen[:, :, 128:, 100:290], seen[:, :, :128, 128:256] = False, True, False
    yield "one for all", seen[0, 0], (150, 330)
    yield "of each sequence", seen, seen.shape
    yield "shared", seen[:1], (1, 1, 150, 330)
    yield "expanded", seen[:1], (2, 4, 150, 330)
    yield "of queries", seen[..., :1], (2, 1, 150, 1)
    yield "transposed", numpy.swapaxes(seen, 2, 3), None
    yield "every other", numpy.repeat(seen, 2, axis=3), None
    yield "odd", numpy.pad(seen, ((0, 0), (0, 0), (0, 1), (1, 2))), None


def stored_mask(target, name, values, shape):
    array = target.array(numpy.ascontiguousarray(values))
    if name == "transposed":
        return array.swapaxes(2, 3)
    if name in ("every other", "odd"):
        return array[..., ::2] if name == "every other" else array[:, :, :150, 1:331]
    if name != "expanded":
        return array
    if hasattr(array, "expand"):
        return array.expand(shape)
    import cupy

    return cupy.broadcast_to(array, shape)


@each(device="cuda")
@pytest.mark.parametrize("storage", list(storages()), ids=lambda x: x[0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_text_of_every_storage(target, storage, head_dim):
    """Rows and tiles that see nothing, full tiles, partial ones, and lengths that fill none."""
    inputs = problem(target, head_dim=head_dim, seqlen_q=150, seqlen_k=330)
    mask = stored_mask(target, *storage)
    poison_free_memory(target.library, target.device, [inputs.q.nbytes, 2 * inputs.q.nbytes])
    with texts(target):
        results = forward_backward(inputs, bias=mask)
    expected(inputs, bias=mask).check(**results)
    if storage[0] != "of queries":
        assert (to_float64(results["out"])[:, 20:37] == 0).all()
        assert (to_float64(results["lse"])[..., 20:37] == -numpy.inf).all()


@each(device="cuda")
@pytest.mark.parametrize(
    "head_dim, options",
    [
        (40, {"causal": True, "scale": 0.3}),
        (96, {"window": (70, 3)}),
        (128, {"causal": "top-left", "sinks": True}),
        (32, {}),
        (128, {"causal": True}),
    ],
    ids=str,
)
def test_text_beside_other_options(target, head_dim, options):
    options, dtype = dict(options), target.dtypes[head_dim // 64 % len(target.dtypes)]
    inputs = problem(target, dtype, head_dim=head_dim, seqlen_q=150, seqlen_k=330)
    if options.pop("sinks", False):
        options["sinks"] = target.array(numpy.linspace(-1, 1, HEADS), "float32")
    mask = target.array(next(storages())[1])
    with texts(target):
        results = forward_backward(inputs, bias=mask, **options)
    expected(inputs, bias=mask, **options).check(**results)


@each(device="cuda")
def test_text_of_a_mask_that_changes(target):
    """Each call finds the tiles of what the mask then is; any byte but 0 is True."""
    inputs = problem(target, head_dim=64, seqlen_q=150, seqlen_k=330)
    seen = next(storages())[1]
    memory = target.array(seen.astype("uint8") * 6)
    mask = memory.view(target.array(seen).dtype)
    with texts(target):
        for values in (seen, ~seen):
            memory[...] = target.array(values.astype("uint8") * 6)
            results = forward_backward(inputs, bias=mask)
            expected(inputs, bias=target.array(values)).check(**results)


# Bad input -----------------------------------------------------------------------------------


@each()
@pytest.mark.parametrize(
    "shape", [(COLS,), (ROWS, COLS + 1), (3, 1, 1), (1, *WHOLE), (ROWS, ROWS)], ids=str
)
def test_shape_that_does_not_broadcast(target, shape):
    inputs, bias = problem(target), make_bias(target, shape)
    with pytest.raises(ValueError, match=r"^attention: bias must broadcast .*got \("):
        cupyflash.attention(inputs.q, inputs.k, inputs.v, bias=bias)


@each()
@pytest.mark.parametrize("dtype", ["float64", "int32", "uint8"])
def test_dtype(target, dtype):
    inputs, bias = problem(target), target.array(numpy.zeros((ROWS, COLS), dtype))
    float32 = target.dtypes[0] == "float32"
    allowed = "bool or float32 like q" if float32 else "bool, float16 like q or float32"
    with pytest.raises(TypeError, match=f"^attention: bias must be {allowed}, got {dtype}"):
        cupyflash.attention(inputs.q, inputs.k, inputs.v, bias=bias)


@each()
def test_of_another_library(target):
    inputs = problem(target)
    with pytest.raises(TypeError, match="^attention: bias must be a .* like q, got list"):
        cupyflash.attention(inputs.q, inputs.k, inputs.v, bias=[[0.0]])


@each()
@pytest.mark.parametrize("dtype", [None, "bool"])
def test_gradient_of_nothing(target, dtype):
    inputs = problem(target)
    qkv, bias = (inputs.q, inputs.k, inputs.v), dtype and make_bias(target, dtype=dtype)
    out, lse = cupyflash.attention(*qkv, bias=bias, return_lse=True)
    with pytest.raises(ValueError, match="^attention_backward: bias_grad needs a bias"):
        cupyflash.attention_backward(inputs.dout, *qkv, out, lse, bias=bias, bias_grad=True)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_not_with_packed_sequences(name):
    """Nor where only the queries or only the keys are packed."""
    target = select("numpy")[0]
    from cupyflash.runtime.lookup import library_of

    inputs = target.varlen_inputs("float32", [3, 4])
    view = library_of(inputs.q).view
    padded = target.inputs("float32", seqlen_q=4)
    arrays = {name: getattr(inputs, name), "bias": numpy.zeros((4, 4), "float32")}
    of_q = name == "cu_seqlens_q"
    options = Options(layout="thd-bshd" if of_q else "bshd-thd", max_seqlens=(4, 4))
    q, kv = (inputs, padded) if of_q else (padded, inputs)
    qkv = {"q": view(q.q), "k": view(kv.k), "v": view(kv.v)}
    with pytest.raises(NotImplementedError, match="^f: bias .*packed"):
        check("f", qkv, options, {key: view(x) for key, x in arrays.items()})
