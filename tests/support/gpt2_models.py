"""Small GPT-2 models for the tests, and the devices that they run on."""

import numpy
import pytest
from matrix import libraries

from cupyflash.models.gpt2 import Gpt2, Gpt2Config

TINY = Gpt2Config(layers=2, heads=4, width=64, context=128, vocabulary=101)


def each_device():
    """Parametrises a test over NumPy and CuPy, on which the model runs."""
    chosen = [target for target in libraries() if target.library in ("numpy", "cupy")]
    return pytest.mark.parametrize("target", chosen, indirect=True, ids=lambda x: x.name)


def device(target):
    return "gpu" if target.gpu else "cpu"


def decodes(target):
    return ("eager", "graph", "persistent") if target.gpu else ("eager", "persistent")


def modes(target):
    """Naive attention needs the matrix products of CuPy, which a light install does not have."""
    if target.gpu:
        import cupy

        try:
            cupy.ones((2, 2)) @ cupy.ones((2, 2))
        except (ImportError, RuntimeError, OSError):
            return ("flash", "fused")
    return ("naive", "flash", "fused")


def lively(model):
    """Weights so large that tokens depend on all of the text; equal for equal configs."""
    rng = numpy.random.default_rng(0)

    def fresh(x):
        values = rng.standard_normal(x.shape, dtype="float32")
        if x.ndim == 2:
            return model.xp.asarray((values * x.shape[1] ** -0.5).astype(x.dtype))
        return x + model.xp.asarray((0.2 * values).astype(x.dtype))

    w = model.weights
    blocks = tuple(type(block)(*map(fresh, block)) for block in w.blocks)
    tokens = fresh(w.token_embedding)
    positions = 3 * fresh(w.position_embedding)
    weights = type(w)(tokens, positions, blocks, w.final_norm, fresh(tokens))
    return Gpt2(model.config, weights, mode=model.mode)


def tiny(target, dtype="float32", mode="fused", config=TINY):
    return lively(Gpt2.random(config, dtype=dtype, device=device(target), mode=mode))


def prompts(*lengths, vocabulary=101):
    rng = numpy.random.default_rng(lengths)
    return [rng.integers(0, vocabulary, length).tolist() for length in lengths]
