"""DRAM traffic of calls, by ncu: the script runs itself below it, once for all of them."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.lib import counters
from bench.lib.counters import Counted

MARK = "vector_addIf"  # the kernel that follows each call: vector_add<float>
LABEL = "profiled: "


def bytes_of(script: str, arguments: Sequence[str]) -> dict[str, float]:
    """Bytes read and written by each call that this run of a script gives to `profile`.

    Raises:
        RuntimeError: no ncu, or it measured nothing.
    """
    found = parse(counters.output_of(script, arguments, counters.DRAM_BYTES))
    return {label: counters.dram_bytes(launches) for label, launches in found.items()}


def parse(text: str) -> dict[str, list[Counted]]:
    """The launches of each call that `profile` announced.

    Raises:
        RuntimeError: as `counters.launches_of`, or not what was announced.
    """
    labels = [x[len(LABEL) :] for x in text.splitlines() if x.startswith(LABEL)]
    between = itertools.groupby(counters.launches_of(text), lambda launch: MARK in launch.name)
    calls = [list(of_call) for is_mark, of_call in between if not is_mark]
    if len(calls) != len(labels):
        raise RuntimeError(f"ncu saw {len(calls)} calls, expected {len(labels)}")
    return dict(zip(labels, calls))


def profile(calls: Mapping[str, Callable[[], Any]]) -> None:
    """Run each once to compile, then once for ncu, with `MARK` behind it."""
    import cupy

    from cupyflash.ops.baselines.baselines import vector_add

    zeros = cupy.zeros(1, "float32")
    vector_add(zeros, zeros)
    for label, call in calls.items():
        call()
        print(LABEL + label, flush=True)
        with counters.measured():
            call()
            vector_add(zeros, zeros)
