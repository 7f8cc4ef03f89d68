"""Fill the kernel cache ahead of the first call, without a GPU: for container images."""

import functools
import itertools
import re
from collections.abc import Iterator, Sequence

from . import jit
from .attention.families import FAMILIES
from .attention.families.preprocess import FlashBwdSinks
from .jit import compiler
from .kernel_config import ITEM_SIZE, Access, Features, KernelConfig
from .kernels import TOPICS

ALL_HEAD_DIMS = range(8, 257, 8)


def warmup(
    archs: Sequence[str],
    *,
    head_dims: Sequence[int] = ALL_HEAD_DIMS,
    dtypes: Sequence[str] = tuple(ITEM_SIZE),
    families: Sequence[str] = tuple(FAMILIES),
    topics: Sequence[str] = tuple(TOPICS),
    plain: bool = False,
    jobs: int | None = None,
    progress: bool = True,
) -> list[jit.Built]:
    """Compile every kernel that calls within these limits can launch, in parallel processes.

    All but attention with a bias or dropout, which is compiled at its first use.

    Args:
        archs: names such as "sm_80" or "sm_90a".
        head_dims: of attention, multiples of 8 up to 256.
        dtypes: of "float16", "bfloat16" and "float32".
        families: of attention: of "sm90", "sm80" and "simt"; none for no attention.
        topics: of the other kernels, keys of `cupyflash.kernels.TOPICS`; none for attention alone.
        plain: attention without softcap, ALiBi and sinks, other kernels for arrays whose rows are
            multiples of 16 bytes.
        jobs: processes; default one a core. A script must call this under
            ``if __name__ == "__main__"``.
        progress: show a progress bar on stderr.

    Raises:
        ValueError: an unknown architecture, family or topic, or nothing to compile.
        OSError: the cache folder cannot be written.
        jit.CompileError: a kernel does not compile.
    """
    for what, known, names in (("families", FAMILIES, families), ("topics", TOPICS, topics)):
        if unknown := set(names) - set(known):
            got = ", ".join(sorted(unknown))
            raise ValueError(f"warmup: {what} must be of {', '.join(known)}, got {got}")
    tasks = []
    for capability in map(capability_of, archs):
        arch = jit.arch_of(capability)
        known = compiler.supported_archs()
        if capability[0] * 10 + capability[1] not in known:
            allowed = ", ".join(jit.arch_of(divmod(number, 10)) for number in known)
            raise ValueError(f"warmup: NVRTC {compiler.version()} knows {allowed}, got {arch}")
        attention = _attention(capability, head_dims, dtypes, families, plain)
        configs = itertools.chain(attention, _beside_attention(capability, dtypes, topics, plain))
        tasks += [(config, arch) for config in configs]
    if not tasks:
        raise ValueError("warmup: no kernel computes that on any of these architectures")
    return jit.build_all(tasks, jobs, progress)


def capability_of(arch: str) -> tuple[int, int]:
    """Compute capability of an architecture name: "sm_90a" is (9, 0)."""
    match = re.fullmatch(r"sm_(\d+)(\d)[af]?", arch.strip())
    if match is None:
        raise ValueError(f"warmup: archs must be names such as sm_80 or sm_90a, got {arch!r}")
    return int(match[1]), int(match[2])


def _attention(
    capability: tuple[int, int],
    head_dims: Sequence[int],
    dtypes: Sequence[str],
    families: Sequence[str],
    plain: bool,
) -> Iterator[KernelConfig]:
    switches = (False,) if plain else (False, True)
    both = (False, True)
    features = itertools.starmap(Features, itertools.product(switches, switches, both, both))
    for name, dtype, head_dim, feature in itertools.product(families, dtypes, head_dims, features):
        family, problem = FAMILIES[name], (dtype, head_dim, feature, capability)
        supports = functools.partial(
            family.supports, dtype, head_dim, Access.TENSOR_MAP, feature, capability
        )
        if supports(backward=False):
            yield from family.forward(*problem).with_splits()
            yield from family.PACKED
        if supports(backward=True):
            yield from family.backward(*problem)
            if not plain:
                yield FlashBwdSinks()


def _beside_attention(
    capability: tuple[int, int], dtypes: Sequence[str], topics: Sequence[str], plain: bool
) -> Iterator[KernelConfig]:
    for config in itertools.chain.from_iterable(
        TOPICS[name].configurations(capability) for name in topics
    ):
        wanted = getattr(config, "dtype", None) in (None, *dtypes)  # some are of a weight only
        if wanted and not (plain and getattr(config, "vector", None) == 1):
            yield config
