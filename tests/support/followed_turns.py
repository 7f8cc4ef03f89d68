"""Backward passes of random problems, of which blocks take tiles and turns but compute nothing.

`emulator/turns.h` says what can fail. Plans, arguments and the code of tiles and turns are those of
the package. ``python tests/support/followed_turns.py FOLDER [EXAMPLES]``; what is compiled is put
into the folder. test_turns.py runs it in every run of the tests.
"""

import collections
import ctypes
import dataclasses
import functools
import itertools
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import emulator
import torch

import cupyflash
from cupyflash import environment, jit
from cupyflash.ops.attention import dispatch, planning
from cupyflash.ops.attention.fp16x3 import kernels as fp16x3
from cupyflash.ops.attention.simt import kernels as simt
from cupyflash.ops.attention.sm80 import backward as sm80
from cupyflash.ops.attention.sm90 import backward as sm90
from cupyflash.ops.attention.sm90.kernels import SEQUENCE_MAPS
from cupyflash.runtime.gpu import Card

# (block_m, block_n) of the kernels for GPUs of all kinds, which wait in the same way.
TILES_SM80 = sorted(
    {tile[:2] for tiles in (*sm80.BACKWARD_TILES.values(), *sm80.BACKWARD_TILES_KEYS.values())
     for tile in tiles.values()}
    | {tile[:2] for tile in (*sm80.BACKWARD_CANDIDATES, *sm80.BACKWARD_CANDIDATES_KEYS)}
)  # fmt: skip
MAIN = {
    "sm90": sm90.MainKernel,
    "sm80": (sm80.FlashBwdSm80, sm80.FlashBwdKeysSm80),
    "fp16x3": fp16x3.FlashBwdFp16x3,
    "simt": simt.FlashBwdSimt,
}
followed = collections.Counter()


def name_of(config: Any) -> str:
    """The kernel, and for sm_90 the order of its tiles: as `follow_sm90` in turns.h takes it."""
    way = " up" if getattr(config, "walks_up", False) else ""
    return config.name + (" heads" if getattr(config, "whole_heads", False) else way)


def tile_of(config: Any) -> tuple[int, int]:
    """Its queries and keys; flash_bwd_simt.cu chooses its queries."""
    if isinstance(config, simt.FlashBwdSimt):
        return (64 if config.head_dim > 128 else 128, config.block_n)
    return config.block_m, config.block_n


class Way(NamedTuple):
    """How a pass is computed; ``up`` takes the place of the rule of `sm90.walks_up`."""

    backend: str
    multiprocessors: int
    up: bool
    tile: tuple[int, int] | None = None  # of flash_bwd_sm80


class Followed:
    """`jit.load` for kernels that are followed; others but that of sequences are left out."""

    def __init__(self, load: Any) -> None:
        self.load = load

    def __call__(self, config: Any, device: int) -> Any:
        kernel = self.load(config, device)
        if config == SEQUENCE_MAPS:
            return kernel
        if not isinstance(config, MAIN[environment.current().backend]):
            return lambda *arguments: None
        library = _library(kernel.folder)
        block_m, block_n = tile_of(config)

        def follow(
            params: int, grid: int, threads: int, shared_memory: int, seed: int, _: bool
        ) -> Any:
            followed[name_of(config), block_m, block_n] += 1
            return library.follow(name_of(config).encode(), block_m, block_n, params, grid, seed)

        kernel.launch = follow
        return kernel


@functools.cache
def _library(folder: Path) -> ctypes.PyDLL:
    headers = ("attention/sm90/flash_bwd_wide_sm90.cu", "attention/sm90/flash_bwd_sm90.cu")
    others = ("attention/sm80/flash_bwd_sm80.cu", "attention/simt/flash_bwd_simt.cu")
    library = emulator.load(folder, '#include "cuda.h"\n#include "turns.h"\n', *headers, *others)
    library.follow.restype = ctypes.c_char_p
    numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    library.follow.argtypes = (ctypes.c_char_p, *numbers)
    return library


WIDE = (192, 256, (192, 128))


def length(draw: random.Random) -> int:
    """Few, at the edges of tiles, or so many that blocks share the rows of a head out."""
    tile = draw.choice([64, 80, 96, 128])
    edge = draw.randint(1, 4) * tile + draw.randint(-2, 6)
    return draw.choice([draw.randint(1, 150), draw.randint(1, 400), edge, edge, 2048])


def problem(draw: random.Random) -> tuple[Way, dict, dict]:
    """How a pass is computed, its shape and its options."""
    backend = draw.choice(["sm90"] * 5 + ["sm80", "fp16x3", "simt"])
    tile = draw.choice(TILES_SM80) if backend == "sm80" else None
    way = Way(backend, draw.choice([1, 3, 8, 132]), draw.random() < 0.5, tile)
    heads_kv = draw.randint(1, 3)
    shape = {
        "batch": draw.randint(1, 3),
        "rows": length(draw),
        "keys": length(draw),
        "heads_kv": heads_kv,
        "heads": heads_kv * draw.randint(1, 3),
        "head_dims": draw.choice([32, 64, 96, 128, *WIDE, *WIDE]),
        "lengths": draw.choice([""] * 4 + ["used", "packed"]),
        "seed": draw.randint(0, 1000),
    }
    options = {
        "causal": draw.choice([False, True, "top-left", "top-left"]),
        "deterministic": draw.random() < 0.75,
        "softcap": draw.choice([0.0, 0.0, 0.0, 3.0]),  # which has other tiles
    }
    if draw.random() < 0.3:
        options["window"] = tuple(draw.choice([None, draw.randint(0, 300)]) for _ in "lr")
    return way, shape, options


def with_fewer_rows(way: Way, shape: dict, options: dict) -> tuple[Way, dict, dict]:
    """The same with a top-left mask and wide heads: key tiles begin in the padding of queries."""
    rows, keys = sorted((shape["rows"], shape["keys"]))
    shape = shape | {"rows": rows % 400 + 1, "keys": keys, "heads": shape["heads_kv"]}
    shape["lengths"], shape["head_dims"] = "", WIDE[shape["seed"] % len(WIDE)]
    options = options | {"causal": "top-left", "deterministic": True}
    return Way("sm90", way.multiprocessors, True), shape, options


def follow(way: Way, shape: dict, options: dict) -> None:
    """Calls the backward pass of a problem."""
    for plans in (dispatch._backward_plans, dispatch._packed_backward_plans):
        plans.clear()  # made in other ways
    card = Card((9, 0), way.multiprocessors, 50 << 20)
    on_gpu = mock.patch.object(planning, "card_of", lambda device: card)
    walks_up = mock.patch.object(sm90, "walks_up", lambda *x: way.up and _can_walk_up(*x[:2]))
    kernels = functools.partial(_kernels, way.tile, sm80.backward_kernels)
    of_tile = mock.patch.object(sm80, "backward_kernels", kernels)
    with environment.override(backend=way.backend), on_gpu, walks_up, of_tile:
        _backward(way.backend, shape, options)


def _can_walk_up(main: Any, problem: Any) -> bool:
    return problem.is_causal and not main.stores_dbias


def _kernels(of_sm80: Any, kernels: Any, *arguments: Any) -> tuple[Any, ...]:
    """Those of a pass, with this tile of sm_80 if there is one."""
    configs = kernels(*arguments)
    if of_sm80 is None:
        return configs
    names = {"block_m": of_sm80[0], "block_n": of_sm80[1]}
    of_main = MAIN["sm80"]
    return tuple(dataclasses.replace(x, **names) if isinstance(x, of_main) else x for x in configs)


def _backward(backend: str, shape: dict, options: dict) -> None:
    width = shape["head_dims"]
    head_dim, head_dim_v = width if isinstance(width, tuple) else (width, width)
    if backend == "fp16x3":
        head_dim = head_dim_v = min(head_dim, 64)
    dtype = torch.float32 if backend in ("fp16x3", "simt") else torch.float16
    batch, rows, keys, heads = (shape[x] for x in ("batch", "rows", "keys", "heads"))
    lengths = torch.Generator().manual_seed(shape["seed"])
    used_q, used_k = (
        torch.randint(0, n + 1, (batch,), generator=lengths, dtype=torch.int32)
        for n in (rows, keys)
    )
    packed = shape["lengths"] == "packed"
    size_q = (int(used_q.sum()),) if packed else (batch, rows)
    size_k = (int(used_k.sum()),) if packed else (batch, keys)
    zeros = functools.partial(torch.zeros, dtype=dtype, requires_grad=packed)
    q = zeros(*size_q, heads, head_dim)
    k = zeros(*size_k, shape["heads_kv"], head_dim)
    v = zeros(*size_k, shape["heads_kv"], head_dim_v)
    if packed:  # this function has no top-left masks
        left, right = (-1 if x is None else x for x in options.get("window", (None, None)))
        out = cupyflash.flash_attn_varlen_func(
            q, k, v, _ends(used_q), _ends(used_k), rows, keys, causal=bool(options["causal"]),
            window_size=(left, right), softcap=options["softcap"],
            deterministic=options["deterministic"],
        )  # fmt: skip
        out.sum().backward()
        return
    if shape["lengths"] == "used":
        options = options | {"seqused_q": used_q, "seqused_k": used_k}
    out, lse = zeros(*size_q, heads, head_dim_v), torch.zeros(batch, heads, rows)
    cupyflash.attention_backward(out, q, k, v, out, lse, **options)


def _ends(lengths: Any) -> Any:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def main(folder: str, examples: int) -> None:
    """Follows the calls that once hung, of this batch and these heads, and then others."""
    shape = {"batch": 8, "rows": 70, "keys": 300, "heads_kv": 16, "heads": 16, "lengths": ""}
    shape["seed"], options = 0, {"causal": "top-left", "deterministic": True, "softcap": 0.0}
    problems = [
        (Way("sm90", 132, up), shape | {"head_dims": head_dim}, options)
        for head_dim, up in itertools.product((192, 256), (False, True))
    ]
    draw = random.Random(1)
    for _ in range(examples):
        drawn = problem(draw)
        problems += [drawn, with_fewer_rows(*drawn)] if draw.random() < 0.3 else [drawn]
    with emulator.hopper(Path(folder)), mock.patch.object(jit, "load", Followed(jit.load)):
        for drawn in problems:
            try:
                follow(*drawn)
            except RuntimeError as error:
                raise AssertionError(f"{drawn}: {error}") from error
    for kernel, number in sorted(followed.items()):
        print(*kernel, number)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 300)
