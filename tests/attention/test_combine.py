"""`flash_attn_combine`: attention over parts of the keys is attention over all of them."""

import warnings

import numpy
import pytest
from matrix import each_library
from passes import one_graph
from wrong_calls import array, check_refused

import cupyflash
from cupyflash.testing import assert_close_to_float64, expected, to_numpy64

SHAPES = [(3, 2, 20, 4, 16), (1, 2, 1, 1, 8), (7, 31, 2, 5)]
CUTS = [0, 13, 13, 60, 70]  # of the keys; one part is empty


def partial(target, shape, dtype="float32", seed=0):
    """out_partial and lse_partial; some parts do not count, and nothing counts in some rows."""
    rng = numpy.random.default_rng(seed)
    out = rng.standard_normal(shape, dtype="float32")
    lse = 10 * rng.standard_normal(shape[:-1], dtype="float32")
    dead = rng.random(shape[:-1]) < 0.3
    dead[:, ..., 0] = True
    lse[dead] = -numpy.inf
    out[dead] = numpy.nan
    return target.array(out, dtype), target.array(lse, "float32"), (out, lse)


def exact_results(out, lse):
    out, lse = (numpy.asarray(x, "float64") for x in (out, lse))
    largest = lse.max(0)
    largest = numpy.where(numpy.isinf(largest), 0, largest)
    weights = numpy.exp(lse - largest)
    total = weights.sum(0)
    with numpy.errstate(divide="ignore", invalid="ignore"):
        combined = numpy.where(weights[..., None] > 0, weights[..., None] * out, 0).sum(0)
        combined = numpy.where(total[..., None] > 0, combined / total[..., None], 0)
        return combined, largest + numpy.log(total)


@each_library()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_formula(target, shape):
    for dtype in target.dtypes:
        out, lse, values = partial(target, shape, dtype)
        found = cupyflash.flash_attn_combine(out, lse, out_dtype=lse.dtype)
        exact = exact_results(to_numpy64(out), values[1])
        for name, a, b in zip(("out", "lse"), found, exact):
            float32 = b.astype("float32")
            assert_close_to_float64(to_numpy64(a), b, float32, "float32", name, terms=4.0)
        same = cupyflash.flash_attn_combine(out, lse)[0]
        assert same.dtype == out.dtype and tuple(same.shape) == shape[1:]


@each_library()
def test_strides_and_given_out(target):
    out, lse, _ = partial(target, (4, 2, 9, 3, 8))
    exact = cupyflash.flash_attn_combine(out, lse)
    strided = lse.swapaxes(2, 3)
    strided = strided.contiguous() if target.library == "torch" else strided.copy()
    found = cupyflash.flash_attn_combine(out, strided.swapaxes(2, 3))
    assert all((a == b).all() for a, b in zip(exact, found))
    given = exact[0] * 0
    result, _ = cupyflash.flash_attn_combine(out, lse, given)
    assert result is given and (given == exact[0]).all()


@each_library()
def test_nan_is_not_lost(target):
    out, lse, _ = partial(target, (3, 2, 4, 2, 8))
    lse[1, 0, 2, 1] = float("nan")
    result, combined = cupyflash.flash_attn_combine(out, lse)
    assert (
        numpy.isnan(to_numpy64(combined)[0, 2, 1])
        and numpy.isnan(to_numpy64(result)[0, 2, 1]).all()
    )


def test_no_warnings():
    """NaN, infinity and overflow are results, of which NumPy says nothing."""
    out, lse = numpy.ones((2, 1, 3, 2, 8), "float32"), numpy.zeros((2, 1, 3, 2), "float32")
    out[0, 0, 0, 0, 0] = lse[0, 0, 1, 0] = numpy.inf
    out[0, 0, 2, 0] = 1e6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, combined = cupyflash.flash_attn_combine(out, lse, out_dtype="float16")
    assert numpy.isinf(result[0, [0, 2], 0, 0]).all() and numpy.isnan(result[0, 1, 0]).all()
    assert numpy.isnan(combined[0, 1, 0]) and (result[0, :, 1] == 1).all()


def parts_of_attention(q, k, v, **options):
    """out_partial and lse_partial of the keys cut at `CUTS`, as lists."""
    parts = []
    for begin, end in zip(CUTS, CUTS[1:]):
        out, lse = cupyflash.attention(q, k[:, begin:end], v[:, begin:end], return_lse=True)
        parts.append((out, lse.swapaxes(1, 2)))
    return zip(*parts)


@each_library()
def test_parts_of_the_keys(target):
    """The results of attention over all keys; with torch also its gradients, through the LSE."""
    inputs = target.inputs(target.dtypes[0], seqlen_q=50, seqlen_k=70, heads_kv=2, head_dim=32)
    exact = expected(inputs)
    if target.library != "torch":
        from cupyflash.runtime.array import array_namespace

        xp = array_namespace(inputs.q)
        outs, lses = parts_of_attention(inputs.q, inputs.k, inputs.v)
        out, lse = cupyflash.flash_attn_combine(xp.stack(outs), xp.stack(lses))
        exact.check(out=out, lse=lse.swapaxes(1, 2))
        return
    import torch

    def combined(q, k, v):
        outs, lses = parts_of_attention(q, k, v)
        return cupyflash.flash_attn_combine(torch.stack(outs), torch.stack(lses))

    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = combined(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, inputs.dout)
    exact.check(out=out.detach(), lse=lse.detach().swapaxes(1, 2), dq=dq, dk=dk, dv=dv)


@each_library(library="torch")
def test_gradients(target):
    """Against autograd of the formula in float64; parts that do not count have none."""
    import torch

    out, lse, _ = partial(target, (4, 2, 9, 3, 8))
    out = torch.nan_to_num(out)
    leaves = [x.detach().requires_grad_() for x in (out, lse)]
    results = cupyflash.flash_attn_combine(*leaves)
    # Rows in which nothing counts have no derivative in the formula itself.
    generator = torch.Generator().manual_seed(0)
    ones = [torch.randn(x.shape, generator=generator).to(x.device) for x in results]
    found = torch.autograd.grad(results, leaves, ones)
    assert all(x.isfinite().all() for x in found)
    some = (lse > -torch.inf).any(0)

    def formula(dtype):
        out_partial, lse_partial = (x.detach().to(dtype).requires_grad_() for x in (out, lse))
        lse_all = lse_partial.logsumexp(0)
        combined = ((lse_partial - lse_all).exp()[..., None] * out_partial).sum(0)
        loss = (combined * ones[0])[some].sum() + (lse_all * ones[1])[some].sum()
        dout, dlse = torch.autograd.grad(loss, (out_partial, lse_partial))
        return torch.where(some[..., None], dout, 0), torch.where(some, dlse, 0)

    terms = 4 * float((out.abs().amax(0) * ones[0].abs()).sum(-1).max())
    three = zip(("dout", "dlse"), found, formula(torch.float64), formula(torch.float32))
    for name, ours, exact, yardstick in three:
        assert_close_to_float64(ours, exact, yardstick, "float32", name, terms=terms)


@each_library(library="torch")
def test_compiled(target):
    import torch

    out, lse, _ = partial(target, (3, 2, 5, 2, 8))
    out, lse = torch.nan_to_num(out).requires_grad_(), lse.requires_grad_()
    graph = one_graph(cupyflash.flash_attn_combine)
    for a, b in zip(graph(out, lse), cupyflash.flash_attn_combine(out, lse)):
        assert torch.equal(a, b)
    torch.autograd.grad(graph(out, lse)[0].sum(), (out, lse))


def test_dlpack():
    """Arrays of other libraries, here NumPy's behind DLPack alone."""

    class Foreign:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **options):
            return self.x.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    rng = numpy.random.default_rng(0)
    out, lse = (rng.standard_normal(x, dtype="float32") for x in ((2, 3, 4, 8), (2, 3, 4)))
    found = cupyflash.flash_attn_combine(Foreign(out), Foreign(lse))
    assert all((a == b).all() for a, b in zip(found, cupyflash.flash_attn_combine(out, lse)))


@each_library()
def test_wrong_calls(target):
    out, lse, _ = partial(target, (3, 2, 5, 2, 8))
    given = out[0] * 0
    good = {"out_partial": out, "lse_partial": lse, "out": None, "out_dtype": None}
    kinds = {
        "out_partial": (*array(out), out[0], out[:, :1], out[:0], lse),
        "lse_partial": (*array(lse, dtypes=("float16", "int32", "float64")), lse[:1], lse[..., 0]),
        "out": (*array(given, optional=True), given[:1], given[..., :4], out),
        "out_dtype": ("text", "int32", "float64", 3, 1.5, [1], object(), complex, int, float),
    }
    check_refused(cupyflash.flash_attn_combine, good, kinds, least=50)


@each_library(library="torch")
def test_out_takes_no_gradient(target):
    out, lse, _ = partial(target, (3, 2, 5, 2, 8))
    with pytest.raises(NotImplementedError, match="^flash_attn_combine: out is not written"):
        cupyflash.flash_attn_combine(out.requires_grad_(), lse, out.detach()[0].clone())
