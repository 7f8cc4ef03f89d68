"""What calls of one signature share: a plan, and the caches in which plans are kept."""

import functools
import threading
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


def keep(plans: dict[tuple, Any], key: tuple, plan: Any, most: int = MAX_PLANS) -> None:
    """Put a plan into a cache of so many, in the place of the oldest."""
    with _keeping:
        while len(plans) >= most:
            del plans[next(iter(plans))]
        plans[key] = plan
