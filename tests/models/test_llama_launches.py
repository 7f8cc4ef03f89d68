"""What a step of a Llama launches on a Hopper GPU (no GPU needed).

A process of its own makes the plans, by `bench.lib.dry_run`.
"""

import dataclasses
import json

import pytest
from places import run_script

pytest.importorskip("torch")
pytest.importorskip("cupy")

SMALL_M = {"linear_small_m", "linear_small_m_sm90"}
# Kernels of a layer in a step of decoding: norm, projection and rotary embedding; attention, which
# puts keys and values into the cache; projection and residual; norm, gate and up; down.
LAYER = (SMALL_M, {"flash_decode", "flash_decode_one"}, SMALL_M, SMALL_M, SMALL_M)
LAYERS = {
    "llama-3.2-1b": LAYER,
    "qwen2.5-0.5b": LAYER,
    "qwen3-0.6b": (LAYER[0], {"head_norm"}, *LAYER[1:]),
}


def launched(size):
    """The names of the kernels of a step with one token of each of 1 and of 8 sequences.

    And of one with the first 12 tokens of 8 sequences: "prompts".
    """
    from llama_steps import Sequences

    from bench.lib.dry_run import hopper
    from cupyflash.models.llama import SIZES, Llama

    shape = {"layers": 2, "inner": 1024, "vocab_size": 256, "max_positions": 64}
    config = dataclasses.replace(SIZES[size], **shape)
    llama = Llama.random(config, library="torch", device="cpu", dtype="bfloat16")
    found = {}
    for name, batch, count in ((1, 1, 1), (8, 8, 1), ("prompts", 8, 12)):
        run, names = Sequences(llama, [[1] * 20] * batch), []
        load = lambda config, device, names=names: lambda *arguments: names.append(config.name)
        with hopper(load=load):
            run.step([count] * batch)
        found[name] = names
    return found


@pytest.fixture(scope="module")
def found():
    return json.loads(run_script(__file__))


@pytest.mark.parametrize("batch", ["1", "8"])
@pytest.mark.parametrize("size", LAYERS)
def test_a_step_of_decoding(found, size, batch):
    """Five launches a layer, six where heads are normalised; one before and one behind them."""
    first, *layers, head = found[size][batch]
    assert first == "embedding" and head in SMALL_M
    expected = 2 * LAYERS[size]
    assert len(layers) == len(expected)
    assert all(name in allowed for name, allowed in zip(layers, expected)), layers


def test_a_step_over_prompts(found):
    """Those that begin with it read no page, and nothing is gathered."""
    first, *layers, norm, head = found["llama-3.2-1b"]["prompts"]
    projection, attention = ["norm_fwd", "linear_sm90"], ["cache_append", "flash_fwd_sm80"]
    layer = [*projection, *attention, "linear_sm90", *projection, "linear_sm90"]
    assert (first, layers, [norm, head]) == ("embedding", 2 * layer, projection)


if __name__ == "__main__":
    print(json.dumps({size: launched(size) for size in LAYERS}))
