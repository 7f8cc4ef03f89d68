"""Scores and masks as texts in kernels that run on the CPU, against float64 (test_score_texts.py).

``python tests/backends/emulated_scores.py FOLDER BACKEND ... [few]``; kernels are compiled into the
folder. With ``few`` every second case runs on sm90, and the other backends have one of both passes
with a gradient of a capture: a GPU runs all of them.
"""

import dataclasses
import itertools
import sys
from pathlib import Path

import emulator
import torch
from score_texts import Capture, Case, Text, cases, temperature

from cupyflash import Score, attention, environment
from cupyflash.ops.attention.checks import check
from cupyflash.ops.attention.options import NO_EXTRAS, Options
from cupyflash.ops.attention.planning import backward_plan, forward_plan
from cupyflash.runtime.lookup import library_of
from cupyflash.testing import Expected, Inputs, Result, make_inputs, make_varlen_inputs
from cupyflash.testing import expected as reference

FLOATS = ("float32", "float16")  # dtypes of arrays that can have a gradient
FEW = "few" in sys.argv[1:]


def comes(number: int, backend: str) -> bool:
    """Whether a backend runs a case."""
    return not FEW or (backend == "sm90" and number % 2 > 0)


def run(case: Case, inputs: Inputs, *, deterministic: str = "", found=None, **options) -> dict:
    """The results of both passes by name; `options` are `Options`, and arrays of `Extras`.

    Args:
        found: `FoundTiles` of the mask.
    """
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    library = library_of(q)
    extras = {name: options.pop(name) for name in NO_EXTRAS._fields if name in options}
    plain = Options(**options)
    captures = list(case.arrays.values())
    views = {name: library.view(x) for name, x in (("q", q), ("k", k), ("v", v))}
    pointers = [library.pointer(extras[x]) if x in extras else 0 for x in NO_EXTRAS._fields]
    pointers += [library.pointer(x) if isinstance(x, torch.Tensor) else x for x in captures]
    pointers += [] if found is None else [found]

    def problem_of(**tensors):
        found = check(
            "attention",
            views | {name: library.view(x) for name, x in tensors.items()},
            plain,
            {name: library.view(x) for name, x in extras.items()},
        )
        of = tuple(library.view(x) if isinstance(x, torch.Tensor) else None for x in captures)
        return dataclasses.replace(found, text=case.text, captures=of)

    plan = forward_plan("attention", problem_of(), library, views["q"], plain)
    out, lse = plan(q, [*map(library.pointer, (q, k, v)), *pointers], True)
    problem = problem_of(dout=dout, out=out)
    plan = backward_plan("attention", problem, library, views, plain, deterministic, False)
    addresses = [library.pointer(x) for x in (dout, q, k, v, out, lse)]
    dq, dk, dv, _, dsinks, *learned = plan(q, k, v, [*addresses, 0, *pointers])
    results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    named = zip(case.arrays, learned)
    results |= {f"d{name}": x for name, x in named if x is not None}
    return results | ({} if dsinks is None else {"dsinks": dsinks})


def by_torch(case: Case, inputs: Inputs, dtype: torch.dtype, *, causal=False, sinks=None) -> dict:
    """The same by torch's autograd, in this dtype; the softmax in float32 or better."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    batch, queries, heads, head_dim = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) * head_dim**-0.5
    place = torch.meshgrid(*map(torch.arange, (batch, heads, queries, keys)), indexing="ij")
    captures = {}
    if case.score:
        floats = (torch.float32, torch.float16)
        arrays = {
            name: x.to(dtype, copy=True) if isinstance(x, torch.Tensor) and x.dtype in floats else x
            for name, x in case.arrays.items()
        }
        captures = {x.name: arrays[x.name] for x in case.text.captures if x.learns}
        for x in captures.values():
            x.requires_grad_()
        scores = case.score(scores, *place, arrays)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if case.mask:
        seen = case.mask(*place, case.arrays)
    if causal:
        seen = seen & (place[3] <= place[2] + keys - queries)
    scores = torch.where(seen, scores, -float("inf")).to(wide)
    learned = [q, k, v]
    if sinks is None:
        lse = torch.logsumexp(scores, -1)
    else:
        sinks = sinks.detach().to(wide, copy=True).requires_grad_()
        learned.append(sinks)
        column = sinks[None, :, None, None].expand(batch, heads, queries, 1)
        lse = torch.logsumexp(torch.cat([scores, column], -1), -1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0, lse)[..., None]).to(dtype)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(group, 2))
    names = [*("dq", "dk", "dv", "dsinks")[: len(learned)], *(f"d{x}" for x in captures)]
    learned += captures.values()
    gradients = torch.autograd.grad(out, learned, inputs.dout.to(dtype))
    found = {"out": out, "lse": lse, **dict(zip(names, gradients))}
    return {name: x.detach() for name, x in found.items()}


def expected(case: Case, inputs: Inputs, **options) -> Expected:
    """Float64, and the dtype of the inputs as the yardstick."""
    exact = by_torch(case, inputs, torch.float64, **options)
    yardstick = by_torch(case, inputs, inputs.q.dtype, **options)
    size = inputs.q.shape[-1] ** 0.5 * max(inputs.q.shape[1], inputs.k.shape[1]) ** 0.5
    dtypes = dict.fromkeys(("out", "dq", "dk", "dv"), inputs.dtype)
    results = {}
    for name, x in exact.items():
        rounded = None if name in ("lse", "dsinks") else inputs.dtype
        dtype = dtypes.get(name, "float32")
        results[name] = Result(x, yardstick[name], dtype, size, rounded)
    return Expected(results)


def check_case(folder: Path, name: str, case: Case, inputs: Inputs, backend: str, **options):
    with emulator.hopper(folder) as launched, environment.override(backend=backend):
        results = run(case, inputs, **options)
    print(f"{name}, {inputs.dtype}, {tuple(inputs.q.shape)}, {options}: {', '.join(launched)}")
    expected(case, inputs, **options).check(**results)


def problems(backend: str):
    """(inputs, options) that the texts take in turn."""
    half = ("bfloat16", "float16")
    dtypes = {"simt": ("float32", *half), "fp16x3": ("float32",)}.get(backend, half)
    slow = backend in ("simt", "fp16x3")  # whose products are loops here
    rows, columns = (70, 150) if slow else (150, 330)
    lengths = {"batch": 2, "seqlen_q": rows, "seqlen_k": columns}
    for number, (head_dim, heads) in enumerate(((64, (2, 1)), (128, (2, 2)), (40, (3, 1)))):
        shape = lengths | {"heads_q": heads[0], "heads_kv": heads[1], "head_dim": head_dim}
        inputs = make_inputs("torch", dtypes[number % len(dtypes)], **shape)
        yield inputs, {"causal": True} if number == 1 else {}
    shape = {"batch": 1, "seqlen_q": 100, "seqlen_k": 100, "heads_q": 2, "head_dim": 256}
    yield make_inputs("torch", dtypes[0], **shape), {"sinks": torch.tensor([0.7, -0.4])}


def check_texts(folder: Path, backend: str) -> None:
    """Every text at one problem on sm90, half of them on the others; every problem with a text.

    Arrays have gradients, and sm90 has its masks in `check_tiles`.
    """
    of = list(problems(backend))
    for number in range(0 if backend == "sm90" else len(of), len(cases(1, 1, 1))):
        if not comes(number, backend):
            continue
        inputs, options = of[number % len(of)]
        if inputs.q.shape[-1] == 256 and backend == "fp16x3":  # too wide for its options
            continue
        shape = inputs.q.shape[2], inputs.q.shape[1], inputs.k.shape[1]
        name, case = list(cases(*shape).items())[number]
        if backend == "sm90":
            if not case.score:
                continue
            if name in ("alibi", "softcap", "table"):  # as a call generates it
                text = case.text.score.replace("divide(score, cap())", "score / cap()")
                case = case._replace(text=Score(text, **case.arrays).alone)
        case = learning(case) if case.score else case
        check_case(folder, name, case, inputs, backend, **options)


def check_beside_options(folder: Path, backend: str) -> None:
    """Texts that stand for an option, beside others: the same results as the option."""
    dtype = "float32" if backend == "fp16x3" else "bfloat16"
    text, numbers = cases(2, 200, 300), itertools.count()

    def check(name, inputs, options, given, right, kernel=""):
        if not comes(next(numbers), backend) and not kernel:
            return
        with emulator.hopper(folder) as launched, environment.override(backend=backend):
            results = run(text[name], inputs, **options, **given)
        print(f"{name}, {inputs.dtype}, {[*options, *given]}: {', '.join(launched)}")
        assert kernel in launched or not kernel
        seed = {"dropout_seed": 5} if "dropout_p" in options else {}
        options.pop("deterministic", "")
        inputs_only = {x: y for x, y in options.items() if x not in ("layout", "max_seqlens")}
        reference(inputs, **inputs_only, **right, **seed).check(**results)

    inputs = make_inputs("torch", dtype, batch=1, seqlen_q=150, seqlen_k=300, heads_q=2)
    bias = torch.randn((1, 2, 150, 300), generator=torch.Generator().manual_seed(3)).to(inputs.q)
    options = {"window": (200, 40), "dropout_p": 0.2}
    seed = torch.tensor([5])
    right = {"softcap": 5.0}
    check("softcap", inputs, options, {"dropout_seed": seed}, right)
    check("softcap", inputs, {"deterministic": "error"}, {"bias": bias}, right | {"bias": bias})
    packed = make_varlen_inputs("torch", dtype, [130, 1, 70], heads_q=2, head_dim=64)
    lengths = {"layout": "thd", "max_seqlens": (130, 130)}
    ends = {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_k": packed.cu_seqlens_k}
    slopes = {"alibi_slopes": text["alibi"].arrays["slopes"]}
    check("alibi", packed, {"causal": True} | lengths, ends, slopes)
    check("causal", packed, lengths, ends, {"causal": True})
    if backend == "sm90":  # so few queries that blocks share their keys
        inputs = make_inputs("torch", dtype, batch=1, seqlen_q=60, seqlen_k=1200, heads_q=1)
        check("softcap", inputs, {}, {}, right, kernel="flash_fwd_combine_sm90")


def check_nan_beside_tanh(folder: Path) -> None:
    """A key of NaN changes the rows that see it, and no others, where scores share a reciprocal."""
    shape = {"batch": 1, "seqlen_q": 150, "seqlen_k": 430, "heads_q": 2}
    inputs, sees = make_inputs("torch", "bfloat16", **shape), torch.ones((1, 1, 150, 430)).bool()
    sees[..., :100, 70] = sees[..., 201] = False
    above = {x: getattr(inputs, x)[:, :100] for x in ("q", "dout")}
    right = reference(dataclasses.replace(inputs, **above), softcap=5.0, bias=sees[..., :100, :])
    k = inputs.k.clone()
    k[:, 70], k[:, 201] = torch.nan, torch.inf
    for option in ({"softcap": 5.0}, {"score": Score("5.0 * tanh(score * 0.2)")}):
        with emulator.hopper(folder) as launched, environment.override(backend="sm90"):
            out, lse = attention(inputs.q, k, inputs.v, bias=sees, return_lse=True, **option)
        print(f"a NaN beside {option}: {', '.join(launched)}")
        right.check(out=out[:, :100], lse=lse[..., :100])
        assert out[:, 100:].isnan().all() and lse[..., 100:].isnan().all()


def check_nan_beside_a_bound(folder: Path, backend: str) -> None:
    """A NaN is no bound: the rows that read it are NaN, as NumPy and torch have it."""
    if not comes(1, backend):
        return
    dtype = "float32" if backend == "fp16x3" else "bfloat16"
    inputs = make_inputs("torch", dtype, batch=1, seqlen_q=70, seqlen_k=150, heads_q=2)
    up, down, nan = torch.ones(70), torch.ones(70), [3, 50]
    score = "max(-0.5, score * up(query)) + min(0.5, score * down(query))"
    text = Text(score, "", tuple(Capture(x, "float32", 1) for x in ("up", "down")))
    results = []
    for number in (1.0, torch.nan):
        up[nan[0]] = down[nan[1]] = number
        with emulator.hopper(folder), environment.override(backend=backend):
            found = run(Case(text, {"up": up, "down": down}), inputs)
        results.append(torch.cat([found["out"].flatten(2)[0], found["lse"][0].T], 1))
    seen = [x for x in range(70) if x not in nan]
    assert torch.equal(results[0][seen], results[1][seen])
    assert results[0].isfinite().all() and results[1][nan].isnan().all()


def check_falling_scores(folder: Path, backend: str) -> None:
    """Dropout beside a score that falls where q k^T grows: that of -q, once more negated."""
    dtype = "float32" if backend in ("simt", "fp16x3") else "bfloat16"
    options, seed = {"dropout_p": 0.3}, torch.tensor([5])
    for number, head_dim in enumerate((64,) if backend == "fp16x3" else (64, 160)):
        if not comes(number, backend):
            continue
        lengths = {"batch": 1, "seqlen_q": 70, "seqlen_k": 150, "heads_q": 2}
        inputs = make_inputs("torch", dtype, head_dim=head_dim, **lengths)
        negated = dataclasses.replace(inputs, q=-inputs.q)
        with emulator.hopper(folder) as launched, environment.override(backend=backend):
            results = run(Case(Text("-score", "", ()), {}), negated, **options, dropout_seed=seed)
        print(f"falling score, {dtype}, {head_dim}: {', '.join(launched)}")
        results["dq"] = -results["dq"]
        reference(inputs, **options, dropout_seed=5).check(**results)


def learning(case: Case) -> Case:
    """The same with the gradients of all its arrays of floats."""
    captures = tuple(x._replace(learns=x.dtype in FLOATS) for x in case.text.captures)
    return case._replace(text=case.text._replace(captures=captures))


def check_gradients(folder: Path, backend: str) -> None:
    """Of an array of rank 0, and in exact sums: equal bits whatever the order of the blocks."""
    dtype = "float32" if backend == "fp16x3" else "bfloat16"
    inputs = make_inputs("torch", dtype, batch=2, seqlen_q=90, seqlen_k=130, heads_q=2)
    if comes(0, backend):
        check_case(folder, "temperature", learning(temperature()), inputs, backend)
    for number, name in enumerate(("table", "gate"), 1):
        if not comes(number, backend):
            continue
        case = learning(cases(2, 90, 130)[name])
        with emulator.hopper(folder) as launched, environment.override(backend=backend):
            first, second = (run(case, inputs, deterministic="error") for _ in range(2))
            of_floats = [run(case, inputs) for _ in range(2)]
        assert launched.count("round_sums") == 2
        print(f"{name}, deterministic: {', '.join(dict.fromkeys(launched))}")
        expected(case, inputs).check(**first)
        assert all(torch.equal(x, second[name]) for name, x in first.items())
        of_capture = f"d{case.text.captures[0].name}"
        assert not torch.equal(*(x[of_capture] for x in of_floats))  # so the orders did differ


def check_gradients_beside_options(folder: Path, backend: str) -> None:
    """A text that reads a bias gives it the gradient of the option, beside other options."""
    dtypes = {"simt": ("float32", "bfloat16"), "fp16x3": ("float32",)}.get(backend, ("float16",))
    shape = {"batch": 2, "seqlen_q": 70, "seqlen_k": 100, "heads_q": 2, "heads_kv": 1}
    rng, numbers = torch.Generator().manual_seed(4), itertools.count()
    table = torch.randn((2, 2, 70, 100), generator=rng)
    mask = torch.rand((2, 100), generator=rng) < 0.7
    captures = (Capture("table", "float32", 4, True),)
    text = Text("score + table(batch, head, query, key)", "", captures)
    for dtype in dtypes:
        inputs = make_inputs("torch", dtype, head_dim=64, **shape)
        if backend == "simt":
            inputs = unaligned(inputs)
        bias = torch.randn((2, 2, 70, 100), generator=rng).to(inputs.q)
        beside = [{"key_mask": mask}, {"window": (60, 20), "dropout_p": 0.2}]
        beside += [] if backend == "fp16x3" else [{"key_mask": mask, "bias": bias}]
        for options in beside:
            if not comes(next(numbers), backend):
                continue
            seeds = [{"dropout_seed": x} for x in (torch.tensor([5]), 5)]
            given, right = (options | x if "dropout_p" in options else options for x in seeds)
            with emulator.hopper(folder) as launched, environment.override(backend=backend):
                results = run(Case(text, {"table": table}), inputs, **given)
            print(f"gradient beside {[*given]}, {dtype}: {', '.join(launched)}")
            of_tensors = "flash_bwd_captures_sm80" in launched
            assert of_tensors != (backend in ("simt", "fp16x3"))
            results["dbias"] = results.pop("dtable")
            both = table + right.get("bias", torch.zeros(1)).float()
            reference(inputs, **right | {"bias": both}).check(**results)


def check_gradients_of_packed(folder: Path, backend: str) -> None:
    """Of slopes that packed sequences share: the sum of the gradients of each."""
    dtype = "float16" if backend in ("sm80", "sm90") else "float32"
    case = learning(cases(2, 130, 130)["alibi"])
    packed = make_varlen_inputs("torch", dtype, [130, 1, 70], heads_q=2, head_dim=64)
    given = {x: getattr(packed, x) for x in ("cu_seqlens_q", "cu_seqlens_k")}
    with emulator.hopper(folder) as launched, environment.override(backend=backend):
        results = run(case, packed, layout="thd", max_seqlens=(130, 130), **given)
    print(f"packed, {dtype}: {', '.join(launched)}")
    total = None
    for start, end in itertools.pairwise(packed.cu_seqlens_q.tolist()):
        rows = {x: getattr(packed, x)[None, start:end] for x in ("q", "k", "v", "dout")}
        found = expected(case, dataclasses.replace(packed, **rows)).results["dslopes"]
        total = found if total is None else total + found
    Expected({"dslopes": total}).check(dslopes=results["dslopes"])


def unaligned(inputs: Inputs) -> Inputs:
    """The same with rows that no kernel can read 16 bytes at a time."""
    names = ("q", "k", "v", "dout")
    wide = {x: torch.nn.functional.pad(getattr(inputs, x), (1, 0)) for x in names}
    return dataclasses.replace(inputs, **{name: x[..., 1:] for name, x in wide.items()})


if __name__ == "__main__":
    torch.set_deterministic_debug_mode("error")  # then torch.empty() is filled with NaN
    for backend in sys.argv[2 : len(sys.argv) - FEW]:
        check_texts(Path(sys.argv[1]), backend)
        check_beside_options(Path(sys.argv[1]), backend)
        check_nan_beside_a_bound(Path(sys.argv[1]), backend)
        check_falling_scores(Path(sys.argv[1]), backend)
        check_gradients_beside_options(Path(sys.argv[1]), backend)
        check_gradients_of_packed(Path(sys.argv[1]), backend)
        if backend == "sm90":
            check_nan_beside_tanh(Path(sys.argv[1]))
        if backend in ("sm90", "fp16x3"):  # which add to the gradients by other kernels
            check_gradients(Path(sys.argv[1]), backend)
