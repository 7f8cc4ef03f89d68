"""Backends: which configurations of which kernels compute a problem, one module a backend.

A backend module has

* ``supports(dtype, head_dim, access, features, capability, *, backward) -> bool``
* ``forward(dtype, head_dim, features, capability)``, the configuration of one kernel
* ``backward(…)``, the configurations in launch order
* ``candidates(head_dim, features, capability, *, backward)``, the tiles that those two take as a
  last argument, the built-in choice first; none where that is the only one
* ``PACKED``, the configurations that packed sequences need besides
* ``configurations(capability)``, everything those two can return: for warm-up and tests

and ``sm80`` says with ``is_faster()`` where it comes before those for newer GPUs.
"""

from types import ModuleType

from ..problem import MAX_FAST_SOFTCAP, Access, Features
from . import fp16x3, simt, sm80, sm90

BACKENDS: dict[str, ModuleType] = {  # the fastest first
    "sm90": sm90,
    "sm80": sm80,
    "fp16x3": fp16x3,
    "simt": simt,
}

_ACCESS = {
    Access.ELEMENT: "not 16-byte aligned",
    Access.VECTOR: "16-byte aligned, zero, negative or huge strides",
    Access.TENSOR_MAP: "16-byte aligned",
}


def in_order(
    head_dim: int, features: Features, capability: tuple[int, int], *, backward: bool
) -> dict[str, ModuleType]:
    """All backends, the fastest for such a problem first."""
    if sm80.is_faster(head_dim, features, capability, backward=backward):
        return {"sm80": sm80} | BACKENDS
    return BACKENDS


def keeps_v(
    forced: str | None,
    dtype: str,
    head_dim: int,
    access: Access,
    features: Features,
    capability: tuple[int, int],
    *,
    backward: bool,
) -> bool:
    """Whether the kernels take v and out with fewer columns than q and k; only ``sm90`` has any."""
    order = in_order(head_dim, features, capability, backward=backward)
    return (
        (forced or next(iter(order))) == "sm90"
        and sm90.supports(dtype, head_dim, access, features, capability, backward=backward)
        and sm90.keeps_v(head_dim, features)
    )


def choose(
    function: str,
    forced: str | None,
    dtype: str,
    head_dim: int,
    access: Access,
    features: Features,
    capability: tuple[int, int],
    *,
    backward: bool,
) -> ModuleType:
    """The first backend that supports the problem, or the forced one.

    Raises:
        NotImplementedError: none does, or the forced one does not.
    """
    candidates = {forced: BACKENDS.get(forced)}
    if forced is None:
        candidates = in_order(head_dim, features, capability, backward=backward)
    problem = (dtype, head_dim, access, features, capability)
    for name, backend in candidates.items():
        if name == "fp16x3" and not forced and not fp16x3.is_faster(features, capability):
            continue
        if backend and backend.supports(*problem, backward=backward):
            return backend
    got = f"{dtype}, head_dim {head_dim}, {_ACCESS[access]}, compute capability {capability}"
    got += f", a softcap above {MAX_FAST_SOFTCAP:g}" if features.wide_softcap else ""
    if forced:
        raise NotImplementedError(
            f"{function}: the backend {forced} (CUPYFLASH_BACKEND) does not support {got}"
        )
    raise NotImplementedError(
        f"{function}: needs a GPU of compute capability {simt.MIN_CAPABILITY} or newer, got {got}"
    )
