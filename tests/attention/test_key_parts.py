"""`attention_backward` of a part of the keys, given the out and the LSE of all of them."""

import numpy
import pytest
from matrix import each

import cupyflash
from cupyflash.testing import expected, to_numpy64

PARTS = (slice(0, 90), slice(90, 280), slice(280, 300))
HIDDEN = PARTS[2]
# What the values of a part are multiplied by: delta of all keys is far from dP of these.
VALUES = {
    "alike": (1.0, 1.0, 1.0),
    "small first": (2.0**-10, 1.0, 1.0),
    "small second": (1.0, 2.0**-10, 1.0),
    "tiny": (2.0**-40, 1.0, 2.0**-40),
    "large": (2.0**40, 1.0, 1.0),
}


@each()
@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize("values", VALUES)
def test_parts_add_up(target, values, head_dim):
    """Nobody sees the keys of the last part."""
    wide = values in ("tiny", "large")
    for dtype in target.dtypes:
        if wide and dtype != "float32":
            continue
        inputs = target.inputs(
            dtype, seqlen_q=130, seqlen_k=300, heads_q=2, heads_kv=1, head_dim=head_dim, batch=1
        )
        for part, factor in zip(PARTS, VALUES[values], strict=True):
            inputs.v[:, part] *= factor
        seen = numpy.ones((1, 1, 1, 300), bool)
        seen[..., HIDDEN] = False
        q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
        out, lse = cupyflash.attention(q, k, v, bias=target.array(seen), return_lse=True)
        found = []
        for part in PARTS:
            # A copy, because the first key of a part may not be aligned.
            arrays = (k[:, part] + 0, v[:, part] + 0, out, lse)
            mask = target.array(numpy.ascontiguousarray(seen[..., part]))
            found.append(cupyflash.attention_backward(dout, q, *arrays, bias=mask))
        dq, *of_keys = ([to_numpy64(x) for x in gradients] for gradients in zip(*found))
        dk, dv = (target.array(numpy.concatenate(parts, 1), dtype) for parts in of_keys)
        dq = target.array(sum(dq), dtype)
        expected(inputs, bias=target.array(seen)).check(dq=dq, dk=dk, dv=dv)
        assert not any(to_numpy64(x)[:, HIDDEN].any() for x in (dk, dv))
