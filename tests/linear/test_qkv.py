"""The projection in front of attention, with rotary embedding."""

import dataclasses

import numpy
import pytest
from arrays import assert_same_oracle, normal, stored
from matrix import covering, each_case, each_library

import cupyflash
from cupyflash import environment
from cupyflash.ops.linear.options import Arrays, Options
from cupyflash.testing import expected_projection, to_library

SHAPES = [(1, 1), (1, 5), (2, 8), (4, 4), (3, 11), (2, 16), (7,), (40,)]
HEADS = [(1, 1), (4, 4), (4, 2), (6, 1)]


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the matrix; ``turned`` is the part of head_dim that is turned."""

    dtype: str
    shape: tuple[int, ...]
    heads: tuple[int, int]
    head_dim: int
    depth: int
    turned: float
    positions: str
    interleaved: bool
    wide: bool
    bias: bool
    norm: bool
    backend: str | None

    def arrays(self, target):
        columns = (self.heads[0] + 2 * self.heads[1]) * self.head_dim
        make = lambda shape, seed, scale=1.0: stored(
            target, scale * normal(shape, seed), self.dtype
        )
        arrays = Arrays(
            x=make((*self.shape, self.depth), 0),
            weight=make((columns, self.depth), 1, self.depth**-0.5),
            bias=make(columns, 2) if self.bias else None,
            norm_weight=make(self.depth, 3) if self.norm else None,
            norm_bias=make(self.depth, 4) if self.norm else None,
        )
        if not self.turned:
            return arrays
        half = int(self.turned * self.head_dim) // 2
        angles = 10 * normal((50, half), 5)
        of_angles = "float32" if self.wide else self.dtype
        cos, sin = (stored(target, f(angles), of_angles) for f in (numpy.cos, numpy.sin))
        positions = None
        if self.positions or len(self.shape) == 1:  # packed sequences must have them
            chosen = numpy.random.default_rng(6).integers(0, 50, self.shape)
            chosen = chosen.astype(self.positions or "int32")
            positions = to_library(chosen, target.library, target.device)
        return arrays._replace(cos=cos, sin=sin, positions=positions)


def cases(target):
    values = {
        "dtype": list(target.dtypes),
        "shape": SHAPES + ([(3, 50), (8, 33)] if target.gpu else []),
        "heads": HEADS,
        "head_dim": [8, 40, 64, 128],
        "depth": [24, 64, 99, 512],
        "turned": [0, 0.5, 1],
        "positions": ["", "int32", "int64"],
        "interleaved": [False, True],
        "wide": [False, True],
        "bias": [False, True],
        "norm": [False, True],
        "backend": target.forced_backends,
    }
    return covering(Case, values)


def project(arrays, heads, interleaved=False, eps=1e-5):
    norm = rotary = None
    if arrays.norm_weight is not None:
        norm = cupyflash.Norm(arrays.norm_weight, arrays.norm_bias, eps)
    if arrays.cos is not None:
        rotary = cupyflash.Rotary(arrays.cos, arrays.sin, arrays.positions, interleaved)
    return cupyflash.qkv_projection(
        arrays.x,
        arrays.weight,
        arrays.bias,
        heads_q=heads[0],
        heads_kv=heads[1],
        norm=norm,
        rotary=rotary,
    )


def joined(parts):
    """q, k and v as the one array that they are views of."""
    parts = [part.reshape(*part.shape[:-2], -1) for part in parts]
    if type(parts[0]).__module__.startswith("torch"):
        import torch

        return torch.cat(parts, -1)
    from cupyflash.runtime.array import array_namespace

    return array_namespace(parts[0]).concatenate(parts, -1)


@each_case(cases)
def test_qkv_projection(target, case):
    arrays = case.arrays(target)
    with environment.override(backend=case.backend):
        q, k, v = project(arrays, case.heads, case.interleaved)
    assert tuple(q.shape) == (*case.shape, case.heads[0], case.head_dim)
    assert tuple(k.shape) == tuple(v.shape) == (*case.shape, case.heads[1], case.head_dim)
    options = Options(interleaved=case.interleaved, heads=case.heads)
    expected_projection(arrays, options).check(out=joined((q, k, v)))


@each_library()
@pytest.mark.parametrize("rows", [8, 9, 32])
@pytest.mark.parametrize("interleaved", [False, True])
def test_deep_rows(target, rows, interleaved):
    """Norm and rotary embedding in the same launch, and from nine rows on in some of their own."""
    case = Case(
        "float16", (rows,), (3, 1), 16, 2056, 1, "int32", interleaved, True, True, True, None
    )
    arrays = case.arrays(target)
    options = Options(interleaved=interleaved, heads=case.heads)
    found = project(arrays, case.heads, interleaved)
    expected_projection(arrays, options).check(out=joined(found))


@each_library()
@pytest.mark.parametrize("head_dim", [12, 20, 24])
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_that_are_no_whole_blocks(target, head_dim, interleaved):
    """Kernels compute eight columns at a time, which may be of two heads."""
    case = Case(
        "float16", (2, 40), (2, 1), head_dim, 64, 8 / head_dim, "", interleaved, True, True, False,
        None,
    )  # fmt: skip
    arrays = case.arrays(target)
    assert arrays.cos.shape[1] == 4
    options = Options(interleaved=interleaved, heads=case.heads)
    found = project(arrays, case.heads, interleaved)
    expected_projection(arrays, options).check(out=joined(found))


@each_library()
def test_packed_sequences_need_positions(target):
    """Without them the second sequence would go on where the first one ends."""
    dtype, heads = target.dtypes[0], {"heads_q": 2, "heads_kv": 1}
    x, weight, angles = (
        stored(target, normal(shape, i), dtype)
        for i, shape in enumerate([(7, 64), (4 * 32, 64), (7, 16)])
    )
    with pytest.raises(ValueError, match="^qkv_projection: positions must be given beside packed"):
        cupyflash.qkv_projection(x, weight, **heads, rotary=cupyflash.Rotary(angles, angles))
    anew = to_library(numpy.array([0, 1, 2, 0, 1, 2, 3], "int32"), target.library, target.device)
    rotary = cupyflash.Rotary(angles, angles, anew)
    packed = cupyflash.qkv_projection(x, weight, **heads, rotary=rotary)
    options = Options(heads=(2, 1))
    for rows in (slice(0, 3), slice(3, 7)):
        alone = Arrays(x[None, rows], weight, cos=angles, sin=angles)
        out = joined([part[None, rows] for part in packed])
        expected_projection(alone, options).check(out=out)


@each_library()
def test_attention_reads_them(target):
    dtype = target.dtypes[0]
    x = stored(target, normal((2, 9, 64), 0), dtype)
    weight = stored(target, normal((4 * 32, 64), 1), dtype)
    q, k, v = cupyflash.qkv_projection(x, weight, heads_q=2, heads_kv=1)
    out = cupyflash.attention(q, k, v, causal=True)
    assert tuple(out.shape) == (2, 9, 2, 32)


@each_library()
def test_empty(target):
    weight = stored(target, normal((32, 24), 1), "float16")
    for shape in ((0, 5), (2, 0)):
        x = stored(target, numpy.zeros((*shape, 24)), "float16")
        q, k, v = cupyflash.qkv_projection(x, weight, heads_q=2, heads_kv=1)
        assert tuple(q.shape) == (*shape, 2, 8) and tuple(k.shape) == (*shape, 1, 8)


def test_rotary_is_the_published_one():
    """cos and sin of position * 10000^(-2 i / d), in pairs (i, i + d / 2) and (2 i, 2 i + 1)."""
    x = normal((1, 6, 1, 8), 0).astype("float64")
    frequencies = 10000.0 ** (-numpy.arange(4) / 4)
    angles = numpy.outer(numpy.arange(6), frequencies)
    from cupyflash.ops.linear.reference import rotate

    for interleaved in (False, True):
        turned = rotate(x, numpy.cos(angles), numpy.sin(angles), None, interleaved)
        pairs = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :4], x[..., 4:])
        as_complex = (pairs[0] + 1j * pairs[1]) * numpy.exp(1j * angles)[None, :, None]
        found = (
            turned[..., ::2] + 1j * turned[..., 1::2]
            if interleaved
            else turned[..., :4] + 1j * turned[..., 4:]
        )
        assert_same_oracle(found.view("float64"), as_complex.view("float64"), within=2.0**-48)


def bad(target, error, match, rotary=(), **changes):
    make = lambda shape, dtype="float16": stored(target, normal(shape, 3), dtype)
    arguments = {"x": make((2, 5, 16)), "weight": make((4 * 8, 16)), "heads_q": 2, "heads_kv": 1}
    if rotary:
        arguments["rotary"] = cupyflash.Rotary(*rotary)
    with pytest.raises(error, match=f"^qkv_projection: .*{match}"):
        cupyflash.qkv_projection(**(arguments | changes))


@each_library()
def test_bad_input(target):
    make = lambda shape, dtype="float16": stored(target, normal(shape, 3), dtype)
    integers = lambda values, dtype="int32": to_library(
        numpy.asarray(values, dtype), target.library, target.device
    )
    bad(target, ValueError, "heads_kv must divide heads_q", heads_kv=3)
    bad(target, ValueError, "heads_q.*0", heads_q=0)
    bad(target, TypeError, "heads_q.*2.0", heads_q=2.0)
    bad(target, ValueError, r"multiple of heads_q \+ 2 heads_kv = 6", heads_kv=2)
    bad(target, ValueError, "2 or 3 dimensions", x=make((1, 2, 5, 16)))
    with pytest.raises(TypeError, match="rotary must be a cupyflash.Rotary.*tuple"):
        x, weight = make((2, 5, 16)), make((4 * 8, 16))
        cupyflash.qkv_projection(x, weight, heads_q=2, heads_kv=1, rotary=(x, x))
    bad(target, TypeError, "sin.*None", (make((5, 4)), None))
    bad(target, ValueError, "cos must have shape", (make((5, 5)), make((5, 5))))
    bad(target, ValueError, r"sin.*\(5, 4\).*\(6, 4\)", (make((5, 4)), make((6, 4))))
    bad(target, ValueError, "at least 5 positions", (make((4, 4)), make((4, 4))))
    bad(target, ValueError, "contiguous", (make((5, 8))[:, ::2], make((5, 8))[:, ::2]))
    angles = make((5, 4)), make((5, 4))
    bad(target, ValueError, r"positions.*\(2, 5\).*\(5,\)", (*angles, integers(range(5))))
    floats = make((2, 5), "float32")
    bad(target, TypeError, "positions must be int32 or int64.*float32", (*angles, floats))
    bad(target, TypeError, "positions must be a .*list", (*angles, [[0] * 5] * 2))
    odd = {"weight": make((4 * 7, 16))}
    bad(target, ValueError, "head_dim must be even", (make((5, 2)), make((5, 2))), **odd)
    beyond = integers([[0, 1, 2, 3, 5]] * 2)
    with environment.override(debug=True):
        bad(target, ValueError, "positions must be from 0 to 4.*0 to 5", (*angles, beyond))


@each_library()
@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
def test_no_tokens(target, shape):
    """An empty batch is turned, too."""
    make = lambda shape, seed: stored(target, normal(shape, seed), "float32")
    rotary = cupyflash.Rotary(make((8, 2), 1), make((8, 2), 2))
    x, weight = make((*shape, 16), 0), make((24, 16), 3)
    q, k, v = cupyflash.qkv_projection(x, weight, heads_q=2, heads_kv=2, rotary=rotary)
    assert q.shape == k.shape == v.shape == (*shape, 2, 4)


@each_library(library="torch")
def test_the_rotation_checks_its_angles(target):
    """torch may come to it with arrays that no projection has checked."""
    import torch

    from cupyflash.ops.linear.torch_ops import rotate

    make = lambda shape, seed, dtype="float32": stored(target, normal(shape, seed), dtype)
    x, cos, sin = make((2, 5, 24), 0), make((8, 2), 1), make((8, 2), 2)
    positions = torch.zeros((2, 5), dtype=torch.int32, device=x.device)
    rotate(x, cos, sin, positions, False, [2, 2])
    wide = make((8, 4), 1)[:, :2]
    wrong = [
        (ValueError, "cos must be contiguous", (x, wide, sin, None)),
        (ValueError, "sin must be contiguous", (x, cos, wide, None)),
        (TypeError, "cos must be float32", (x, cos.half(), sin.half(), None)),
        (ValueError, "cos must have at least 5", (x, cos[:4], sin[:4], None)),
        (ValueError, r"sin must have shape \(8, 2\).*\(4, 2\)", (x, cos, sin[:4], None)),
        (TypeError, "positions must be int32", (x, cos, sin, positions.short())),
        (ValueError, "positions must be given", (x[0], cos, sin, None)),
        (ValueError, "must have 2 or 3 dimensions", (x[None], cos, sin, None)),
        (ValueError, "multiple of heads_q", (x[..., :23].contiguous(), cos, sin, None)),
    ]
    for error, match, arrays in wrong:
        with pytest.raises(error, match=match):
            rotate(*arrays, False, [2, 2])


@each_library(library="torch")
def test_compiled_angles_are_checked(target):
    """Also where torch multiplies: angles that are no array of their own are refused."""
    import torch

    torch.compiler.reset()
    make = lambda shape, seed: stored(target, normal(shape, seed), "float32")
    cos, sin = (make((8, 4), seed)[:, :2] for seed in (1, 2))
    x, weight = make((2, 5, 16), 0), make((24, 16), 3).requires_grad_()
    call = lambda x, weight: cupyflash.qkv_projection(
        x, weight, heads_q=2, heads_kv=2, rotary=cupyflash.Rotary(cos, sin)
    )
    with pytest.raises(Exception, match="cos must be contiguous"):
        torch.compile(call, backend="aot_eager")(x, weight)
