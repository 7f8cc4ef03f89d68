"""Texts whose parts a warp computes once on sm90, in kernels that run on the CPU (test_parts.py).

``python tests/backends/emulated_parts.py FOLDER [few]``, as emulated_scores.py.
"""

import dataclasses
import itertools
import sys
from pathlib import Path

import emulator
import torch
from emulated_scores import FEW, check_case, expected, learning, run
from score_texts import Case

from cupyflash import Score, environment
from cupyflash.testing import Expected, make_inputs, make_varlen_inputs

LENGTH = 440  # of the longest sequence


def cases(heads: int) -> dict[str, Case]:
    """The texts by name; those behind the fifth one are left to the run with a GPU."""
    rng = torch.Generator().manual_seed(11)
    table, far = torch.randn(heads, 41, generator=rng), torch.randn(heads, 881, generator=rng)
    up, down = torch.randn(2, LENGTH, generator=rng), torch.randn(2, LENGTH, generator=rng)
    rising = torch.arange(LENGTH) * 0.4  # so that maxima come late
    # Keys that are hidden, a tile of them, too; rows whose factor is not above 0.
    hidden = torch.where(torch.rand(2, LENGTH, generator=rng) < 0.1, -torch.inf, down)
    hidden[:, 128:256] = -torch.inf
    factors = torch.where(torch.arange(LENGTH) // 16 % 3 == 0, up, up.abs())
    factors[:, 7], factors[:, 77] = 0.0, 1e-30

    return {
        "far tiles have one number": _case(
            "0.5 + (score - table(head, clamp(key - query, -20, 20) + 20)) - head",
            {"table": table},
            lambda s, b, h, q, k, c: (
                0.5 + (s - c["table"][h, torch.clamp(k - q, -20, 20) + 20]) - h
            ),
        ),
        "all three": _case(
            "score * sigmoid(up(batch, query)) + exp(down(batch, key)) + "
            "where(query % 2 == 0, 0.3, far(head, key - query + 440))",
            {"up": up, "down": down, "far": far},
            lambda s, b, h, q, k, c: (
                s * torch.sigmoid(c["up"][b, q])
                + torch.exp(c["down"][b, k])
                + torch.where(q % 2 == 0, 0.3, c["far"][h, k - q + 440])
            ),
        ),
        "terms of keys": _case(
            "(0.3 - down(batch, key)) - "
            "(up(batch, query) - score / 1.5 * sigmoid(up(batch, query)))",
            {"up": up, "down": down},
            lambda s, b, h, q, k, c: (
                0.3 - c["down"][b, k] - c["up"][b, q] + s / 1.5 * torch.sigmoid(c["up"][b, q])
            ),
        ),
        "terms out of range": _case(
            "factors(batch, query) * score + hidden(batch, key)",
            {"factors": factors, "hidden": hidden},
            lambda s, b, h, q, k, c: s * c["factors"][b, q] + c["hidden"][b, k],
        ),
        # Far from the diagonal these are lines, or constants.
        "one slope on each side": _case(
            "0.25 - head - (slopes(head) * abs(query - key) / 3.0 + 1.5) + score",
            {"slopes": torch.tensor([0.7, -0.2])[:heads]},  # with which maxima come late
            lambda s, b, h, q, k, c: 0.25 - h - (c["slopes"][h] * (q - k).abs() / 3.0 + 1.5) + s,
        ),
        "a slope on one side": _case(
            "score + max(2 * (query - key) - 7, -20) * slopes(head)",
            {"slopes": torch.tensor([-0.03, 0.02])[:heads]},
            lambda s, b, h, q, k, c: s + torch.clamp(2 * (q - k) - 7, min=-20) * c["slopes"][h],
        ),
        "a line on one side": _case(
            "score - where(query - key >= 30, slopes(head), sin(0.1 * (key - query)))",
            {"slopes": torch.tensor([0.3, 0.2])[:heads]},
            lambda s, b, h, q, k, c: (
                s - torch.where(q - k >= 30, c["slopes"][h], torch.sin(0.1 * (k - q)))
            ),
        ),
        "late maxima": _case(
            "score + rising(abs(key - query)) * (head + 1)",
            {"rising": rising},
            lambda s, b, h, q, k, c: s + c["rising"][(k - q).abs()] * (h + 1),
        ),
        "a slope of the score": _case(
            "score * sigmoid(score * up(batch, query)) - down(batch, key)",
            {"up": up, "down": down},
            lambda s, b, h, q, k, c: s * torch.sigmoid(s * c["up"][b, q]) - c["down"][b, k],
        ),
        "slopes of distances": _case(
            "where(key < 7, score, score * far(head, query - key + 440)) / 1.5",
            {"far": far},
            lambda s, b, h, q, k, c: torch.where(k < 7, s, s * c["far"][h, q - k + 440]) / 1.5,
        ),
    }


def _case(text: str, arrays: dict[str, torch.Tensor], function) -> Case:
    return learning(Case(Score(text, **arrays).alone, arrays, function))


def problems():
    """Rows and columns past the end, tiles far from the diagonal, and heads that share keys."""
    shapes = (
        ({"seqlen_q": 150, "seqlen_k": 437, "head_dim": 64, "heads_q": 2, "heads_kv": 1}, {}),
        ({"seqlen_q": 200, "seqlen_k": 300, "head_dim": 128, "heads_q": 2}, {"causal": True}),
        ({"seqlen_q": 440, "seqlen_k": 129, "head_dim": 96, "heads_q": 2}, {}),
    )
    for number, (shape, options) in enumerate(shapes):
        dtype = ("bfloat16", "float16")[number % 2]
        yield make_inputs("torch", dtype, batch=2, **shape), options


def check_shared_keys(folder: Path) -> None:
    """So few queries that blocks share their keys: each begins at a tile of its own."""
    shape = {"batch": 1, "seqlen_q": 60, "seqlen_k": 1200, "heads_q": 1, "head_dim": 64}
    one, terms = (cases(2)[name] for name in ("far tiles have one number", "terms of keys"))
    long = {name: x.repeat(1, 3) for name, x in terms.arrays.items()}
    for case in (one, terms._replace(arrays=long)):
        inputs = make_inputs("torch", "bfloat16", **shape)
        check_case(folder, f"shared keys, {case.text.score}", case, inputs, "sm90")


def check_options(folder: Path) -> None:
    """What comes behind a score, beside terms of keys."""
    shape = {"batch": 1, "seqlen_q": 200, "seqlen_k": 440, "heads_q": 2, "head_dim": 64}
    sinks = torch.tensor([0.7, -0.4])
    for options in ({"sinks": sinks}, {"sinks": sinks, "causal": True}):
        inputs = make_inputs("torch", "float16", **shape)
        check_case(folder, "options", cases(2)["terms of keys"], inputs, "sm90", **options)


def check_large_terms(folder: Path) -> None:
    """Terms above the limit of the product; the LSE keeps no digit, so there are no gradients."""
    case, (inputs, _) = cases(2)["terms out of range"], next(problems())
    case.arrays["hidden"][:, 290] = torch.tensor([-1e30, 1e19])
    with emulator.hopper(folder) as launched, environment.override(backend="sm90"):
        results = run(case, inputs)
    print(f"large terms: {', '.join(launched)}")
    right = Expected({x: expected(case, inputs).results[x] for x in ("out", "lse")})
    right.check(out=results["out"], lse=results["lse"])


def check_terms_that_cancel(folder: Path) -> None:
    """Numbers of queries and keys cancel, as far as they are large: these have the same results."""
    inputs, _ = next(problems())
    x = torch.randint(-3, 1, (2, LENGTH), generator=torch.Generator().manual_seed(2)).cumsum(1)
    found = []
    for large in (0.0, 2.0**20):
        arrays = {"x": x * 0.25 + large}  # both without rounding
        case = Case(
            Score("score + (x(batch, query) - x(batch, key))", **arrays).alone, arrays, None
        )
        with emulator.hopper(folder), environment.override(backend="sm90"):
            found.append(run(case, inputs))
    torch.testing.assert_close(found[1]["lse"], found[0]["lse"], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found[1]["out"], found[0]["out"], rtol=0.01, atol=0.01)


def check_packed(folder: Path) -> None:
    """Sequences of other lengths, each by itself."""
    packed = make_varlen_inputs("torch", "bfloat16", [130, 1, 270], heads_q=2, head_dim=64)
    given = {x: getattr(packed, x) for x in ("cu_seqlens_q", "cu_seqlens_k")}
    for name in ("all three", "terms of keys"):
        case = cases(2)[name]
        arrays = {x: torch.cat([y, y[:1]]) if x != "far" else y for x, y in case.arrays.items()}
        case = case._replace(arrays=arrays)
        with emulator.hopper(folder) as launched, environment.override(backend="sm90"):
            results = run(case, packed, layout="thd", max_seqlens=(270, 270), **given)
        print(f"packed, {name}: {', '.join(launched)}")
        for number, (start, end) in enumerate(itertools.pairwise(packed.cu_seqlens_q.tolist())):
            rows = {x: getattr(packed, x)[None, start:end] for x in ("q", "k", "v", "dout")}
            one = case._replace(
                arrays={x: y[number:] if x != "far" else y for x, y in case.arrays.items()}
            )
            right = expected(one, dataclasses.replace(packed, **rows))
            names = ("out", "dq", "dk", "dv")
            right = Expected({x: right.results[x] for x in names})
            right.check(**{x: results[x][None, start:end] for x in names})


if __name__ == "__main__":
    torch.set_deterministic_debug_mode("error")  # then torch.empty() is filled with NaN
    for number, (name, case) in enumerate(cases(2).items()):
        for turn, (inputs, options) in enumerate(problems()):
            if FEW and (number > 4 or turn != number % 3):
                continue
            check_case(Path(sys.argv[1]), name, case, inputs, "sm90", **options)
    check_large_terms(Path(sys.argv[1]))
    check_terms_that_cancel(Path(sys.argv[1]))
    if not FEW:
        check_options(Path(sys.argv[1]))
        check_shared_keys(Path(sys.argv[1]))
        check_packed(Path(sys.argv[1]))
