"""The engine: whether its model is right, and its times."""

import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from bench.engine import peers
from bench.engine.peers import synchronize
from bench.lib import data
from bench.lib.harness import assert_right
from cupyflash.models.engine import Batch, Engine, PagePool
from cupyflash.models.engine.devices import device_of
from cupyflash.models.loading import load_model, random_model

CHECKED = (2, 80)  # layers of the model that is compared with transformers, and tokens
SLACK = 8  # steps before the clock and after


def place(dtype: str) -> dict[str, str]:
    """The options of a model here."""
    return {"dtype": dtype, "device": "gpu" if data.DEVICE == "cuda" else "cpu"}


def for_engine(model: Any) -> Any:
    """A model as an `Engine` takes it."""
    return getattr(model, "paged", model)


def random_for_engine(name: str, dtype: str) -> Any:
    """A model of a size with random weights."""
    return for_engine(random_model(name, **place(dtype)))


def check(name: str, dtype: str) -> None:
    """Compare two layers of a size, from a folder that transformers has written, with float64.

    Raises:
        AssertionError: the logits are wrong.
    """
    layers, count = CHECKED
    config = peers.config_of(name, layers)
    given = numpy.random.default_rng(0).integers(0, config.vocab_size, count).tolist()
    model = peers.random_peer(config, dtype, "eager")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        ours = for_engine(load_model(folder, **place(dtype)))
        tokens = torch.tensor([given], device=data.DEVICE)
        eager = model(tokens).logits[0].double().cpu().numpy()
        exact = model.double()(tokens).logits[0].cpu().numpy()
    found = numpy.asarray(whole_logits(ours, given), "float64")
    assert_right(found, exact, eager, "logits", dtype)


def whole_logits(model: Any, tokens: Sequence[int]) -> numpy.ndarray:
    """Logits (tokens, vocab_size) of one text."""
    device, config = device_of(model.like), model.config
    with device.current():
        arrays = [list(tokens), range(len(tokens)), [0], [[1]], [0, len(tokens)]]
        made = [device.integers(*numpy.shape(x)) for x in arrays]
        for target, values in zip(made, arrays):
            device.write(target, numpy.array(values, "int32"))
        size = config.layers, 2, len(tokens), config.heads_kv, config.head_dim
        batch = Batch(*made, len(tokens), sequences=device.integers(len(tokens)))
        found = model.logits(batch, PagePool(*size, model.like))
    found = found.get() if hasattr(found, "get") else found
    return found.astype("float32") if isinstance(found, numpy.ndarray) else found.float().cpu()


class OurDecode:
    """Steps of decoding of ``batch`` sequences behind prompts of ``keys`` tokens."""

    def __init__(self, model: Any, batch: int, keys: int, steps: int) -> None:
        length = keys + steps + 2 * SLACK
        self.engine = Engine(model, max_batch=batch, max_length=length)
        rng = numpy.random.default_rng(batch)
        shape = batch, keys
        self.prompts = rng.integers(0, model.config.vocab_size, shape).tolist()
        self.steps = steps

    def __call__(self) -> float:
        """Milliseconds of a step."""
        engine, count = self.engine, self.steps + SLACK
        requests = [engine.submit(x, count, stop_tokens=-1) for x in self.prompts]
        while len(engine.scheduler.rows) < len(requests):
            engine.step()
        for _ in range(SLACK // 2):  # the graph is made
            engine.step()
        synchronize()
        begin = time.perf_counter()
        for _ in range(self.steps):
            engine.step()
        synchronize()
        ms = 1e3 * (time.perf_counter() - begin) / self.steps
        while engine.busy:
            engine.step()
        return ms


class OurPrompt:
    """A prompt with so many new tokens, alone."""

    def __init__(self, model: Any, prompt: list[int], count: int) -> None:
        self.engine = Engine(model, max_batch=1, max_length=len(prompt) + count)
        self.prompt, self.count = prompt, count

    def __call__(self) -> float:
        """Milliseconds from the first step to the last token."""
        synchronize()
        begin = time.perf_counter()
        self.engine.generate([self.prompt], self.count, stop_tokens=-1)
        return 1e3 * (time.perf_counter() - begin)
