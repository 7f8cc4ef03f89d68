"""Masks as texts in the kernels of Hopper that run on the CPU, against float64.

``python tests/backends/emulated_masks.py FOLDER [few]``; kernels are compiled into the folder. With
``few`` three head dims have one of `PLACES` each, and each Boolean bias one order of its sums.
"""

import itertools
import struct
import sys
from pathlib import Path
from unittest import mock

import emulator
import torch
from emulated_scores import FEW, check_case, expected, run
from passes import forward_backward
from score_texts import Capture, Case, Text, cases
from targets import boolean_texts

from cupyflash import environment
from cupyflash.ops.attention import masks
from cupyflash.ops.attention.score_text.tiles import FoundTiles
from cupyflash.testing import expected as reference
from cupyflash.testing import make_inputs

# With a place in memory for each partial tile, for one of each word, and for none.
PLACES = (masks.PLACES_BYTES, 40000, 0)


def check_tiles(folder: Path) -> None:
    """Tiles that the mask hides are not read, and their bits are found once."""
    shape = {"batch": 2, "seqlen_q": 300, "seqlen_k": 700, "heads_q": 2, "heads_kv": 1}
    inputs = make_inputs("torch", "float16", **shape)
    for name in ("documents", "causal")[: 2 - FEW]:
        case, found = cases(2, 300, 700)[name], FoundTiles()
        seen = case.mask(
            *torch.meshgrid(*map(torch.arange, (1, 1, 300, 700)), indexing="ij"), case.arrays
        )
        last = int(seen.any(2).nonzero()[-1, -1])
        right = expected(case, inputs)
        inputs.k[:, last // 128 * 128 + 128 :] = inputs.v[:, last // 128 * 128 + 128 :] = torch.nan
        for tiles in (["mask_tiles", "mask_order"], []):
            with emulator.hopper(folder) as launched, environment.override(backend="sm90"):
                results = run(case, inputs, found=found)
            print(f"tiles of {name}: {', '.join(launched)}")
            assert launched[: len(tiles) + 1] == [*tiles, "flash_fwd_sm90"]
            assert launched.count("mask_tiles") == launched.count("mask_order") == len(tiles)
            right.check(**results)
        inputs.k.nan_to_num_(), inputs.v.nan_to_num_()
    # Without the tiles, where blocks add in turns.
    with emulator.hopper(folder) as launched, environment.override(backend="sm90"):
        results = run(case, inputs, deterministic="error")
    assert launched.count("mask_tiles") == 1
    expected(case, inputs).check(**results)


def check_order(folder: Path, shared: bool) -> None:
    """Rows of tiles are sorted by the tiles that they visit, and equal ones stay in their order.

    Args:
        shared: whether the sequences have the same mask, which has the order of the first one.
    """
    case, found = cases(1, 1500, 700)["documents"], FoundTiles()
    if not shared:
        text = case.text._replace(mask=f"({case.text.mask}) && batch >= 0")
        case = case._replace(text=text)
    inputs = make_inputs("torch", "float16", batch=2, seqlen_q=1500, seqlen_k=700, heads_q=1)
    with emulator.hopper(folder), environment.override(backend="sm90"):
        expected(case, inputs).check(**run(case, inputs, found=found))
    for (config, *_), of_stream in found.of_kernel.items():
        ((memory, packed),) = of_stream.values()
        _, _, of_batch, words, _, _, order, of_order = struct.unpack("QQiiiiQi20x", packed)
        rows = -(-700 // config.block_n) if config.by_keys else -(-1500 // config.block_m)
        assert (of_batch, of_order) == ((0, 0) if shared else (rows * words, rows))
        memory, at = memory.view(torch.int32), (order - memory.data_ptr()) // 4
        for batch in range(1 if shared else 2):
            some = memory[2 * of_batch * batch :][: 2 * rows * words].view(rows, 2, words)[:, 0]
            work = [sum(int(x).bit_count() for x in row & 0xFFFFFFFF) for row in some.long()]
            work = work[::-1] if config.by_keys else work
            assert len(set(work)) > 1
            found_order = memory[at + batch * rows :][:rows].tolist()
            assert found_order == sorted(range(rows), key=work.__getitem__)


def dense(queries: int, keys: int) -> Case:
    """A Boolean array, of which no query sees a stretch, and all see another."""
    seen = torch.rand(queries, keys, generator=torch.Generator().manual_seed(5)) < 0.5
    seen[:, 40:90], seen[:, 150:300] = True, False
    text = Text("", "seen(query, key)", (Capture("seen", "bool", 2),))
    return Case(text, {"seen": seen}, mask=lambda b, h, q, k, c: c["seen"][q, k])


def check_partial_tiles(folder: Path) -> None:
    """Bits of scores from memory and from the text, in the fragments of all kernels."""
    shapes = itertools.product((64, 96, 128, 192, 256), PLACES)
    for number, (head_dim, places) in enumerate(shapes):
        if FEW and number % 7:
            continue
        shape = {"batch": 1 + number % 2, "seqlen_q": 150, "seqlen_k": 330, "head_dim": head_dim}
        inputs = make_inputs("torch", ("bfloat16", "float16")[number % 2], heads_q=1, **shape)
        options = {"causal": True} if number % 3 == 2 else {}
        print(f"{places} bytes:", end=" ")
        with mock.patch.object(masks, "PLACES_BYTES", places):
            check_case(folder, "dense", dense(150, 330), inputs, "sm90", **options)
    with mock.patch.object(masks, "PLACES_BYTES", 0):
        check_case(folder, "both", cases(1, 150, 330)["both"], inputs, "sm90")


def check_bytes(folder: Path) -> None:
    """Any byte of a Boolean array but 0 is True."""
    inputs = make_inputs("torch", "float16", batch=1, seqlen_q=150, seqlen_k=330, head_dim=64)
    case = dense(150, 330)
    bytes_of = {"seen": (case.arrays["seen"].to(torch.uint8) * 6).view(torch.bool)}
    with emulator.hopper(folder), environment.override(backend="sm90"):
        results = run(case._replace(arrays=bytes_of), inputs)
    expected(case, inputs).check(**results)


def check_late_maxima(folder: Path) -> None:
    """Of the keys that come first queries see one: its score is no maximum to keep."""
    inputs = make_inputs("torch", "float16", batch=1, seqlen_q=130, seqlen_k=330, head_dim=128)
    case = dense(130, 330)
    case.arrays["seen"][:, 256:329] = False
    case.arrays["seen"][:, 329] = True
    inputs.q.mul_(40)
    check_case(folder, "late maxima", case, inputs, "sm90")


def check_boolean_bias(folder: Path) -> None:
    """A text for a bias that all heads share, but not in a backward whose blocks add in turns."""
    shape = {"batch": 2, "seqlen_q": 150, "seqlen_k": 330, "heads_q": 2, "heads_kv": 1}
    inputs = make_inputs("torch", "bfloat16", **shape, head_dim=128)
    seen = dense(150, 330).arrays["seen"].repeat(2, 1, 1, 1)
    seen[1, :, :70] = ~seen[1, :, :70]
    seen[:, :, 20:37] = False
    # Sequences and heads of the bias, and the passes in which it is a text.
    for number, (sequences, heads, passes) in enumerate(((1, 1, 2), (2, 1, 2), (2, 2, 0))):
        bias = seen[:sequences].repeat(1, heads, 1, 1)
        for deterministic in (number % 2 > 0,) if FEW else (False, True):
            torch.set_deterministic_debug_mode("error" if deterministic else "default")
            with emulator.hopper(folder) as launched, boolean_texts():
                results = forward_backward(inputs, bias=bias)
            print(f"Boolean bias {tuple(bias.shape)}: {', '.join(launched)}")
            assert launched.count("mask_tiles") == max(0, passes - deterministic)
            reference(inputs, bias=bias).check(**results)


if __name__ == "__main__":
    torch.set_deterministic_debug_mode("error")  # then torch.empty() is filled with NaN
    check_tiles(Path(sys.argv[1]))
    for shared in (True, False):
        check_order(Path(sys.argv[1]), shared)
    check_partial_tiles(Path(sys.argv[1]))
    check_bytes(Path(sys.argv[1]))
    check_late_maxima(Path(sys.argv[1]))
    check_boolean_bias(Path(sys.argv[1]))
