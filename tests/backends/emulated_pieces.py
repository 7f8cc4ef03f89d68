"""Ranks that have some heads, and pieces of sequences, by kernels that run on the CPU.

``python tests/backends/emulated_pieces.py FOLDER BACKEND``; kernels are compiled into the folder.
"""

import dataclasses
import sys
from pathlib import Path

import emulator
import torch
from emulated_scores import run
from score_texts import Case

from cupyflash import Score, environment
from cupyflash.ops.attention.score_text import Text
from cupyflash.parallel.exchange import calls
from cupyflash.parallel.pieces import DeviceCall
from cupyflash.parallel.texts import CallText
from cupyflash.parallel.tokens import Band, Tokens
from cupyflash.testing import expected, make_varlen_inputs

LENGTHS, RANKS, HEADS, GROUP, SEED = [150, 37], 2, 4, 2, 5


def check_pieces(folder: Path, backend: str, score: str) -> None:
    """Dropout, a window and ALiBi, by a score or by the option, of all ranks together."""
    dtype = "float32" if backend in ("simt", "fp16x3") else "bfloat16"
    inputs = make_varlen_inputs(
        "torch", dtype, LENGTHS, LENGTHS, heads_q=HEADS, heads_kv=HEADS // GROUP, head_dim=64
    )
    slopes = torch.linspace(0.05, 0.3, HEADS)
    options = {"window": (60, 0), "dropout_p": 0.25}
    right = expected(inputs, alibi_slopes=slopes, dropout_seed=SEED, **options)
    text, captures = Text("", "", ()), ()
    if score:
        text, captures = Score(score, slopes=slopes).alone, (slopes,)
    names = frozenset(("batch", "head", "query", "key"))
    whole = CallText(text._replace(drops=True), captures, names, 0, HEADS)
    results = {name: torch.full_like(inputs.q, torch.nan) for name in ("out", "dq")}
    results["lse"] = torch.full((HEADS, sum(LENGTHS)), torch.nan)
    results |= {name: torch.zeros(inputs.k.shape) for name in ("dk", "dv")}
    tokens = Tokens.of(LENGTHS, RANKS)
    for rank in range(RANKS):
        index = torch.from_numpy(tokens.index(rank))
        for call in calls(tokens, rank, Band(*options["window"], 16)):
            assert (call.queries < 0).any()  # pieces begin anywhere
            for first in range(0, HEADS, GROUP):
                heads = slice(first, first + GROUP)
                given = {} if score else {"alibi_slopes": slopes[heads]}
                of_heads = whole.of_heads(first)
                found = of_call(folder, backend, inputs, call, index, of_heads, heads, given)
                keys = torch.from_numpy(call.keys)
                made = DeviceCall.of(call, index.device)
                for name in ("out", "dq"):
                    rows = results[name][index]
                    made.put(found[name], rows[:, heads])
                    results[name][index] = rows
                rows = results["lse"][:, index]
                made.put(found["lse"].t(), rows[heads].t())
                results["lse"][:, index] = rows
                for name in ("dk", "dv"):
                    of_key_head = results[name][:, first // GROUP]
                    of_key_head.index_add_(0, keys, found[name][:, 0].float())
    results |= {name: results[name].to(inputs.q.dtype) for name in ("dk", "dv")}
    right.check(**results)


def of_call(folder, backend, inputs, call, index, text, heads, given):
    """The results of one call for some query heads, whose key head is one.

    Args:
        given: other arrays of `Extras`.
    """
    made, keys = DeviceCall.of(call, index.device), torch.from_numpy(call.keys)
    kv = slice(heads.start // GROUP, heads.start // GROUP + 1)
    parts = {name: made.rows(getattr(inputs, name)[index][:, heads]) for name in ("q", "dout")}
    parts |= {name: getattr(inputs, name)[keys][:, kv] for name in ("k", "v")}
    of_call, captures = text.of(made.places)
    arrays = {x.name: y for x, y in zip(of_call.captures, captures, strict=True)}
    left, right = call.window
    options = {
        "layout": "thd", "max_seqlens": call.longest, "window": (left, right), "dropout_p": 0.25,
        "cu_seqlens_q": made.cu_seqlens_q, "cu_seqlens_k": made.cu_seqlens_k,
        "dropout_seed": torch.tensor([SEED]), **given,
    }  # fmt: skip
    with emulator.hopper(folder) as launched, environment.override(backend=backend):
        found = run(Case(of_call, arrays), dataclasses.replace(inputs, **parts), **options)
    print(f"{text.text.score or 'no score'}, {inputs.dtype}, heads {heads}: {', '.join(launched)}")
    return found


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # then torch.empty() is filled with NaN
    for score in ("score - slopes(head) * abs(query - key)", ""):
        check_pieces(Path(sys.argv[1]), sys.argv[2], score)
