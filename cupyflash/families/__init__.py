"""Kernel families: which configurations of which kernels compute a problem, one module a family.

A family module has

* ``supports(dtype, head_dim, aligned, capability, *, backward) -> bool``
* ``forward(dtype, head_dim, softcap, alibi, capability)``, the configuration of one kernel
* ``backward(…)``, the configurations in launch order
* ``configurations(capability)``, everything those two can return: for warm-up and tests
"""

from types import ModuleType

from . import simt, sm80

FAMILIES: dict[str, ModuleType] = {"sm80": sm80, "simt": simt}  # the fastest first


def choose(
    function: str,
    forced: str | None,
    dtype: str,
    head_dim: int,
    aligned: bool,
    capability: tuple[int, int],
    *,
    backward: bool,
) -> ModuleType:
    """The first family that supports the problem, or the forced one.

    Raises:
        NotImplementedError: none does, or the forced one does not.
    """
    candidates = FAMILIES if forced is None else {forced: FAMILIES.get(forced)}
    for family in candidates.values():
        if family and family.supports(dtype, head_dim, aligned, capability, backward=backward):
            return family
    alignment = "16-byte aligned" if aligned else "not 16-byte aligned"
    got = f"{dtype}, head_dim {head_dim}, {alignment}, compute capability {capability}"
    if forced:
        raise NotImplementedError(
            f"{function}: the kernel family {forced} (CUPYFLASH_FAMILY) does not support {got}"
        )
    raise NotImplementedError(
        f"{function}: needs a GPU of compute capability {simt.MIN_CAPABILITY} or newer, got {got}"
    )
