"""Kernels compile for every architecture, without spills and ptxas warnings. Needs no GPU.

There are hundreds of configurations for an architecture, too many to compile in each run, so a
deterministic selection is. Without a GPU: every kernel for `DIFFERENT`, and over all architectures
every value of every switch.
Where there is a GPU, and so usually more than two cores: in the backends of attention every tile of
each architecture with every pair of switches (dtype, softcap, ALiBi, ...), and over all
architectures every tile with every value of every switch; the other kernels are the same on all
architectures, so their tiles and pairs over all of them. The GPU report says whether that ran on
these sources.

``PYTHONPATH=tests/support python tests/jit/test_compile.py`` compiles everything. With the name of
a function of `SOME` it compiles what that returns, as CI does with the oldest and the newest NVRTC
that the extras allow.
"""

import functools
import heapq
import itertools
import os
import re
import sys

import pytest
from places import ROOT
from targets import compute_capability
from tiny_kernel import needs_nvrtc

from cupyflash import jit
from cupyflash.jit import compiler
from cupyflash.ops.attention.backends import BACKENDS
from cupyflash.ops.attention.fitting import FEW_STACK_BYTES
from cupyflash.precompile import TOPICS

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
SWITCHES = (
    *("dtype", "softcap", "alibi", "bias", "dropout", "split", "walks_up", "whole_heads"),
    *("weight", "model", "rms", "activation", "draw", "gated", "rotary", "sequences"),
)
SETS = {**BACKENDS, **TOPICS}
SAME_EVERYWHERE = {
    type(config)
    for topic, capability in itertools.product(TOPICS.values(), CAPABILITIES)
    for config in topic.configurations(capability)
}
NEWEST = ((10, 0), (12, 0))  # CI compiles each kernel for one, as their code is made in other ways
DIFFERENT = ((7, 5), (9, 0))  # the least and the most instructions that kernels choose between
OLDER = ((6, 0), (7, 0))  # what these spill is not looked at
THOROUGH = compute_capability()[0] > 0


def needs(config, capability):
    """What compiling a configuration covers: (for its architecture, for all of them)."""
    if not THOROUGH:
        return {config.name} if capability in DIFFERENT else set(), few_needs(config)
    values = dict(vars(config))
    switches = {name: values.pop(name) for name in SWITCHES if name in values}
    whole = (config.name, *values.items())
    pairs = {(config.name, *pair) for pair in itertools.combinations(switches.items(), 2)}
    if type(config) in SAME_EVERYWHERE:
        return {config.name}, {whole, *pairs}
    return {whole, *pairs}, {(whole, switch) for switch in switches.items()}


def few_needs(config):
    """What all architectures together must cover without a GPU."""
    switches = {x: getattr(config, x) for x in SWITCHES if hasattr(config, x)}
    if type(config) in SAME_EVERYWHERE:  # which share what loads a dtype, and the like
        single = switches.get("dtype") == "float32"
        several = switches.pop("sequences", 1) > 1
        return {*switches.items(), (config.name, single), ("several", several)}
    bias = switches.pop("bias", 0)
    named = {(config.name, x) for x in (*switches.items(), bool(bias))}
    # Kernels share what loads each kind of bias, and those of sm90 take longest to compile.
    return named if "/sm90/" in config.source else named | {("bias", bias)}


@functools.cache
def selection(name):
    """{capability: configurations}; greedy, the first of those that cover most."""
    backend = SETS[name]
    offered = {c: {x: needs(x, c) for x in backend.configurations(c)} for c in CAPABILITIES}
    selected = {capability: [] for capability in CAPABILITIES}
    everywhere = _union(n[1] for configs in offered.values() for n in configs.values())
    for capability, configs in offered.items():
        here = _union(n[0] for n in configs.values())
        # What a kernel adds only shrinks: one that is still before the bounds of the others wins.
        bounds = [(_cost(x, here, everywhere), i, c) for i, (c, x) in enumerate(configs.items())]
        heapq.heapify(bounds)
        while here:
            _, place, best = heapq.heappop(bounds)
            bound = _cost(configs[best], here, everywhere), place
            if bounds and bound > bounds[0][:2]:
                heapq.heappush(bounds, (*bound, best))
                continue
            selected[capability].append(best)
            here -= configs[best][0]
            everywhere -= configs[best][1]
    # The rest, which too few architectures had a turn for: first those that cover much of it.
    for least, capability in itertools.product((16, 8, 4, 2, 1), CAPABILITIES):
        for config, (_, wanted) in offered[capability].items():
            if len(wanted & everywhere) >= least:
                selected[capability].append(config)
                everywhere -= wanted
    return selected


def _cost(needs, here, everywhere):
    """Minus the numbers of needs that a kernel adds: here, and for all."""
    of_arch, of_all = needs
    return -len(of_arch & here), -len(of_all & everywhere)


def _union(sets):
    return set().union(*sets)


def faults(tasks, **options):
    """One line for each kernel that uses local memory or that the compiler complains about.

    With a text, a few registers in local memory cost less than the next smaller tile.
    """
    return [
        f"{built.expression} for {built.arch}: {built.registers} registers, "
        f"{built.spill_bytes} bytes spilled, {built.stack_bytes} on the stack "
        f"{' '.join(built.warnings)}"
        for built in jit.build_all(tasks, **options)
        if built.stack_bytes > (FEW_STACK_BYTES if built.has_text else 0)
        or (built.spill_bytes and not built.has_text)
        or built.warnings
        if built.arch not in map(jit.arch_of, OLDER)
    ]


def parts():
    """(backend, capability, first, step): the kernels of a test, few enough for pytest-xdist."""
    for backend, capability in itertools.product(SETS, CAPABILITIES):
        hopper = (backend, capability) == ("sm90", (9, 0))
        step = (24 if hopper else 6) if THOROUGH else 2
        for first in range(step):
            test = f"{backend}-{jit.arch_of(capability)}-{first}"
            yield pytest.param(backend, capability, first, step, id=test)


@needs_nvrtc
@pytest.mark.parametrize(("backend", "capability", "first", "step"), list(parts()))
def test_compile(backend, capability, first, step):
    if capability[0] * 10 + capability[1] not in compiler.supported_archs():
        pytest.skip(f"NVRTC {compiler.version()} does not know {jit.arch_of(capability)}")
    configs = selection(backend)[capability][first::step]
    tasks = [(config, jit.arch_of(capability)) for config in configs]
    # Under pytest-xdist the tests are what runs in parallel.
    jobs = 1 if "PYTEST_XDIST_WORKER" in os.environ else None
    assert faults(tasks, jobs=jobs, progress=False) == []


@needs_nvrtc
@pytest.mark.parametrize("capability", OLDER if THOROUGH else (), ids=jit.arch_of)
def test_every_kernel_compiles_for_older_gpus(capability):
    """One configuration of each; without a GPU, `.ci/run` compiles them."""
    if capability[0] * 10 + capability[1] not in compiler.supported_archs():
        pytest.skip(f"NVRTC {compiler.version()} does not know {jit.arch_of(capability)}")
    configs = [config for backend in SETS.values() for config in backend.configurations(capability)]
    kernels = {config.name: config for config in reversed(configs)}
    jit.build_all([(x, jit.arch_of(capability)) for x in kernels.values()], jobs=1, progress=False)


@pytest.mark.parametrize("backend", SETS)
def test_selection_covers(backend):
    """The selection has what each architecture, and what all of them together need."""
    some, every = set(), set()
    for capability, configs in selection(backend).items():
        offered = [needs(x, capability) for x in SETS[backend].configurations(capability)]
        assert _union(needs(x, capability)[0] for x in configs) == _union(n[0] for n in offered)
        some |= _union(needs(x, capability)[1] for x in configs)
        every |= _union(n[1] for n in offered)
    assert some == every


def test_ci_compiles_the_rest():
    """Every kernel for the old GPUs and one of the new, in this run or in CI's, every file for
    Hopper by the newest NVRTC, and each of `tiles` by that or by the one of the tests.
    """
    compiled = {(config.name, arch) for config, arch in rest()}
    for backend in SETS.values():
        for generation in (OLDER, NEWEST):
            for config in itertools.chain(*map(backend.configurations, generation)):
                wanted = {(config.name, jit.arch_of(x)) for x in generation}
                assert wanted <= compiled if generation is OLDER else wanted & compiled
        assert {x.source for x in backend.configurations((9, 0))} <= {x.source for x, _ in widest()}
    assert {*tiles()} <= {*rest(), *widest()}
    assert {x.source for x, _ in tiles()} <= {x.source for x, _ in hopper()}
    words = re.findall(r'nvidia-cuda-nvrtc\S* (\w+)"', (ROOT / ".ci" / "run").read_text())
    assert set(words) == set(SOME)


def everything():
    return [
        (config, jit.arch_of(capability))
        for backend, capability in itertools.product(SETS.values(), CAPABILITIES)
        for config in backend.configurations(capability)
    ]


@functools.cache
def rest():
    """What the tests leave to CI: each kernel for the old GPUs and a new one, half of `tiles`."""
    found = []
    for generation in (OLDER, NEWEST):
        of_name = {}
        for backend, capability in itertools.product(SETS.values(), generation):
            for config in backend.configurations(capability):
                of_name.setdefault(config.name, {}).setdefault(capability, config)
        for number, configs in enumerate(of_name.values()):
            some = [*configs] if generation is OLDER else [[*configs][number % len(configs)]]
            found += [(configs[capability], jit.arch_of(capability)) for capability in some]
    return found + tiles()[::2]


@functools.cache
def widest():
    """A kernel of each file for Hopper, and the other half of `tiles`."""
    return list(dict.fromkeys((*files().values(), *tiles()[1::2])))


@functools.cache
def hopper():
    """Those of `files` that no other GPU can run: they depend most on NVRTC."""
    others = {x.source for backend in SETS.values() for x in backend.configurations((8, 0))}
    return [task for source, task in files().items() if source not in others]


@functools.cache
def files():
    """The first kernel of each file, of sm90 the widest of `tiles`, by the file."""
    found = {}
    for backend in SETS.values():
        for config in backend.configurations((9, 0)):
            found.setdefault(config.source, (config, "sm_90a"))
    return found | {task[0].source: task for task in tiles()}


@functools.cache
def tiles():
    """The widest tile of sm90 for each head dim, which spills first; two NVRTCs share them."""
    first, found = {}, {}
    for config in SETS["sm90"].configurations((9, 0)):
        first.setdefault(tile(config), config)
    for config in sorted(first.values(), key=area):
        if area(config):
            columns = [getattr(config, x, 0) for x in ("head_dim", "head_dim_v", "whole_heads")]
            found[(config.source, *columns)] = config, "sm_90a"
    return [found[x] for x in sorted(found)]


def tile(config):
    """The sizes of a kernel's tile, without what follows from those and options."""
    without = {"smem_bytes", *SWITCHES} - {"whole_heads"}  # which has registers of its own
    return config.name, *(x for x in vars(config).items() if x[0] not in without)


def area(config):
    return getattr(config, "block_m", 0) * getattr(config, "block_n", 0)


def compile_all(tasks):
    found = faults(tasks)
    print(
        *found,
        f"{len(tasks)} kernels by NVRTC {compiler.version()}, {len(found)} with spills or warnings",
        sep="\n",
    )
    return 1 if found else 0


SOME = {"rest": rest, "hopper": hopper, "widest": widest}

if __name__ == "__main__":
    sys.exit(compile_all(SOME[sys.argv[1]]() if sys.argv[1:] else everything()))
