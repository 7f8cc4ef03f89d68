"""Beside plain packed sequences: lengths, padding, sinks and windows as in flash-attn."""

import functools
import itertools
import operator

import numpy
import pytest
from arrays import stack
from matrix import each
from wrong_calls import array, check_refused

import cupyflash
from cupyflash import environment
from cupyflash.testing import (
    Expected,
    Inputs,
    expected,
    make_alibi_slopes,
    poison_free_memory,
    to_float64,
    to_numpy64,
)

# Rows of each sequence in memory, and how many of them count.
LENGTHS_Q, USED_Q = [150, 1, 77, 0, 64], [150, 0, 40, 0, 63]
LENGTHS_K, USED_K = [3, 200, 64, 90, 0], [2, 131, 0, 90, 0]
FORMS = [x for x in itertools.product((True, False), repeat=4) if any(x[:2])]
OPTIONS = [
    {"causal": True},
    {"window_size": (30, 5), "softcap": 4.0},
    {"sinks": True},
    {"alibi": True, "causal": True, "sinks": True},
    {"dropout": True},
]


class Case:
    """One problem whose queries and keys are each packed or padded; what does not count is NaN."""

    def __init__(self, target, packed_q, packed_k, some_q, some_k):
        """``some_q``: only the rows of `USED_Q` count."""
        self.target, self.packed_q, self.packed_k = target, packed_q, packed_k
        self.used_q, self.used_k = USED_Q if some_q else LENGTHS_Q, USED_K if some_k else LENGTHS_K
        rng, dtype = numpy.random.default_rng(0), target.dtypes[0]
        self.dtype, self.values = dtype, []  # of each sequence, those that count
        for rows, cols in zip(self.used_q, self.used_k):
            shapes = [(rows, 4, 64), (cols, 2, 64), (cols, 2, 64), (rows, 4, 64)]
            self.values.append([rng.standard_normal(shape, dtype="float32") for shape in shapes])
        self.q, self.k, self.v, self.dout = (
            self.stored(index, index in (0, 3)) for index in range(4)
        )
        array = lambda x: target.array(numpy.array(x, "int32"))
        self.lengths = {
            "cu_seqlens_q": array(numpy.cumsum([0, *LENGTHS_Q])) if packed_q else None,
            "cu_seqlens_k": array(numpy.cumsum([0, *LENGTHS_K])) if packed_k else None,
            "max_seqlen_q": 150,
            "max_seqlen_k": 200,
            "seqused_q": array(self.used_q) if some_q or not packed_q else None,
            "seqused_k": array(self.used_k) if some_k or not packed_k else None,
        }

    def stored(self, index, of_queries):
        packed = self.packed_q if of_queries else self.packed_k
        lengths = LENGTHS_Q if of_queries else LENGTHS_K
        shape = self.values[0][index].shape[1:]
        rows = [numpy.full((length, *shape), numpy.nan, "float32") for length in lengths]
        if not packed:
            rows = [numpy.full((max(lengths), *shape), numpy.nan, "float32") for _ in lengths]
        for row, values in zip(rows, self.values):
            row[: len(values[index])] = values[index]
        return self.target.array((numpy.concatenate if packed else numpy.stack)(rows), self.dtype)

    def sequence(self, name, x, b):
        """Of a result: (rows that count with an axis of length 1 in front, the others)."""
        of_queries = name not in ("dk", "dv")
        packed = self.packed_q if of_queries else self.packed_k
        lengths, used = (LENGTHS_Q, self.used_q) if of_queries else (LENGTHS_K, self.used_k)
        if name == "lse":
            x = x.swapaxes(-1, -2)
        start = sum(lengths[:b])
        x = x[start : start + lengths[b]] if packed else x[b]
        mine, rest = x[: used[b]][None], x[used[b] :]
        return (mine.swapaxes(1, 2) if name == "lse" else mine), rest

    def run(self, **options):
        """out and lse, and with torch the gradients of q, k, v and sinks, by name."""
        call = cupyflash.flash_attn_varlen_func
        options |= {**self.lengths, "return_attn_probs": True}
        if self.target.library != "torch":
            out, lse, _ = call(self.q, self.k, self.v, **options)
            return {"out": out, "lse": lse}
        import torch

        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        if "sinks" in options:
            options["sinks"] = options["sinks"].detach().requires_grad_()
            leaves.append(options["sinks"])
        out, lse, _ = call(*leaves[:3], **options)
        names = ("dq", "dk", "dv", "dsinks")
        gradients = dict(zip(names, torch.autograd.grad(out, leaves, self.dout)))
        return {"out": out.detach(), "lse": lse.detach(), **gradients}

    def check(self, results, **options):
        """Sequence by sequence against float64; what does not count is 0, its LSE -inf."""
        of_sinks = []
        for b, values in enumerate(self.values):
            arrays = (self.target.array(x[None], self.dtype) for x in values)
            own = dict(options)
            exact = expected(Inputs(*arrays, self.dtype), **own)
            if "sinks" in own:
                of_sinks.append(exact.results["dsinks"])
            for name, x in results.items():
                if name == "dsinks":
                    continue
                mine, rest = self.sequence(name, x, b)
                exact.check(**{name: mine})
                nothing = -numpy.inf if name == "lse" else 0
                assert (to_float64(rest) == nothing).all(), name
        if "dsinks" in results:
            whole = functools.reduce(operator.add, of_sinks)
            Expected({"dsinks": whole}).check(dsinks=results["dsinks"])


@each()
@pytest.mark.parametrize(
    "form", FORMS, ids=lambda x: "-".join("packed" if packed else "padded" for packed in x[:2])
    + "".join(f"-used_{side}" for side, some in zip("qk", x[2:]) if some),
)  # fmt: skip
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_packed_and_padded(target, form, options):
    """Queries and keys each packed or padded, each with seqused or without."""
    check_case(target, form, options)


@each()
@pytest.mark.parametrize("options", OPTIONS[2:], ids=str)
@pytest.mark.parametrize("form", [(True, True, True, True), (True, False, False, True)], ids=str)
def test_options(target, form, options):
    check_case(target, form, options)


def check_case(target, form, options):
    case, options = Case(target, *form), dict(options)
    if options.pop("sinks", False):
        values = numpy.random.default_rng(2).standard_normal(4, dtype="float32")
        options["sinks"] = target.array(values, "float32")
    if options.pop("alibi", False):
        options["alibi_slopes"] = make_alibi_slopes(4, target.library, device=target.device)
    if options.pop("dropout", False):
        # Which weights are dropped is not asked here: nothing outside of the lengths is read.
        results = case.run(dropout_p=0.3)
        for b in range(len(LENGTHS_Q)):
            for name, x in results.items():
                mine, rest = case.sequence(name, x, b)
                finite = numpy.isfinite(to_numpy64(mine)).all() or name == "lse"
                assert finite and (to_float64(rest) == (-numpy.inf if name == "lse" else 0)).all()
        return
    size = case.q.nbytes
    poison_free_memory(target.library, target.device, [size, case.k.nbytes, 2 * size])
    results = case.run(**options)
    theirs = dict(options)
    if "window_size" in theirs:
        theirs["window"] = theirs.pop("window_size")
    case.check(results, **theirs)


@each()
def test_padded_without_cu_seqlens(target):
    """Neither packed: `attention` with seqused."""
    inputs = target.inputs("float16", seqlen_q=20, seqlen_k=30)
    used = {"seqused_k": target.array(numpy.array([30, 7], "int32"))}
    out = cupyflash.flash_attn_varlen_func(
        inputs.q, inputs.k, inputs.v, None, None, 20, 30, causal=True, **used
    )
    assert (out == cupyflash.attention(inputs.q, inputs.k, inputs.v, causal=True, **used)).all()
    kv = stack(target, inputs.k, inputs.v)
    packed = cupyflash.flash_attn_varlen_kvpacked_func(
        inputs.q, kv, None, None, 20, 30, causal=True, **used
    )
    assert (out == packed).all()


@each()
def test_sinks(target):
    """In the packed functions, and in the others."""
    inputs = target.inputs("float16", seqlen_q=20)
    sinks = target.array(numpy.linspace(-1, 2, 4), "float32")
    qkv = inputs.q, inputs.k, inputs.v
    exact = cupyflash.attention(*qkv, causal=True, sinks=sinks)
    options = {"causal": True, "sinks": sinks}
    kv, packed = stack(target, *qkv[1:]), stack(target, *qkv)
    assert (cupyflash.flash_attn_func(*qkv, **options) == exact).all()
    assert (cupyflash.flash_attn_kvpacked_func(inputs.q, kv, **options) == exact).all()
    assert (cupyflash.flash_attn_qkvpacked_func(packed, **options) == exact).all()
    ends = target.array(numpy.array([0, 20, 40], "int32"))
    flat = [x.reshape(40, *x.shape[2:]) for x in (inputs.q, kv, packed)]
    found = [
        cupyflash.flash_attn_varlen_kvpacked_func(*flat[:2], ends, ends, 20, 20, **options),
        cupyflash.flash_attn_varlen_qkvpacked_func(flat[2], ends, 20, **options),
    ]
    assert all((x.reshape(exact.shape) == exact).all() for x in found)


@each(library="torch")
def test_compiled(target):
    """Packed queries with padded keys, one graph."""
    import torch

    case = Case(target, True, False, False, True)
    exact = case.run(causal=True)
    torch.compiler.reset()
    graph = torch.compile(
        lambda *qkv: cupyflash.flash_attn_varlen_func(*qkv, causal=True, **case.lengths),
        fullgraph=True,
        backend="aot_eager",
    )
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    out = graph(*leaves)
    found = torch.autograd.grad(out, leaves, case.dout)
    case.check({"out": out.detach(), **dict(zip(("dq", "dk", "dv"), found))}, causal=True)
    assert torch.equal(out, exact["out"])


# Windows -------------------------------------------------------------------------------------


@each()
def test_windows(target):
    """-1 and None are unlimited; any two integers will do."""
    inputs = target.inputs("float16", seqlen_q=20)
    qkv = inputs.q, inputs.k, inputs.v
    plain = cupyflash.flash_attn_func(*qkv)
    for window in ((-1, -1), (None, None), [-1, None]):
        assert (cupyflash.flash_attn_func(*qkv, window_size=window) == plain).all()
    exact = cupyflash.attention(*qkv, window=(3, None))
    windows = [(3, -1), (3, None), [3, -1], numpy.array([3, -1])]
    if target.library == "torch":
        import torch

        windows.append(torch.tensor([3, -1]))
    for window in windows:
        assert (cupyflash.flash_attn_func(*qkv, window_size=window) == exact).all()


WRONG_WINDOWS = [
    (3, TypeError),
    ("ab", TypeError),
    ((1,), TypeError),
    ((1, 2, 3), TypeError),
    ((1.5, 2), TypeError),
    ((-2, 3), ValueError),
    ((3, -5), ValueError),
    ((None, -2), ValueError),
]


@each()
@pytest.mark.parametrize("window, error", WRONG_WINDOWS, ids=str)
def test_wrong_windows(target, window, error):
    inputs = target.inputs("float16", seqlen_q=20)
    with pytest.raises(error, match=r"^flash_attn_func: .*window_size .*got"):
        cupyflash.flash_attn_func(inputs.q, inputs.k, inputs.v, window_size=window)


# Bad input -----------------------------------------------------------------------------------


@each()
@pytest.mark.parametrize(
    "change, error, fact",
    [
        (
            {"cu_seqlens_q": None},
            ValueError,
            r"q must have shape \(batch, seqlen_q, heads_q, head_dim\)",
        ),
        (
            {"cu_seqlens_k": None},
            ValueError,
            r"k must have shape \(batch, seqlen_k, heads_kv, 64\)",
        ),
        ({"seqused_k": [1, 2]}, ValueError, r"seqused_k must have shape \(5,\) .*got \(2,\)"),
        ({"seqused_q": [150, 1, 77, 1, 64]}, ValueError, "seqused_q must be from 0 to the lengths"),
        ({"seqused_k": [3, 200, -1, 0, 0]}, ValueError, "seqused_k must be from 0 to the lengths"),
        ({"cu_seqlens_k": [0, 3]}, ValueError, r"cu_seqlens_k must have shape \(6,\) .*\(2,\)"),
        ({"max_seqlen_q": 2.5}, TypeError, "max_seqlen_q must be an integer"),
        ({"max_seqlen_k": None}, TypeError, "max_seqlen_k must be an integer"),
        ({"sinks": [1.0]}, TypeError, "sinks must be"),
    ],
    ids=str,
)
def test_wrong_lengths(target, change, error, fact):
    case = Case(target, True, True, False, False)
    arguments = dict(case.lengths)
    for name, value in change.items():
        as_array = isinstance(value, list) and name != "sinks"
        arguments[name] = target.array(numpy.array(value, "int32")) if as_array else value
    with (
        environment.override(debug=True),
        pytest.raises(error, match=f"^flash_attn_varlen_func: {fact}"),
    ):
        cupyflash.flash_attn_varlen_func(case.q, case.k, case.v, **arguments)


@each()
@pytest.mark.parametrize("packed", [(True, True), (True, False), (False, True)], ids=str)
def test_wrong_calls(target, packed):
    """Beside those of test_attention_wrong_calls.py: sinks and lengths, packed and padded."""
    case = Case(target, *packed, True, True)
    sinks = target.array(numpy.ones(4), "float32")
    good = {"q": case.q, "k": case.k, "v": case.v, **case.lengths, "sinks": sinks}
    kinds = {"sinks": (*array(sinks, optional=True), sinks[:1])}
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        if good[name] is not None:
            wrong = array(good[name], optional=True, dtypes=("int64", "float32", "float16"))
            kinds[name] = (*wrong, good[name][:3], *([None] if name.startswith("cu") else []))
        else:
            kinds[name] = (good["seqused_q"], "text", 3)
    kinds |= {name: array(good[name]) for name in "qkv"}
    check_refused(cupyflash.flash_attn_varlen_func, good, kinds, least=70)


@each()
def test_no_cu_seqlens_of_packed_qkv(target):
    qkv = target.array(numpy.ones((9, 3, 2, 8)), "float16")
    fact = "^flash_attn_varlen_qkvpacked_func: cu_seqlens must be int32"
    with pytest.raises(TypeError, match=fact):
        cupyflash.flash_attn_varlen_qkvpacked_func(qkv, None, 9)
