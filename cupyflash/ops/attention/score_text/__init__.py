"""Scores and masks that a caller writes, as text that becomes a part of the kernels.

| Module | What it is for |
|---|---|
| arguments.py | from the arguments of `attention` to what a call passes on |
| scores.py | `Score` and `Mask` |
| trace.py, recorder.py, stand_in.py | from a Python function to a tree |
| remembered.py | functions that have been traced before |
| block_mask.py | BlockMasks of FlexAttention |
| text.py | `Text`, a part of a kernel's configuration, and the header that kernels include |
| tree.py | what a text says: nodes, and the kind of each (bool, int or float) |
| functions.py | the functions of the language, with their derivatives |
| parse.py, write.py | from text to tree, and from a tree to text and to C++ |
| evaluate.py, call.py | the value of a tree, and its derivatives, in NumPy and CuPy |
| pieces.py | the text of a call with pieces of sequences, or some of the heads |
| encode.py | a text as the string that a torch operator takes |
"""

from .capture import Capture
from .text import Text

__all__ = ["Capture", "Text"]
