"""The gradient of the LSE, which is added to that of out."""

import numpy
import pytest
from matrix import each
from passes import one_graph

import cupyflash
from cupyflash.testing import assert_close_to_float64, expected, make_alibi_slopes, to_float64

CASES = {
    "plain": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 4.0, "window": (9, 2)},
    "alibi": {"causal": "top-left", "alibi": 2},
    "bias": {"bias": (2, 1, 40, 50)},
    "sinks": {"sinks": True, "causal": True},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 7},
    "all": {"bias": (4, 1, 50), "sinks": True, "dropout_p": 0.2, "dropout_seed": 1, "softcap": 3.0},
}


def options_of(target, name):
    options, rng = dict(CASES[name]), numpy.random.default_rng(6)
    if options.pop("alibi", 0):
        options["alibi_slopes"] = make_alibi_slopes(
            4, target.library, batch=2, device=target.device
        )
    if "bias" in options:
        values = rng.standard_normal(options["bias"], dtype="float32")
        options["bias"] = target.array(values, "float32")
    if options.pop("sinks", False):
        options["sinks"] = target.array(rng.standard_normal(4, dtype="float32"))
    return options


def gradients(target, inputs, dlse, *, deterministic=False, **options):
    """By name, of out and LSE together, as a user of the library gets them."""
    options["layout"] = inputs.layout
    qkv, learned = (
        (inputs.q, inputs.k, inputs.v),
        {name: options[name] for name in ("bias", "sinks") if name in options},
    )
    names = ["dq", "dk", "dv", *(f"d{name}" for name in learned)]
    if target.library == "torch" and not deterministic:
        import torch

        leaves = [x.detach().requires_grad_() for x in (*qkv, *learned.values())]
        options |= dict(zip(learned, leaves[3:]))
        results = cupyflash.attention(*leaves[:3], return_lse=True, **options)
        found = torch.autograd.grad(results, leaves, (inputs.dout, dlse))
        return dict(zip(names, found, strict=True))
    out, lse = cupyflash.attention(*qkv, return_lse=True, **options)
    found = cupyflash.attention_backward(
        inputs.dout, *qkv, out, lse, dlse=dlse, bias_grad="bias" in learned,
        deterministic=deterministic, **options,
    )  # fmt: skip
    return dict(zip(names, [x for x in found if x is not None], strict=True))


def gradient_of_lse(target, shape):
    """Large beside the gradient of out, so that its place and sign show."""
    values = 5 * numpy.random.default_rng(3).standard_normal(shape, dtype="float32")
    return target.array(values, "float32")


@each()
@pytest.mark.parametrize("name", CASES)
def test_gradients(target, name):
    plain = name == "plain"
    for dtype in target.dtypes if plain else target.dtypes[:1]:
        for head_dim in (64, 128, 256, 40) if plain and target.gpu else (64,):
            inputs = target.inputs(
                dtype, seqlen_q=40, seqlen_k=50, heads_kv=2, layout="bhsd", head_dim=head_dim
            )
            options = options_of(target, name)
            dlse = gradient_of_lse(target, (2, 4, 40))
            found = gradients(target, inputs, dlse, **options)
            expected(inputs, dlse=dlse, **options).check(**found)


@each()
def test_long_deterministic(target):
    length = 700 if target.gpu else 90
    inputs = target.inputs("float16", seqlen_q=length, head_dim=128)
    dlse = gradient_of_lse(target, (2, 4, length))
    found = gradients(target, inputs, dlse, deterministic=True, causal=True)
    expected(inputs, dlse=dlse, causal=True).check(**found)


@each()
def test_rows_without_a_key_have_none(target):
    """Whatever the gradient of their LSE is."""
    inputs = target.inputs("float16", seqlen_q=60, seqlen_k=20)
    values = numpy.ones((2, 4, 60), "float32")
    values[..., :40] = numpy.nan
    found = gradients(target, inputs, target.array(values, "float32"), causal=True)
    values[..., :40] = 0
    exact = expected(inputs, dlse=target.array(values, "float32"), causal=True)
    exact.check(**found)
    assert (to_float64(found["dq"])[:, :40] == 0).all()


@each()
@pytest.mark.parametrize("seqlen_k", [0, 3])
def test_rows_with_a_sink_alone(target, seqlen_k):
    """Their LSE is the sink, so all of its gradient is that of the sink."""
    inputs = target.inputs("float16", seqlen_q=5, seqlen_k=seqlen_k)
    options = {"sinks": target.array(numpy.ones(4, "float32")), "causal": True}
    dlse = gradient_of_lse(target, (2, 4, 5))
    found = gradients(target, inputs, dlse, **options)
    if seqlen_k == 0:
        exact = to_float64(dlse).sum((0, 2))
        # Each is multiplied by exp(sink - LSE), which is 1 but for some last places.
        terms = 4 * float(abs(to_float64(dlse)).sum((0, 2)).max())
        assert_close_to_float64(found["dsinks"], exact, exact, "float32", "dsinks", terms=terms)
        assert (to_float64(found["dq"]) == 0).all()
    else:
        expected(inputs, dlse=dlse, **options).check(**found)


@each()
def test_packed_and_padded_sequences(target):
    """Packed ones against the reference; padded ones against the packed ones."""
    lengths = [1, 70, 0, 33]
    packed = target.varlen_inputs("float16", lengths, heads_kv=2)
    dlse = gradient_of_lse(target, (4, 104))
    exact = expected(packed, dlse=dlse, causal=True)
    if target.library == "torch":
        import torch

        leaves = [x.detach().requires_grad_() for x in (packed.q, packed.k, packed.v)]
        ends = packed.cu_seqlens_q
        out, lse, _ = cupyflash.flash_attn_varlen_func(
            *leaves, ends, ends, 70, 70, causal=True, return_attn_probs=True
        )
        found = torch.autograd.grad((out, lse), leaves, (packed.dout, dlse))
        exact.check(**dict(zip(("dq", "dk", "dv"), found)))
    inputs = target.inputs("float16", batch=4, seqlen_q=70, heads_kv=2)
    padded_dlse = target.array(numpy.ones((4, 4, 70), "float32"))
    for x, values in (
        (inputs.q, packed.q), (inputs.k, packed.k), (inputs.v, packed.v),
        (inputs.dout, packed.dout), (padded_dlse.swapaxes(1, 2), dlse.swapaxes(0, 1)),
    ):  # fmt: skip
        start = 0
        for b, length in enumerate(lengths):
            x[b, :length] = values[start : start + length]
            start += length
    used = target.array(numpy.array(lengths, "int32"))
    found = gradients(target, inputs, padded_dlse, causal=True, seqused_q=used, seqused_k=used)
    for name, whole in found.items():
        assert all((to_float64(whole)[b, length:] == 0).all() for b, length in enumerate(lengths))
        rows = [whole[b, :length] for b, length in enumerate(lengths)]
        if target.library == "torch":
            import torch

            exact.check(**{name: torch.cat(rows)})
        else:
            from cupyflash.runtime.array import array_namespace

            exact.check(**{name: array_namespace(whole).concatenate(rows)})


@each(library="torch")
def test_of_the_lse_alone(target):
    """Without a gradient of out, and with one that is an expanded number."""
    import torch

    inputs = target.inputs("float16", seqlen_q=20)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = cupyflash.attention(*leaves, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), leaves)
    assert (dv == 0).all()
    zeros = torch.zeros_like(inputs.dout)
    ones = torch.ones_like(lse)
    again = cupyflash.attention_backward(zeros, *(x.detach() for x in leaves), out, lse, dlse=ones)
    assert all(torch.equal(a, b) for a, b in zip((dq, dk, dv), again))
    none = cupyflash.attention_backward(zeros, *(x.detach() for x in leaves), out, lse)
    assert all((x == 0).all() for x in none)


@each(library="torch")
def test_compiled_and_transformed(target):
    """torch.compile, and torch.func.grad of each sample, against autograd."""
    import torch

    inputs = target.inputs("float16", batch=3, seqlen_q=20)
    weights = gradient_of_lse(target, (3, 4, 20))

    def loss(q, k, v, weights):
        out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
        return out.float().sum() + (lse * weights).sum()

    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    exact = torch.autograd.grad(loss(*leaves, weights), leaves)
    graph = one_graph(loss)
    found = torch.autograd.grad(graph(*leaves, weights), leaves)
    assert all(torch.equal(a, b) for a, b in zip(exact, found))

    def of_sample(q, k, v, weights):
        return loss(q[None], k[None], v[None], weights[None])

    found = torch.func.vmap(torch.func.grad(of_sample, (0, 1, 2)))(
        inputs.q, inputs.k, inputs.v, weights
    )
    for a, b in zip(exact, found):
        assert torch.equal(a, b)


@each()
@pytest.mark.parametrize(
    "make, error, fact",
    [
        (lambda x: x[:, :, :-1], ValueError, r"dlse must have shape \(2, 4, 5\), got \(2, 4, 4\)"),
        (
            lambda x: x[..., None],
            ValueError,
            r"dlse must have shape \(2, 4, 5\), got \(2, 4, 5, 1\)",
        ),
        (lambda x: "half", TypeError, "dlse must be float32, got float16"),
        (lambda x: "text", TypeError, "dlse must be"),
        (lambda x: 3.0, TypeError, "dlse must be"),
    ],
)
def test_wrong_gradients(target, make, error, fact):
    inputs = target.inputs("float16", seqlen_q=5)
    out, lse = cupyflash.attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    dlse = make(lse)
    if isinstance(dlse, str) and dlse == "half":
        dlse = lse.half() if target.library == "torch" else lse.astype("float16")
    with pytest.raises(error, match=f"^attention_backward: {fact}"):
        cupyflash.attention_backward(inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, dlse=dlse)
