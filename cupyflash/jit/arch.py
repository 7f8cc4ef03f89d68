"""Which architecture a GPU's kernels are compiled for."""

from . import compiler

# Cubins of the integrated (Jetson, DRIVE) GPUs are not promised to run on others.
_INTEGRATED = (53, 62, 72, 87, 101)


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture's name: ``sm_90a`` for (9, 0), whose wgmma needs it, else ``sm_XY``."""
    major, minor = capability
    return "sm_90a" if capability == (9, 0) else f"sm_{major}{minor}"


def target_arch(capability: tuple[int, int]) -> str:
    """The best architecture that NVRTC knows for a GPU of this compute capability.

    A cubin also runs on GPUs of the same major number and a higher minor one, so a GPU that is
    younger than NVRTC gets the newest of those.

    Raises:
        RuntimeError: NVRTC knows none; names the pip line.
    """
    wanted = capability[0] * 10 + capability[1]
    known = compiler.supported_archs()
    if wanted in known:
        return arch_of(capability)
    usable = [a for a in known if a // 10 == capability[0] and a < wanted and a not in _INTEGRATED]
    if usable:
        return arch_of(divmod(max(usable), 10))
    extra = "cuda13" if wanted > max(known) else "cuda12"
    raise RuntimeError(
        f"cupyflash: NVRTC {compiler.version()} compiles for compute capability "
        f"{', '.join(f'{a // 10}.{a % 10}' for a in known)}, this GPU has "
        f"{capability[0]}.{capability[1]}; pip install --upgrade 'cupyflash[{extra}]'"
    )
