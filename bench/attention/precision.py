"""The error of float32 attention against float64: cupyflash's precisions beside SDPA and bfloat16.

    python -m bench precision

The error of out, LSE, dq, dk and dv is relative to the exact result: the root mean square to its
root mean square, the maximum to its maximum. Float64 is computed by torch on the same float32
data, which bfloat16 gets rounded. Data is standard normal; "outliers" multiplies every 64th row of
v and dout by 1000, and q is multiplied by the standard deviation that the logits have to have.
How the tensor core rounds, on which the float32 method rests, is measured besides
(tensor_core.py). The results are bench/results/precision.json, the table precision.md, and the
picture precision.svg. Exit status 1 if a result of cupyflash is not finite.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.attention import tensor_core
from bench.lib import data, harness, plots, report
from bench.lib.providers import PROVIDERS, Call
from bench.lib.report import Row
from cupyflash.testing.problem import Problem

HEADS = 2
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
TO_80 = 14.0  # standard deviation of logits that reach 80
SPREADS = (1.0, 2.0, 4.0, 8.0, TO_80, 30.0, 100.0)
RESULTS = ("out", "lse", "dq", "dk", "dv")
# provider, dtype, options
IMPLS = {
    "cupyflash": ("cupyflash", "float32", {}),
    "cupyflash-tf32": ("cupyflash", "float32", {"precision": "tf32"}),
    "cupyflash-simt": ("cupyflash-simt", "float32", {}),
    "sdpa-efficient": ("sdpa-efficient", "float32", {}),
    "sdpa-math": ("sdpa-math", "float32", {}),
    "cupyflash-bfloat16": ("cupyflash", "bfloat16", {}),
}
PEERS = ("sdpa-efficient", "sdpa-math")
# Label, colour and marker in the picture, in the order in which they are drawn.
STYLES = {
    "cupyflash-bfloat16": ("cupyflash, bfloat16", plots.BLUE, "D"),
    "cupyflash-tf32": ('cupyflash, float32, "tf32"', plots.AMBER, "s"),
    "sdpa-math": ("SDPA math, float32", plots.PALE, "v"),
    "sdpa-efficient": ("SDPA efficient, float32", plots.SKY, "^"),
    "cupyflash-simt": ("cupyflash, float32, CUDA cores", plots.PINK, "x"),
    "cupyflash": ("cupyflash, float32 (default)", plots.RED, "o"),
}
PROTOCOL = "relative to float64: rms error / rms, largest error / largest magnitude; no time"


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem of `HEADS` heads and its data."""

    seqlen: int
    head_dim: int = 128
    causal: bool = False
    spread: float = 1.0  # standard deviation of the logits
    outliers: bool = False

    def __str__(self) -> str:
        data = "outliers" if self.outliers else f"logits x {self.spread:g}"
        data = "normal" if data == "logits x 1" else data
        return f"{data} D={self.head_dim} {'causal' if self.causal else 'full'} {self.seqlen}"

    def tensors(self) -> tuple[Any, ...]:
        """q, k, v, dout (1, seqlen, HEADS, head_dim) in float32."""
        shape = (self.head_dim, 1, self.seqlen, HEADS, HEADS, self.causal)
        q, k, v, dout = data.of_problem(Problem("float32", *shape))
        q *= self.spread
        if self.outliers:
            v[:, ::64] *= 1e3
            dout[:, ::64] *= 1e3
        return q, k, v, dout


def cases(lengths: Sequence[int]) -> Iterator[Case]:
    """Each once: every length, every range of logits, and all data in all kinds of problems."""
    middle = lengths[len(lengths) // 2] if 4096 not in lengths else 4096
    found = [Case(seqlen) for seqlen in lengths]
    found += [Case(middle, spread=spread) for spread in SPREADS]
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        found += [Case(n, head_dim, causal) for n in (lengths[0], middle, lengths[-1])]
        found.append(Case(middle, head_dim, causal, outliers=True))
        found.append(Case(middle, head_dim, causal, spread=TO_80))
    yield from dict.fromkeys(found)


def exact_results(case: Case, tensors: Sequence[Any]) -> tuple[dict[str, Any], float]:
    """{name: tensor} in float64 as `results_of` returns them, and the largest logit's magnitude."""
    import torch

    heads, largest = [], 0.0
    for head in range(HEADS):
        q, k, v, dout = (x[0, :, head].double() for x in tensors)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        logits = q @ k.T * case.head_dim**-0.5
        largest = max(largest, float(logits.detach().abs().max()))
        if case.causal:
            logits = logits.masked_fill(torch.ones_like(logits).triu(1) > 0, -torch.inf)
        out = logits.softmax(-1) @ v
        gradients = torch.autograd.grad(out, leaves, dout)
        heads.append((out.detach(), logits.detach().logsumexp(-1), *gradients))
    results = dict(zip(RESULTS, map(torch.stack, zip(*heads)), strict=True))
    layout = {name: x[None].transpose(1, 2) for name, x in results.items() if name != "lse"}
    return {**results, "lse": results["lse"][None], **layout}, largest


def results_of(impl: str, case: Case, tensors: Sequence[Any]) -> dict[str, Any]:
    """{name: tensor} (1, seqlen, HEADS, head_dim); the LSE (1, HEADS, seqlen) if there is one."""
    import torch

    name, dtype, options = IMPLS[impl]
    tensors = [x.to(getattr(torch, dtype)) for x in tensors]
    call = Call(PROVIDERS[name], tensors, case.causal, **options)
    found = dict(zip(("dq", "dk", "dv"), call.backward(), strict=True))
    found = {key: call.to_layout(x) for key, x in (("out", call.graph[0].detach()), *found.items())}
    if impl.startswith("cupyflash"):
        both = Call(PROVIDERS[name], tensors, case.causal, return_lse=True, **options)
        found["lse"] = both.forward()[1]
    elif impl == "sdpa-efficient":
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        lse = efficient(call.q, call.k, call.v, None, True, 0.0, case.causal)[1]
        found["lse"] = lse[..., : case.seqlen]  # rounded up to a multiple of 32
    return found


def errors(found: dict[str, Any], exact: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{"rms": {name: error}, "max": ...} of these results."""
    of: dict[str, dict[str, float]] = {"rms": {}, "max": {}}
    for name in (x for x in RESULTS if x in found):
        assert bool(found[name].isfinite().all()), f"{name}: not finite everywhere"
        error, right = (found[name].double() - exact[name]).abs(), exact[name].abs()
        of["max"][name] = float(f"{float(error.max() / right.max()):.3g}")
        rms = float((error.square().mean() / right.square().mean()).sqrt())
        of["rms"][name] = float(f"{rms:.3g}")
    return of


def measure(run: harness.Run, case: Case) -> None:
    """Add a row for each implementation."""
    tensors = case.tensors()
    exact, largest = exact_results(case, tensors)

    def checked(impl: str) -> Callable[[], Any]:
        of = errors(results_of(impl, case, tensors), exact)
        fields = dataclasses.asdict(case) | {"largest_logit": round(largest, 1)}
        run.rows.append({"case": str(case), **fields, "impl": impl, **of})
        return lambda: None

    run.notes.working(str(case), IMPLS, checked)


def precision_table(rows: list[Row]) -> Any:
    """case | result | rms and largest error of each implementation; a dash where there is none."""
    table = report.new_table("case", "result", right=tuple(IMPLS))
    for case, group in itertools.groupby(rows, lambda row: row["case"]):
        of = {row["impl"]: row for row in group}
        for i, name in enumerate(RESULTS):
            figures = [
                f"{of[x]['rms'][name]:.1e} {of[x]['max'][name]:.1e}"
                if name in of.get(x, {}).get("rms", {})
                else "-"
                for x in IMPLS
            ]
            table.add_row("" if i else case, name, *figures)
    return table


def summary(rows: list[Row]) -> list[str]:
    """How often cupyflash's error is at most SDPA's, and the worst ratio to it."""
    lines = []
    for peer, kind in itertools.product(PEERS, ("rms", "max")):
        of = {(row["case"], row["impl"]): row[kind] for row in rows}
        ratios = {
            f"{name} of {case}": of[case, "cupyflash"][name] / error
            for (case, impl), errors in of.items()
            for name, error in errors.items()
            if impl == peer and error and of.get((case, "cupyflash"), {}).get(name)
        }
        if ratios:
            worst, below = max(ratios, key=ratios.get), sum(x <= 1 for x in ratios.values())
            mean = report.geometric_mean(list(ratios.values()))
            lines.append(
                f"{kind} error of cupyflash / {peer}: geometric mean {mean:.2f}, at most 1 in "
                f"{below} of {len(ratios)}, worst {ratios[worst]:.2f} ({worst})"
            )
    return lines


def worst(row: Row) -> float:
    """The largest of the rms errors of out and the gradients."""
    return max(row["rms"][name] for name in RESULTS if name != "lse")  # SDPA gives no LSE


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture: error by length, and by the largest logit."""
    rows = [x for x in results["rows"] if x["head_dim"] == 128]
    rows = [x for x in rows if not (x["causal"] or x["outliers"])]
    most = max((row["seqlen"] for row in rows if row["spread"] != 1), default=0)
    panels = (
        ("Error hardly grows with the length", "seqlen", [x for x in rows if x["spread"] == 1]),
        (
            f"Error grows with the logits in every precision (length {most})",
            "largest_logit",
            [x for x in rows if x["seqlen"] == most],
        ),
    )
    with plots.picture(path, (10, 4.4), 1, 2, sharey=True) as (figure, ((left, right),)):
        for axes, (title, key, shown) in zip((left, right), panels):
            for impl, (label, colour, marker) in STYLES.items():
                points = sorted((row[key], worst(row)) for row in shown if row["impl"] == impl)
                look = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.6}
                axes.plot(*zip(*points), label=label, **look) if points else None
            axes.set_xscale("log", base=2)
            ticks = sorted({row[key] for row in shown})
            axes.set_xticks(ticks, [f"{x:.0f}" for x in ticks])
            axes.minorticks_off()
            axes.set_yscale("log")
            plots.grid(axes)
            axes.set_title(title)
        left.set_xlabel("sequence length")
        right.set_xlabel("largest magnitude of a logit")
        left.set_ylabel("rms error / rms, worst of out, dq, dk, dv")
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=3)


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("precision", __doc__, repeats=None)
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), metavar="N")
    options = parser.parse_args(arguments)
    import torch

    torch.set_float32_matmul_precision("highest")  # of sdpa-math
    run = harness.Run("precision", PROTOCOL, arguments, options, timed=False)
    run.out.width = report.WIDTH if not run.out.is_terminal else None
    asked = None
    if torch.cuda.is_available():
        asked = run.fields["tensor_core"] = tensor_core.measure(tensor_core.mma)
    for case in run.each(cases(sorted(options.lengths))):
        measure(run, case)
    tables = [precision_table(run.rows), *([tensor_core.table(asked)] if asked else [])]
    lines = summary(run.rows)
    status = run.finish(*tables, *lines)
    run.write_page(tables, lines, "Relative errors, root mean square and largest,")
    run.draw(draw)
    return status
