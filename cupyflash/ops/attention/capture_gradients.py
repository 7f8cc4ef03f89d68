"""The gradients of the captures of a text, by a kernel behind the others of a backward pass.

Threads add to an element of a gradient at the same time, so float32 sums depend on their order.
Where an order is asked for, the kernel adds to exact sums in scratch memory, and another one rounds
them (``cuda_src/attention/text/exact_sum.cuh``).
"""

import ctypes
import dataclasses
import math
import re
import struct
from collections.abc import Sequence
from typing import Any, ClassVar

from ...runtime.array import Array, View, dense_strides
from ...runtime.config import KernelConfig
from ...runtime.launch import Launch, call_fields
from ...runtime.structs import header
from .captures import NUMBERS, byte_strides
from .kernels import AttentionKernel, AttentionLaunch
from .options import NO_EXTRAS
from .passes import Sharing, Wanted, backward_params, zeros_for
from .problem import Problem

structs = header("attention/text/round_sums.cu")
INCLUDE = '#include "attention/text.cuh"\n'
INCLUDE_LEARNING = '#include "attention/text/learning.cuh"\n'
SUM_WORDS = ctypes.sizeof(structs.ExactSum) // 4


@dataclasses.dataclass(frozen=True)
class CapturesKernel(AttentionKernel):
    """A kernel that computes the scores once more and adds to the gradients of captures.

    Attributes:
        exact: they are exact sums.
    """

    tiles_of: ClassVar[str] = "k"

    exact: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def header(self) -> str:
        """The header of the text, in which captures that learn are read with a derivative."""
        text = super().header.replace(INCLUDE, f"{INCLUDE}{INCLUDE_LEARNING}")
        reads, starts = [], []
        for capture in self.text.captures:
            if not capture.learns:
                continue
            name = capture.name
            text = re.sub(rf"Capture<(\w+, \d+)> {name};", rf"LearningCapture<\1> {name};", text)
            starts.append(f"captures.{name}.start(-1);")
            for read in range(len(re.findall(rf"\b{name}\b", self.text.score))):
                reads.append(f"function({len(reads)}, captures.{name}, {read});")
        text = re.sub(r" *uint8_t padding\[\d+\];\n?", "", text)
        return (
            f"{'#define EXACT_GRADIENTS' if self.exact else ''}\n"
            f"{text}namespace text {{\nconstexpr int NUM_READS = {len(reads)};\n"
            "__device__ __forceinline__ void start_reads(const Captures& captures) "
            f"{{ {' '.join(starts)} }}\n"
            "template <class Function> __device__ __forceinline__ void for_each_read(\n"
            f"    const Captures& captures, Function function) {{ {' '.join(reads)} }}\n}}\n"
        )

    @property
    def captures_size(self) -> int:
        return struct.calcsize(_format(self.text))


@dataclasses.dataclass(frozen=True)
class RoundSums(KernelConfig):
    """Rounds the exact sums of one capture to its gradient in float32."""

    source: ClassVar[str] = "attention/text/round_sums.cu"

    num_threads: int = 256

    def grid(self, size: int) -> int:
        """Number of blocks for so many elements; a launch has one at least."""
        return max(1, -(-size // self.num_threads))


def _format(text: Any) -> str:
    parts = []
    for x in text.captures:
        learning = f"Q{max(1, x.rank)}q" * 2 + "16x"
        parts.append(NUMBERS.get(x.dtype) or (learning if x.learns else f"Q{x.rank}q"))
    return "=" + "".join(parts)


class CaptureGradients:
    """The launches for one problem."""

    def __init__(self, config: CapturesKernel, problem: Problem, wanted: Wanted) -> None:
        config = dataclasses.replace(config, exact=wanted.in_order)
        params = backward_params(problem, wanted, Sharing())
        self.launch = AttentionLaunch(config, problem, params)
        self.semaphore = call_fields(params).index("dq_semaphore")
        self.text, self.views, self.learned = problem.text, problem.captures, problem.learned
        self.pack = struct.Struct(_format(problem.text)).pack
        self.sums = tuple(
            ExactSums(problem.device, x) if config.exact and x is not None else None
            for x in self.learned
        )

    def __call__(
        self, library: Any, stream: Any, like: Array, arguments: tuple, extras: Sequence
    ) -> tuple[Array | None, ...]:
        """Starts them; returns a float32 array for each capture that learns, None for the others.

        Args:
            extras: the addresses of `Extras`, and those of the captures behind them.
        """
        values = extras[len(NO_EXTRAS) :]
        packed, gradients = [], zeros_for(library, self.learned, like)
        sums = [of and of.zeros(library, like) for of in self.sums]
        for capture, view, value, gradient, exact in zip(
            self.text.captures, self.views, values, gradients, sums
        ):
            packed += [value, *(byte_strides(capture, view) or (0,) * capture.learns)]
            if gradient is not None:
                dense = dense_strides(view.shape, range(len(view.shape)))
                to = gradient if exact is None else exact
                packed += [library.pointer(to), *(dense or (0,))]
        arguments = list(arguments)
        arguments[self.semaphore] = 0  # its blocks take no turns
        argument = self.launch.argument(*arguments)
        self.launch.start(stream, self.launch.with_captures(argument, self.pack(*packed)))
        for of, exact, gradient in zip(self.sums, sums, gradients):
            if of is not None:
                of.round(library, stream, exact, gradient)
        return gradients


class ExactSums:
    """The exact sums of the gradient of one capture, 48 bytes for each of its elements."""

    def __init__(self, device: int, view: View) -> None:
        config = RoundSums()
        self.size = math.prod(view.shape)
        params = structs.RoundSumsParams(size=self.size)
        self.launch = Launch(config, device, config.grid(self.size), params)

    def zeros(self, library: Any, like: Array) -> Array:
        """The memory of one call."""
        return library.zeros_int32(SUM_WORDS * self.size, like)

    def round(self, library: Any, stream: Any, sums: Array, gradient: Array) -> None:
        """Starts the kernel that writes the gradient."""
        pointers = library.pointer(sums), library.pointer(gradient)
        self.launch.start(stream, self.launch.argument(*pointers))
