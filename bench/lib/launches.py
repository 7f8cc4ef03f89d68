"""Which kernels a call launches."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from cupyflash import jit
from cupyflash.runtime.config import KernelConfig
from cupyflash.runtime.launch import Launch, recorder


@contextlib.contextmanager
def configurations() -> Iterator[dict[Any, KernelConfig]]:
    """The configurations of the kernels that plans load meanwhile, by their loaded functions."""
    found, load = {}, jit.load

    def noting(config: KernelConfig, device: int) -> Any:
        function = load(config, device)
        found[function] = config
        return function

    with mock.patch.object(jit, "load", noting):
        yield found


def recorded(call: Callable[[], Any]) -> tuple[Any, list[tuple[Launch, bytes]]]:
    """The results of a call, and its launches with their parameters; without copies of arrays."""
    recorder.launches = launches = []
    try:
        results = call()
    finally:
        recorder.launches = None
    return results, [x for x in launches if x is not None]
