"""Train the same small GPT with eager attention, SDPA and cupyflash; the losses must coincide.

    python -m bench train_char_gpt

It predicts the bytes of Python's own standard library, or of the files given. All runs have the
same first weights and batches, and compute in bfloat16 (autocast).

**Noise.** Training amplifies rounding: two correct runs whose sums are added up in another order
part after some steps, and no step is then equal. How far they part is measured in the same run,
with SDPA alone: once with the backend of torch's choice, once with its "math" backend (another
order of the sums, other roundings), once with every first weight moved by at most one last place of
float32. Losses are averaged over 20 steps. The largest distance of any two of these three curves at
any step is the noise; the curves of eager attention and cupyflash may be as far from SDPA's as
three times the noise, and 2^-23 of the loss, and the script exits with 1 if one is further away.

Tokens per second are those of whole training steps after the tenth, on the host's clock.
"""

import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.table import Table

from bench.lib import data, harness, plots, report
from bench.lib.report import Row
from bench.transformers.gpt import GPT, Size, autocast, held, make_model

SIZE = Size(layers=6, width=512, heads=8, seqlen=1024, batch=16)
SMOOTHED, MARGIN, WARM = 20, 3.0, 10
COMPARED = ("eager", "sdpa", "cupyflash")
MOVED = "sdpa, weights moved"
NOISE = ("sdpa", "sdpa-math", MOVED)
PROTOCOL = (
    f"losses averaged over {SMOOTHED} steps; noise: largest distance of two of {', '.join(NOISE)}; "
    f"allowed: {MARGIN:g} times that and 2^-23 of the loss; tokens/s of the steps after number "
    f"{WARM}, host clock"
)


def standard_library() -> list[Path]:
    """Python's own modules, in an order that does not change."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def batches(files: Sequence[Path], size: Size, steps: int, device: str) -> list[torch.Tensor]:
    """Tokens (batch, seqlen + 1) for each step, from random places of the text."""
    text = b"\n".join(path.read_bytes() for path in files)
    if len(text) <= size.seqlen + 1:
        raise ValueError(f"train_char_gpt: text must be longer than {size.seqlen} bytes")
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - size.seqlen, (steps, size.batch, 1), generator=generator)
    return [text[x].long() for x in (starts + torch.arange(size.seqlen + 1)).to(device)]


def train(
    model: GPT, optimizer: torch.optim.Optimizer, data: list[torch.Tensor], device: str
) -> tuple[list[float], float]:
    """(loss of each step, seconds per step)."""
    losses, begin = [], time.perf_counter()
    for step, tokens in enumerate(data):
        if step == WARM:
            synchronize(device)
            begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 50)
        with autocast(device):
            loss = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    synchronize(device)
    timed = len(data) - WARM if len(data) > WARM else len(data)
    return torch.stack(losses).tolist(), (time.perf_counter() - begin) / timed


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def move(model: GPT) -> None:
    """Each weight by one last place up, down, or not at all."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for x in model.parameters():
            step = torch.randint(-1, 2, x.shape, generator=generator).to(x.device)
            x.mul_(1 + step * torch.finfo(x.dtype).eps)


def smoothed(losses: Sequence[float]) -> numpy.ndarray:
    """Means of SMOOTHED neighbouring steps, or of all where there are fewer."""
    width = min(SMOOTHED, len(losses))
    return numpy.convolve(losses, numpy.full(width, 1 / width), "valid")


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    return float(numpy.abs(smoothed(a) - smoothed(b)).max())


def allowed(losses: dict[str, list[float]]) -> float:
    """How far from SDPA's curve another may be, as said above."""
    noise = max(distance(losses[a], losses[b]) for a in NOISE for b in NOISE)
    return MARGIN * noise + 2.0**-23 * max(losses["sdpa"])


def curves(size: Size, files: Sequence[Path], steps: int, device: str) -> list[Row]:
    """One row for each run, those of COMPARED first."""
    data, rows, losses = batches(files, size, steps, device), [], {}
    for name in dict.fromkeys(COMPARED + NOISE):
        model, optimizer = make_model(size, name.partition(",")[0], device)
        if name == MOVED:
            move(model)
        with held(name.partition(",")[0]):
            losses[name], seconds = train(model, optimizer, data, device)
        rows.append({"impl": name, "tokens_per_s": round(size.tokens / seconds)})
    limit = allowed(losses)
    for row in rows:
        curve = losses[row["impl"]]
        row["last_loss"] = round(float(smoothed(curve)[-1]), 5)
        row["distance"] = distance(curve, losses["sdpa"])
        row |= {"allowed": limit, "losses": [round(x, 6) for x in curve]}
    return rows


def coincides(row: Row) -> bool:
    """False also for a curve that is not finite."""
    return row["distance"] <= row["allowed"]


def table(rows: list[Row]) -> Table:
    figures = ("tokens/s", "vs SDPA", "last loss", "from SDPA's curve", "allowed")
    found = report.new_table("attention", right=figures)
    sdpa = next(row["tokens_per_s"] for row in rows if row["impl"] == "sdpa")
    for row in rows:
        found.add_row(
            row["impl"],
            f"{row['tokens_per_s']:,}",
            f"{row['tokens_per_s'] / sdpa:.2f}",
            f"{row['last_loss']:.4f}",
            f"{row['distance']:.2g}",
            f"{row['allowed']:.2g}" if row["impl"] in COMPARED else "",
            style="bold" if row["impl"] == "cupyflash" else "",
        )
    return found


def title_of(results: dict[str, Any]) -> str:
    return f"GPT of {results['size']} on {results['gpu']}"


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture: the three curves, and below them how far each is from SDPA's."""
    rows = results["rows"]
    colours = {"eager": plots.PALE, "sdpa": plots.BLUE, "cupyflash": plots.RED}
    shared = {"sharex": True, "height_ratios": (2, 1)}
    with plots.picture(path, (8, 6), 2, 1, **shared) as (_, ((above,), (below,))):
        losses = {row["impl"]: row["losses"] for row in rows}
        reference = smoothed(losses["sdpa"])
        first = min(SMOOTHED, len(losses["sdpa"]))
        steps = numpy.arange(first, first + len(reference))
        for name, style, width in zip(COMPARED, ("-", "--", ":"), (3.0, 2.0, 2.0)):
            look = {"color": colours[name], "linestyle": style, "linewidth": width}
            rate = next(row["tokens_per_s"] for row in rows if row["impl"] == name)
            above.plot(steps, smoothed(losses[name]), label=f"{name}: {rate:,} tokens/s", **look)
            below.plot(steps, smoothed(losses[name]) - reference, **look)
        limit = rows[0]["allowed"]
        below.axhspan(-limit, limit, color=plots.GREY, alpha=0.3, zorder=0, label="allowed")
        above.set_ylabel(f"loss, mean of {first} steps")
        below.set_ylabel("minus SDPA's")
        below.set_xlabel("step")
        above.set_title(title_of(results))
        for axis in (above, below):
            plots.grid(axis)
            axis.legend(loc="upper right")


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("train_char_gpt", __doc__, repeats=None, output=False)
    parser.add_argument("--text", nargs="+", type=Path, help="files to train on")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args(arguments)
    run = harness.Run("train_char_gpt", PROTOCOL, arguments, options, timed=False, size=str(SIZE))
    run.rows += curves(SIZE, options.text or standard_library(), options.steps, data.DEVICE)
    run.draw(draw)
    wrong = [row["impl"] for row in run.rows if row["impl"] in COMPARED and not coincides(row)]
    lines = [
        f"WRONG: the curve of {name} is further from SDPA's than noise explains" for name in wrong
    ]
    run.finish(title_of(run.results), table(run.rows), *lines)
    return int(bool(wrong))
