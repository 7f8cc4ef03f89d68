"""Tables of wrong calls of attention's public functions: each is refused, alike on CPU and GPU."""

import numpy
import pytest
from arrays import stack
from matrix import each
from wrong_calls import CHOICE, FLAG, INTEGER, NOT_IN_FLOAT32, NUMBER, array, check_refused

import cupyflash

DROPOUT = (*NUMBER, -0.1, 1.0, 1.5)
FACTOR = (*NUMBER, -1.0, *NOT_IN_FLOAT32, 1e-40, 3e38)  # denormal; infinite times log2(e)
SCALE, SOFTCAP = (*FACTOR, 0.0), FACTOR
WINDOW = (
    3,
    1.5,
    "ab",
    (1,),
    (1, 2, 3),
    (1.5, 2),
    ("1", 2),
    (True, 1),
    {},
    {1, 2},
    object(),
    (-2, 0),
)
SEED = ("text", 1.5, -1, 2**63, True, [1], {}, object())
INT32 = ("int64", "float32", "float16")


def good(target, **changes):
    """q, k, v, and beside them optional arrays of every kind."""
    sizes = {"batch": 2, "seqlen_q": 5, "seqlen_k": 6, "heads_q": 4, "heads_kv": 2, "head_dim": 16}
    return target.inputs(target.dtypes[0], **sizes | changes)


def shared_kinds():
    """The options of `attention` and of its backward."""
    return {
        "causal": (*FLAG, "left"),
        "scale": SCALE,
        "window": WINDOW,
        "softcap": SOFTCAP,
        "dropout_p": DROPOUT,
        "dropout_seed": SEED,
        "layout": (*CHOICE, "thd", "bhsd", None),
        "deterministic": FLAG,
    }


def optional_arrays(target):
    arrays = {
        "alibi_slopes": numpy.full(4, 0.5, "float32"),
        "bias": numpy.zeros((1, 4, 5, 6), "float32"),
        "sinks": numpy.zeros(4, "float32"),
        "seqused_q": numpy.array([5, 3], "int32"),
        "seqused_k": numpy.array([6, 2], "int32"),
    }
    arrays = {name: target.array(x) for name, x in arrays.items()}
    kinds = {
        name: array(x, optional=True, dtypes=INT32 if name.startswith("seqused") else ())
        for name, x in arrays.items()
    }
    return arrays, kinds


@each()
def test_attention(target):
    inputs, (arrays, kinds) = good(target), optional_arrays(target)
    call = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dropout_p": 0.1, "dropout_seed": 3}
    kinds |= {name: array(call[name]) for name in "qkv"} | shared_kinds()
    kinds["return_lse"] = FLAG
    check_refused(cupyflash.attention, call | arrays, kinds, least=150)


@each()
def test_attention_backward(target):
    inputs, (arrays, kinds) = good(target), optional_arrays(target)
    arrays |= {"dropout_p": 0.1, "dropout_seed": 3}
    out, lse = cupyflash.attention(inputs.q, inputs.k, inputs.v, return_lse=True, **arrays)
    call = {"dout": inputs.dout, "q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out}
    kinds |= {name: array(x) for name, x in call.items()} | shared_kinds()
    kinds |= {"lse": array(lse, dtypes=("float16", "int32")), "bias_grad": FLAG}
    kinds["deterministic"] = (*FLAG, True)  # the bias is broadcast
    call |= {"lse": lse, "bias_grad": True}
    check_refused(cupyflash.attention_backward, call | arrays, kinds, least=170)


@each()
def test_scaled_dot_product_attention(target):
    inputs = good(target, layout="bhsd", heads_kv=4)
    call = {"query": inputs.q, "key": inputs.k, "value": inputs.v}
    kinds = {name: array(x) for name, x in call.items()}
    call["attn_mask"] = mask = target.array(numpy.zeros((1, 4, 5, 6), "float32"))
    no_masks = [x for x in array(mask, optional=True) if getattr(x, "shape", None) != ()]
    kinds |= {
        "attn_mask": no_masks,  # one number is a mask
        "dropout_p": DROPOUT,
        "is_causal": (*FLAG, "bottom-right", "top-left", True),  # True: there is a mask
        "scale": SCALE,
        "enable_gqa": FLAG,
    }
    check_refused(cupyflash.scaled_dot_product_attention, call, kinds, least=90)


def flash_attn_kinds(slopes):
    return {
        "dropout_p": DROPOUT,
        "softmax_scale": SCALE,
        "causal": (*FLAG, "left"),
        "window_size": WINDOW,
        "softcap": SOFTCAP,
        "alibi_slopes": array(slopes, optional=True),
        "deterministic": FLAG,
        "return_attn_probs": FLAG,
    }


def slopes_of(target):
    return target.array(numpy.full(4, 0.5, "float32"))


@each()
@pytest.mark.parametrize("packed", ["", "kv", "qkv"])
def test_flash_attn(target, packed):
    inputs = good(target, seqlen_k=5, heads_kv=4)
    call = {
        "": {"q": inputs.q, "k": inputs.k, "v": inputs.v},
        "kv": {"q": inputs.q, "kv": stack(target, inputs.k, inputs.v)},
        "qkv": {"qkv": stack(target, inputs.q, inputs.k, inputs.v)},
    }[packed]
    kinds = {name: array(x) for name, x in call.items()}
    call["alibi_slopes"] = slopes_of(target)
    kinds |= flash_attn_kinds(call["alibi_slopes"])
    name = f"flash_attn_{packed}packed_func" if packed else "flash_attn_func"
    check_refused(getattr(cupyflash, name), call, kinds, least=100)


@each()
@pytest.mark.parametrize("packed", ["", "kv", "qkv"])
def test_flash_attn_varlen(target, packed):
    inputs = target.varlen_inputs(target.dtypes[0], [3, 4], heads_q=4, heads_kv=4, head_dim=16)
    call = {
        "": {"q": inputs.q, "k": inputs.k, "v": inputs.v},
        "kv": {"q": inputs.q, "kv": stack(target, inputs.k, inputs.v)},
        "qkv": {"qkv": stack(target, inputs.q, inputs.k, inputs.v)},
    }[packed]
    kinds = {name: array(x) for name, x in call.items()}
    lengths, longest = array(inputs.cu_seqlens_q, dtypes=INT32), (*INTEGER, -1, None)
    if packed == "qkv":
        call |= {"cu_seqlens": inputs.cu_seqlens_q, "max_seqlen": 4}
        kinds |= {"cu_seqlens": lengths, "max_seqlen": longest}
    else:
        call |= {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
        call |= {"max_seqlen_q": 4, "max_seqlen_k": 4}
        kinds |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
        kinds |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    call["alibi_slopes"] = slopes_of(target)
    kinds |= flash_attn_kinds(call["alibi_slopes"])
    if not packed:
        kinds["block_table"] = (inputs.cu_seqlens_q, "text", 3)
    name = f"flash_attn_varlen_{packed}packed_func" if packed else "flash_attn_varlen_func"
    check_refused(getattr(cupyflash, name), call, kinds, least=110)


@each(library="cupy")
def test_memory_that_no_kernel_reads(target):
    """Rows or an array that do not begin at a multiple of an element."""
    import cupy

    inputs = good(target)
    raw = cupy.zeros(8192, "int8")
    shape, dtype = inputs.q.shape, inputs.q.dtype
    row = shape[-1] * dtype.itemsize + 1
    strides = (row * shape[1] * shape[2], row * shape[2], row, dtype.itemsize)
    rows = cupy.lib.stride_tricks.as_strided(raw.view(dtype), shape, strides)
    with pytest.raises(TypeError, match="^attention: q must be .*, got .* at unaligned strides"):
        cupyflash.attention(rows, inputs.k, inputs.v)
    if target.aligned_only:
        pytest.skip("a forced backend takes addresses on 16 bytes alone, of empty arrays too")
    # But where there is nothing to read, or one index, strides do not matter.
    row_of_one = cupy.lib.stride_tricks.as_strided(raw.view(dtype), (1, 1, 1, 16), strides)
    assert cupyflash.attention(row_of_one, row_of_one, row_of_one).shape == (1, 1, 1, 16)
    assert not cupyflash.attention(inputs.q, rows[:, :0], rows[:, :0]).any()
    odd = cupy.ndarray(shape, dtype, raw.data + 1)
    assert not cupyflash.attention(inputs.q, odd[:, :0], odd[:, :0]).any()
    with pytest.raises(ValueError, match="arrays must be aligned to their elements"):
        cupyflash.attention(odd, inputs.k, inputs.v)


def test_a_device_that_is_none_of_ours():
    from cupyflash.ops.attention.checks import check
    from cupyflash.ops.attention.options import Options
    from cupyflash.runtime.array import View

    x = View((1, 5, 2, 16), (160, 32, 16, 1), "float32", "mps:0")
    options = Options()
    with pytest.raises(ValueError, match="^f: q must be on a CPU or a CUDA device, got mps:0"):
        check("f", {"q": x, "k": x, "v": x}, options)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_factors_are_numbers_of_float32(name):
    """Kernels take them, and their products with log2(e), as they are; numbers beside are none."""
    from cupyflash.ops.attention.checks import check
    from cupyflash.ops.attention.options import LEAST_FACTOR, MOST_FACTOR, Options
    from cupyflash.runtime.array import View

    x, float32 = View((1, 5, 2, 16), (160, 32, 16, 1), "float32", 0), numpy.finfo("float32")
    options = Options()
    for value in (LEAST_FACTOR, MOST_FACTOR):
        problem = check("f", {"q": x, "k": x, "v": x}, options._replace(**{name: value}))
        stored = getattr(problem.shape, name)
        assert stored == value
        assert float32.tiny <= stored <= stored * numpy.log2(numpy.e) <= float32.max
    for value in (LEAST_FACTOR / 2, MOST_FACTOR * 2):
        with pytest.raises(ValueError, match=f"^f: {name} must be .*positive"):
            check("f", {"q": x, "k": x, "v": x}, options._replace(**{name: value}))


def test_errors_speak_the_words_of_the_caller():
    q, odd = numpy.ones((1, 2, 5, 16), "float32"), numpy.ones((1, 2, 5, 16), "int8")
    sdpa, flash = cupyflash.scaled_dot_product_attention, cupyflash.flash_attn_func
    packed = cupyflash.flash_attn_varlen_qkvpacked_func
    lengths, qkv = numpy.array([0, 5], "int32"), numpy.ones((5, 3, 2, 16), "float32")
    for call, message in (
        (lambda: sdpa(q, odd, q), "key must be float32 like query, got int8"),
        (lambda: sdpa(q, q, q, odd), "attn_mask must"),
        (lambda: sdpa(None, q, q), "query must be .*got NoneType"),
        (lambda: sdpa(q, q, q, is_causal="bottom-right"), "is_causal must be True or False, got"),
        (lambda: flash(q, q, q, softmax_scale=0), "softmax_scale must be positive"),
        (lambda: flash(q, q, q, window_size=(-3, 0)), "window_size must be"),
        (lambda: packed(qkv, None, 5), "cu_seqlens must be"),
        (lambda: packed(qkv, lengths, -1), "max_seqlen must be"),
        (lambda: packed(qkv.astype("int8"), lengths, 5), "qkv must be float16"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^[a-z_]*: ({message})"):
            call()
