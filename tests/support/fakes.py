"""Stand-ins for CuPy, its streams and a GPU: for tests of what comes before a launch."""

import contextlib
import sys
from types import SimpleNamespace


class Stream:
    """A stream of CuPy: a pointer."""

    def __init__(self, ptr):
        self.ptr = ptr

    def synchronize(self):
        pass


def fake_cupy(monkeypatch, **parts):
    """Puts a module `cupy` without a GPU in the place of CuPy.

    Args:
        parts: further names of ``cupy.cuda``.

    Returns:
        The module. `current` is its current stream, `capturing` has the pointers of streams under
        capture, `made_current` the devices that were made current.
    """
    fake = SimpleNamespace(current=Stream(7), capturing=set(), made_current=[], int32="int32")
    runtime = SimpleNamespace(
        setDevice=fake.made_current.append,
        streamIsCapturing=lambda ptr: ptr in fake.capturing,
        memsetAsync=lambda *arguments: None,
    )
    of_cuda = {
        "Device": lambda device: contextlib.nullcontext(),
        "get_current_stream": lambda: fake.current,
        "runtime": runtime,
    }
    fake.cuda = SimpleNamespace(**(of_cuda | parts))
    fake_modules(monkeypatch, cupy=fake)
    return fake


def fake_modules(monkeypatch, **modules):
    """What an import of each name finds: a stand-in, or nothing for None, also of submodules."""
    for name, module in modules.items():
        known = [x for x in sys.modules if x.startswith(f"{name}.")] if module is None else []
        for x in (name, *known):
            monkeypatch.setitem(sys.modules, x, module)


def fake_driver(monkeypatch, answer):
    """``answer(name)`` is the function of the CUDA driver of this name."""
    from cupyflash.runtime import driver

    monkeypatch.setattr(driver, "function", lambda name, *types: answer(name))


def fake_graphs(monkeypatch, fake):
    """``fake.ends`` has what is called when the graphs that are captured now are gone."""
    from cupyflash.runtime import scratch

    fake.ends = []
    monkeypatch.setattr(scratch, "when_graph_is_gone", lambda _, end: fake.ends.append(end))


def fake_facts(monkeypatch, *modules, **facts):
    """What functions of the modules say of the machine: ``capability_of=(9, 0)``, say.

    A fact is what the function of its name returns, in each of the modules that has it.
    """
    for name, fact in facts.items():
        having = [module for module in modules if hasattr(module, name)]
        assert having, f"no module has {name}"
        for module in having:
            monkeypatch.setattr(module, name, lambda *_, fact=fact: fact)


def fake_kernels(monkeypatch, kernel_of):
    """``kernel_of(config)`` is what a launch gets in place of a compiled kernel."""
    from cupyflash.runtime import launch

    monkeypatch.setattr(launch.jit, "load", lambda config, device: kernel_of(config))


def fresh_plans(monkeypatch, module):
    """The module has no plans yet, and those of the test end with it."""
    from cupyflash.runtime.operation import Plans

    kept = {name: x for name, x in vars(module).items() if isinstance(x, Plans)}
    assert kept
    for name, x in kept.items():
        monkeypatch.setattr(module, name, Plans(x.wide, x.most))


def without_detour(monkeypatch, *modules):
    """Calls that a GPU would compute in steps of the library are handed to these steps as is."""
    for module in modules:
        monkeypatch.setattr(module, "Detour", lambda library, device, call: call)


def fake_launches(monkeypatch, params):
    """Takes the place of CuPy, of the driver and of all kernels of linear layers on 132
    multiprocessors.

    Args:
        params: the struct that the kernels take.

    Returns:
        `encoded`, the tensor maps as (pointer, spec), and `launched`, the launches as (grid,
        threads, shared memory, params).
    """
    from cupyflash.ops.linear import launches
    from cupyflash.runtime import launch
    from cupyflash.runtime.tensor_map import TensorMapSpec

    found = SimpleNamespace(encoded=[], launched=[], processors=132)

    def encode(spec, pointer):
        found.encoded.append((pointer, spec))
        return bytes([len(found.encoded)]) * 128

    def function(grid, threads, argument, shared_memory, *_, **__):
        argument = params.from_buffer_copy(argument)
        found.launched.append((grid, threads, shared_memory, argument))

    fake_cupy(monkeypatch)
    monkeypatch.setattr(TensorMapSpec, "encode", encode)
    fake_facts(monkeypatch, launch, capability_of=(8, 0))  # none begins early
    fake_kernels(monkeypatch, lambda config: function)
    monkeypatch.setattr(launches, "multiprocessors", lambda device: found.processors)
    return found
