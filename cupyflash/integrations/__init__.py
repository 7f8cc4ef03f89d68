"""One module for each framework that cupyflash plugs into; imported by its name only."""

import importlib

from ..packages import importing

with importing(__name__, "torch>=2.7"):
    importlib.import_module("torch")  # which all need; under no name, as a module here has it
