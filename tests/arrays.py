"""Arrays of any library in any memory layout, from NumPy values: for the norms and the samplers."""

import numpy

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
