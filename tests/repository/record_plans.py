"""Writes down what calls of attention launch, for changes of the host that must not change it.

    python tests/repository/record_plans.py before.txt            # in the old tree
    python tests/repository/record_plans.py after.txt             # in the new tree
    diff before.txt after.txt

The calls are those of `bench models`, of the 72 cells of `bench attention` and of
`tests/support/attention_cases.py`, forward and backward, the first two also with a deterministic
backward, on several GPUs and with each forced backend. Plans are made by `bench.lib.dry_run`, so
no GPU is needed. For each launch there is a line: the kernel, the grid, the threads of a block, the
shared memory, what each pointer of the argument points to, its tensor maps, and a digest of all
other bytes of the argument. Allocations are lines as well: their sizes are those of results and
scratch.
"""

import argparse
import collections
import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from attention_cases import Case, cases  # noqa: E402
from targets import Target  # noqa: E402

from bench.attention import model_shapes  # noqa: E402
from bench.attention.attention import parse, problems  # noqa: E402
from bench.lib import data, dry_run  # noqa: E402
from cupyflash.runtime.gpu import Card  # noqa: E402
from cupyflash.testing.problem import Problem  # noqa: E402

CARDS = {
    "sm_90": dry_run.HOPPER,
    "sm_80": Card((8, 0), 108, 40 << 20),
    "sm_86": Card((8, 6), 84, 6 << 20),
    "sm_75": Card((7, 5), 40, 4 << 20),
    "sm_100": Card((10, 0), 148, 126 << 20),
    "sm_120": Card((12, 0), 170, 96 << 20),
}
# (card, forced backend or ""); the first computes everything, the others what is special to them.
RUNS = (
    *(("sm_90", name) for name in ("", "sm80", "fp16x3", "simt")),
    *((name, "") for name in CARDS if name != "sm_90"),
)
DTYPES = ("float16", "bfloat16", "float32")
pack_map, unpack_map = struct.Struct("2Q").pack, struct.Struct("2Q").unpack


class Recorder:
    """Takes the place of the memory and of the launches of the package."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.memory: dict[int, tuple[int, str]] = {}  # address: (bytes, name)
        self.held: list[Any] = []  # so that no address is given twice
        self.maps: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()

    def begin(self, title: str) -> None:
        for x in (self.memory, self.held, self.counts):
            x.clear()
        self.lines.append(f"== {title}")

    def tensor(self, x: Any, kind: str, memory: str = "") -> Any:
        """Gives a tensor a name: "result2", say."""
        size = x.untyped_storage().nbytes()
        name = f"{kind}{self.counts[kind]}"
        self.counts[kind] += 1
        self.memory[x.untyped_storage().data_ptr()] = size, name
        self.held.append(x)
        if memory:
            strides = "x".join(map(str, x.stride()))
            self.lines.append(f"  {memory} {name}: {size} bytes, strides {strides}")
        return x

    def place(self, address: int) -> str:
        """What an address points to: "scratch0+4096", say."""
        if address in self.memory:
            return self.memory[address][1]
        for start, (size, name) in self.memory.items():
            if start < address <= start + size:  # at its end there is nothing, as there may be
                return f"{name}+{address - start}"
        return str(address) if address < 1 << 20 else "counters"

    def encode(self, spec: Any, pointer: int) -> bytes:
        """Stands for `TensorMapSpec.encode`: 128 bytes that say which map it is."""
        self.maps.append(str(spec))
        return pack_map(len(self.maps) - 1, pointer).ljust(128, b"\xff")

    def load(self, config: Any, device: int) -> Callable[..., None]:
        """Stands for `jit.load`."""

        def launch(grid, threads, argument, shared_memory, stream, cooperative=False) -> None:
            values, rest = [], hashlib.sha256()
            self._read(config.params.from_buffer_copy(argument), values, rest)
            sizes = f"grid {grid}, block {threads}, shared {shared_memory}"
            sizes += ", cooperative" if cooperative else ""
            text = f"  {config.expression}: {sizes}, {rest.hexdigest()[:16]}, {' '.join(values)}"
            self.lines.append(text)

        return launch

    def _read(self, params: ctypes.Structure, values: list[str], rest: Any) -> None:
        """Splits an argument into pointers and maps, as text, and all else."""
        for name, kind in params._fields_:
            value = getattr(params, name)
            if kind in (ctypes.c_void_p, ctypes.c_uint64):
                values.append(f"{name}={self.place(value or 0)}")
            elif kind.__name__ == "TensorMap":
                values.append(f"{name}=[{self._map(bytes(value))}]")
            elif kind.__name__.startswith("TensorMap_Array"):
                values.extend(f"{name}[{i}]=[{self._map(bytes(x))}]" for i, x in enumerate(value))
            elif isinstance(value, ctypes.Structure):
                self._read(value, values, rest)
            else:
                number = kind(value) if isinstance(value, int | float) else value
                rest.update(name.encode() + bytes(number))

    def _map(self, packed: bytes) -> str:
        if packed == bytes(len(packed)):
            return ""
        number, pointer = unpack_map(packed[:16])
        return f"{self.maps[number]} of {self.place(pointer)}"


@contextlib.contextmanager
def recording(card: Card) -> Iterator[Recorder]:
    """Calls make their plans for this card, and a `Recorder` takes their launches."""
    import torch

    from cupyflash import jit
    from cupyflash.runtime.tensor_map import TensorMapSpec
    from cupyflash.runtime.torch_library import TorchLibrary

    made = Recorder()
    torch.manual_seed(0)
    real = {name: getattr(TorchLibrary, name) for name in ("empty", "empty_float32", "pointer")}

    def pointer(library: Any, x: Any) -> int:
        address = real["pointer"](library, x)
        if address and made.place(address) == "counters":
            made.tensor(x, "input")
        return address

    def empty(library: Any, shape: tuple, strides: tuple, like: Any) -> Any:
        return made.tensor(real["empty"](library, shape, strides, like), "result", "allocates")

    def zeros_like(library: Any, x: Any) -> Any:
        return made.tensor(torch.empty_like(x), "result", "allocates zeros")

    def empty_float32(library: Any, shape: tuple, like: Any) -> Any:
        return made.tensor(real["empty_float32"](library, shape, like), "scratch", "allocates")

    def zeros_int32(library: Any, size: int, like: Any) -> Any:
        return made.tensor(torch.empty(size, dtype=torch.int32), "scratch", "allocates zeros")

    def fill(library: Any, x: Any, value: float) -> None:
        made.lines.append(f"  fills {made.place(x.data_ptr())} with {value}")

    changed = (pointer, empty, zeros_like, empty_float32, zeros_int32, fill)
    with dry_run.hopper(card), contextlib.ExitStack() as stack:
        change = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        for function in changed:
            change(TorchLibrary, function.__name__, function)
        change(TorchLibrary, "empty_strided", empty)
        change(TorchLibrary, "gpu_allocator", lambda library: None)
        change(jit, "load", made.load)
        change(TensorMapSpec, "encode", lambda spec, pointer: made.encode(spec, pointer))
        change(data, "random", _uninitialised)
        change(model_shapes, "random", _uninitialised)
        yield made


def _uninitialised(shape: tuple[int, ...], dtype: str, source: Any) -> Any:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype))


def calls(card: str, forced: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, call) of everything that is recorded in one run, both passes in one call."""
    cells = problems(parse([])) if card == "sm_90" and not forced else []
    for deterministic in (False, True):
        suffix = ", deterministic" * deterministic
        for cell in cells:
            options = {"causal": cell.causal, "deterministic": deterministic}
            yield f"{cell}{suffix}", functools.partial(_cell, cell, options)
        for model in model_shapes.MODELS:
            yield f"{model.name}{suffix}", functools.partial(_model, model, deterministic)
    for number, case in enumerate(cases(GpuSized("record", "torch", dtypes=DTYPES))):
        yield f"case {number}: {case}", functools.partial(_case, case)


class GpuSized(Target):
    """A target of the host's memory with the lengths of a GPU's."""

    gpu = True


def _cell(cell: Problem, options: dict[str, Any]) -> None:
    _both(data.of_problem(cell), **options)


def _model(model: model_shapes.Model, deterministic: bool) -> None:
    tensors, options = data.of_problem(model.problem), model.make_options()
    options |= {"causal": model.problem.causal, "deterministic": deterministic}
    lengths = options.pop("lengths", None)
    if lengths is None:
        _both(tensors, **options)
    else:
        _packed([x[0] for x in tensors], lengths, **options)


def _packed(tensors: Sequence[Any], lengths: Sequence[int], **options: Any) -> None:
    """The same for packed sequences."""
    import torch

    import cupyflash

    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    options["window_size"] = options.pop("window", (-1, -1))
    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ends)
    options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(lengths))
    *qkv, dout = tensors
    qkv = (x.detach().requires_grad_() for x in qkv)
    cupyflash.flash_attn_varlen_func(*qkv, **options).backward(dout)


def _case(case: Case) -> None:
    inputs, options = case.problem(GpuSized("record", "torch"))
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    _both(tensors, layout=case.layout, **options)


def _both(tensors: Sequence[Any], **options: Any) -> None:
    """The forward and, by torch's autograd, the backward."""
    import cupyflash

    *qkv, dout = tensors
    qkv = (x.detach().requires_grad_() for x in qkv)
    cupyflash.attention(*qkv, **options).backward(dout)


def record(card: str, forced: str) -> list[str]:
    """The lines of one run."""
    with recording(CARDS[card]) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for title, call in calls(card, forced):
            made.begin(f"{card} {forced} {title}".replace("  ", " "))
            try:
                call()
            except NotImplementedError as error:
                made.lines.append(f"  refused: {error}")
        return made.lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--run", type=int, help="(internal) the number of one run, in a process")
    options = parser.parse_args(arguments)
    if options.run is not None:
        lines = record(*RUNS[options.run])
        options.output.write_text("\n".join(lines) + "\n")
        return 0
    parts = [options.output.with_suffix(f".{i}") for i in range(len(RUNS))]
    for i, ((_, forced), part) in enumerate(zip(RUNS, parts)):
        # The package remembers what it was told of the GPU, so each run has a process.
        variables = os.environ | {"CUDA_VISIBLE_DEVICES": "", "CUPYFLASH_BACKEND": forced}
        command = [sys.executable, __file__, str(part), "--run", str(i)]
        subprocess.run(command, check=True, env=variables)
    options.output.write_text("".join(part.read_text() for part in parts))
    for part in parts:
        part.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
