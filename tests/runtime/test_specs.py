"""Declarations of arrays: what they accept, and the words of their errors."""

import numpy
import pytest

from cupyflash.runtime.array import View, dense_strides
from cupyflash.runtime.lookup import library_of
from cupyflash.runtime.specs import Spec, check_views, views_of

LIKE, EITHER = Spec((..., "n")), Spec(("n",), "like x or float32")


def view(*shape, dtype="float16", device=0, order=None):
    strides = dense_strides(shape, range(len(shape)) if order is None else order)
    return View(shape, strides, dtype, device)


def check(specs, *views, **lengths):
    specs = dict(zip("xyz", specs))
    return check_views("f", specs, dict(zip(specs, views)), **lengths)


def test_lengths_are_learned():
    found = check([LIKE, EITHER], view(2, 3, 8), view(8, dtype="float32"))
    assert found == {...: (2, 3), "n": 8}


@pytest.mark.parametrize(
    "specs, views",
    [
        ([LIKE, Spec((..., 2), "float32")], [view(2, 3, 8), view(2, 3, 2, dtype="float32")]),
        ([LIKE, Spec([(), ("n",)])], [view(8), view()]),
        ([LIKE, Spec([(), ("n",)])], [view(8), view(8)]),
        ([LIKE, Spec(("n",), "like or narrower")], [view(8, dtype="float32"), view(8)]),
        ([Spec((...,), strides="dense")] * 2, [view(4, 5, order=(1, 0))] * 2),
        ([Spec(("m", "n"), strides=1)], [View((4, 5), (9, 1), "float16", 0)]),
        ([Spec(("m", "n"), strides="free")], [View((4, 5), (1, 7), "float16", 0)]),
        ([LIKE], [View((0, 5), (9, 3), "float16", 0)]),  # strides of no elements do not matter
    ],
)
def test_right_arrays(specs, views):
    check(specs, *views)


BAD_DTYPES = [
    ([LIKE], [view(8, dtype="int32")], "x must be float16, bfloat16 or float32, got int32"),
    ([LIKE, LIKE], [view(8), view(8, dtype="float32")], "y must be float16 like x, got float32"),
    (
        [LIKE, EITHER],
        [view(8), view(8, dtype="bfloat16")],
        "y must be float16 like x or float32, got bfloat16",
    ),
    (
        [LIKE, Spec(("n",), "like or narrower")],
        [view(8), view(8, dtype="float32")],
        "y must be float16 like x, got float32",
    ),
]
BAD_SHAPES = [
    ([Spec(("m", "n"))], [view(8)], {}, "x must have shape (m, n), got (8,)"),
    (
        [LIKE, LIKE],
        [view(2, 8), view(3, 8)],
        {},
        "y must have shape (2, 8) for (..., n), got (3, 8) beside x (2, 8)",
    ),
    (
        [LIKE, Spec([(), ("n", 2)])],
        [view(8), view(8)],
        {},
        "y must have shape () or (8, 2) for () or (n, 2), got (8,) beside x (8,)",
    ),
    ([LIKE], [view(2, 12)], {"n": 8}, "x must have shape (..., 8) for (..., n), got (2, 12)"),
    (
        [LIKE],
        [view(2, 0)],
        {"n": range(1, 9)},
        "n of x must be from 1 to 8, got 0 in (..., n) = (2, 0)",
    ),
    (
        [LIKE],
        [view(2, 12)],
        {"n": range(8, 65, 8)},
        "n of x must be a multiple of 8 from 8 to 64, got 12 in (..., n) = (2, 12)",
    ),
]
BAD_PLACES = [
    ([LIKE], [view(8, device="mps:0")], "x must be on a CPU or a CUDA device, got mps:0"),
    (
        [LIKE, LIKE],
        [view(8, device=-1), view(8)],
        "all arrays must be on the same device, got x on device CPU and y on device 0",
    ),
    ([LIKE], [View((4, 5), (9, 1), "float16", 0)], "x must be contiguous, got strides (9, 1)"),
    (
        [Spec(("m", "n"), strides=1)],
        [View((4, 5), (5, 2), "float16", 0)],
        "the last dimension of x must be contiguous, got strides (5, 2)",
    ),
    (
        [Spec(("k", "m", "n"), strides=2)],
        [View((4, 5, 6), (60, 12, 1), "float16", 0)],
        "x must be contiguous in each row, which is its last 2 dimensions, got strides (60, 12, 1)",
    ),
    (
        [Spec((...,), strides="dense")] * 2,
        [view(4, 5), view(4, 5, order=(1, 0))],
        "y must be dense, with the strides of x, got strides (1, 4)",
    ),
]


@pytest.mark.parametrize(
    "specs, views, lengths, message",
    [(*x[:2], {}, x[2]) for x in BAD_DTYPES + BAD_PLACES] + BAD_SHAPES,
)
def test_wrong_arrays(specs, views, lengths, message):
    error = TypeError if (specs, views, message) in BAD_DTYPES else ValueError
    with pytest.raises(error) as caught:
        check(specs, *views, **lengths)
    assert str(caught.value) == f"f: {message}"


def test_libraries_and_none():
    x, specs = numpy.ones((2, 8), "float32"), {"x": LIKE, "seed": Spec((), "int64")}
    views = lambda spec, seed: views_of(  # noqa: E731
        "f", library_of(x), specs | {"seed": spec}, (x, seed)
    )
    seed = specs["seed"]
    assert list(views(seed._replace(optional=True), None)) == ["x"]
    assert list(views(seed, numpy.array(3))) == ["x", "seed"]
    with pytest.raises(TypeError, match=r"^f: seed must be a numpy.ndarray like x, got NoneType$"):
        views(seed, None)
    with pytest.raises(TypeError, match="^f: seed must be an integer or a numpy.ndarray like x, g"):
        views(seed._replace(instead="an integer"), "text")
