"""Ranks that have pieces of sequences, one after another, by kernels that run on the CPU.

``python tests/parallel/emulated_pieces.py FOLDER BACKEND ... [few]``; kernels are compiled into the
folder. With ``few`` each case runs on two of the four backends.
"""

import sys
from pathlib import Path

import emulator
import texts
import torch

from cupyflash import Mask, environment
from cupyflash.ops.attention.options import NO_EXTRAS
from cupyflash.parallel import pieces
from cupyflash.parallel.exchange import calls
from cupyflash.parallel.texts import CallText, text_of
from cupyflash.parallel.tokens import Band, Tokens
from cupyflash.testing import make_varlen_inputs

LENGTHS = [150, 37]
FEW = "few" in sys.argv[1:]


def check(folder: Path, backend: str) -> None:
    """Dropout, by each of `texts.SCORES`; and a score and a mask, with the gradient of a table."""
    dtype = "float32" if backend in ("simt", "fp16x3") else "bfloat16"
    shape = {"heads_q": 4, "heads_kv": 2, "head_dim": 64}
    inputs = make_varlen_inputs("torch", dtype, LENGTHS, **shape)
    first = backend in ("sm90", "simt")
    step = slice(first, None, 2) if FEW else slice(None)
    for score in texts.SCORES[step]:
        with emulator.hopper(folder) as launched, environment.override(backend=backend):
            found = texts.with_dropout(inputs, LENGTHS, 2, score)
        print(f"{score or 'no score'}, {dtype}: {', '.join(sorted(set(launched)))}")
        texts.expected_with_dropout(inputs).check(**found)
    both = (({"causal": True}, Band(None, 0)), ({"window": (9, 4)}, Band(9, 4, 16)))
    for options, band in both[step]:
        arguments = (LENGTHS, dtype, (4, 2), 64, options)
        with emulator.hopper(folder) as launched, environment.override(backend=backend):
            found = texts.with_both(arguments, 2, band, learn=dtype != "float32")
        print(f"both, {dtype}, {options}: {', '.join(sorted(set(launched)))}")
        texts.expected(arguments, "both").check(**found)


def check_tiles(folder: Path) -> None:
    """The tiles of a mask are found once for each call of a rank, whatever its heads."""
    shape = {"heads_q": 4, "heads_kv": 2, "head_dim": 64}
    inputs = make_varlen_inputs("torch", "bfloat16", LENGTHS, **shape)
    document = torch.arange(150).repeat(2, 1) // 50
    mask = Mask(lambda b, h, q, k: document[b, q] == document[b, k]).tiles()
    *written, found = text_of(None, mask, tuple(LENGTHS), 4)
    text = CallText(*written, texts.PLACES, 0, 4, found)
    tokens = Tokens.of(LENGTHS, 2)
    made = [calls(tokens, rank, Band()) for rank in range(2)]
    on_device = [[pieces.DeviceCall.of(x, inputs.q.device) for x in some] for some in made]
    with emulator.hopper(folder) as launched, environment.override(backend="sm90"):
        for rank, head, finds in ((0, 0, True), (0, 2, False), (1, 0, True), (0, 0, False)):
            index, keys = (torch.from_numpy(x) for x in (tokens.index(rank), made[rank][0].keys))
            q = inputs.q[index][:, head : head + 2]
            pair = [x[keys][:, head // 2 : head // 2 + 1] for x in (inputs.k, inputs.v)]
            results = []
            for of_call in (text.of_heads(head), text._replace(found=None)):
                launched.clear()
                results += pieces.forward(on_device[rank], q, [pair], {}, NO_EXTRAS, of_call)
                print(f"tiles: {', '.join(launched)}")
                assert "flash_fwd_sm90" in launched
                assert ("mask_tiles" in launched) == (finds or of_call.found is None)
            assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


if __name__ == "__main__":
    for backend in sys.argv[2 : len(sys.argv) - FEW]:
        check(Path(sys.argv[1]), backend)
        if backend == "sm90":
            check_tiles(Path(sys.argv[1]))
