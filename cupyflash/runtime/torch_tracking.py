"""What torch does around a call: gradients, dispatch modes, transforms, subclasses of tensors."""

from typing import Any

from . import loaded
from .array import Array
from .libraries import Library


class TorchTracking(Library):
    """The part of torch's adapter that says what follows a call and its tensors."""

    has_autograd = True

    def __init__(self) -> None:
        self.torch = loaded.torch
        self._transforms_active = self.torch._C._are_functorch_transforms_active
        self._modes = self.torch._C._len_torch_dispatch_stack
        self._tracer = self.torch._C._get_tracing_state
        self.is_autocast = self.torch._C._is_any_autocast_enabled
        self._forward_mode = self.torch.autograd.forward_ad
        self._plain = self.torch.Tensor.__torch_dispatch__  # only tensor subclasses have another
        self._is_plain = {self.torch.Tensor: True}  # keys: types

    def route(self, first: Array, arrays: tuple) -> str:
        """The method of a `TorchSide` that takes a call of these arrays, or ""; 0.8 µs for three.

        It is "traced" as `traced` says, and "called" under autocast and where an array requires a
        gradient. None and arrays of other libraries are ignored.

        Raises:
            NotImplementedError: an array has a forward-mode tangent.
        """
        if self._forward_mode._current_level >= 0:
            self.refuse_tangents(*arrays)
        is_plain, wanted = self._is_plain, False
        for x in arrays:
            kind = type(x)
            if not (is_plain.get(kind) or self._kind_is_plain(kind)):
                return "traced"
            if not wanted and getattr(x, "requires_grad", False) is True:
                wanted = True
        if (
            self._modes() > 0
            or first.is_meta
            or self._transforms_active()
            or self._tracer() is not None
        ):
            return "traced"
        return "called" if self.is_autocast() or (wanted and self.torch.is_grad_enabled()) else ""

    def traced(self, *arrays: Any) -> bool:
        """Whether torch must see the call as an operator.

        It must under a dispatch mode, if the first array is a meta tensor, and in the cases of
        `replaced`; `compiling` covers torch.compile. Costs 0.2 µs and 0.05 µs for each array.

        Raises:
            NotImplementedError: an array has a forward-mode tangent.
        """
        self.refuse_tangents(*arrays)
        return self._modes() > 0 or arrays[0].is_meta or self.replaced(*arrays)

    def replaced(self, *arrays: Any) -> bool:
        """Whether a transform of torch.func, torch.jit.trace or a tensor subclass is involved.

        Their tensors are stand-ins for the numbers that a kernel needs. None and arrays of other
        libraries do not count.
        """
        is_plain = self._is_plain
        for x in arrays:
            if not (is_plain.get(type(x)) or self._kind_is_plain(type(x))):
                return True
        return self._transforms_active() or self._tracer() is not None

    def _kind_is_plain(self, kind: type) -> bool:
        if kind not in self._is_plain:
            refuse_sharded(kind)
            plain = getattr(kind, "__torch_dispatch__", self._plain) is self._plain
            plain = plain and kind.__module__ != "torch.nn.attention.bias"  # memory with no numbers
            self._is_plain[kind] = plain or not issubclass(kind, self.torch.Tensor)
        return self._is_plain[kind]

    def refuse_tangents(self, *arrays: Any) -> None:
        """Raises NotImplementedError if an array has a forward-mode tangent."""
        if self._forward_mode._current_level < 0:
            return
        for x in arrays:
            if isinstance(x, self.torch.Tensor) and self._has_tangent(x):
                fact = "forward-mode derivatives are not built, allowed are those of backward"
                raise NotImplementedError(f"cupyflash: {fact}, got a dual tensor")

    def _has_tangent(self, x: Array) -> bool:
        try:
            return self._forward_mode.unpack_dual(x).tangent is not None
        except RuntimeError:  # inside of code that torch.compile runs, torch does not answer
            return True

    def wants_gradient(self, *arrays: Array | None) -> bool:
        """Whether a derivative, of backward or forward mode, would be lost in a plain result.

        None and arrays of other libraries do not count.
        """
        for x in arrays:
            if x is not None and getattr(x, "requires_grad", False) is True:
                return self.torch.is_grad_enabled()
        if self._forward_mode._current_level < 0:
            return False
        return any(self._has_tangent(x) for x in arrays if isinstance(x, self.torch.Tensor))

    def determinism(self) -> str:
        """The setting of torch.use_deterministic_algorithms: "error", "warn" or ""."""
        if not self.torch.are_deterministic_algorithms_enabled():
            return ""
        warn = self.torch.is_deterministic_algorithms_warn_only_enabled()
        return "warn" if warn else "error"

    def followed(self, *arrays: Array) -> bool:
        """Whether `what_follows` may return something for tensors on a GPU; 1 µs for six."""
        is_plain = self._is_plain
        for x in arrays:
            if x.requires_grad or not is_plain.get(type(x)):
                return True
        return (
            self._transforms_active()
            or self._modes() > 0
            or self._tracer() is not None
            or self._forward_mode._current_level >= 0
        )

    def what_follows(self, *arrays: Array, gradients: bool = True) -> str:
        """The name of what tracks these, so that no kernel may take them; "" for nothing."""
        if self._transforms_active() or self._modes() > 0 or self._tracer() is not None:
            return "a call within a transform of torch.func, torch.jit.trace or a dispatch mode"
        for x in arrays:
            if not self._kind_is_plain(type(x)):
                return f"a {type(x).__name__}"
            if x.is_meta:
                return "a tensor on the device 'meta'"
        if self._forward_mode._current_level >= 0 and any(map(self._has_tangent, arrays)):
            return "a tensor with a forward-mode tangent"
        if gradients and self.wants_gradient(*arrays):
            return "inputs that require a gradient (use torch.no_grad())"
        return ""


def refuse_sharded(kind: type) -> None:
    """Raises NotImplementedError if a type is DTensor: the operators have no sharding rule."""
    if kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed"):
        fact = "no function has a rule for sharded tensors"
        allowed = "allowed are their local parts (torch.distributed.tensor.experimental.local_map)"
        raise NotImplementedError(f"cupyflash: {fact}, {allowed}, got a DTensor")
