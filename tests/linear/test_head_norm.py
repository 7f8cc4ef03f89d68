"""The norm and rotary embedding of the heads of q and k, in place."""

import dataclasses

import numpy
import pytest
from arrays import integers, normal, stored
from matrix import covering, each_case, each_library

import cupyflash
from cupyflash.ops.linear import reference
from cupyflash.ops.linear.head_norm import head_norm
from cupyflash.testing import assert_close_to_float64, numpy_dtype, to_numpy64

EPS, POSITIONS = 1e-6, 50


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the matrix; ``joined``: q, k and v lie side by side in one array."""

    dtype: str
    rows: int
    heads: tuple[int, int]
    head_dim: int
    joined: bool

    def arrays(self, target):
        """q, k and v, their weights and the angles."""
        heads_q, heads_kv = self.heads
        values = 3 * normal((self.rows, heads_q + 2 * heads_kv, self.head_dim), 0)
        split = lambda x: numpy.split(x, [heads_q, heads_q + heads_kv], 1)
        if self.joined:
            qkv = stored(target, values, self.dtype)
            q_and_k = qkv[:, :heads_q], qkv[:, heads_q : heads_q + heads_kv]
            q_k_v = *q_and_k, qkv[:, heads_q + heads_kv :]
        else:
            q_k_v = [stored(target, x, self.dtype, "padded") for x in split(values)]
        weights = [stored(target, normal(self.head_dim, x, mean=1.0), self.dtype) for x in (1, 2)]
        angles = 10 * normal((POSITIONS, self.head_dim // 2), 3)
        cos, sin = (stored(target, f(angles), "float32") for f in (numpy.cos, numpy.sin))
        chosen = numpy.random.default_rng(4).integers(0, POSITIONS, self.rows)
        return *q_k_v, *weights, cupyflash.Rotary(cos, sin, integers(target, chosen))


def cases(target):
    return covering(
        Case,
        {
            "dtype": list(target.dtypes),
            "rows": [0, 1, 7, 200],
            "heads": [(1, 1), (6, 2), (4, 4)],
            "head_dim": [2, 6, 64, 96, 128, 256],
            "joined": [True, False],
        },
    )


@each_case(cases)
def test_head_norm(target, case):
    """Both are as their formula, and v beside them is as it was."""
    q, k, v, *weights, rotary = case.arrays(target)
    given = [to_numpy64(x) for x in (q, k, *weights, rotary.cos, rotary.sin)]
    positions, before = to_numpy64(rotary.positions).astype("int64"), to_numpy64(v)
    assert head_norm(q, k, *weights, rotary=rotary, eps=EPS) is None
    narrow = lambda x: x.astype(numpy_dtype(case.dtype)).astype("float32")
    for name, found, x, weight in zip("qk", (q, k), given[:2], given[2:4]):
        angles = (*given[4:], positions, EPS)
        exact = reference.head_norm(x, weight, *angles)
        rounded = reference.head_norm(x.astype("float32"), weight, *angles, narrow)
        terms = 2 * abs(exact).max(initial=0)
        assert_close_to_float64(found, exact, rounded, case.dtype, name, terms=terms)
    assert (to_numpy64(v) == before).all()


@each_library()
def test_wrong_calls(target):
    q, k, _, *weights, rotary = Case("float32", 3, (2, 1), 8, True).arrays(target)
    call = lambda *x, **options: head_norm(*x, **{"rotary": rotary, "eps": EPS} | options)
    with pytest.raises(ValueError, match="^head_norm: rotary must be .* without interleaved"):
        call(q, k, *weights, rotary=rotary._replace(interleaved=True))
    with pytest.raises(TypeError, match="^head_norm: positions must be .*, got NoneType"):
        call(q, k, *weights, rotary=rotary._replace(positions=None))
    with pytest.raises(ValueError, match="^head_norm: head_dim must be even"):
        call(q[..., :7], k[..., :7], weights[0][:7], weights[1][:7])
    narrow = stored(target, normal((9, 3), 5), "float32")
    with pytest.raises(ValueError, match=r"^head_norm: cos must have shape \(num_positions, 4\)"):
        call(q, k, *weights, rotary=rotary._replace(cos=narrow, sin=narrow))
    with pytest.raises(ValueError, match=r"^head_norm: k must have shape \(3, "):
        call(q, k[:2], *weights)
    with pytest.raises(TypeError, match="^head_norm: eps must be a number"):
        call(q, k, *weights, eps="small")
    if not target.gpu:
        for place in (-1, POSITIONS):
            wrong = rotary._replace(positions=integers(target, [0, place, 1]))
            with pytest.raises(ValueError, match="^head_norm: positions must be from 0 to 49"):
                call(q, k, *weights, rotary=wrong)


@each_library(library="torch")
def test_gradients_are_refused(target):
    q, k, _, *weights, rotary = Case("float32", 3, (2, 1), 8, False).arrays(target)
    weights[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="^head_norm: .*gradient"):
        head_norm(q, k, *weights, rotary=rotary, eps=EPS)
