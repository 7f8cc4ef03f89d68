"""Array operations of CuPy: their device, and what a graph then holds. No GPU: CuPy is a fake."""

import contextlib
import gc
import types
import weakref

import pytest
from fakes import fake_cupy

from cupyflash.runtime import scratch


class Memory:
    """What an allocator of CuPy returns."""


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
    fake.allocators, fake.ends = allocators, []
    monkeypatch.setattr(scratch, "when_graph_is_gone", lambda _, end: fake.ends.append(end))
    return fake


@pytest.mark.parametrize("capturing", [False, True])
def test_until_the_graph_is_gone(cupy, monkeypatch, capturing):
    monkeypatch.setattr(scratch, "is_capturing", lambda stream: capturing)
    x = types.SimpleNamespace(device=contextlib.nullcontext())
    with scratch.array_operations(types.SimpleNamespace(name="cupy.ndarray"), x):
        memory = weakref.ref(cupy.allocators[-1](100))
    gc.collect()
    assert (memory() is not None) == capturing and len(cupy.allocators) == 1
    for end in cupy.ends:
        end()
    gc.collect()
    assert memory() is None


def test_other_libraries_hold_their_own(cupy):
    for library in (None, types.SimpleNamespace(name="torch.Tensor")):
        with scratch.array_operations(library, None):
            assert len(cupy.allocators) == 1


def test_on_the_device_of_the_array(cupy, monkeypatch):
    monkeypatch.setattr(scratch, "is_capturing", lambda stream: False)
    current = []

    @contextlib.contextmanager
    def device():
        current.append("its device")
        yield
        current.pop()

    x = types.SimpleNamespace(device=device())
    with scratch.array_operations(types.SimpleNamespace(name="cupy.ndarray"), x):
        assert current == ["its device"]
    assert not current
