"""Which multiprocessor works on which tile of a launch: time stamps of a debug build.

    python -m bench timeline

writes bench/results/timeline.json and draws it, timeline.svg: a line for each
multiprocessor, a bar for each tile. The debug build is the source of a kernel with stamps inserted
into a copy of it; the package's own kernels know nothing of them. Results of the debug build are
compared with those of the kernel itself, bit by bit in the forward pass.
"""

import copy
import ctypes
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from bench.lib import data, harness
from bench.lib.launches import configurations, recorded
from bench.profile.pictures import draw_timeline as draw
from cupyflash import jit
from cupyflash.jit import sources
from cupyflash.runtime.config import KernelConfig
from cupyflash.runtime.launch import Launch
from cupyflash.testing.problem import Problem

PROTOCOL = (
    "globaltimer, read by the first consumer thread of a block when a tile begins (its first "
    "scores are there; backward: its keys are) and when its results have been written (forward: "
    "handed to the writer); the second launch after a warm one"
)
# Neighbours of these many rows share a slot, which is less than the rows of a tile.
ROWS, SLOTS = 64, 1 << 16
HEADER = "trace.cuh"
TRACE = f"""#pragma once
#include "common/types.cuh"

// When the tile that begins at a row of a head began and ended, and where it ran.
struct TraceRecord {{
  uint64_t begin, end;
  int multiprocessor, row, head, batch;
}};
__device__ TraceRecord trace_records[{SLOTS}];

__device__ inline uint64_t trace_clock() {{
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}}
__device__ inline TraceRecord& trace_record(int row, int pair) {{
  return trace_records[(uint32_t(pair) * 1024 + row / {ROWS}) % {SLOTS}];
}}
__device__ inline void trace_begin(int row, int head, int batch, int heads) {{
  if (threadIdx.x != 128) return;
  int multiprocessor;
  asm volatile("mov.u32 %0, %smid;" : "=r"(multiprocessor));
  TraceRecord& record = trace_record(row, batch * heads + head);
  record.multiprocessor = multiprocessor;
  record.row = row;
  record.head = head;
  record.batch = batch;
  record.begin = trace_clock();
}}
__device__ inline void trace_end(int row, int head, int batch, int heads) {{
  if (threadIdx.x != 128) return;
  trace_record(row, batch * heads + head).end = trace_clock();
}}
"""


class TraceRecord(ctypes.Structure):
    """The same struct."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("begin", "end")),
        *((name, ctypes.c_int32) for name in ("multiprocessor", "row", "head", "batch")),
    )


# (the line of the source that a stamp follows, the stamp), by the name of the kernel.
STAMPS = {
    "flash_fwd_sm90": (
        (
            "                    AT_NEW_MAX);\n",
            "  trace_begin(consumer.tile->m_begin, consumer.tile->head, consumer.tile->batch,\n"
            "              consumer.params.base.shape.heads_q);\n",
        ),
        (
            "      consumer.write_tile(acc_o, state, done, done_stage);\n",
            "      trace_end(done.m_begin, done.head, done.batch, params.base.shape.heads_q);\n",
        ),
    ),
    "flash_bwd_sm90": (
        (
            "    shared.v.wait_full(kv_place(record));\n",
            "    trace_begin(tile.n_begin, tile.head_kv, tile.batch, shape.heads_kv);\n",
        ),
        (
            "               dv_strides.row, acc_dv, rows, shape.head_dim);\n",
            "    trace_end(tile.n_begin, tile.head_kv, tile.batch, shape.heads_kv);\n",
        ),
    ),
}
ROW_OF = {"flash_fwd_sm90": "queries", "flash_bwd_sm90": "keys"}  # of a tile


def stamped(name: str, text: str) -> str:
    """The source of a kernel with its stamps.

    Raises:
        ValueError: the source has changed, so that a stamp has no place in it, or more than one.
    """
    for line, stamp in STAMPS[name]:
        if text.count(line) != 1:
            fact = "the source must have the line of a stamp once"
            raise ValueError(f"bench timeline: {fact}, got {text.count(line)} of {line!r}")
        text = text.replace(line, line + stamp)
    return text


def debug_config(config: KernelConfig) -> KernelConfig:
    """The same instantiation of the debug build; another key for every cache."""
    kind = type(f"Traced{type(config).__name__}", (type(config),), {})
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return kind(**fields)


def with_debug_sources(name: str, work: Callable[[], Any]) -> Any:
    """Calls ``work`` with a copy of ``cuda_src`` in which a kernel has its stamps."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "cuda_src"
        shutil.copytree(sources.root(), root)
        (source,) = root.rglob(f"{name}.cu")
        text = stamped(name, source.read_text(encoding="utf-8"))
        source.write_text(f'#include "{HEADER}"\n{text}', encoding="utf-8")
        (root / HEADER).write_text(TRACE, encoding="utf-8")
        with mock.patch.object(sources, "root", lambda: root):
            return work()


def debug_build(config: KernelConfig, arch: str) -> jit.Built:
    """The debug build of a kernel, from the cache if it is there. Needs no GPU."""
    return with_debug_sources(config.name, lambda: jit.build(debug_config(config), arch))


class Trace:
    """The launches of a call, to be repeated with the debug build of one of its kernels.

    Attributes:
        results: of the call, into which the repeated launches write again.
    """

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        import cupy

        with configurations() as by_function:
            call()  # makes the plan, of which there is none yet
        self.results, launches = recorded(call)
        normal, config = next(x for x in by_function.items() if x[1].name == name)
        function = with_debug_sources(name, lambda: jit.load(debug_config(config), 0))
        self.launches = [
            (_with_function(launch, function) if launch.function is normal else launch, params)
            for launch, params in launches
        ]
        arch = jit.arch_of(divmod(int(cupy.cuda.Device(0).compute_capability), 10))
        path = debug_build(config, arch).path
        # CuPy loads a path once, so this is the module that the launches use.
        memory = cupy.RawModule(path=str(path)).get_global("trace_records")
        size = SLOTS * ctypes.sizeof(TraceRecord)
        self.records = cupy.ndarray(size, "uint8", memory)

    def run(self, stream: Any) -> list[dict[str, Any]]:
        """Repeats the launches twice; the tiles of the second time, the earliest first.

        A tile is {"sm", "begin_us", "end_us", "row", "head", "batch"}.
        """
        for _ in range(2):
            self.records.fill(0)
            self.records.device.synchronize()
            for launch, params in self.launches:
                launch.start(stream, params)
            self.records.device.synchronize()
        return tiles_of((TraceRecord * SLOTS).from_buffer_copy(self.records.get().tobytes()))


def _with_function(launch: Launch, function: Any) -> Launch:
    changed = copy.copy(launch)
    changed.function = function
    return changed


def tiles_of(records: Sequence[TraceRecord]) -> list[dict[str, Any]]:
    """The records that were written, in microseconds since the first beginning."""
    written = [x for x in records if x.begin]
    first = min((x.begin for x in written), default=0)
    return [
        {
            "sm": x.multiprocessor,
            "begin_us": (x.begin - first) / 1000,
            "end_us": (x.end - first) / 1000,
            "row": x.row,
            "head": x.head,
            "batch": x.batch,
        }
        for x in sorted(written, key=lambda x: x.begin)
    ]


def busy_share(tiles: Sequence[dict[str, Any]]) -> float:
    """The share of the time between the first beginning and the last end in which tiles ran."""
    end = max(tile["end_us"] for tile in tiles)
    busy = sum(tile["end_us"] - tile["begin_us"] for tile in tiles)
    return busy / (end * len({tile["sm"] for tile in tiles}))


def measure(name: str, shape: Problem) -> dict[str, Any]:
    """A row of the results: the kernel, the problem, its tiles; checked against the kernel."""
    import torch

    import cupyflash

    q, k, v, dout = data.of_problem(shape)
    call = functools.partial(cupyflash.attention, q, k, v, causal=shape.causal, return_lse=True)
    if "bwd" in name:
        arrays = dout, q, k, v, *call()
        call = functools.partial(cupyflash.attention_backward, *arrays, causal=shape.causal)
    trace = Trace(name, call)
    # On the host: on the GPU they could get the memory of the call's workspace, which is free now,
    # and which the repeated launches write to.
    right = [x.cpu() for x in trace.results[:3]]
    for x in trace.results[:3]:
        x.fill_(torch.nan)
    tiles = trace.run(cupyflash.runtime.lookup.library_of(q).stream(0))
    for found, wanted in zip(trace.results, right):
        # Atomic additions to dq come in any order.
        error = (found.cpu().float() - wanted.float()).abs().max().item()
        limit = 0.02 * wanted.float().abs().max().item() if "bwd" in name else 0.0
        if not error <= limit:
            raise AssertionError(f"{name}: the debug build is wrong by {error}, allowed {limit}")
    busy = round(busy_share(tiles), 4)
    return shape.row(kernel=name, rows_are=ROW_OF[name], busy=busy, tiles=compact(tiles))


def compact(tiles: Sequence[dict[str, Any]]) -> list[list[float]]:
    """[sm, begin, end in microseconds, row, head, batch] of each tile."""
    return [[round(x, 2) for x in tile.values()] for tile in tiles]


def main(arguments: Sequence[str]) -> int:
    parser = harness.parser("timeline", __doc__, repeats=None)
    parser.add_argument("--seqlen", type=int, default=8192)
    options = parser.parse_args(arguments)
    run = harness.Run("timeline", PROTOCOL, arguments, options, timed=False)
    for name in STAMPS:
        shape = Problem("bfloat16", 128, 1, options.seqlen, 16, 16, True)
        try:
            run.rows.append(measure(name, shape))
        except AssertionError as error:
            run.notes.left_out("cupyflash", error, name)
    run.draw(draw)
    lines = [f"{row['kernel']}: multiprocessors busy {100 * row['busy']:.1f} %" for row in run.rows]
    return run.finish(*lines)
