"""Many requests of mixed lengths at once: what an engine has generated of them after some seconds.

All engines are measured by one rule. They get all requests at once; the clock ends with the last
token, or after so many seconds, and what counts are the new tokens until then. Prompts are random,
so that pages which requests share would help in a second run only: transformers shares none.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bench.engine.peers import synchronize
from cupyflash.integrations.transformers_models import NAME
from cupyflash.models.engine import Engine

Load = Sequence[tuple[list[int], int]]  # prompts, and the number of new tokens of each
PAGE = 256  # tokens; transformers' own size
CHUNK = 8192  # tokens of a step of transformers at most, as is its default
SPARE = 1.25  # transformers lets no request in while less than 15 % of its pages are free
# Without flash-attn each query of a step attends to the keys of all sequences of that step, and a
# mask takes those of the others out: of 200 sequences 88 times the work that is needed, of 32 25
# times. Fewer sequences make more steps.
MASKED_BATCH = 32
TICK = 0.1  # seconds between two looks at the clock


class Generated(NamedTuple):
    """The new tokens of all requests, the seconds that they took, and how the engine was set."""

    seconds: float
    tokens: int
    settings: str


@contextlib.contextmanager
def ours(
    model: Any, load: Load, max_batch: int, seconds: float
) -> Iterator[Callable[[], Generated]]:
    """A call that runs the requests through `Engine`, which has run all of them once.

    The first run compiles kernels and captures graphs; a limit would leave some to the clock.
    """
    longest = max(len(prompt) + count for prompt, count in load)
    batch = min(max_batch, len(load))
    engine = Engine(model, max_batch=batch, max_length=longest)

    def generated(limit: float = seconds) -> Generated:
        synchronize()
        begin = time.perf_counter()
        requests = [engine.submit(*given, stop_tokens=-1) for given in load]
        while engine.busy and time.perf_counter() - begin < limit:
            engine.step()
        synchronize()
        took, tokens = time.perf_counter() - begin, sum(len(x.tokens) for x in requests)
        ended = [(x, count) for x, (_, count) in zip(requests, load) if x.reason]
        _check([len(x.tokens) == count for x, count in ended])
        for request in requests:
            engine.cancel(request)
        while engine.busy:
            engine.step()
        return Generated(took, tokens, f"{batch} at once")

    generated(float("inf"))
    yield generated


@contextlib.contextmanager
def transformers(
    model: Any, load: Load, max_batch: int, seconds: float
) -> Iterator[Callable[[], Generated]]:
    """The same through transformers' continuous batching, whose manager lives as long as this.

    Its first run has the limit, too: it may take many minutes.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # cancelling warns
    batch = min(max_batch if _has_flash(model) else MASKED_BATCH, max_batch, len(load))
    pages = sorted(-(-(len(prompt) + count) // PAGE) for prompt, count in load)
    fields = ContinuousBatchingConfig.__dataclass_fields__
    config = ContinuousBatchingConfig(
        num_blocks=int(SPARE * sum(pages[-batch:])) + 1,
        max_batch_tokens=min(CHUNK, sum(len(prompt) for prompt, _ in load)),
        max_requests_per_batch=batch,
        allow_block_sharing=False,
        **{"page_size" if "page_size" in fields else "block_size": PAGE},  # since 5.24
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0,
                                  max_new_tokens=max(count for _, count in load))  # fmt: skip
    with torch.no_grad():
        manager = model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
        try:
            manager.warmup()
            manager.start()
            generated = functools.partial(_of_manager, manager, load, seconds)
            generated()
            yield generated
        finally:
            manager.stop(block=True, timeout=60)


def _of_manager(manager: Any, load: Load, seconds: float) -> Generated:
    """The new tokens that a manager of continuous batching generates, and their time.

    Raises:
        RuntimeError: its thread has failed.
    """
    synchronize()
    begin, tokens, result = time.perf_counter(), 0, None
    left = {manager.add_request(prompt, max_new_tokens=count): count for prompt, count in load}
    try:
        while left and (result or time.perf_counter() - begin < seconds):
            result = manager.get_result(timeout=TICK)
            if result is None and not manager.is_running():
                raise RuntimeError(f"{len(left)} of {len(load)} requests did not end")
            if result is None or result.request_id not in left:  # of an earlier call
                continue
            if result.error:
                raise RuntimeError(result.error)
            tokens += len(result.generated_tokens)
            _check([len(result.generated_tokens) == left.pop(result.request_id)])
        took = time.perf_counter() - begin
        of_active = manager.batch_processor.scheduler.get_active_request_static_outputs
        tokens += sum(len(of_active(name)) for name in left)
    finally:
        for name in left:
            manager.cancel_request(name)
    config = manager.continuous_batching_config
    graphs = "CUDA graphs" if any(config.cuda_graph_booleans) else "no CUDA graphs"
    attention = manager.model.config._attn_implementation
    return Generated(
        took, tokens, f"{attention}, {config.max_requests_per_batch} at once, {graphs}"
    )


def _has_flash(model: Any) -> bool:
    """Whether the steps of transformers attend inside each sequence alone."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    registered = model.config._attn_implementation == NAME
    return registered or is_flash_attn_2_available() or is_flash_attn_3_available()


def _check(complete: list[bool]) -> None:
    """Raises AssertionError unless all requests that have ended have all their tokens."""
    assert all(complete), f"{complete.count(False)} requests have ended early"
