"""Any shape with any options: out, LSE and gradients obey the tolerance rule (hypothesis)."""

import numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrix import each
from passes import explicit_gradients

import cupyflash
from cupyflash.testing import STORAGES, expected, make_alibi_slopes, to_numpy64

BOUNDS = st.one_of(st.none(), st.integers(0, 300))


@each()
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,  # the same examples on every machine: a GPU report describes these sources
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_attention(target, data):
    draw = data.draw
    # A few head dims only on a GPU, as each is a compilation.
    head_dims = st.sampled_from([32, 64, 72]) if target.gpu else st.integers(1, 32).map((8).__mul__)
    heads_kv = draw(st.integers(1, 3))
    storages = [s for s in STORAGES if s != "unaligned" or not target.aligned_only]
    lengths = st.integers(1, 700 if target.gpu else 150)
    heads_q = heads_kv * draw(st.integers(1, 3))
    inputs = target.inputs(
        draw(st.sampled_from(target.dtypes)),
        batch=draw(st.integers(1, 3)),
        seqlen_q=draw(lengths),
        seqlen_k=draw(lengths),
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=draw(head_dims),
        layout=draw(st.sampled_from(["bshd", "bhsd"])),
        storage=draw(st.sampled_from(storages)),
        seed=draw(st.integers(0, 2**31)),
    )
    options = {
        "causal": draw(st.sampled_from([False, True, "bottom-right", "top-left"])),
        "window": draw(st.one_of(st.none(), st.tuples(BOUNDS, BOUNDS))),
        "scale": draw(st.sampled_from([None, 0.05])),
        "softcap": draw(st.sampled_from([0.0, 3.0])),
    }
    if draw(st.booleans()):
        options["alibi_slopes"] = make_alibi_slopes(heads_q, target.library, device=target.device)
    layout = {"layout": inputs.layout}
    out, lse = cupyflash.attention(
        inputs.q, inputs.k, inputs.v, return_lse=True, **layout, **options
    )
    dq, dk, dv = explicit_gradients(inputs, **layout, **options)
    wanted = expected(inputs, **options)
    if target.backend == "fp16x3":
        # Its factors have 22 bits. Where few terms are added, that shows: as four times the
        # rounding of float32 to the largest result.
        for name, result in wanted.results.items():
            largest = abs(to_numpy64(result.exact))
            terms = result.terms + 4 * largest[numpy.isfinite(largest)].max(initial=0)
            wanted.results[name] = result._replace(terms=terms)
    wanted.check(out=out, lse=lse, dq=dq, dk=dk, dv=dv)
