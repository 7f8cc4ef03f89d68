"""Bad input: a clear error that names the function and the facts, before any launch."""

import re

import numpy
import pytest
from fakes import fake_modules
from matrix import each
from targets import CPU_TARGETS

import cupyflash
from cupyflash import environment
from cupyflash.runtime import operation as kernel_plan
from cupyflash.testing import make_inputs

NUMPY = CPU_TARGETS[0]


def says(function, *facts):
    """A pattern for "function: …" with all the facts, in any order."""
    anywhere = "".join(rf"(?=.*{re.escape(str(fact))})" for fact in facts)
    return rf"(?s)^{function}: {anywhere}"


def tensors(target, **shape):
    inputs = target.inputs("float16", **{"seqlen_q": 5, "head_dim": 16} | shape)
    return inputs.q, inputs.k, inputs.v


def rejects(function, error, *facts, call):
    with pytest.raises(error, match=says(function, *facts)):
        call()


@each()
def test_wrong_rank(target):
    q, k, v = tensors(target)
    facts = ("q", "(batch, seqlen_q, heads_q, head_dim)", tuple(q.shape[1:]))
    rejects("attention", ValueError, *facts, call=lambda: cupyflash.attention(q[0], k, v))
    facts = ("k", "(batch, seqlen_k, heads_kv, head_dim)", tuple(k.shape[1:]))
    rejects("attention", ValueError, *facts, call=lambda: cupyflash.attention(q, k[0], v[0]))


@each()
def test_dtype_mix(target):
    q, k, v = tensors(target)
    wide = target.inputs("float32", seqlen_q=5, head_dim=16).k
    call = lambda: cupyflash.attention(q, wide, v)
    rejects("attention", TypeError, "float16", "float32", call=call)


@pytest.mark.parametrize("dtype", ["float64", "int32", "complex64"])
def test_dtype_not_supported(dtype):
    q, k, v = (x.astype(dtype) for x in tensors(NUMPY))
    facts = ("float16", "bfloat16", "float32", dtype)
    rejects("attention", TypeError, *facts, call=lambda: cupyflash.attention(q, k, v))


@each()
def test_not_an_array(target):
    q, k, _ = tensors(target)
    rejects("attention", TypeError, "v", "list", call=lambda: cupyflash.attention(q, k, [1.0]))


@each(device="cuda")
def test_device_mix(target):
    q, k, _ = tensors(target)
    other = make_inputs("numpy", "float16", seqlen_q=5, head_dim=16).v
    call = lambda: cupyflash.attention(q, k, other)
    rejects("attention", (TypeError, ValueError), "v", call=call)


@each(library="torch")
def test_library_mix(target):
    q, k, _ = tensors(target)
    other = make_inputs("numpy", "float16", seqlen_q=5, head_dim=16).v
    rejects("attention", TypeError, "numpy", call=lambda: cupyflash.attention(q, k, other))


@each()
def test_head_counts_do_not_divide(target):
    q, k, v = tensors(target, heads_q=6, heads_kv=4)
    rejects("attention", ValueError, "heads", 6, 4, call=lambda: cupyflash.attention(q, k, v))


@each()
@pytest.mark.parametrize("head_dim", [257, 264, 0])
def test_head_dim(target, head_dim):
    q, k, v = tensors(target, head_dim=head_dim)
    facts = ("head_dim", 1, 256, head_dim)
    rejects("attention", ValueError, *facts, call=lambda: cupyflash.attention(q, k, v))


@each()
@pytest.mark.parametrize(
    "change",
    [{"seqlen_k": 6}, {"batch": 3}, {"head_dim": 264}, {"heads_q": 2}],
    ids=["seqlen", "batch", "head_dim", "heads"],
)
def test_shapes_do_not_fit(target, change):
    q, k, _ = tensors(target)
    v = tensors(target, **change)[2]
    allowed = (
        "256" if "head_dim" in change else f"({', '.join(map(str, k.shape[:-1]))}, head_dim_v)"
    )
    facts = ("v", allowed, tuple(v.shape))
    rejects("attention", ValueError, *facts, call=lambda: cupyflash.attention(q, k, v))


@each()
def test_last_dimension_is_not_contiguous(target):
    q, k, v = tensors(target, head_dim=32)
    call = lambda: cupyflash.attention(q[..., ::2], k[..., :16], v[..., :16])
    rejects("attention", ValueError, "q", "contiguous", call=call)


@each()
@pytest.mark.parametrize("window", [(-2, 0), (0, -5), (1,), 3, (1, 2, 3), (1.5, 0)], ids=str)
def test_window(target, window):
    qkv = tensors(target)
    call = lambda: cupyflash.attention(*qkv, window=window)
    got = 1.5 if window == (1.5, 0) else window
    rejects("attention", (ValueError, TypeError), "window", got, call=call)


@each()
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("causal", "left"),
        ("scale", -1.0),
        ("scale", float("nan")),
        ("scale", float("inf")),
        ("softcap", -1.0),
        ("softcap", float("nan")),
        ("layout", "sbhd"),
    ],
    ids=str,
)
def test_option_out_of_range(target, option, value):
    qkv = tensors(target)
    call = lambda: cupyflash.attention(*qkv, **{option: value})
    rejects("attention", ValueError, option, value, call=call)


@each()
@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 4)], ids=str)
def test_alibi_slopes_shape(target, shape):
    qkv = tensors(target)
    values = make_inputs(target.library, "float32", seqlen_q=8, device=target.device).q
    slopes = values.reshape(-1)[: numpy.prod(shape)].reshape(shape)
    call = lambda: cupyflash.attention(*qkv, alibi_slopes=slopes)
    rejects("attention", ValueError, "alibi_slopes", shape, call=call)


@each()
def test_alibi_slopes_dtype(target):
    qkv = tensors(target)
    call = lambda: cupyflash.attention(*qkv, alibi_slopes=qkv[0][0, 0, :, 0])
    rejects("attention", TypeError, "alibi_slopes", "float32", "float16", call=call)


@each()
@pytest.mark.parametrize("position", [0, 4, 5], ids=["dout", "out", "lse"])
def test_backward_shapes(target, position):
    inputs = target.inputs("float16", seqlen_q=5, head_dim=16)
    qkv = inputs.q, inputs.k, inputs.v
    arguments = [inputs.dout, *qkv, *cupyflash.attention(*qkv, return_lse=True)]
    arguments[position] = arguments[position][:1]
    name = {0: "dout", 4: "out", 5: "lse"}[position]
    facts = (name, tuple(arguments[position].shape))
    call = lambda: cupyflash.attention_backward(*arguments)
    rejects("attention_backward", ValueError, *facts, call=call)


# cu_seqlens ----------------------------------------------------------------------------------


def varlen(target, change):
    """A call whose cu_seqlens_q went through ``change``."""
    inputs = target.varlen_inputs("float16", [3, 4])
    cu_seqlens = change(inputs.cu_seqlens_q)
    return lambda: cupyflash.flash_attn_varlen_func(
        inputs.q, inputs.k, inputs.v, cu_seqlens, inputs.cu_seqlens_k, 4, 4
    )


def like(array, values):
    """The values with the library, dtype and device of the array."""
    result = array * 0
    for i, value in enumerate(values):
        result[i] = value
    return result


@each()
def test_cu_seqlens_dtype(target):
    def wide(x):
        return x.long() if target.library == "torch" else x.astype("int64")

    facts = ("cu_seqlens_q", "int32", "int64")
    rejects("flash_attn_varlen_func", TypeError, *facts, call=varlen(target, wide))


@each()
def test_cu_seqlens_shape(target):
    function, name = "flash_attn_varlen_func", "cu_seqlens_q"
    rejects(function, ValueError, name, call=varlen(target, lambda x: x[None]))
    rejects(function, ValueError, name, call=varlen(target, lambda x: x[:2]))


@each()
@pytest.mark.parametrize("values", [[0, 5, 3], [1, 3, 7], [0, 3, 8]], ids=str)
def test_cu_seqlens_values(target, values):
    """Decreasing, not from 0, beyond the end; on a GPU only with debug on, as it costs a sync."""
    call = varlen(target, lambda x: like(x, values))
    with environment.override(debug=True):
        rejects("flash_attn_varlen_func", ValueError, "cu_seqlens_q", call=call)


@each()
def test_alibi_slopes_of_another_library(target):
    qkv = tensors(target)
    facts = ("alibi_slopes", "list")
    call = lambda: cupyflash.attention(*qkv, alibi_slopes=[1.0] * 4)
    rejects("attention", TypeError, *facts, call=call)


# Missing hardware and software ---------------------------------------------------------------


@each(device="cuda")
def test_forced_backend_that_cannot_compute_the_dtype(target):
    if "float32" in target.dtypes:
        pytest.skip("this backend computes every dtype")
    inputs = target.inputs("float32", seqlen_q=5)
    facts = (target.backend, "float32")
    call = lambda: cupyflash.attention(inputs.q, inputs.k, inputs.v)
    rejects("attention", (ValueError, NotImplementedError), *facts, call=call)


def test_missing_cupy_names_the_pip_line(monkeypatch):
    """A torch tensor on a GPU, but no CuPy."""
    fake_modules(monkeypatch, cupy=None)
    with pytest.raises(ImportError, match=r"CuPy is not installed.*; pip install .*nvidia-cuda"):
        kernel_plan.Plan(0)


def test_results_of_expanded_tensors_are_dense():
    torch = pytest.importorskip("torch")
    from cupyflash.runtime.lookup import library_of

    x = torch.empty(2, 128, 1, 64).expand(2, 128, 8, 64)
    library = library_of(x)
    assert library.strides_of_empty(x.shape, library.view(x))[-1] == 1
