"""The forward pass on every target."""

import numpy
import pytest
from arrays import stack
from attention_cases import cases
from matrix import each, each_case
from targets import EMULATED, TARGETS

import cupyflash
from cupyflash.testing import expected, poison_free_memory, to_float64


def poison(target, inputs):
    """Leave NaN where the output and the LSE are likely to be allocated."""
    rows = inputs.q.size if target.library != "torch" else inputs.q.numel()
    out_bytes = rows * (4 if inputs.dtype == "float32" else 2)
    lse_bytes = rows // max(1, inputs.q.shape[-1]) * 4
    poison_free_memory(target.library, target.device, [out_bytes, lse_bytes])


@each_case(cases, TARGETS)
def test_forward(target, case):
    inputs, options = case.problem(target)
    poison(target, inputs)
    out, lse = cupyflash.attention(
        inputs.q, inputs.k, inputs.v, layout=inputs.layout, return_lse=True, **options
    )
    expected(inputs, **options).check(out=out, lse=lse)


@each()
def test_result_belongs_to_the_caller(target):
    inputs = target.inputs("float16", seqlen_q=5, layout="bhsd")
    out = cupyflash.attention(inputs.q, inputs.k, inputs.v, layout="bhsd")
    assert type(out) is type(inputs.q)
    assert out.shape == inputs.q.shape and out.dtype == inputs.q.dtype
    assert out.device == inputs.q.device


@each()
@pytest.mark.parametrize("scale", [0.01, 1.7])
def test_scale(target, scale):
    inputs = target.inputs(target.dtypes[0], seqlen_q=70)
    out, lse = cupyflash.attention(inputs.q, inputs.k, inputs.v, scale=scale, return_lse=True)
    expected(inputs, scale=scale).check(out=out, lse=lse)


@each()
def test_rows_without_a_key(target):
    """seqlen_q > seqlen_k, causal: the first rows lie before the first key."""
    inputs = target.inputs("float16", seqlen_q=150, seqlen_k=20)
    poison(target, inputs)
    out, lse = cupyflash.attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True)
    assert (to_float64(out)[:, :130] == 0).all()
    assert (to_float64(lse)[..., :130] == -numpy.inf).all()
    expected(inputs, causal=True).check(out=out, lse=lse)


@each()
@pytest.mark.parametrize(
    "shape",
    [
        {"batch": 0, "seqlen_q": 3},
        {"seqlen_q": 0, "seqlen_k": 3},
        {"seqlen_q": 3, "seqlen_k": 0},
        {"seqlen_q": 0, "seqlen_k": 0},
        {"seqlen_q": 3, "heads_q": 0, "heads_kv": 0},
    ],
    ids=str,
)
def test_empty(target, shape):
    inputs = target.inputs("float16", **shape)
    poison(target, inputs)
    out, lse = cupyflash.attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    assert tuple(out.shape) == tuple(inputs.q.shape)
    assert tuple(lse.shape) == tuple(inputs.q.shape[i] for i in (0, 2, 1))
    assert (to_float64(out) == 0).all() and (to_float64(lse) == -numpy.inf).all()


@each()
@pytest.mark.parametrize("columns", [64, 65, 72])
def test_view_without_keys(target, columns):
    """A slice of a cache that is still empty has the strides of that cache."""
    if target.aligned_only and columns % 8:
        pytest.skip("a forced backend takes addresses on 16 bytes alone, of empty arrays too")
    dtype = "float16"
    inputs = target.inputs(dtype, seqlen_q=33, head_dim=64)
    wide = target.array(numpy.ones((*inputs.k.shape[:-1], columns), "float32"), dtype)
    k = wide[:, 2:2, :, :64]
    v = wide[:, :0, :, columns - 64 :]
    out, lse = cupyflash.attention(inputs.q, k, v, return_lse=True)
    assert (to_float64(out) == 0).all() and (to_float64(lse) == -numpy.inf).all()
    dq, dk, dv = cupyflash.attention_backward(inputs.dout, inputs.q, k, v, out, lse)
    assert (to_float64(dq) == 0).all()
    assert tuple(dk.shape) == tuple(dv.shape) == tuple(k.shape)


@each()
def test_large_scores(target):
    """Scores far beyond the range of exp in float32 and of float16."""
    inputs = target.inputs("float16", seqlen_q=100)
    out, lse = cupyflash.attention(inputs.q, inputs.k, inputs.v, scale=300.0, return_lse=True)
    assert numpy.isfinite(to_float64(out)).all() and numpy.isfinite(to_float64(lse)).all()
    assert float(abs(to_float64(lse)).max()) > 1000


@each()
def test_flash_attn_func(target):
    inputs = target.inputs("float16", seqlen_q=33, seqlen_k=65, heads_q=4, heads_kv=2)
    qkv = inputs.q, inputs.k, inputs.v
    out, lse, probabilities = cupyflash.flash_attn_func(
        *qkv, 0.0, 0.2, True, (16, -1), 3.0, return_attn_probs=True
    )
    assert probabilities is None
    options = {"scale": 0.2, "causal": True, "window": (16, None), "softcap": 3.0}
    expected(inputs, **options).check(out=out, lse=lse)
    alone = cupyflash.flash_attn_func(
        *qkv, softmax_scale=0.2, causal=True, window_size=(16, -1), softcap=3.0
    )
    assert (alone == out).all()


@each()
def test_flash_attn_packed(target):
    inputs = target.inputs("float16", seqlen_q=33)
    qkv = stack(target, inputs.q, inputs.k, inputs.v)
    kv = stack(target, inputs.k, inputs.v)
    separate = cupyflash.flash_attn_func(inputs.q, inputs.k, inputs.v, causal=True)
    assert (cupyflash.flash_attn_qkvpacked_func(qkv, causal=True) == separate).all()
    assert (cupyflash.flash_attn_kvpacked_func(inputs.q, kv, causal=True) == separate).all()


@each(library="torch")
@pytest.mark.skipif(bool(EMULATED), reason="by DLPack, a tensor of the CPU is one")
def test_any_dlpack_object(target):
    """An object that is of no known library, but speaks DLPack."""

    class Wrapped:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **arguments):
            return self.tensor.__dlpack__(**arguments)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    inputs = target.inputs("float16", seqlen_q=40)
    out = cupyflash.attention(*map(Wrapped, (inputs.q, inputs.k, inputs.v)))
    plain = cupyflash.attention(inputs.q, inputs.k, inputs.v)
    assert (to_float64(out) == to_float64(plain)).all()


@each(device="cuda")
def test_forward_is_bitwise_repeatable(target):
    inputs = target.inputs(target.dtypes[0], seqlen_q=1023, head_dim=128)
    first = cupyflash.attention(inputs.q, inputs.k, inputs.v, causal=True)
    second = cupyflash.attention(inputs.q, inputs.k, inputs.v, causal=True)
    assert (first == second).all()


@pytest.mark.parametrize("layout", ["thd", "thd-bshd", "bshd-thd", "bhsd-bshd", "bshd-"])
def test_names_of_packed_layouts_are_not_for_callers(layout):
    q = numpy.zeros((2, 2, 2, 8) if layout.startswith("b") else (2, 2, 8), numpy.float32)
    k = numpy.zeros((2, 2, 2, 8) if not layout.endswith("thd") else (2, 2, 8), numpy.float32)
    with pytest.raises(
        ValueError, match=f"attention: layout must be 'bshd' or 'bhsd', got '{layout}'"
    ):
        cupyflash.attention(q, k, k, layout=layout)
