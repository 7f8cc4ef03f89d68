"""Random weights: so that everything can be tried and measured without a checkpoint."""

from collections.abc import Callable

import numpy

from ...runtime.array import Array
from .config import Gpt2Config
from .weights import Tensor, Weights, all_tensors, assemble, numpy_dtype, progress

STD = 0.02


def random_weights(
    config: Gpt2Config, dtype: str, put: Callable[[numpy.ndarray], Array], seed: int = 0
) -> Weights:
    """Weights as GPT-2 is initialised; equal seeds give equal weights.

    Matrices are normal with deviation 0.02, those that write to the residual divided by
    sqrt(2 layers); norms are 1 and biases 0.
    """
    rng, loaded = numpy.random.default_rng(seed), {}
    for tensor in progress(all_tensors(config), "random weights"):
        loaded[tensor.name] = put(_values(config, tensor, rng).astype(numpy_dtype(dtype)))
    return assemble(config, lambda tensor: loaded[tensor.name], None)


def _values(config: Gpt2Config, tensor: Tensor, rng: numpy.random.Generator) -> numpy.ndarray:
    if len(tensor.shape) == 1:
        is_norm = ".ln_" in f".{tensor.name}" and tensor.name.endswith("weight")
        return numpy.full(tensor.shape, float(is_norm), "float32")
    shape = tensor.shape[::-1] if tensor.transposed else tensor.shape
    values = rng.standard_normal(shape, dtype="float32")
    values *= STD / (2 * config.layers) ** 0.5 if "c_proj" in tensor.name else STD
    return values
