"""Every architecture of transformers, tiny and random, beside eager attention, on the CPU.

python -m bench architectures [--only llama bert ...] [--table bench/results/architectures.json]

Each model that hands its attention over runs without padding, with padding on the left and on the
right, packed (by positions), with gradients, and with a dynamic and a static cache, where it has
them; windows are of 7 tokens. Results may differ by `ROUNDING` times as much as those of eager
attention do when every weight moves by one last place. The other models must raise.
"""

import argparse
import collections
import concurrent.futures
import copy
import gc
import json
import pathlib
import platform
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers

from bench.transformers.tiny_models import (
    LENGTHS,
    VOCABULARY,
    WINDOW,
    Tensors,
    architectures,
    media_inputs,
    small_config,
    small_model,
    takes,
    text_inputs,
)
from cupyflash.integrations import transformers as integration
from cupyflash.integrations.transformers_models import hands_attention_over

ROUNDING = 8
SECONDS = 60  # for a model; one that is not tiny takes longer


def main(arguments: Sequence[str]) -> int:
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench architectures", description=__doc__, formatter_class=formatter
    )
    parser.add_argument("--only", nargs="*", help="types, as in config.model_type")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--table", type=pathlib.Path, help="where the results go")
    options = parser.parse_args(arguments)
    kinds = [kind for kind, *_ in architectures(options.only or None)]
    rows = {}
    with concurrent.futures.ProcessPoolExecutor(options.jobs, initializer=prepare) as pool:
        for kind, row in zip(kinds, pool.map(row_of, kinds)):
            rows[kind] = row
            print(kind, *(f"{key}={value}" for key, value in row.items()), flush=True)
    counts = collections.Counter(row["result"] for row in rows.values())
    print(dict(counts))
    if options.table:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions["transformers"] = transformers.__version__
        table = {"versions": versions, "counts": counts, "rows": rows}
        options.table.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    return 0


def prepare() -> None:
    """Once for each process."""
    signal.signal(signal.SIGALRM, _too_slow)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    integration.register()


def row_of(kind: str) -> dict[str, Any]:
    """One row of the table."""
    ((_, config_class, model_class),) = architectures([kind])
    signal.alarm(SECONDS)
    try:
        return compared(config_class, model_class)
    except Exception as error:
        return {"model": model_class.__name__, "result": "not built", "why": _line(error)}
    finally:
        signal.alarm(0)


def compared(config_class: type, model_class: type) -> dict[str, Any]:
    """One row of the table: the model, the result, and the cases that were compared.

    The result is "equal", "raises" (when it is loaded, since its attention is its own, or when it
    is called; why), "no attention" (nothing was handed over), "not built" (no tiny model or no
    inputs from the default configuration; why), or "differs" (how).
    """
    row = {"model": model_class.__name__}
    gc.collect()
    if not hands_attention_over(model_class, transformers.PreTrainedModel):
        return row | {"result": "raises"}
    try:
        config = small_config(config_class)
        eager = small_model(model_class, config, "eager")
    except Exception as error:
        return row | {"result": "not built", "why": _line(error)}
    try:
        ours = small_model(model_class, small_config(config_class), integration.NAME)
    except ValueError as error:
        why = _line(error)
        return row | {"result": "raises" if "attention interface" in why else "differs", "why": why}
    moved = copy.deepcopy(eager)
    with torch.no_grad():
        for x in moved.parameters():
            x.mul_(1 + torch.randint_like(x, -1, 2) * torch.finfo(x.dtype).eps)
    done, skipped, calls, wrong = [], {}, 0, {}
    for name, run in cases(eager):
        torch.manual_seed(0)
        try:
            expected = run(eager)
        except Exception as error:
            skipped[name] = _line(error)
            continue
        torch.manual_seed(0)
        rounded = run(moved)
        torch.manual_seed(0)
        try:
            with counted_calls() as count:
                actual = run(ours)
        except Exception as error:
            wrong[name] = _line(error)
            continue
        calls += len(count)
        error = difference(actual, expected, rounded)
        if error is None:
            skipped[name] = "eager is not finite"
        elif error:
            wrong[name] = error
        else:
            done.append(name)
    if wrong and not done and all(integration.FUNCTION in why for why in wrong.values()):
        return row | {"result": "raises", "why": wrong}
    if wrong:
        return row | {"result": "differs", "cases": done, "why": wrong}
    if not done:
        return row | {"result": "not built", "why": skipped}
    if not calls:
        return row | {"result": "no attention", "cases": done}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "sliding_window", None) == WINDOW:
        done.append("sliding")
    return row | {"result": "equal", "cases": done}


def cases(model: torch.nn.Module) -> Iterator[tuple[str, Callable[[torch.nn.Module], Tensors]]]:
    """The names of the cases of a model, and functions that run them."""
    main = getattr(model, "main_input_name", "input_ids")
    if main != "input_ids":
        inputs = media_inputs(model, main)
        yield "none", lambda x: results(x(**inputs))
        yield "gradients", lambda x: gradients(x, inputs)
        return
    yield "none", lambda x: results(x(**text_inputs(x)[0]))
    for side in ("left", "right"):
        yield side, lambda x, side=side: padded(x, side)
    yield "gradients", lambda x: gradients(x, text_inputs(x, "right")[0])
    cached = takes(model, "cache") or takes(model, "past_key_values")  # the latter until 5.23
    if cached and takes(model, "use_cache"):
        if takes(model, "position_ids") and not takes(model, "decoder_input_ids"):
            yield "packed", packed
        for kind in ("dynamic", "static"):
            yield f"{kind} cache", lambda x, kind=kind: generated(x, kind)


def padded(model: torch.nn.Module, side: str) -> Tensors:
    inputs, tokens = text_inputs(model, side)
    out = results(model(**inputs))
    rows = {name: x[tokens] for name, x in out.items() if x.shape[:2] == tokens.shape}
    if takes(model, "decoder_input_ids"):
        shape = inputs["decoder_input_ids"].shape
        rows |= {name: x for name, x in out.items() if x.shape[:2] == shape}
    if not rows:
        raise ValueError("no result for each token")
    return rows


def packed(model: torch.nn.Module) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY - 8, (1, sum(LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return results(model(input_ids=ids, position_ids=positions, use_cache=False))


def generated(model: torch.nn.Module, cache: str) -> Tensors:
    """Logits of a prompt with padding on the left and of the tokens after it."""
    inputs, _ = text_inputs(model, "left")
    inputs = {name: x for name, x in inputs.items() if name in ("input_ids", "attention_mask")}
    forced = torch.arange(5, 11)
    logits = []

    def record(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logits.append(scores)  # and go on with the same tokens, whatever rounding says
        chosen = torch.full_like(scores, float("-inf"))
        chosen[:, forced[len(logits) - 1]] = 0
        return chosen

    transformers.GenerationMixin.generate(
        model, **inputs, do_sample=False, max_new_tokens=len(forced), cache_implementation=cache,
        disable_compile=True, eos_token_id=None, pad_token_id=0,
        logits_processor=transformers.LogitsProcessorList([record]),
    )  # fmt: skip
    return {"logits": torch.stack(logits)}


def gradients(model: torch.nn.Module, inputs: Tensors) -> Tensors:
    """The gradients of a weighted sum of the results, those of all parameters in one vector."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(2)
    total = 0.0
    rows = inputs.get("attention_mask")
    for x in results(model(**inputs)).values():
        if x.requires_grad:
            if rows is not None and x.shape[:2] == rows.shape:
                x = x * rows.view(*rows.shape, *[1] * (x.dim() - 2))
            elif rows is not None and not takes(model, "decoder_input_ids"):
                continue
            total = total + (x * torch.randn(x.shape, generator=generator)).sum()
    total.backward()
    return {"all": torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])}


def results(out: Any) -> Tensors:
    """The floating-point tensors of a model's output, by name or number."""
    pairs = out.items() if isinstance(out, dict) else enumerate(out)
    found = {}
    for name, x in pairs:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            found[str(name)] = x
    return found


def difference(actual: Tensors, expected: Tensors, rounded: Tensors) -> str | None:
    """The first difference beyond rounding; "" if there is none, None if eager is not finite."""
    if not all(x.isfinite().all() for x in expected.values()):
        return None
    for name, x in expected.items():
        noise = (rounded[name] - x).abs().max()
        last_place = torch.finfo(x.dtype).eps * x.abs().max()
        error = (actual[name] - x).abs().max()
        if not error <= ROUNDING * (noise + last_place):
            size = x.abs().max()
            return f"{name}: {error / size:.2g} of the largest, by rounding {noise / size:.2g}"
    return ""


class counted_calls(list):
    """The layers that called the attention function inside the block."""

    def __enter__(self) -> "counted_calls":
        def attention(module: Any, *arguments: Any, **options: Any) -> Any:
            self.append(module)
            return integration.attention(module, *arguments, **options)

        transformers.AttentionInterface.register(integration.NAME, attention)
        return self

    def __exit__(self, *error: Any) -> None:
        transformers.AttentionInterface.register(integration.NAME, integration.attention)


def _too_slow(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
