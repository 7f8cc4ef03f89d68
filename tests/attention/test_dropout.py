"""Dropout: which weights it keeps, their statistics, and results with the explicit mask."""

from types import SimpleNamespace

import numpy
import pytest
from arrays import seed_generator
from fakes import fake_facts
from matrix import each
from passes import forward_backward

import cupyflash
from cupyflash.runtime.libraries import CupyLibrary
from cupyflash.runtime.philox import keep_mask, philox
from cupyflash.testing import expected, to_float64

SEED = 2**41 + 12345
# Standard deviations that a count may be off: one in 500 million fails by chance, and the seeds are
# fixed, so a test that passes once passes always.
SIGMAS = 6


def threshold(p):
    return round(p * 65536)


def masks(p, batch, heads, rows, cols, seed=SEED):
    """True where a weight is kept, (batch, heads, rows, cols)."""
    places = numpy.arange(batch * heads, dtype="uint64")
    kept = keep_mask(seed, threshold(p), places, range(rows), range(cols))
    return kept.reshape(batch, heads, rows, cols)


# The numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counter, key, numbers",
    [
        ("00000000 " * 4, "00000000 " * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ("ffffffff " * 4, "ffffffff " * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
)
def test_philox_is_that_of_random123(counter, key, numbers):
    """The known answers for philox4x32 with 7 rounds that its authors publish."""
    counter, key, numbers = ([int(x, 16) for x in text.split()] for text in (counter, key, numbers))
    words = philox(key[0] | key[1] << 32, tuple(numpy.array([x], "uint64") for x in counter))
    assert [int(word[0]) for word in words] == numbers


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_kept_fraction(p):
    kept = masks(p, 4, 4, 256, 256)
    p = threshold(p) / 65536
    for axes in [(0, 1, 2, 3), (2, 3), (0, 1, 2), (0, 1, 3)]:  # all, of a head, of a column or row
        count = numpy.prod([kept.shape[axis] for axis in axes])
        sigma = (p * (1 - p) / count) ** 0.5
        assert abs(kept.mean(axis=axes) - (1 - p)).max() < SIGMAS * sigma


@pytest.mark.parametrize(
    "shift", [(0, 0, 0, 1), (0, 0, 0, 8), (0, 0, 1, 0), (0, 0, 8, 0), (0, 0, 8, 8), (0, 1, 0, 0)]
)
def test_neighbours_are_independent(shift):
    """Also those that come from one call of philox."""
    kept = masks(0.5, 4, 4, 256, 256)
    other = numpy.roll(kept, shift, axis=(0, 1, 2, 3))
    assert abs((kept == other).mean() - 0.5) < SIGMAS * 0.5 / kept.size**0.5


def test_seeds_are_independent():
    for seed in (SEED + 1, SEED + 2**32, SEED ^ 2**62):
        same = (masks(0.5, 2, 4, 256, 256) == masks(0.5, 2, 4, 256, 256, seed)).mean()
        assert abs(same - 0.5) < SIGMAS * 0.5 / (2 * 4 * 256 * 256) ** 0.5


# The weights of a call -----------------------------------------------------------------------


def weights_of(target, p, rows, cols, head_dim, **options):
    """The weights of equal scores, from values that are one for one key a time: (b, h, i, j)."""
    inputs = target.inputs(
        target.dtypes[0], seqlen_q=rows, seqlen_k=cols, heads_kv=2, head_dim=head_dim
    )
    found = []
    for first in range(0, cols, head_dim):
        v = numpy.zeros((2, cols, 2, head_dim), "float32")
        for j in range(first, min(first + head_dim, cols)):
            v[:, j, :, j - first] = 1
        out = cupyflash.attention(
            inputs.q * 0, inputs.k, target.array(v, target.dtypes[0]), dropout_p=p,
            dropout_seed=SEED, **options,
        )  # fmt: skip
        found.append(numpy.asarray(_on_cpu(out)).swapaxes(1, 2))
    return numpy.concatenate(found, axis=3)[..., :cols]


def _on_cpu(x):
    x = to_float64(x)
    return x.get() if hasattr(x, "get") else x


@each()
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows, cols", [(150, 200), (1, 33), (65, 16), (300, 1)])
def test_mask_does_not_depend_on_tiles_or_backend(target, rows, cols, head_dim):
    """Every backend, with the tiles of any head dim, drops the weights that keep_mask says."""
    weights = weights_of(target, 0.3, rows, cols, head_dim)
    kept = masks(0.3, 2, 4, rows, cols)
    assert ((weights > 0) == kept).all()
    scale = 1 / cols / (1 - threshold(0.3) / 65536)
    # A bound from theory: each is a single number, rounded to a dtype of 16 bits at most twice.
    numpy.testing.assert_allclose(weights[kept], scale, rtol=2**-7)


@each()
def test_mask_with_a_causal_mask_and_a_window(target):
    for options in ({"causal": True}, {"window": (40, 9)}):
        whole = weights_of(target, 0.0, 150, 150, 64, **options) > 0
        weights = weights_of(target, 0.3, 150, 150, 64, **options)
        assert ((weights > 0) == (masks(0.3, 2, 4, 150, 150) & whole)).all()


@each()
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softcap": 4.0},
        {"window": (60, 3)},
        {"dropout_p": 0.9},
        {"dropout_p": 1e-4},
    ],
    ids=str,
)
def test_results(target, options, head_dim):
    """Forward and backward against the reference, which has the mask in memory."""
    inputs = target.inputs(
        target.dtypes[-1], seqlen_q=130, seqlen_k=190, heads_kv=2, head_dim=head_dim
    )
    options = {"dropout_p": 0.25, "dropout_seed": SEED} | options
    expected(inputs, **options).check(**forward_backward(inputs, **options))


@each()
def test_packed_sequences_are_those_of_a_batch(target):
    """The index of a sequence counts, not where its rows lie."""
    batched = target.inputs("float16", batch=3, seqlen_q=50)
    packed = target.varlen_inputs("float16", [50] * 3)
    q, k, v = (x.reshape(150, 4, 64) for x in (batched.q, batched.k, batched.v))
    from cupyflash.ops.attention.operations import FORWARD
    from cupyflash.ops.attention.options import Extras

    extras = Extras(packed.cu_seqlens_q, packed.cu_seqlens_k, dropout_seed=SEED)
    options = (True, None, None, 0.0, "thd", (50, 50), 0.4, False)
    out, _ = FORWARD("f", (q, k, v, *extras), (options, False))
    same = cupyflash.attention(
        batched.q, batched.k, batched.v, causal=True, dropout_p=0.4, dropout_seed=SEED
    )
    assert (to_float64(out).reshape(3, 50, 4, 64) == to_float64(same)).all()


@each()
def test_lse_is_that_of_all_weights(target):
    inputs = target.inputs("float16", seqlen_q=70)
    qkv = inputs.q, inputs.k, inputs.v
    _, plain = cupyflash.attention(*qkv, return_lse=True)
    _, lse = cupyflash.attention(*qkv, dropout_p=0.5, return_lse=True)
    # Dropout drops no weight from the sum: the same weights, perhaps in tiles of another size.
    numpy.testing.assert_allclose(_on_cpu(lse), _on_cpu(plain), rtol=1e-5, atol=1e-5)


# Seeds ---------------------------------------------------------------------------------------


@each()
def test_repeatable(target):
    inputs = target.inputs("float16", seqlen_q=70)
    call = lambda seed: cupyflash.attention(
        inputs.q, inputs.k, inputs.v, dropout_p=0.5, dropout_seed=seed
    )
    assert (call(SEED) == call(SEED)).all() and not (call(SEED) == call(SEED + 1)).all()
    array = target.array(numpy.array([SEED]))
    assert (call(array) == call(SEED)).all() and (call(array.reshape(())) == call(SEED)).all()


@each()
@pytest.mark.parametrize("function", ["attention", "flash_attn_func"])
def test_without_a_seed_it_follows_the_generator(target, function):
    inputs = target.inputs("float16", seqlen_q=70)
    call = lambda: getattr(cupyflash, function)(inputs.q, inputs.k, inputs.v, dropout_p=0.5)
    seed_generator(target, 1)
    first, second = call(), call()
    seed_generator(target, 1)
    assert (call() == first).all() and not (first == second).all()


@each(library="torch")
def test_backward_of_a_drawn_seed(target):
    """Autograd keeps the seed that the forward drew: the gradient is that of the same mask."""
    import torch

    inputs = target.inputs("float32" if "float32" in target.dtypes else "float16", seqlen_q=70)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    torch.manual_seed(3)
    out = cupyflash.flash_attn_func(q, k, v, dropout_p=0.4)
    gradients = torch.autograd.grad(out, (q, k, v), inputs.dout)
    torch.manual_seed(3)
    seed = int(torch.randint(2**63 - 1, (1,), device=q.device))
    results = forward_backward(inputs, dropout_p=0.4, dropout_seed=seed)
    assert (results["out"] == out).all()
    exact = expected(inputs, dropout_p=0.4, dropout_seed=seed)
    exact.check(**dict(zip(("dq", "dk", "dv"), gradients)))


@each()
def test_nothing_is_dropped(target):
    """p = 0, and a p that rounds to it, are plain attention to the last bit."""
    inputs = target.inputs("float16", seqlen_q=70)
    qkv = inputs.q, inputs.k, inputs.v
    plain = cupyflash.attention(*qkv)
    assert (cupyflash.attention(*qkv, dropout_p=0.0, dropout_seed=SEED) == plain).all()
    assert (to_float64(cupyflash.attention(*qkv, dropout_p=1e-6)) == to_float64(plain)).all()


@each()
def test_almost_everything_is_dropped(target):
    inputs = target.inputs("float32" if "float32" in target.dtypes else "bfloat16", seqlen_q=70)
    out = cupyflash.attention(inputs.q, inputs.k, inputs.v, dropout_p=1 - 1e-9)
    assert numpy.isfinite(_on_cpu(out)).all()


# Bad input -----------------------------------------------------------------------------------


@each()
@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan"), "0.1", None], ids=str)
def test_probability(target, p):
    inputs = target.inputs("float16", seqlen_q=5)
    error = ValueError if isinstance(p, float) else TypeError
    with pytest.raises(error, match=f"^attention: dropout_p must be .*got '?{p}'?"):
        cupyflash.attention(inputs.q, inputs.k, inputs.v, dropout_p=p)


@each()
@pytest.mark.parametrize("seed", [-1, 2**63], ids=str)
def test_seed_out_of_range(target, seed):
    inputs = target.inputs("float16", seqlen_q=5)
    with pytest.raises(ValueError, match=f"^attention: dropout_seed .*got {seed}"):
        cupyflash.attention(inputs.q, inputs.k, inputs.v, dropout_p=0.1, dropout_seed=seed)


@each()
def test_seed_of_another_kind(target):
    inputs = target.inputs("float16", seqlen_q=5)
    for seed, error in [
        (1.5, TypeError),
        (True, TypeError),
        (target.array(numpy.zeros(1, "int32")), TypeError),
        (target.array(numpy.zeros(2, "int64")), ValueError),
    ]:
        with pytest.raises(error, match="^attention: dropout_seed must"):
            cupyflash.attention(inputs.q, inputs.k, inputs.v, dropout_p=0.1, dropout_seed=seed)


@each()
def test_backward_needs_the_seed(target):
    inputs = target.inputs("float16", seqlen_q=5)
    qkv = inputs.q, inputs.k, inputs.v
    out, lse = cupyflash.attention(*qkv, dropout_p=0.1, dropout_seed=1, return_lse=True)
    with pytest.raises(ValueError, match="^attention_backward: .*dropout_seed of the forward"):
        cupyflash.attention_backward(inputs.dout, *qkv, out, lse, dropout_p=0.1)


def test_cupy_without_curand(monkeypatch):
    """CuPy's light install has no generator on the GPU; seeds that are given still work."""
    cupy = pytest.importorskip("cupy")

    def missing(*_, **__):
        raise ImportError("libcurand.so.10")

    monkeypatch.setattr(cupy, "random", SimpleNamespace(randint=missing), raising=False)
    library = CupyLibrary()
    fake_facts(monkeypatch, library, current_device=0)
    like = SimpleNamespace(data=SimpleNamespace(device_id=0))
    with pytest.raises(ImportError, match="dropout_seed .* needs cuRAND: pip install"):
        library.random_seed(like)
