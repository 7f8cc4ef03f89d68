"""One module for each framework that cupyflash plugs into; imported by its name only."""

from ..packages import importing

with importing(__name__, "torch>=2.7"):
    import torch  # noqa: F401  # which all of them need
