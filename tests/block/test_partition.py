"""Cooperative launches where fewer multiprocessors are to be had than the GPU has."""

import contextlib
import ctypes
from ctypes import byref, c_int, c_uint, c_void_p

import pytest
from arrays import normal, stored
from block_stacks import CASE
from block_stacks import make as make_blocks
from fakes import fake_driver, fake_facts
from matrix import each_library
from targets import compute_capability

import cupyflash
from cupyflash.runtime import driver, gpu, launch
from cupyflash.runtime.gpu import multiprocessors
from cupyflash.runtime.launch import Launch, Prepared
from cupyflash.runtime.operation import Plan
from cupyflash.testing import expected_norm, expected_stack

# Without a GPU: 16 multiprocessors, and a stream that has 4 of them ----------------------------


class TooLarge(RuntimeError):
    """As CuPy's CUDADriverError."""

    status = driver.TOO_LARGE


class FakePlan(Plan):
    """Launches a block for each multiprocessor that the plan is made for."""

    made = 0

    def __init__(self, views, *, factor):
        type(self).made += 1
        views["x"] = "changed"  # as the plans of linear layers change theirs
        self.device_id, self.current_device = 0, lambda: 0
        self.launch = launch = Launch.__new__(Launch)
        launch.grid, launch.threads, launch.shared_memory = factor * multiprocessors(0), 1, 0
        launch.cooperative, launch.dependent = True, False
        launch.multiprocessors, launch.was_too_large = multiprocessors(0), False
        launch.function = self.function
        self.views = views

    def function(self, grid, threads, argument, shared_memory, stream, cooperative):
        assert cooperative
        if grid > FakeStream.at[stream].room:
            raise TooLarge
        FakeStream.at[stream].started.append(grid)

    def run(self, stream):
        self.launch.start(stream, b"abc")
        return self.launch.grid


class FakeStream:
    """Room for so many blocks."""

    at = {}  # by address

    def __init__(self, room):
        self.room, self.started, self.ptr = room, [], room
        self.at[room] = self


@pytest.fixture
def fake(monkeypatch):
    fake_facts(monkeypatch, gpu, all_multiprocessors=16)
    monkeypatch.setattr(driver, "multiprocessors_of", lambda stream: stream)
    monkeypatch.setattr(FakePlan, "made", 0)
    views = {"x": "given"}
    yield FakePlan(dict(views), factor=1), views


def test_another_plan_for_fewer(fake):
    plan, _ = fake
    whole, part, less = FakeStream(16), FakeStream(4), FakeStream(3)
    assert [plan(x) for x in (whole, part, whole, part, less, part)] == [16, 4, 16, 4, 3, 4]
    assert whole.started == [16, 16] and part.started == [4, 4, 4] and FakePlan.made == 3
    assert multiprocessors(0) == 16


def test_the_second_time_nothing_is_refused(fake):
    """A launch that the driver refuses would end the capture of a CUDA graph."""
    plan, _ = fake
    part = FakeStream(4)
    plan(part)
    plan.launch.function = None  # would be called first
    assert plan(part) == 4


def test_made_again_of_what_it_was_made_of():
    views = {"x": "given"}

    class Seen(FakePlan):
        def __init__(self, views, *, factor):
            self.given = dict(views)
            super().__init__(views, factor=factor)

    with driver.limit_multiprocessors(2):
        plan = Seen(views, factor=3)
        assert plan.again().given == plan.given == {"x": "given"}


@pytest.mark.parametrize("said", [None, 8, 16, 100])
def test_half_of_them_where_the_driver_does_not_say(fake, monkeypatch, said):
    plan, _ = fake
    fake_facts(monkeypatch, driver, multiprocessors_of=said)
    part = FakeStream(5)
    assert [plan(part), plan(part)] == [4, 4] and part.started == [4, 4]
    with pytest.raises(TooLarge):
        plan(FakeStream(0))


class Driver:
    """What cuda.h says of the functions that are asked."""

    def __init__(self, green=0, of_green=0, of_context=0, affinity=0):
        self.green, self.counts = green, {green: of_green, 77: of_context}
        self.affinity = affinity

    def cuStreamGetGreenCtx(self, stream, context):
        context._obj.value = self.green
        return 0 if stream.value == 5 else 400

    def cuCtxGetCurrent(self, context):
        context._obj.value = 77
        return 0

    def cuGreenCtxGetDevResource(self, context, resource, kind):
        assert kind.value == 1
        count = self.counts[context.value]
        resource[96:100] = count.to_bytes(4, "little")
        return 0 if count else 1

    cuCtxGetDevResource = cuGreenCtxGetDevResource

    def cuCtxGetExecAffinity(self, affinity, kind):
        affinity[1] = self.affinity
        return 0 if self.affinity and kind.value == 0 else 224


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (Driver(green=9, of_green=8, of_context=132), 8),
        (Driver(of_context=132), 132),
        (Driver(of_context=132, affinity=40), 40),
        (Driver(), None),
    ],
)
def test_what_the_driver_is_asked(answers, expected, monkeypatch):
    fake_driver(monkeypatch, lambda name: getattr(answers, name))
    assert driver.multiprocessors_of(5) == expected


def test_a_prepared_launch_in_another_context(fake):
    plan, _ = fake
    whole, part = FakeStream(16), FakeStream(4)
    current = [whole]
    prepared = Prepared(lambda: plan(current[0]), lambda: current[0])
    assert [prepared(), prepared()] == [16, 16]
    current[0] = part
    assert prepared() == 4 and part.started == [4]


def test_clusters_of_a_part(monkeypatch):
    """In proportion, and at least one."""
    fake_facts(monkeypatch, launch, gpu, all_multiprocessors=132, _clusters_of_all=30)

    class Config:
        cluster = 4

    found = [launch.clusters_at_once(Config, 0)]
    for count in (66, 8, 1):
        with driver.limit_multiprocessors(count):
            found.append(launch.clusters_at_once(Config, 0))
    assert found == [30, 15, 1, 1]


# On a GPU: a green context --------------------------------------------------------------------

SM_RESOURCE, DEFAULT_STREAM, NON_BLOCKING = c_int(1), c_uint(1), c_uint(1)


@contextlib.contextmanager
def green_stream(count):
    """(address of a stream that has about ``count`` multiprocessors, how many it has)."""
    cuda = ctypes.CDLL(driver.DRIVER)
    if not hasattr(cuda, "cuGreenCtxStreamCreate"):
        pytest.skip("the driver has no green contexts")

    def call(name, *arguments):
        status = getattr(cuda, name)(*arguments)
        if status == 801:  # CUDA_ERROR_NOT_SUPPORTED
            pytest.skip(f"{name} is not supported here")
        assert status == 0, f"{name}: {status}"

    whole, part, rest = (ctypes.create_string_buffer(256) for _ in range(3))
    groups, description, context, stream = c_uint(1), c_void_p(), c_void_p(), c_void_p()
    device = c_int()
    call("cuDeviceGet", byref(device), c_int(0))
    call("cuDeviceGetDevResource", device, whole, SM_RESOURCE)
    split = byref(groups), whole, rest, c_uint(0), c_uint(count)
    call("cuDevSmResourceSplitByCount", part, *split)
    call("cuDevResourceGenerateDesc", byref(description), part, c_uint(1))
    call("cuGreenCtxCreate", byref(context), description, device, DEFAULT_STREAM)
    call("cuGreenCtxStreamCreate", byref(stream), context, NON_BLOCKING, c_int(0))
    try:
        yield stream.value, driver.multiprocessors_of(stream.value)
    finally:
        call("cuStreamSynchronize", stream)
        call("cuStreamDestroy_v2", stream)
        call("cuGreenCtxDestroy", context)


@contextlib.contextmanager
def current(target, pointer):
    """A stream as the current one of the library."""
    if target.library == "torch":
        import torch

        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.ExternalStream(pointer)):
            yield
        torch.cuda.synchronize()
    else:
        import cupy

        cupy.cuda.Device().synchronize()
        with cupy.cuda.ExternalStream(pointer):
            yield
        cupy.cuda.Device().synchronize()


@each_library(device="cuda")
@pytest.mark.parametrize("before", [False, True], ids=["first there", "on the GPU before"])
def test_blocks_in_a_green_context(target, before):
    if compute_capability()[0] < 75:
        pytest.skip("the kernel needs compute capability 7.5")
    p = make_blocks(target, CASE)
    stack, arrays = p.stack(), (p.x, p.k_cache, p.v_cache, p.lengths)
    exact = expected_stack(p.blocks, p.x, p.k_cache, p.v_cache, p.lengths)
    if before:
        stack(*arrays)
    with green_stream(8) as (pointer, count):
        assert 0 < count < gpu.all_multiprocessors(0)
        for _ in range(3):
            with current(target, pointer):
                out = stack(*arrays)
            exact.check(out=out, k_cache=p.k_cache, v_cache=p.v_cache)
    exact.check(out=stack(*arrays))


@each_library(device="cuda")
@pytest.mark.parametrize("columns", [768, 32768])
def test_norms_in_a_green_context(target, columns):
    """The blocks, or clusters of them, add up the gradients of the weight together."""
    dout, x = (stored(target, normal((300, columns), seed), "float16") for seed in (0, 1))
    weight, bias = (stored(target, normal((columns,), seed), "float16") for seed in (2, 3))
    exact = expected_norm(False, dout, x, weight, bias, None, None, eps=1e-5)
    _, stats = cupyflash.layer_norm(x, weight, bias, return_stats=True)
    names = ("dx", "dweight", "dbias")
    with green_stream(8) as (pointer, _):
        for _ in range(2):
            with current(target, pointer):
                gradients = cupyflash.layer_norm_backward(dout, x, weight, stats)
            exact.check(**dict(zip(names, gradients)))
