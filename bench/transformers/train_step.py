"""Time of a training step of a 124M GPT-2 and of two small models, with SDPA and cupyflash.

    python -m bench train_step
    python -m bench train_step --only small

| model | layers, width, heads | vocabulary | batches |
|---|---|---|---|
| gpt2 | 12, 768, 12 | 50304 | 16 x 1024, 4 x 4096 |
| small | 6, 768, 12 | 256 | 8 x 1024 |
| small | 6, 512, 8 | 256 | 2 x 256 |

Each is eager, compiled by torch.compile, and compiled with CUDA graphs (mode "reduce-overhead").
The models have bfloat16 autocast and fused AdamW; the optimizer is in no graph. A sample is the
host's clock around ten steps (forward, backward, optimizer) and a synchronisation; implementations
in turn, in a random order; the median of the samples counts. The first losses of all
implementations must agree to 2^-8, bfloat16's last place; one that does not is left out, and the
exit status is 1. SDPA is held to each of its backends: "vs SDPA" is the time of the best of them
divided by the row's.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence

import torch
from rich.table import Table

from bench.lib import harness, report
from bench.lib.report import Row
from bench.lib.timing import medians
from bench.transformers.gpt import Size, autocast, held, make_model

SIZES = {
    "gpt2": (Size(12, 768, 12, 1024, 16, 50304), Size(12, 768, 12, 4096, 4, 50304)),
    "small": (Size(6, 768, 12, 1024, 8), Size(6, 512, 8, 256, 2)),
}
COMPARED = ("sdpa-flash", "sdpa-cudnn", "cupyflash")
# Options of torch.compile, None without it.
MODES = {"eager": None, "compiled": {}, "graphs": {"mode": "reduce-overhead"}}
STEPS, DEVICE = 10, "cuda"
PROTOCOL = (
    f"host clock around {STEPS} whole steps and a synchronisation, implementations in turn, in a "
    "random order; median of {repeats}; bfloat16 autocast, fused AdamW"
)


def make_step(size: Size, name: str, mode: str, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """One training step, which returns the loss before it."""
    model, optimizer = make_model(size, name, DEVICE)
    options = MODES[mode]
    forward = model if options is None else torch.compile(model, fullgraph=True, **options)

    def step() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # the results of the last step are not needed
        with held(name):
            with autocast(DEVICE):
                loss = forward(tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def checked_steps(
    size: Size, mode: str, names: Sequence[str], notes: harness.Notes
) -> dict[str, Callable[[], torch.Tensor]]:
    """The steps of those that work and agree with the first of them, warm."""
    generator = torch.Generator().manual_seed(0)
    shape = (size.batch, size.seqlen + 1)
    torch.compiler.reset()  # else the models of the last size stay in memory
    tokens = torch.randint(size.vocabulary, shape, generator=generator).to(DEVICE)
    steps, first = {}, None
    for name in names:
        try:
            step = make_step(size, name, mode, tokens)
            loss = step().item()
            first = loss if first is None else first
            if not abs(loss - first) <= 2.0**-8 * first:
                raise AssertionError(f"first loss {loss:.4f} instead of {first:.4f}")
            for _ in range(3):
                step()
            steps[name] = step
        except Exception as error:  # whatever a backend raises where it cannot do this
            notes.left_out(name, error, f"{mode} {size}")
    return steps


def sample(step: Callable[[], torch.Tensor]) -> float:
    """Milliseconds of a step."""
    begin = time.perf_counter()
    for _ in range(STEPS):
        loss = step()
    loss.item()
    return 1e3 * (time.perf_counter() - begin) / STEPS


def measure(run: harness.Run, size: Size, mode: str, repeats: int) -> None:
    """Add a row for each of COMPARED that works and agrees with the others."""
    steps = checked_steps(size, mode, COMPARED, run.notes)
    clocks = {name: functools.partial(sample, step) for name, step in steps.items()}
    for name, ms in medians(clocks, repeats).items():
        shape = {"layers": size.layers, "width": size.width, "mode": mode}
        shape |= {"seqlen": size.seqlen, "batch": size.batch, "impl": name}
        rate = round(size.tokens / ms * 1e3)
        run.rows.append({"op": "train_step", **shape, "ms": round(ms, 3), "tokens_per_s": rate})


def ratio_to_sdpa(row: Row, rows: list[Row]) -> float | None:
    """Time of SDPA's best backend divided by the row's."""
    cell = ("layers", "width", "mode", "seqlen", "batch")
    peers = [
        other["ms"]
        for other in rows
        if other["impl"].startswith("sdpa") and all(other[x] == row[x] for x in cell)
    ]
    return min(peers) / row["ms"] if peers else None


def table(rows: list[Row]) -> Table:
    figures = ("ms", "tokens/s", "vs SDPA")
    found = report.new_table("layers x width", "mode", "batch x seqlen", "attention", right=figures)
    for row in rows:
        ratio = ratio_to_sdpa(row, rows)
        found.add_row(
            f"{row['layers']} x {row['width']}",
            row["mode"],
            f"{row['batch']} x {row['seqlen']}",
            row["impl"],
            f"{row['ms']:.2f}",
            f"{row['tokens_per_s']:,}",
            "" if ratio is None else f"{ratio:.3f}",
            style="bold" if row["impl"] == "cupyflash" else "",
        )
    return found


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("train_step", __doc__, repeats=7, output=False)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES), metavar="MODEL")
    options = parser.parse_args(arguments)
    run = harness.Run("train_step", PROTOCOL, arguments, options, timed=False)
    sizes = [size for name in options.only for size in SIZES[name]]
    for size, mode in run.each(itertools.product(sizes, options.modes)):
        measure(run, size, mode, options.repeats)
    run.finish(table(run.rows))
    return int(bool(run.notes.wrong))
