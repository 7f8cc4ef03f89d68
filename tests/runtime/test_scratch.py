"""Array operations of CuPy, and what captures of a graph need. No GPU: CuPy is a fake."""

import contextlib
import gc
import weakref

import numpy
import pytest
from fakes import fake_cupy, fake_graphs

from cupyflash.runtime import scratch


class Memory:
    """What an allocator of CuPy returns."""


class CupyArray:
    def __init__(self, device):
        self.device = device


CupyArray.__module__ = "cupy"


@pytest.fixture
def cupy(monkeypatch):
    allocators = [lambda size: Memory()]

    @contextlib.contextmanager
    def using_allocator(allocator):
        allocators.append(allocator)
        yield
        allocators.pop()

    get_allocator = lambda: allocators[-1]
    fake = fake_cupy(monkeypatch, get_allocator=get_allocator, using_allocator=using_allocator)
    fake.allocators = allocators
    fake_graphs(monkeypatch, fake)
    return fake


@pytest.mark.parametrize("capturing", [False, True])
def test_until_the_graph_is_gone(cupy, capturing):
    cupy.capturing = {cupy.current.ptr} if capturing else set()
    with scratch.array_operations(CupyArray(contextlib.nullcontext())):
        memory = weakref.ref(cupy.allocators[-1](100))
    gc.collect()
    assert (memory() is not None) == capturing and len(cupy.allocators) == 1
    while cupy.ends:  # called in another capture, which cudaFree would end
        cupy.ends.pop()()
    gc.collect()
    assert (memory() is not None) == capturing
    scratch.unused_memory.clear()
    gc.collect()
    assert memory() is None


def test_other_arrays_need_nothing(cupy):
    for x in (numpy.zeros(2), [1.0]):
        with scratch.array_operations(x):
            assert len(cupy.allocators) == 1


def test_on_the_device_of_the_array(cupy):
    current = []

    @contextlib.contextmanager
    def device():
        current.append("its device")
        yield
        current.pop()

    with scratch.array_operations(CupyArray(device())):
        assert current == ["its device"]
    assert not current


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_in_a_capture(enabled):
    """Afterwards it is as it was, also after an error."""
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError), scratch.no_garbage_collected():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_no_garbage_is_collected_while_another_thread_captures():
    before = gc.isenabled()
    gc.enable()
    try:
        first, second = (scratch.no_garbage_collected() for _ in range(2))
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not gc.isenabled()
        second.__exit__(None, None, None)
        assert gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
