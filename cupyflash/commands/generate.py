"""``python -m cupyflash generate``: text from a checkpoint or from random weights."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..models.engine import Engine
from ..models.engine.request import gathered
from ..models.gpt2 import Gpt2, Sampling, load_tokenizer
from ..models.gpt2.decoder import DECODES
from ..models.gpt2.layers import MODES
from ..models.gpt2.tokenizer import ByteTokenizer, StopStrings, TextStream
from ..models.loading import load_model, random_model
from .chat import chat_prompts, has_template

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
NEW_TOKENS = 64


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="text from a language model on these kernels, without torch",
        description="Prints text as it comes, that of several prompts at the end, then tokens per "
        "second.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    add = parser.add_argument
    source.add_argument("--model", metavar="DIR", help="checkpoint folder of Hugging Face")
    sizes = "random weights of a size, such as tiny and small of GPT-2, or llama-3.2-1b"
    source.add_argument("--random", metavar="SIZE", help=sizes)
    add("--prompt", action="append", metavar="TEXT", help="may be given several times: a batch")
    add("--prompts", metavar="FILE", help="a prompt in each line that is not empty")
    text = "leave out the chat template, which prompts get where the tokenizer has one"
    add("--plain", action="store_true", help=text)
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
    add("--mode", choices=MODES, default="fused", help="of GPT-2; naive and flash are to compare")
    add("--decode", choices=DECODES, default="auto", help="how a step of GPT-2 runs")
    parser.set_defaults(run=run, default_of=parser.get_default)


def run(arguments: argparse.Namespace) -> int:
    """Exit code."""
    texts = list(arguments.prompt or ())
    if arguments.prompts:
        lines = Path(arguments.prompts).read_text(encoding="utf-8").splitlines()
        texts += [line for line in lines if line.strip()]
    if not texts:
        raise ValueError("--prompt must be given, got none")
    # Checked before anything is loaded.
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    if sampling.temperature == 0 and (idle := _given(arguments, "top_k", "top_p", "seed")):
        raise ValueError(f"{idle[0]} needs a --temperature above 0, got 0, which is greedy")
    options = {"dtype": DTYPES.get(arguments.dtype), "device": arguments.device}
    if arguments.model:
        tokenizer = load_tokenizer(arguments.model)
        model = load_model(arguments.model, **options)
    else:
        tokenizer, model = ByteTokenizer(), random_model(arguments.random, **options)
    if arguments.model and not arguments.plain and has_template(arguments.model):
        prompts, shown = chat_prompts(arguments.model, tokenizer, texts), ["" for _ in texts]
    else:
        prompts, shown = [tokenizer.encode(text) for text in texts], texts
    start = time.perf_counter()
    steps = _steps(arguments, model, tokenizer, prompts, sampling)
    _check_room(arguments.max_new_tokens or 0, max(map(len, prompts)), model.config.max_positions)
    clock = Clock(steps, start)
    show = _show_one if len(prompts) == 1 else _show_batch
    show(tokenizer, shown, clock)
    _print_speed(clock, sum(map(len, prompts)))
    return 0


def _steps(
    arguments: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    sampling: Sampling,
) -> Iterator[list[int | None]]:
    """New tokens of all prompts, as they come."""
    count = NEW_TOKENS if arguments.max_new_tokens is None else arguments.max_new_tokens
    strings = arguments.stop or ()
    if isinstance(model, Gpt2):
        return Gpt2(model.config, model.weights, mode=arguments.mode).stream(
            prompts,
            count,
            sampling,
            end_of_text=arguments.end,
            stop_strings=strings,
            tokenizer=tokenizer,
            decode=arguments.decode,
        )
    if idle := _given(arguments, "mode", "decode"):
        raise ValueError(f"{idle[0]} is for GPT-2, got a {type(model).__name__}")
    if not all(strings):
        raise ValueError("--stop must have characters, got none")
    stop = StopStrings(tokenizer, strings) if strings else None
    engine = Engine(model, max_length=_longest(model, prompts, count))
    return engine.stream(prompts, count, sampling, stop_tokens=arguments.end, stop=stop)


def _longest(model: Any, prompts: list[list[int]], count: int) -> int:
    """The length that the engine must have room for."""
    return min(model.config.max_positions, max(map(len, prompts)) + max(1, count))


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
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("texts", total=len(texts))

        def steps() -> Iterator[list[int | None]]:
            for tokens in clock:
                yield tokens
                bar.update(task, completed=tokens.count(None))

        results = gathered(steps(), len(texts))
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
