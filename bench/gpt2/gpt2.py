"""GPT-2 from prompt to text: naive, flash and fused, beside transformers.

    python -m bench gpt2 --random small

Prefill is 8 x 1024 tokens by CUDA events as in bench attention. Decode is greedy after a prompt,
with the tokens on the host as they come: the host's clock from the first token to the last, the
median of the repeats. Logits after a prompt are compared with transformers in float64 first; who
is off by more than twice transformers in this dtype, plus rounding, is left out and said so; exit
status 1 if that is cupyflash. (The compiled one is checked before it is compiled, as each shape is
compiled anew.) After --seconds transformers is left out. HBM traffic comes from ncu (--ncu) or is
not shown.
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

from bench.gpt2 import measure
from bench.gpt2.measure import ops_of, our_models, prefill_shape
from bench.gpt2.ops import prompt_attention
from bench.gpt2.report import draw, peers_table, story_table
from bench.lib import harness, traffic
from bench.lib.deadline import Deadline
from bench.lib.report import Row
from cupyflash.commands.generate import DTYPES
from cupyflash.models.gpt2.config import SIZES

PEERS = ("transformers-eager", "transformers-sdpa", "transformers-compile")
SECONDS = 35.0  # so that all of it ends within a minute; compiling alone takes a quarter of one
PROTOCOL = (
    "prefill: CUDA events, L2 cold and clean, launch cost hidden, in turn, median of {repeats}; "
    "decode: greedy, host clock from the first token to the last of {new_tokens}, median of "
    "{repeats}; "
    "ops: as prefill, each by itself, batch 1; transformers without generate(), compile with "
    "reduce-overhead and a static cache; bytes by ncu (dram__bytes)"
)


def make_parser() -> argparse.ArgumentParser:
    parser = harness.parser("gpt2", __doc__, repeats=5)  # --output names a picture, too
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="checkpoint folder")
    source.add_argument("--random", choices=SIZES, default="small")
    add("--dtype", choices=DTYPES, default="fp16")
    add("--new-tokens", type=int, default=64)
    add("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    add("--seconds", type=float, default=SECONDS, help="after these no peer goes on")
    add("--ncu", action="store_true", help="measure HBM traffic too")
    add("--profile", action="store_true", help=argparse.SUPPRESS)
    return parser


def profile(options: argparse.Namespace) -> int:
    """Runs attention over prompts and each operation of a token, for ncu."""
    models = our_models(options)
    calls = {mode: prompt_attention(x, *prefill_shape(x)).call for mode, x in models.items()}
    for mode, ops in ops_of(models).items():
        calls |= {f"{mode}: {op.name}": op.call for op in ops}
    traffic.profile(calls)
    return 0


def add_traffic(arguments: list[str], bench: Any, ops: list[Row], notes: Any) -> dict[str, Row]:
    """Bytes of each row of ``ops``, in place, and of attention over prompts by mode."""
    run = [*(x for x in arguments if x != "--ncu"), "--profile"]
    try:
        moved = traffic.bytes_of("gpt2", run)
    except Exception as error:  # no ncu, no rights, too old
        notes.left_out("ncu", error, "the traffic")
        return {}
    for row in ops:
        row["bytes"] = moved[f"{row['mode']}: {row['name']}"]
    found = {}
    for mode, model in bench.ours.items():
        flops = prompt_attention(model, *prefill_shape(model)).flops
        found[mode] = {"bytes": moved[mode], "flop_per_byte": round(flops / moved[mode], 1)}
    return found


def main(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    if options.profile:
        return profile(options)
    deadline = Deadline(options.seconds)
    run = harness.Run("gpt2", PROTOCOL, arguments, options)
    bench, moved = measure.Bench(options, run, deadline), {}
    decoding = (functools.partial(bench.decode, *x) for x in measure.DECODE)
    for part in run.each([*decoding, bench.prefill]):
        run.rows += part()
    ops = bench.ops()
    if options.ncu:
        moved = add_traffic(arguments, bench, ops, run.notes)
    run.fields |= {"attention_traffic": moved, "ops": ops}
    run.draw(draw)
    weight_bytes = bench.model.config.parameters * bench.model.dtype.itemsize
    tables = peers_table(run.rows, weight_bytes, run.fields["copy_gbps"])
    return run.finish(story_table(run.rows, moved), tables)
