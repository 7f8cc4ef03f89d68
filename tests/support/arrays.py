"""Arrays of any library in any memory layout, from NumPy values and back."""

import importlib

import numpy

from cupyflash.runtime.array import array_namespace
from cupyflash.testing import cast

STORAGES = ("contiguous", "padded", "unaligned", "transposed", "channels_last")


def stored(target, values, dtype, storage="contiguous"):
    """The values with NaN around them.

    "padded" and "unaligned" have more numbers in each row, "transposed" has the first two axes
    swapped in memory, "channels_last" has axis 1 innermost.
    """
    values = numpy.asarray(values, "float32")
    make = lambda x: cast(numpy.ascontiguousarray(x), dtype, target.library, target.device)
    if storage == "transposed" and values.ndim > 2:
        return make(values.swapaxes(0, 1)).swapaxes(0, 1)
    if storage == "channels_last":
        array, last = make(numpy.moveaxis(values, 1, -1)), values.ndim - 1
        axes = (0, last, *range(1, last))
        return array.permute(axes) if target.library == "torch" else array.transpose(axes)
    if storage in ("padded", "unaligned"):
        before, after = (8, 8) if storage == "padded" else (1, 2)
        width = values.shape[-1]
        memory = numpy.full((*values.shape[:-1], before + width + after), numpy.nan, "float32")
        memory[..., before : before + width] = values
        return make(memory)[..., before : before + width]
    return make(values)


def normal(shape, seed, *, mean=0.0):
    return mean + numpy.random.default_rng(seed).standard_normal(shape, dtype="float32")


def integers(target, values):
    return target.array(numpy.array(values, "int32"))  # a copy


def spread_out(target, values, dtype="float32"):
    """The same values in an array whose axes do not collapse and whose last is not contiguous."""
    axes = numpy.random.default_rng(values.ndim).permutation(values.ndim)
    axes = axes if axes[-1] != values.ndim - 1 else numpy.roll(axes, 1)
    x = stored(target, values.transpose(axes), dtype)
    back = tuple(int(axis) for axis in numpy.argsort(axes))
    return x.permute(back) if target.library == "torch" else x.transpose(back)


def stack(target, *arrays):
    """Arrays (..., heads, head_dim) as one (..., n, heads, head_dim)."""
    return importlib.import_module(target.library).stack(arrays, -3)


def seed_generator(target, seed):
    """Seeds the generator of the target's library, from which dropout draws its own seeds."""
    library = importlib.import_module(target.library)
    (library.manual_seed if target.library == "torch" else library.random.seed)(seed)


def to_numpy(x):
    """An array of any library in NumPy, in its own dtype; not for a bfloat16 tensor of torch."""
    return x.get() if hasattr(x, "get") else numpy.asarray(x.cpu() if hasattr(x, "cpu") else x)


def broadcast(x, shape):
    """A view with strides of 0, as the gradient of a sum has."""
    if hasattr(x, "expand"):
        return x.expand(shape)
    return array_namespace(x).broadcast_to(x, shape)


def assert_same_oracle(found, right, within=2.0**-46):
    """Two float64 results of one formula: the tolerance rule needs a yardstick of fewer digits.

    They may differ by sums of hundreds of terms in another order: by ``within`` of the largest.
    """
    found, right = (numpy.asarray(x, "float64") for x in (found, right))
    largest = abs(right).max(initial=1.0, where=numpy.isfinite(right))
    numpy.testing.assert_allclose(found, right, rtol=0, atol=within * largest)
