"""The examples of the documentation, and a script that runs some of them in one process.

``python tests/support/page_blocks.py < blocks.json``, where the file is a list of (name, code).
Each gets a namespace of its own. Every float that a block has made must be finite, gradients
included; how many arrays there are is printed.
"""

import json
import re
import sys
import warnings

from places import ROOT

README = ROOT / "README.md"
DOCS = {path.stem: path for path in sorted((ROOT / "cupyflash" / "docs").glob("*.md"))}
ADDING = DOCS.pop("adding_an_operation")  # its example is built by test_contributing
PARALLEL = DOCS.pop("parallel")  # those of this page run on two processes: test_parallel_page


def blocks_of(path, language):
    """(name, text) of the fenced blocks of a page, named by the line on which each begins."""
    text = path.read_text()
    fence = re.compile(rf"^```{language}\n(.+?)^```$", re.MULTILINE | re.DOTALL)
    line = lambda match: text.count("\n", 0, match.start()) + 1
    return [(f"{path.name}:{line(match)}", match[1]) for match in fence.finditer(text)]


def floats(x):
    """x and its gradient as NumPy arrays of float64, as far as they are arrays of floats."""
    import numpy

    for y in (x, getattr(x, "grad", None)):
        if hasattr(y, "shape") and "float" in str(getattr(y, "dtype", "")):
            y = y.detach().double().cpu() if hasattr(y, "detach") else y
            yield numpy.asarray(y.get() if hasattr(y, "get") else y).astype("float64")


def run(name, code):
    import numpy

    namespace = {"__name__": "__main__"}
    exec(compile(code, name, "exec"), namespace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: the grad of what is no leaf
        made = [y for x in list(namespace.values()) for y in floats(x)]
    assert all(numpy.isfinite(y).all() for y in made), f"{name}: a number is not finite"
    print(name, len(made))


if __name__ == "__main__":
    for name, code in json.load(sys.stdin):
        run(name, code)
