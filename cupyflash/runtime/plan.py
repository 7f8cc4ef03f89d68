"""What calls of one signature share: a plan, and the caches in which plans are kept."""

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ..jit import compiler
from . import partition

MAX_PLANS = 4096  # lengths that change with every call must not fill the memory

_keeping = threading.Lock()


class Plan:
    """A plan runs with the device of its arrays as the current one, whatever is current outside.

    Where a context has fewer multiprocessors than a cooperative launch was planned for, another
    plan is made of the same arguments.
    """

    def __new__(cls, *arguments: Any, **options: Any) -> "Plan":
        plan = super().__new__(cls)
        arguments = tuple(dict(x) if isinstance(x, dict) else x for x in arguments)
        plan.again = functools.partial(cls, *arguments, **options)
        plan.smaller = {}
        return plan

    def __init__(self, device: int) -> None:
        compiler.nvrtc()  # the error that names the pip line, where CuPy or NVRTC is missing
        import cupy

        self.device_id, self.device = device, cupy.cuda.Device(device)
        self.current_device = cupy.cuda.runtime.getDevice

    def __call__(self, *arguments: Any) -> tuple:
        try:
            if self.current_device() == self.device_id:
                return self.run(*arguments)
            with self.device:
                return self.run(*arguments)
        except partition.GridTooLarge as error:
            plan = self._for_fewer(error.multiprocessors)
        return plan(*arguments)

    def _for_fewer(self, multiprocessors: int) -> "Plan":
        if multiprocessors not in self.smaller:
            with partition.only(multiprocessors):
                self.smaller[multiprocessors] = self.again()
        return self.smaller[multiprocessors]

    def run(self, *arguments: Any) -> tuple:
        raise NotImplementedError


class Plans(dict):
    """The plans of one operation, by the signatures of its arrays and by its options.

    A call of known signature costs one look-up: shapes, strides, dtypes and devices of the arrays
    are in the key, and all that follows from them, checks included, is in the plan.

    Args:
        wide: so many of the first arrays are read 16 bytes at a time where all of them allow it.
        most: plans at once; then the oldest makes room.
        plain: the operation has no gradient and no torch operator, so that torch must not follow
            what is done to its arrays.
    """

    def __init__(self, wide: int = 0, most: int = MAX_PLANS, plain: bool = False) -> None:
        super().__init__()
        self.wide, self.most, self.plain = wide, most, plain

    def find(
        self,
        library: Any,
        arrays: Sequence[Any],
        options: Hashable,
        check: Callable[[], Any],
        make: Callable[[Any, bool], Any],
        *,
        anew: bool = False,
    ) -> tuple[Any, list[int]]:
        """The plan of a call and the pointers of its arrays, 0 for None.

        Args:
            library: of the first array.
            check: raises what is wrong with the arrays, of other libraries too; else returns what
                ``make`` wants to know of them.
            make: makes the plan of that, and of whether the arrays are aligned.
            anew: check, and make the plan, though there is one.
        """
        pointer, signature = library.pointer, library.signature
        try:
            if self.plain:
                given = [x for x in arrays if x is not None]
                if library.followed(*given) and library.what_follows(*given):
                    check()
            pointers = [0 if x is None else pointer(x) for x in arrays]
            key = tuple([None if x is None else signature(x) for x in arrays])
        except (AttributeError, TypeError):  # an array of another library, or none
            check()
            raise
        bits = 0
        for address in pointers[: self.wide]:
            bits |= address
        aligned = bits % 16 == 0
        key = (key, options, aligned)
        plan = self.get(key)
        if plan is None or anew:
            plan = self.add(key, make(check(), aligned))
        return plan, pointers

    def add(self, key: Hashable, plan: Any) -> Any:
        """Keep a plan, in the place of the oldest one if there are too many; returns it."""
        with _keeping:
            while len(self) >= self.most:
                del self[next(iter(self))]
            self[key] = plan
        return plan
