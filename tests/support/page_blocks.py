"""Runs examples of the documentation in one process, each in a namespace of its own.

``python tests/page_blocks.py < blocks.json``, where the file is a list of (name, code). Every float
that a block has made must be finite, gradients included; how many arrays there are is printed.
"""

import json
import sys
import warnings


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
