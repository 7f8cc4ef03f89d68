"""``python -m cupyflash gpt2``: text from a checkpoint or from random weights."""

import argparse
import time
from collections.abc import Iterator
from typing import Any

from ..models.gpt2 import Gpt2, Sampling, load_tokenizer
from ..models.gpt2.config import SIZES
from ..models.gpt2.decoder import DECODES
from ..models.gpt2.layers import MODES
from ..models.gpt2.tokenizer import ByteTokenizer, TextStream

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
NEW_TOKENS = 64


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "gpt2",
        help="text from a GPT-2 on these kernels, without torch",
        description="Prints text as it comes, then tokens per second.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    add = parser.add_argument
    source.add_argument("--model", metavar="DIR", help="checkpoint folder of Hugging Face")
    source.add_argument("--random", choices=SIZES, help="random weights of this size")
    add("--prompt", action="append", metavar="TEXT", help="may be given several times: a batch")
    text = f"default {NEW_TOKENS}, or what the context has room for"
    add("--max-new-tokens", type=int, metavar="N", help=text)
    add("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    add("--top-k", type=int, default=0, metavar="N", help="default 0: all; needs a temperature")
    add("--top-p", type=float, default=1.0, metavar="P", help="default 1: all; the same")
    add("--seed", type=int, metavar="N", help="default: new random numbers in each run; the same")
    ends = "ends a text, may be given several times; default that of the model, -1: none"
    add("--end", action="append", type=int, metavar="TOKEN", help=ends)
    add("--stop", action="append", metavar="TEXT", help="ends a text, may be given several times")
    add("--dtype", choices=DTYPES, help="default fp16 on a GPU, fp32 on the CPU")
    add("--device", choices=("gpu", "cpu"), help="default the GPU if there is one")
    add("--mode", choices=MODES, default="fused", help="naive and flash are for comparison")
    add("--decode", choices=DECODES, default="auto", help="how a step runs")
    parser.set_defaults(run=run, default_of=parser.get_default)


def run(arguments: argparse.Namespace) -> int:
    """Exit code."""
    if not arguments.prompt:
        raise ValueError("--prompt must be given, got none")
    # Checked before anything is loaded.
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    if sampling.temperature == 0 and (idle := _given(arguments, "top_k", "top_p", "seed")):
        raise ValueError(f"{idle[0]} needs a --temperature above 0, got 0, which is greedy")
    options = {
        "dtype": DTYPES.get(arguments.dtype),
        "device": arguments.device,
        "mode": arguments.mode,
    }
    if arguments.model:
        tokenizer = load_tokenizer(arguments.model)
        model = Gpt2.from_folder(arguments.model, **options)
    else:
        tokenizer, model = ByteTokenizer(), Gpt2.random(arguments.random, **options)
    prompts = [tokenizer.encode(text) for text in arguments.prompt]
    start = time.perf_counter()
    steps = model.stream(
        prompts,
        NEW_TOKENS if arguments.max_new_tokens is None else arguments.max_new_tokens,
        sampling,
        end_of_text=arguments.end,
        stop_strings=arguments.stop or (),
        tokenizer=tokenizer,
        decode=arguments.decode,
    )
    _check_room(arguments.max_new_tokens or 0, max(map(len, prompts)), model.config.context)
    clock = Clock(steps, start)
    show = _show_one if len(prompts) == 1 else _show_batch
    show(tokenizer, arguments.prompt, clock)
    _print_speed(clock, sum(map(len, prompts)))
    return 0


def _given(arguments: argparse.Namespace, *names: str) -> list[str]:
    """The given options that differ from their defaults, as they are written."""
    given = [name for name in names if getattr(arguments, name) != arguments.default_of(name)]
    return [f"--{name.replace('_', '-')}" for name in given]


def _check_room(wanted: int, longest: int, context: int) -> None:
    room = context + 1 - longest  # the last new token needs no place
    if wanted > room:
        fact = f"--max-new-tokens must be at most {room} after a prompt of {longest} tokens"
        raise ValueError(f"{fact}, as the context has {context}, got {wanted}")


class Clock:
    """Passes steps on, and knows when the first of them came, and the last."""

    def __init__(self, steps: Iterator[list[int | None]], start: float) -> None:
        self.steps, self.tokens, self.of_first = steps, 0, 0
        self.start = self.first = self.last = start

    def __iter__(self) -> Iterator[list[int | None]]:
        for tokens in self.steps:
            self.last = time.perf_counter()
            count = sum(token is not None for token in tokens)
            if self.first == self.start:
                self.first, self.of_first = self.last, count
            self.tokens += count
            yield tokens


def _show_one(tokenizer: Any, texts: list[str], clock: Clock) -> None:
    print(texts[0], end="", flush=True)
    stream = TextStream(tokenizer)
    for (token,) in clock:
        if token is not None:
            print(stream.add(token), end="", flush=True)
    print(stream.rest())


def _show_batch(tokenizer: Any, texts: list[str], clock: Clock) -> None:
    """Text of several sequences cannot be shown as it comes: each is shown at the end."""
    results: list[list[int]] = [[] for _ in texts]
    for tokens in clock:
        for result, token in zip(results, tokens):
            if token is not None:
                result.append(token)
    for number, (text, result) in enumerate(zip(texts, results)):
        print(f"[{number}] {text}{tokenizer.decode(result)}")


def _print_speed(clock: Clock, prompt_tokens: int) -> None:
    """The first call may compile, so the time to the first token is no measurement."""
    from rich.console import Console

    later, seconds = clock.tokens - clock.of_first, clock.last - clock.first
    rate = f", then {later / seconds:.1f} tokens/s" if later and seconds else ""
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"{prompt_tokens} tokens of prompts, {clock.tokens} new ones; the first after "
        f"{clock.first - clock.start:.2f} s{rate}"
    )
