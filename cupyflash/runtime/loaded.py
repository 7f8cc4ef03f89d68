"""The array libraries that the caller has imported: ``loaded.torch``, say, or None.

Code that torch.compile traces must not touch ``sys.modules``: Dynamo would walk over all entries,
which takes up to 170 ms, runs imports that other modules have put off, and fails where these add
entries. An attribute of a module is read, not traced.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers do not see the class of this module
    torch: Any
    cupy: Any
    jax: Any


class _Loaded(ModuleType):
    @property
    def torch(self) -> Any:
        return sys.modules.get("torch")

    @property
    def cupy(self) -> Any:
        return sys.modules.get("cupy")

    @property
    def jax(self) -> Any:
        return sys.modules.get("jax")


sys.modules[__name__].__class__ = _Loaded
