"""Which counter a launch gets. Needs no GPU: CuPy is a fake."""

import types

import pytest
from fakes import Stream, fake_cupy, fake_driver, fake_graphs

from cupyflash.runtime import scratch
from cupyflash.runtime.scratch import COUNTERS, NULL, POOL_SIZE, TileCounters, pack_pointer

POOL = 4096  # its address


@pytest.fixture
def cupy(monkeypatch):
    fake = fake_cupy(monkeypatch)
    fake.zeros = lambda size, dtype: types.SimpleNamespace(data=types.SimpleNamespace(ptr=POOL))
    fake.numbers = {}  # of streams whose handle is not their number
    monkeypatch.setattr(scratch, "stream_number", lambda x: fake.numbers.get(x, x))
    fake_graphs(monkeypatch, fake)
    return fake


@pytest.fixture
def counters_of(cupy, monkeypatch):
    """Counters of a pool of this size."""

    def make(size):
        monkeypatch.setattr(scratch, "POOL_SIZE", size)
        return TileCounters(0)

    return make


def test_a_counter_for_each_stream(cupy):
    counters = TileCounters(0)
    found = [counters(Stream(ptr)) for ptr in (5, 6, 5, 0)]
    assert found[0] == found[2] == pack_pointer(POOL) and len(set(found)) == 3
    assert counters(None) == counters(Stream(7))  # CuPy's current stream


def test_counters_do_not_overlap(cupy):
    sizes = []
    zeros = cupy.zeros
    cupy.zeros = lambda size, dtype: sizes.append(size) or zeros(size, dtype)
    counters = TileCounters(0)
    first, second = (int.from_bytes(counters(Stream(ptr)), "little") for ptr in (5, 6))
    assert second - first == 4 * COUNTERS and sizes == [COUNTERS * POOL_SIZE]


def test_a_captured_launch_keeps_its_counter(cupy):
    counters = TileCounters(0)
    plain = counters(Stream(5))
    cupy.capturing = {5}
    captured = {counters(Stream(5)) for _ in range(3)}
    cupy.capturing = set()
    assert len(captured) == 3 and plain not in captured and counters(Stream(5)) == plain


def test_the_end_of_a_graph_gives_its_counters_back(cupy, counters_of):
    counters = counters_of(2)
    cupy.capturing = {5}
    assert counters.is_capturing(Stream(5)) and not counters.is_capturing(Stream(6))
    first, second, none = (counters(Stream(5)) for _ in range(3))
    assert len({first, second}) == 2 and none == NULL
    cupy.ends.pop(0)()
    assert counters(Stream(5)) == first and counters(Stream(5)) == NULL


def test_the_next_stream_of_a_handle_has_other_counters(cupy):
    """The work of the first may still be pending when CUDA gives its handle to the next."""
    counters = TileCounters(0)
    first = counters(Stream(5))
    cupy.numbers = {5: 105}
    second = counters(Stream(5))
    assert second != first and counters(Stream(5)) == second


def test_streams_leave_counters_to_graphs(cupy, monkeypatch):
    monkeypatch.setattr(scratch, "MAX_STREAMS", 3)
    counters = TileCounters(0)
    found = [counters(Stream(ptr)) for ptr in range(10, 15)]
    assert len(set(found[:3])) == 3 and found[3:] == [NULL, NULL]
    cupy.capturing = {14}
    assert counters(Stream(14)) not in found
    assert [counters(Stream(ptr)) for ptr in range(10, 14)] == found[:4]


def test_without_counters_blocks_take_turns(counters_of):
    counters = counters_of(1)
    assert counters(Stream(5)) == pack_pointer(POOL)
    assert counters(Stream(6)) == NULL == counters(Stream(8))
    assert counters(Stream(5)) == pack_pointer(POOL)


def test_the_number_of_a_stream(monkeypatch):
    """The driver is asked, except for the two names of the legacy default stream."""

    def ask(stream, number):
        number._obj.value = 2**40 + stream
        return 400 * (stream == 9)

    functions = {"cuStreamGetId": ask}
    fake_driver(monkeypatch, functions.__getitem__)
    assert [scratch.stream_number(x) for x in (0, 1, 2, 8)] == [0, 0, 2**40 + 2, 2**40 + 8]
    with pytest.raises(RuntimeError, match="stream 0x9 has no number, CUDA error 400"):
        scratch.stream_number(9)


def test_a_launch_that_needs_counters_gets_zeros_of_its_own(counters_of):
    made = []
    library = types.SimpleNamespace(
        zeros_int32=lambda size, like: made.append((size, like)) or "zeros",
        pointer={"zeros": 8192}.get,
    )
    counters = counters_of(1)
    assert counters.address(Stream(5), library, "x") == (POOL, None) and made == []
    assert counters.address(Stream(6), library, "x") == (8192, "zeros")
    assert made == [(COUNTERS, "x")]
    for count in (COUNTERS, COUNTERS + 1):
        counters.address(Stream(5), library, "x", count)
    assert made[1:] == [(COUNTERS + 1, "x")]


def test_wide_counters_do_not_overlap(cupy):
    counters = TileCounters(0, 1024)
    first, second = (int.from_bytes(counters(Stream(ptr)), "little") for ptr in (5, 6))
    assert second - first == 4 * 1024
