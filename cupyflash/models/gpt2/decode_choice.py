"""How a step of decoding runs: what a caller asked for, if it can be, or what is fastest."""

from typing import Any

from cupyflash.runtime.gpu import capability_of

from ...runtime import launch
from ...runtime.checks import short
from ...runtime.structs import header

structs = header("decode/stack_params.cuh")

DECODES = ("auto", "eager", "graph", "persistent")
# Up to which one kernel for a token is faster than a graph of kernels, by whether these overlap.
PERSISTENT_BATCH = {True: 2, False: 8}


def way_to_decode(function: str, model: Any, decode: str, batch: int) -> str:
    """One of `DECODES` but "auto", for a `Gpt2` and so many prompts.

    Raises:
        ValueError: no such way, or not with this mode, device or batch.
        NotImplementedError: the persistent kernel does not take the model.
    """
    if not isinstance(decode, str) or decode not in DECODES:
        fact = f"decode must be {', '.join(DECODES)}"
        raise ValueError(f"{function}: {fact}, got {short(decode)}")
    if decode == "graph" and not model.on_gpu:
        raise ValueError(f"{function}: decode='graph' needs a GPU, got a model on the CPU")
    if decode == "persistent":
        _require_persistent(function, model, batch)
    if decode != "auto":
        return decode
    if not model.on_gpu or model.mode == "naive":
        return "eager"
    capability = capability_of(model.weights.token_embedding.device.id)
    overlap = launch.dependent_possible(capability)
    if model.mode != "fused" or batch > PERSISTENT_BATCH[overlap]:
        return "graph"
    return "graph" if model.stack_problem else "persistent"


def _require_persistent(function: str, model: Any, batch: int) -> None:
    if model.mode != "fused":
        fact = "decode='persistent' needs mode 'fused'"
        raise ValueError(f"{function}: {fact}, got {model.mode!r}")
    if batch > structs.MAX_BATCH:
        fact = f"decode='persistent' takes at most {structs.MAX_BATCH} prompts"
        raise ValueError(f"{function}: {fact}, got {batch}")
    if model.stack_problem:
        fact = "decode='persistent' cannot run this model"
        raise NotImplementedError(f"{function}: {fact}: {model.stack_problem}")
