"""torch.compile and torch.export of models that call cupyflash: one graph, the results of eager."""

import functools
import shutil

import numpy
import pytest
from matrix import each
from passes import leaves, one_graph, results

import cupyflash
from cupyflash.testing import assert_close_to_float64, expected, make_alibi_slopes, to_float64

RESULTS = ("out", "dq", "dk", "dv")


@each(library="torch")
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_compiled_attention(target, layout):
    """Windows, slopes and the LSE too; the second compilation has no gradient."""
    import torch

    inputs = target.inputs("float16", seqlen_q=20, heads_q=4, heads_kv=2, layout=layout)
    slopes = make_alibi_slopes(4, "torch", device=target.device)
    options = {"causal": True, "window": (7, None), "softcap": 4.0, "alibi_slopes": slopes}

    def function(q, k, v):
        return cupyflash.attention(q * 1, k, v, layout=layout, return_lse=True, **options)

    graph = one_graph(function)
    exact = expected(inputs, **options)
    exact.check(**results(lambda *qkv: graph(*qkv)[0], inputs))
    with torch.no_grad():
        out, lse = graph(inputs.q, inputs.k, inputs.v)
    exact.check(out=out, lse=lse)


@each(library="torch")
def test_compiled_flash_attn_func(target):
    inputs = target.inputs("float16", seqlen_q=20, heads_q=4, heads_kv=2)
    graph = one_graph(lambda *qkv: cupyflash.flash_attn_func(*qkv, 0.0, None, True, (7, 0)))
    expected(inputs, causal=True, window=(7, 0)).check(**results(graph, inputs))


@each(library="torch")
def test_compiled_varlen(target):
    inputs = target.varlen_inputs("float16", [9, 0, 11], [12, 3, 12], heads_q=4, heads_kv=2)
    packed = inputs.cu_seqlens_q, inputs.cu_seqlens_k, 11, 12
    graph = one_graph(lambda *qkv: cupyflash.flash_attn_varlen_func(*qkv, *packed, causal=True))
    expected(inputs, causal=True).check(**results(graph, inputs))


@each(library="torch")
def test_compiled_sdpa(target):
    inputs = target.inputs("float16", seqlen_q=20, heads_q=4, heads_kv=2, layout="bhsd")

    def function(q, k, v):
        return cupyflash.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    expected(inputs, causal="top-left").check(**results(one_graph(function), inputs))


@each(library="torch")
def test_compiled_gradients_of_bias_and_sinks(target):
    import torch

    inputs = target.inputs("float32" if not target.gpu else "float16", seqlen_q=20)
    learned = [
        torch.randn(shape, device=target.device, requires_grad=True) for shape in [(20, 20), (4,)]
    ]

    def function(q, k, v, bias, sinks):
        return cupyflash.attention(q, k, v, bias=bias, sinks=sinks)

    def gradients(function):
        everything = (*leaves(inputs), *learned)
        return torch.autograd.grad(function(*everything), everything, inputs.dout)

    for found, eager in zip(gradients(one_graph(function)), gradients(function), strict=True):
        # The same kernels or reference in both: only sums outside of them may round otherwise.
        torch.testing.assert_close(found, eager)
        assert found.dtype == eager.dtype


@each(library="torch")
@pytest.mark.parametrize("seed", [None, 7])
def test_compiled_dropout_has_the_mask_of_eager(target, seed):
    import torch

    inputs = target.inputs("float16", seqlen_q=40)

    def function(q, k, v):
        return cupyflash.attention(q, k, v, dropout_p=0.4, dropout_seed=seed)

    torch.manual_seed(3)
    eager = results(function, inputs)
    graph = one_graph(function)
    torch.manual_seed(3)
    for name, x in results(graph, inputs).items():
        # The same kernels or reference with the same seed: another mask differs by far more.
        torch.testing.assert_close(x, eager[name], msg=name)
    torch.manual_seed(4)
    assert torch.equal(graph(inputs.q, inputs.k, inputs.v), eager["out"]) == (seed is not None)


@each(library="torch")
def test_one_graph_for_many_lengths(target):
    from torch._dynamo.testing import CompileCounterWithBackend

    frames = CompileCounterWithBackend("aot_eager")
    graph = one_graph(
        lambda *qkv: cupyflash.attention(*qkv, causal=True), dynamic=True, backend=frames
    )
    counts = set()
    for seqlen in (20, 33, 50):
        inputs = target.inputs("float16", seqlen_q=seqlen, seqlen_k=seqlen + 7)
        expected(inputs, causal=True).check(**results(graph, inputs))
        counts.add(frames.frame_count)
    assert len(counts) == 1


@each(library="torch")
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_inductor(target):
    """A whole layer, its projections around attention: strides are inductor's choice."""
    import torch

    torch.manual_seed(0)
    width, dtype = 4 * 32, "float16" if target.gpu else "float32"
    options = {"device": target.device, "dtype": getattr(torch, dtype), "requires_grad": True}
    x = torch.randn(2, 20, width, **options)
    weight = torch.randn(3 * width, width, **options)

    def layer(attend, x, weight):
        q, k, v = (x @ weight.t() / width**0.5).view(2, 20, 3, 4, 32).permute(2, 0, 3, 1, 4)
        return torch.tanh(attend(q, k, v).transpose(1, 2).reshape(x.shape))

    def gradients(function, *inputs):
        return torch.autograd.grad(function(*inputs).sum(), inputs)

    sdpa = torch.nn.functional.scaled_dot_product_attention
    ours = functools.partial(cupyflash.attention, layout="bhsd", causal=True)
    torchs = functools.partial(sdpa, is_causal=True)
    found = gradients(one_graph(functools.partial(layer, ours), backend="inductor"), x, weight)
    wide = (y.detach().double().requires_grad_() for y in (x, weight))
    exact = gradients(functools.partial(layer, torchs), *wide)
    yardstick = gradients(functools.partial(layer, torchs), x, weight)
    for name, *gradient in zip(("dx", "dweight"), found, exact, yardstick):
        assert_close_to_float64(*gradient, dtype, name)


@each(library="torch")
def test_compiled_error_names_the_mistake(target):
    inputs = target.inputs("float16", seqlen_q=20)
    graph = one_graph(lambda *qkv: cupyflash.attention(*qkv, causal="left"))
    with pytest.raises(Exception, match="attention: causal must be .*, got 'left'"):
        graph(inputs.q, inputs.k, inputs.v)
    graph = one_graph(cupyflash.attention)
    with pytest.raises(Exception, match="attention: q must have 4 dimensions, got 3"):
        graph(inputs.q[0], inputs.k[0], inputs.v[0])


@each(library="torch")
def test_exported(target):
    import torch

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return cupyflash.attention(q, k, v, causal=True)

    inputs = target.inputs("float16", seqlen_q=20)
    qkv = inputs.q, inputs.k, inputs.v
    for strict in (False, True):
        program = torch.export.export(Model(), qkv, strict=strict)
        assert "cupyflash.attention" in str(program.graph)
        assert (to_float64(program.module()(*qkv)) == to_float64(Model()(*qkv))).all()


@each(library="torch")
def test_options_that_change(target):
    """Scales and windows become symbols of the graph; a tensor as an option is an error."""
    import torch

    inputs = target.inputs("float16", seqlen_q=20)
    qkv = inputs.q, inputs.k, inputs.v
    graph = one_graph(
        lambda scale, left, softcap: cupyflash.attention(
            *qkv, scale=scale, window=[left, None], softcap=softcap
        ),
        dynamic=True,
    )
    for scale, left, softcap in ((0.1, 3, 0), (0.2, 5, 2.0), (0.3, 9, 3.0), (0.7, None, 4.0)):
        options = {"scale": scale, "window": (left, None), "softcap": softcap}
        expected(inputs, **options).check(out=graph(scale, left, softcap))
    for scale in (torch.tensor(0.1), torch.nn.Parameter(torch.tensor(0.1)), numpy.float32(0.1)):
        with pytest.raises(Exception, match="scale must be a Python number under torch.compile"):
            graph(scale, 3, 0.0)


@each(library="torch")
def test_scale_of_numpy_breaks_the_graph(target):
    import torch

    inputs = target.inputs("float16", seqlen_q=20)
    call = lambda scale: cupyflash.attention(inputs.q, inputs.k, inputs.v, scale=scale)
    compiled = torch.compile(call, backend="aot_eager")
    assert torch.equal(compiled(numpy.float32(0.25)), call(0.25))


@each(library="torch")
@pytest.mark.parametrize("fullgraph", [True, False])
def test_slopes_that_want_a_gradient_are_refused(target, fullgraph):
    import torch

    inputs = target.inputs("float16", seqlen_q=20)
    slopes = torch.full((inputs.q.shape[2],), 0.5, device=target.device, requires_grad=True)
    call = lambda x: cupyflash.attention(inputs.q, inputs.k, inputs.v, alibi_slopes=x)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=fullgraph)
    with pytest.raises(Exception, match="alibi_slopes have no gradient"):
        compiled(slopes)
    assert torch.equal(compiled(slopes.detach()), call(slopes.detach()))


@each(library="torch")
@pytest.mark.parametrize("graph_of", ["eager", "aot_eager"])
@pytest.mark.parametrize("first", [False, True], ids=["compiled before", "compiles"])
def test_forward_mode_of_a_compiled_call_is_refused(target, graph_of, first):
    from torch.autograd import forward_ad

    inputs = target.inputs("float16", seqlen_q=20)
    row, weight = inputs.q[0, 0], inputs.q[0, 0, 0].float()
    calls = {
        "attention": lambda q: cupyflash.attention(q, inputs.k, inputs.v),
        "layer_norm": lambda x: cupyflash.layer_norm(x, weight),
        "group_norm": lambda x: cupyflash.group_norm(x[None], 1, weight, weight),
    }
    for name, call in calls.items():
        x = inputs.q if name == "attention" else row.T if name == "group_norm" else row
        x = x.contiguous()
        graph = one_graph(call, backend=graph_of)
        if not first:
            graph(x)
        with (
            forward_ad.dual_level(),
            # The second is torch's own word, since 2.14.
            pytest.raises(Exception, match="forward-mode (derivatives are not built|AD tangent)"),
        ):
            graph(forward_ad.make_dual(x, x))


@each(library="torch")
def test_exported_with_any_length(target):
    import torch

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return cupyflash.attention(q, k, v, causal=True, window=(q.shape[1] // 2, 0), scale=1)

    inputs, other = (target.inputs("float16", seqlen_q=n, seqlen_k=n) for n in (20, 33))
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = dict.fromkeys("qkv", {1: length})
    for strict in (False, True):
        program = torch.export.export(
            Model(), (inputs.q, inputs.k, inputs.v), dynamic_shapes=shapes, strict=strict
        )
        qkv = other.q, other.k, other.v
        assert (to_float64(program.module()(*qkv)) == to_float64(Model()(*qkv))).all()
