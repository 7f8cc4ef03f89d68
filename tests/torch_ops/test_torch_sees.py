"""What torch has to see it sees, whichever array it is; what it cannot see is refused."""

import contextlib

import numpy
import pytest
from matrix import each, each_library

import cupyflash
from cupyflash.testing import expected, to_float64


def wrapper(x, calls):
    """A tensor subclass without memory of its own, as a gathered tensor is while it is awaited."""
    import torch
    from torch.utils import _pytree

    class Awaited(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
            )

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
            calls.append(str(function))
            plain = lambda y: y.inner if isinstance(y, Awaited) else y
            return function(
                *_pytree.tree_map(plain, arguments), **_pytree.tree_map(plain, keywords or {})
            )

    return Awaited(x)


def attention_calls(target):
    """name: (function, arrays by argument, operator)."""
    inputs = target.inputs(target.dtypes[0], seqlen_q=20)
    q, k, v = inputs.q, inputs.k, inputs.v
    optional = {
        "alibi_slopes": target.array(numpy.full(4, 0.5, "float32")),
        "bias": target.array(numpy.zeros((20, 20), "float32")),
        "sinks": target.array(numpy.zeros(4, "float32")),
        "seqused_k": target.array(numpy.array([20, 3], "int32")),
        "dropout_seed": target.array(numpy.array([4], "int64")),
    }
    out, lse = cupyflash.attention(q, k, v, return_lse=True, dropout_p=0.2, **optional)
    tensors = {"dout": inputs.dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    dropped = {"dropout_p": 0.2}
    return {
        "attention": ({"q": q, "k": k, "v": v, **optional}, dropped),
        "attention_backward": (tensors | optional, dropped),
        "scaled_dot_product_attention": ({"query": q, "key": k, "value": v}, {}),
        "flash_attn_func": ({"q": q, "k": k, "v": v}, {}),
        "attention_with_cache": (cached_arrays(target), {"window": (9, None)}),
        "cache_append": (appended_arrays(target), {}),
    }


def cached_arrays(target):
    """Those of `attention_with_cache`, which writes the same into its cache each time."""
    dtype, rng = target.dtypes[0], numpy.random.default_rng(0)
    make = lambda *shape: target.array(rng.standard_normal(shape), dtype)
    integers = lambda values: target.array(numpy.array(values, "int32"))
    arrays = {name: make(2, 1, heads, 64) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    arrays |= {name: make(5, 8, 2, 64) for name in ("k_cache", "v_cache")}
    return arrays | {"positions": integers([3, 9]), "page_table": integers([[4, 0], [1, 3]])}


def appended_arrays(target):
    """Those of `cache_append`."""
    arrays = {name: x for name, x in cached_arrays(target).items() if name != "q"}
    return arrays | {name: arrays[name][:, 0] for name in "kv"}


def sibling_calls(target):
    dtype = target.dtypes[0]
    rng = numpy.random.default_rng(0)
    array = lambda *shape: target.array(rng.standard_normal(shape), dtype)
    x, w = array(3, 16), array(16)
    _, stats = cupyflash.layer_norm(x, w, return_stats=True)
    image = array(2, 16, 5)
    _, of_groups = cupyflash.group_norm(image, 4, w, w, return_stats=True)
    square = array(16, 16)
    norm = {"x": x, "weight": w, "bias": w, "residual": x}
    group = {"x": image, "weight": w, "bias": w}
    mlp = {"x": x, "up_weight": square, "down_weight": square, "up_bias": w, "residual": x}
    return {
        "layer_norm": (norm, {}),
        "rms_norm": ({"x": x, "weight": w, "residual": x}, {}),
        "layer_norm_backward": ({"dout": x, "x": x, "weight": w, "stats": stats}, {}),
        "group_norm": (group, {"num_groups": 4}),
        "group_norm_backward": ({"dout": image, **group, "stats": of_groups}, {}),
        "linear": ({"x": x, "weight": square, "bias": w, "residual": x}, {}),
        "mlp": (mlp, {}),
    }


def flat(results):
    results = results if isinstance(results, tuple) else (results,)
    return [to_float64(x) for x in results if x is not None]


def check_every_array_is_seen(name, arrays, options):
    function = getattr(cupyflash, name)
    wanted = flat(function(**arrays, **options))
    for argument, x in arrays.items():
        calls = []
        found = flat(function(**{**arrays, argument: wrapper(x, calls)}, **options))
        assert any("cupyflash" in call for call in calls), f"{argument}: {calls}"
        assert all((a == b).all() for a, b in zip(found, wanted, strict=True)), argument


@each(library="torch")
@pytest.mark.parametrize(
    "name",
    ["attention", "attention_backward", "scaled_dot_product_attention", "flash_attn_func"]
    + ["attention_with_cache", "cache_append"],
)
def test_any_array_may_be_a_subclass(target, name):
    check_every_array_is_seen(name, *attention_calls(target)[name])


@each_library(library="torch")
@pytest.mark.parametrize(
    "name",
    ["layer_norm", "rms_norm", "layer_norm_backward", "group_norm", "group_norm_backward"]
    + ["linear", "mlp"],
)
def test_any_array_of_siblings_may_be_a_subclass(target, name):
    check_every_array_is_seen(name, *sibling_calls(target)[name])


@each(library="torch")
def test_a_gathered_tensor(target):
    """torch's own: keys that other ranks have sent and nobody has waited for yet."""
    import torch

    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    inputs = target.inputs(target.dtypes[0], seqlen_q=20)
    k, v = map(collectives.AsyncCollectiveTensor, (inputs.k, inputs.v))
    if not hasattr(torch.ops._c10d_functional, "wait_tensor"):
        pytest.skip("this torch is built without torch.distributed")
    expected(inputs).check(out=cupyflash.attention(inputs.q, k, v))


@each(library="torch")
@pytest.mark.parametrize("argument", ["q", "k", "v", "bias", "sinks"])
def test_forward_mode_is_refused(target, argument):
    import torch
    from torch.autograd import forward_ad

    arrays, options = attention_calls(target)["attention"]
    x, rest = arrays[argument], {key: y for key, y in arrays.items() if key != argument}
    function = lambda y: cupyflash.attention(**rest, **options, **{argument: y})
    refused = pytest.raises(NotImplementedError, match="forward-mode derivatives are not built")
    with forward_ad.dual_level():
        function(x)  # none is wanted
        with refused:
            function(forward_ad.make_dual(x, x))
        with refused:
            function(forward_ad.make_dual(x.clone().requires_grad_(), x))
    with refused:
        torch.func.jvp(function, (x,), (x,))


@each_library(library="torch")
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm", "linear", "mlp"])
def test_forward_mode_of_siblings_is_refused(target, name):
    import torch
    from torch.autograd import forward_ad

    arrays, options = sibling_calls(target)[name]
    function = getattr(cupyflash, name)
    for argument, x in arrays.items():
        with forward_ad.dual_level(), pytest.raises(NotImplementedError):
            function(**{**arrays, argument: forward_ad.make_dual(x, x)}, **options)
        with pytest.raises(NotImplementedError):
            torch.func.jvp(
                lambda y, argument=argument: function(**{**arrays, argument: y}, **options),
                (x,),
                (x,),
            )


@each(library="torch")
@pytest.mark.parametrize("name", ["attention", "scaled_dot_product_attention", "flash_attn_func"])
def test_traced_by_torch_jit(target, name):
    """The trace holds the operator, and computes from its own inputs."""
    import torch

    first = target.inputs(target.dtypes[0], seqlen_q=20)
    other = target.inputs(target.dtypes[0], seqlen_q=20, seed=1)
    function = getattr(cupyflash, name)
    trace = torch.jit.trace(function, (first.q, first.k, first.v), check_trace=False)
    assert "cupyflash::attention" in str(trace.graph)
    for inputs in (first, other):
        qkv = inputs.q, inputs.k, inputs.v
        assert torch.equal(trace(*qkv), function(*qkv))


@each_library(library="torch")
@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "linear", "mlp"])
def test_siblings_traced_by_torch_jit(target, name):
    import torch

    arrays, options = sibling_calls(target)[name]
    function = lambda x: flat_tensor(getattr(cupyflash, name)(**{**arrays, "x": x}, **options))
    trace = torch.jit.trace(function, (arrays["x"].clone(),), check_trace=False)
    other = arrays["x"] * 2 + 1
    assert torch.equal(trace(other), function(other))


def flat_tensor(result):
    return result[0] if isinstance(result, tuple) else result


@each(library="torch")
def test_meta_and_real_tensors_do_not_mix(target):
    for name in ("attention", "attention_backward", "attention_with_cache"):
        arrays, options = attention_calls(target)[name]
        for argument in arrays:
            meta = arrays | {argument: arrays[argument].to("meta")}
            with pytest.raises(ValueError, match=f"^{name}: .*got .*meta"):
                getattr(cupyflash, name)(**meta, **options)


@each_library(library="torch")
@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "linear", "mlp"])
def test_meta_and_real_tensors_of_siblings_do_not_mix(target, name):
    arrays, options = sibling_calls(target)[name]
    for argument in arrays:
        meta = arrays | {argument: arrays[argument].to("meta")}
        with pytest.raises(ValueError, match="meta"):
            getattr(cupyflash, name)(**meta, **options)


@each(library="torch")
def test_tensors_that_are_more_than_numbers(target):
    """A bit says that the numbers in memory are negated; sparse ones have no place for each."""
    import torch

    inputs = target.inputs(target.dtypes[0], seqlen_q=20)
    q, k, v = inputs.q, inputs.k, inputs.v
    for name, x in (("q", q), ("k", k), ("v", v)):
        arrays = {"q": q, "k": k, "v": v}
        for other in (torch._neg_view(x), x.to_sparse()):
            with pytest.raises(TypeError, match=f"^attention: {name} must be"):
                cupyflash.attention(**arrays | {name: other})
    imaginary = torch.randn(20, 20, dtype=torch.complex64, device=target.device).conj().imag
    assert imaginary.is_neg()
    for bias in (imaginary, torch.zeros(20, 20, device=target.device).to_sparse()):
        with pytest.raises(TypeError, match="^attention: bias must be"):
            cupyflash.attention(q, k, v, bias=bias)
    with pytest.raises(TypeError, match="^scaled_dot_product_attention: query must be"):
        cupyflash.scaled_dot_product_attention(q.to_sparse(), k, v)


@each(library="torch")
def test_tensors_of_other_layouts(target):
    import torch

    inputs = target.inputs("float16" if target.gpu else "float32", seqlen_q=20)
    q, rows = inputs.q, inputs.q[0, :, 0].float()
    others = [
        torch.nested.nested_tensor([rows, rows]),
        torch.quantize_per_tensor(rows.cpu(), 1.0, 0, torch.qint8).to(target.device),
        rows.to_sparse_csr(),
    ]
    others += [] if target.gpu else [q.to_mkldnn()]
    for other in others:
        for name in ("q", "k", "bias"):
            arrays = {"q": q, "k": q, "v": q} | {name: other}
            with pytest.raises((TypeError, ValueError, NotImplementedError)):
                cupyflash.attention(**arrays)
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            cupyflash.layer_norm(other, rows[0])
    zero = torch._efficientzerotensor(q.shape, dtype=q.dtype, device=q.device)
    with pytest.raises(RuntimeError):  # no memory: torch's error, or NotImplementedError
        cupyflash.attention(q, q, zero)


@each(library="torch")
def test_explicit_backward_is_no_constant(target):
    """Its own derivative is an error, not zero."""
    import torch

    arrays, options = attention_calls(target)["attention_backward"]
    arrays["q"] = arrays["q"].detach().requires_grad_()
    dq = cupyflash.attention_backward(**arrays, **options)[0]
    with pytest.raises(NotImplementedError, match="attention has no second derivative"):
        dq.sum().backward()
    arrays["dropout_seed"] = 4  # the number that the array holds
    assert torch.equal(cupyflash.attention_backward(**arrays, **options)[0], dq)
    with torch.no_grad():
        assert not cupyflash.attention_backward(**arrays, **options)[0].requires_grad


# Subclasses of other libraries ------------------------------------------------------------------


def subclasses(x):
    yield numpy.ma.masked_array(x, x > 0)
    if x.ndim == 2:
        yield numpy.asmatrix(x)


@pytest.mark.parametrize(
    "name",
    ["attention", "scaled_dot_product_attention", "layer_norm", "group_norm", "linear"],
)
def test_masked_arrays(name):
    rng = numpy.random.default_rng(0)
    x = rng.standard_normal((1, 5, 2, 16), dtype="float32")
    rows, weight = x[0, :, 0], numpy.ones(16, "float32")
    square = numpy.ones((16, 16), "float32")
    arrays = {
        "attention": {"q": x, "k": x, "v": x, "bias": x[0, :, 0, :5]},
        "scaled_dot_product_attention": {
            "query": x, "key": x, "value": x, "attn_mask": numpy.zeros((2, 2), "float32"),
        },
        "layer_norm": {"x": rows, "weight": weight, "residual": rows},
        "group_norm": {"x": rows, "num_groups": 2, "weight": weight, "bias": weight},
        "linear": {"x": rows, "weight": square, "residual": rows},
    }[name]  # fmt: skip
    function = getattr(cupyflash, name)
    function(**arrays)
    for argument, value in arrays.items():
        if isinstance(value, numpy.ndarray):
            for other in subclasses(value):
                with pytest.raises(TypeError, match=f"^{name}: "):
                    function(**arrays | {argument: other})


def test_a_memory_mapped_array(tmp_path):
    x = numpy.random.default_rng(0).standard_normal((1, 5, 2, 16), dtype="float32")
    mapped = numpy.memmap(tmp_path / "x", "float32", "w+", shape=x.shape)
    mapped[...] = x
    out = cupyflash.attention(mapped, mapped, x)
    assert (out == cupyflash.attention(x, x, x)).all()


@pytest.mark.parametrize("name", ["requires_grad", "stop_gradient"])
def test_a_gradient_of_another_library(name):
    """Of which nothing is known but its DLPack: it would be lost without a word."""

    class Other:
        def __init__(self, x):
            self.x = x
            setattr(self, name, name == "requires_grad")

        def __dlpack__(self, **arguments):
            return self.x.__dlpack__(**arguments)

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    x = numpy.ones((1, 5, 2, 16), "float32")
    with pytest.raises(NotImplementedError, match="^attention: q of libraries other than torch"):
        cupyflash.attention(Other(x), Other(x), Other(x))


# Determinism ------------------------------------------------------------------------------------


@contextlib.contextmanager
def switched(**options):
    import torch

    torch.use_deterministic_algorithms(True, **options)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def bias_problem(target, whole):
    import torch

    inputs = target.inputs(target.dtypes[0], seqlen_q=600)
    batch, rows, heads, _ = inputs.q.shape
    shape = (batch, heads, rows, rows) if whole else (rows, 1)
    bias = torch.zeros(shape, device=target.device, dtype=inputs.q.dtype, requires_grad=True)
    return [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)], bias, inputs.dout


def gradients(qkv, bias, dout, **options):
    import torch

    out = cupyflash.attention(*qkv, bias=bias, **options)
    wanted = qkv if bias is None else [*qkv, bias]
    return torch.autograd.grad(out, wanted, dout)


@each(library="torch", device="cuda")
@pytest.mark.parametrize("how", ["option", "switch", "warn_only"])
def test_deterministic(target, how):
    import torch

    qkv, bias, dout = bias_problem(target, True)
    options = {"deterministic": True} if how == "option" else {}
    switch = contextlib.nullcontext()
    if how != "option":
        switch = switched(warn_only=how == "warn_only")
    with switch:
        first = gradients(qkv, bias, dout, **options)
        for _ in range(5):
            for a, b in zip(gradients(qkv, bias, dout, **options), first, strict=True):
                assert torch.equal(a, b)


@each(library="torch", device="cuda")
def test_what_has_no_deterministic_order(target):
    qkv, bias, dout = bias_problem(target, False)
    with switched():
        with pytest.raises(NotImplementedError, match="deterministic .* bias that is broadcast"):
            gradients(qkv, bias, dout)
        gradients(qkv, None, dout)
    with switched(warn_only=True), pytest.warns(UserWarning, match="has no deterministic order"):
        gradients(qkv, bias, dout)
    gradients(qkv, bias, dout)


@each()
def test_deterministic_is_refused_alike(target):
    """On the CPU every order is fixed; the error is that of a GPU all the same."""
    inputs = target.inputs(target.dtypes[0], seqlen_q=20)
    bias = target.array(numpy.zeros((20, 1), "float32"))
    qkv = inputs.q, inputs.k, inputs.v
    out, lse = cupyflash.attention(*qkv, bias=bias, return_lse=True, deterministic=True)
    with pytest.raises(NotImplementedError, match="^attention_backward: .*bias that is broadcast"):
        cupyflash.attention_backward(
            inputs.dout, *qkv, out, lse, bias=bias, bias_grad=True, deterministic=True
        )


@each(library="torch", device="cpu")
def test_the_switch_reaches_the_plan(target, monkeypatch):
    """What a GPU's plan is asked for, seen without one."""
    from cupyflash.runtime.lookup import library_of

    library = library_of(target.inputs("float32", seqlen_q=5).q)
    assert library.determinism() == ""
    with switched():
        assert library.determinism() == "error"
    with switched(warn_only=True):
        assert library.determinism() == "warn"


# Functions without an operator -------------------------------------------------------------------


def operatorless(target):
    """name: (function, arrays by argument)."""
    from cupyflash.ops.decode.embedding import embedding
    from cupyflash.ops.decode.sampling import sample

    dtype = target.dtypes[0]
    normal = lambda *shape: target.array(numpy.random.default_rng(0).standard_normal(shape), dtype)
    integers = lambda *values: target.array(numpy.array(values, "int32"))
    sampler = cupyflash.DiffusionSampler.ddpm(cupyflash.beta_schedule("linear", 10))
    x = normal(2, 5)
    return {
        "embedding": (embedding, {"tokens": integers(1, 2), "token_weight": normal(5, 16)}),
        "sample": (sample, {"logits": normal(2, 9), "out": integers(0, 0)}),
        "step": (
            lambda **arrays: sampler.step(**arrays, step=3),
            {"x": x, "predicted": normal(2, 5), "noise": normal(2, 5)},
        ),
    }


@each_library(library="torch")
@pytest.mark.parametrize("name", ["embedding", "sample", "step"])
def test_what_torch_cannot_see_is_refused(target, name):
    """A subclass, whichever array it is; the second time too, when there is a plan."""
    function, arrays = operatorless(target)[name]
    function(**arrays)
    for argument, x in arrays.items():
        for other in (wrapper(x, []), x.to("meta")):
            with pytest.raises((TypeError, ValueError, NotImplementedError), match="got"):
                function(**arrays | {argument: other})


@each_library(library="torch")
def test_derivatives_of_what_torch_cannot_see(target):
    import torch
    from torch.autograd import forward_ad

    step, arrays = operatorless(target)["step"]
    for argument, x in arrays.items():
        call = lambda y, argument=argument: step(**arrays | {argument: y})
        with forward_ad.dual_level(), pytest.raises(NotImplementedError):
            call(forward_ad.make_dual(x, x))
        with pytest.raises(NotImplementedError):
            call(x.clone().requires_grad_())
        with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError)):
            torch.func.vmap(call)(x[None])
