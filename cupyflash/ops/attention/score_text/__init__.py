"""Scores and masks that a caller writes, as text that becomes a part of the kernels.

| Module | What it is for |
|---|---|
| text.py | `Text`, a part of a kernel's configuration, and the header that kernels include |
| tree.py | what a text says: nodes, and the kind of each (bool, int or float) |
| functions.py | the functions of the language, with their derivatives |
| parse.py, write.py | from text to tree, and from a tree to text and to C++ |
| evaluate.py | the value of a tree, and its derivatives, in NumPy and CuPy |
"""

from .text import Capture, Text

__all__ = ["Capture", "Text"]
