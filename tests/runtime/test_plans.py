"""How many plans are kept, and on which GPU they allocate (no GPU needed)."""

import concurrent.futures
import types

import pytest

from cupyflash.runtime.array import Empty
from cupyflash.runtime.operation import Plans


def test_the_oldest_plan_makes_room():
    plans = Plans(most=3)
    for number in range(10):
        assert plans.add((number,), f"plan {number}") == f"plan {number}"
    assert list(plans) == [(7,), (8,), (9,)]
    plans.add((0,), "again")
    assert plans[0,] == "again" and (7,) not in plans


def test_threads_that_keep_plans():
    plans = Plans(most=5)

    def fill(start):
        for number in range(2000):
            plans.add((start, number), None)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(fill, range(8)))
    assert len(plans) == 5


@pytest.mark.parametrize("float32", (False, True))
@pytest.mark.parametrize("current", (-1, 1))
def test_results_are_on_the_gpu_of_the_input(monkeypatch, current, float32):
    """torch's current GPU may not be CUDA's, on which plans run."""
    torch = pytest.importorskip("torch")
    from cupyflash.runtime.torch_library import TorchLibrary

    made = []

    def on_gpu(shape, strides, dtype):
        assert type(shape) is type(strides) is tuple
        made.append(torch.empty_strided(shape, strides, dtype=dtype))
        elsewhere = {"get_device": lambda: current, "data_ptr": lambda: 0}
        return made[-1] if current == -1 else types.SimpleNamespace(**elsewhere)

    monkeypatch.setattr(TorchLibrary, "gpu_allocator", lambda self: on_gpu)
    library, x = TorchLibrary(), torch.empty(3, 2, dtype=torch.float16).T
    view = library.view(x)._replace(device=0)
    wanted = Empty(x.shape, (3, 1), view, float32)
    (result,), (pointer,) = library.allocator(wanted)(x)
    assert pointer == result.data_ptr()
    assert (result is made[0]) == (current == -1)
    assert result.dtype == (torch.float32 if float32 else torch.float16)
    assert result.shape == x.shape and result.stride() == (3, 1) and result.get_device() == -1
