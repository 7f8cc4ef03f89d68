"""Waits of a kernel for what another block writes: all of them, and why each one ends (no GPU)."""

import ctypes
import re

import emulator
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import precompile
from cupyflash.jit import sources
from cupyflash.ops.attention.backends import BACKENDS
from cupyflash.ops.block.plan import num_blocks, structs

# What blocks of a cluster, a grid or a launch in turns wait with. Waits of the warps of one block
# for each other are not among them; they are those that the emulator watches.
WAITS = re.compile(
    rb"\b(wait_flag|wait_flag_fenced|load_acquire|ld_relaxed\w*|wait_for_all_blocks|grid_barrier"
    rb"|cluster_wait|cluster_sync|mbarrier_arrive_cluster|st_async_cluster|tma_load_multicast)\("
    rb"|volatile int\*"
)
TURNS = "test_turns.py follows the blocks: each waits for as many turns as have been before its own"
# Each block arrives once, and all run at the same time: test_all_blocks_run.
GRID = "a barrier of a cooperative launch, reached by all blocks on all ways"
# The hardware runs the blocks of a cluster together, and a grid is a multiple of a cluster.
CLUSTER = "a barrier of a cluster, reached by all of its threads that have not ended"
EXCHANGE = "all blocks of a cluster send in each round, before they wait, and make the same rounds"
KNOWN = {
    "attention/sm90/bwd_turns.cuh": TURNS,
    "attention/sm80/dq_sum.cuh": TURNS,
    "attention/simt/flash_bwd_simt.cu": TURNS,
    "common/grid_barrier.cuh": GRID,
    "block/decode_stack.cu": GRID,
    "norm/norm_bwd.cu": GRID,
    "block/outputs.cuh": "loads words that the same block has written, once",
    "block/tagged_words.cuh": "each word is a row of one block, which sends it in every round: "
    "test_rows_of_the_decode_stack",
    "linear/linear_block_sm90.cuh": "both blocks of a cluster take tiles of the same numbers",
    "linear/linear_sm90.cu": CLUSTER,
    "linear/linear_small_m_sm90.cu": CLUSTER,
    "linear/small_m_block_sm90.cuh": "each block of a cluster sends its sums once to each, which "
    "has a step of the depth at least: small_m_sm90_kernels.choose",
    "norm/cluster_exchange.cuh": EXCHANGE,
}
ALL_BLOCKS = {"common/grid_barrier.cuh", "block/tagged_words.cuh"}
CAPABILITIES = [(7, 5), (8, 0), (9, 0)]


def test_all_waits_are_known():
    """A new one needs a reason why it ends, and a test of that."""
    found = set()
    for path in sources.root().rglob("*.cu*"):
        name = path.relative_to(sources.root()).as_posix()
        code = re.sub(rb"//[^\n]*", b"", path.read_bytes())
        if not name.startswith("ptx/") and WAITS.search(code):
            found.add(name)
    assert found == set(KNOWN)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_all_blocks_run(capability):
    """Blocks that wait for all others of a launch are launched cooperatively, or not at all."""
    kinds = {}
    for topic in precompile.TOPICS.values():
        for config in topic.configurations(capability):
            kinds[type(config)] = config
    waiting = set()
    for kind, config in kinds.items():
        if ALL_BLOCKS & set(sources.closure(config.source)):
            waiting.add(kind.__name__)
            assert config.cooperative, kind
    assert waiting == {"DecodeStack", "NormBwd"}


def test_attention_needs_no_cooperative_launch():
    """Its blocks take tickets, and wait for earlier ones only."""
    configs = (x for backend in BACKENDS.values() for x in backend.configurations((9, 0)))
    for source in {config.source for config in configs}:
        assert not ALL_BLOCKS & set(sources.closure(source))


ROWS = """
#include "cuda.h"
#include "block/steps.cuh"
extern "C" void rows_of_block(const DecodeStackParams* params, int matrix, unsigned block,
                              unsigned blocks, int* begin, int* rows) {
  blockIdx.x = block;
  gridDim.x = blocks;
  const BlockRows found = block_rows<float, 41600>(*params, Matrix(matrix));
  *begin = found.begin;
  *rows = found.rows;
}
"""
SIZES = st.one_of(st.integers(1, 200), st.integers(1, 4000))


@pytest.fixture(scope="module")
def rows_of_block(emulated_kernels):
    if not emulator.COMPILER:
        pytest.skip("needs g++")
    folder = emulator.prepared(emulated_kernels)
    function = emulator.load(folder, ROWS, "block/decode_stack.cu").rows_of_block
    numbers = [ctypes.c_int, ctypes.c_uint, ctypes.c_uint]
    function.argtypes = [ctypes.c_void_p, *numbers, *[ctypes.POINTER(ctypes.c_int)] * 2]
    return function


@settings(max_examples=100, deadline=None)
@given(width=SIZES, hidden=SIZES, vocab=SIZES, processors=st.integers(1, 200))
def test_rows_of_the_decode_stack(rows_of_block, width, hidden, vocab, processors):
    """Each row of a matrix, and so each word, belongs to one block, and each block has one."""
    params = structs.DecodeStackParams(width=width, hidden_width=hidden, vocab=vocab, segment=8)
    blocks = num_blocks(width, hidden, vocab, processors)
    sizes = {"qkv": 3 * width, "proj": width, "up": hidden, "down": width, "head": vocab}
    begin, rows = ctypes.c_int(), ctypes.c_int()
    for matrix, size in sizes.items():
        end = 0
        for block in range(blocks):
            where = ctypes.byref(params), structs.Matrix.index(matrix), block, blocks
            rows_of_block(*where, ctypes.byref(begin), ctypes.byref(rows))
            assert begin.value == end and rows.value > 0
            end += rows.value
        assert end == size
