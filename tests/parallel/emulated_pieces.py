"""Ranks that have pieces of sequences, one after another, by kernels that run on the CPU.

``python tests/parallel/emulated_pieces.py FOLDER BACKEND``; kernels are compiled into the folder.
"""

import sys
from pathlib import Path

import emulator
import texts

from cupyflash import environment
from cupyflash.parallel.tokens import Band
from cupyflash.testing import make_varlen_inputs

LENGTHS = [150, 37]


def check(folder: Path, backend: str) -> None:
    """Dropout, by each of `texts.SCORES`; and a score and a mask, with the gradient of a table."""
    dtype = "float32" if backend in ("simt", "fp16x3") else "bfloat16"
    shape = {"heads_q": 4, "heads_kv": 2, "head_dim": 64}
    inputs = make_varlen_inputs("torch", dtype, LENGTHS, **shape)
    for score in texts.SCORES:
        with emulator.hopper(folder) as launched, environment.override(backend=backend):
            found = texts.with_dropout(inputs, LENGTHS, 2, score)
        print(f"{score or 'no score'}, {dtype}: {', '.join(sorted(set(launched)))}")
        texts.expected_with_dropout(inputs).check(**found)
    for options, band in (({"causal": True}, Band(None, 0)), ({"window": (9, 4)}, Band(9, 4, 16))):
        arguments = (LENGTHS, dtype, (4, 2), 64, options)
        with emulator.hopper(folder) as launched, environment.override(backend=backend):
            found = texts.with_both(arguments, 2, band, learn=dtype != "float32")
        print(f"both, {dtype}, {options}: {', '.join(sorted(set(launched)))}")
        texts.expected(arguments, "both").check(**found)


if __name__ == "__main__":
    check(Path(sys.argv[1]), sys.argv[2])
