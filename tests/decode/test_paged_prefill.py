"""Many new tokens on a cache in pages, which the forward of sm_90 reads where they lie."""

from pathlib import Path

import pytest
from emulator import COMPILER
from matrix import each_library
from places import run_script
from targets import few, has

from cupyflash.ops.attention.sm90.launch import box_of_pages
from cupyflash.ops.decode.paged_rows import structs


@pytest.mark.skipif(not (COMPILER and has("torch")), reason="needs g++ and torch")
def test_emulated(emulated_kernels):
    """In a process that takes itself for one with a Hopper GPU."""
    run_script(Path(__file__).with_name("prefill_calls.py"), emulated_kernels, *few())


@each_library(library="torch", device="cuda")
def test_on_a_gpu(target):
    """The same calls."""
    from prefill_calls import CASES, FROM_DIAGONAL, GATHERED, SPLIT, check, splits

    for case in (*CASES, *GATHERED):
        check(case, "cuda")
    check(FROM_DIAGONAL, "cuda", causal=False)
    with splits(3):
        check(SPLIT, "cuda")


@pytest.mark.parametrize("page", [8, 16, 24, 32, 48, 64, 100, 128, 256, 4096])
@pytest.mark.parametrize("block_n", [64, 80, 96, 112, 128])
def test_boxes_lie_within_pages(page, block_n):
    """A box of a tile begins at a multiple of its rows, and one lane of a warp copies it."""
    rows = box_of_pages(block_n, structs.PagedRows(page_size=page, capacity=3 * page))
    assert page % rows == 0 and block_n % rows == 0 and block_n <= 32 * rows
    assert rows % 8 == 0 or page % 8


def test_the_box_of_a_single_page():
    assert box_of_pages(96, structs.PagedRows(page_size=1001, capacity=1001)) == 96
