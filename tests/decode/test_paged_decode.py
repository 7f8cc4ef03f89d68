"""Attention to a cache in pages, in one launch: the kernel itself (paged_calls.py)."""

from pathlib import Path

import pytest
from emulator import COMPILER
from hypothesis import given
from hypothesis import strategies as st
from matrix import each_library
from places import run_script
from targets import FORCED, has, parts_of_processes

from cupyflash.ops.decode import paged_rows

SIZES = st.one_of(st.integers(1, 300), st.integers(1, 2**31 - 1))


@given(key=st.integers(0, 2**31 - 1), size=SIZES)
def test_division(key, size):
    """page_of() in paged_rows.cuh is exact, at the edges of a page above all."""
    shift, multiplier = paged_rows.division(size)
    assert multiplier < 2**32
    for k in (key, key // size * size, max(0, key // size * size - 1), 2**31 - 1):
        assert 2 * k * multiplier >> 32 >> shift == k // size


@st.composite
def divisions(draw):
    """Rounds of all units, and the number of blocks."""
    return draw(st.lists(st.integers(1, 60), min_size=1, max_size=40)), draw(st.integers(1, 90))


@given(divisions())
def test_shares(division):
    """As decode_work.cuh divides them: every round has one block, and of the units of a block only
    the first and the last have other parts, whose places are their own.
    """
    units, blocks = division
    total = sum(units)
    share = -(-total // blocks)
    seen, places = 0, set()
    for block in range(blocks):
        at, end = min(total, block * share), min(total, (block + 1) * share)
        segments = []
        while at < end:
            begin = 0
            unit = next(i for i in range(len(units)) if at < sum(units[: i + 1]))
            begin = sum(units[:unit])
            first, last = begin // share, (begin + units[unit] - 1) // share
            part, stop = block - first, min(end, begin + units[unit])
            assert at == max(begin, block * share) and 0 <= part <= last - first
            if last > first:
                slot = 2 * first + (2 * part - 1 if part else 0)
                assert slot < 2 * blocks and slot not in places
                places.add(slot)
            segments.append(last > first)
            seen, at = seen + stop - at, stop
        assert not any(segments[1:-1])
    assert seen == total


@pytest.mark.skipif(not (COMPILER and has("torch")), reason="needs g++ and torch")
@pytest.mark.parametrize("parts", parts_of_processes(("few", "tile", "narrow")), ids="-".join)
def test_emulated(emulated_kernels, parts):
    """In a process that takes itself for one with a Hopper GPU."""
    run_script(Path(__file__).with_name("paged_calls.py"), emulated_kernels, *parts)


@pytest.mark.skipif(FORCED == "simt", reason="simt computes such calls by another kernel")
@each_library(library="torch", device="cuda")
def test_on_a_gpu(target):
    """The same calls, with more blocks, each twice: the counters are 0 again."""
    from paged_calls import (
        CASES,
        FIXED,
        FIXED_TILE,
        LONG,
        LONG_TILE,
        NARROW_CASES,
        NARROW_ONE,
        ONE,
        ROWS,
        Call,
        NarrowCall,
        check_fixed_splits,
        grid_of,
    )

    for case in (*CASES, *ONE, LONG, LONG_TILE):
        for blocks in (None, 1, 7, 400):
            with grid_of(None if case.num_splits else blocks):
                for _ in range(2):
                    Call(case, "cuda").check()
    for case in (*NARROW_CASES, *NARROW_ONE):
        for blocks in (None, 1, 7, 400):
            with grid_of(None if case.num_splits else blocks):
                NarrowCall(case, "cuda").check()
    for case in (FIXED, FIXED_TILE):
        check_fixed_splits(case, "cuda")
    for rows in ROWS:
        rows.check("cuda")
