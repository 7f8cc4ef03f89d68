"""The gradients of the captures of a text, by a kernel behind the others of a backward pass."""

import dataclasses
import re
import struct
from collections.abc import Sequence
from typing import Any, ClassVar

from ....runtime.array import Array, dense_strides
from ....runtime.gpu import HALF, architecture
from ....runtime.launch import call_fields
from ..captures import NUMBERS, byte_strides
from ..kernels import AttentionKernel
from ..kind import KEY_MASK, Access, Kind
from ..launching import AttentionLaunch
from ..options import NO_EXTRAS
from ..passes import Sharing, Wanted, backward_params, zeros_for
from ..problem import Problem
from .forward import padded_head_dim

# block_m, block_n, num_warps: the first one whose operands fit the shared memory.
TILES = ((64, 64, 4), (32, 64, 4), (32, 32, 4))
CONSTANTS = 3 * 1024  # bytes of shared memory


@dataclasses.dataclass(frozen=True)
class FlashBwdCapturesSm80(AttentionKernel):
    """Backward: the gradients of captures; a block owns ``block_n`` keys of a key head."""

    source: ClassVar[str] = "attention/sm80/flash_bwd_captures_sm80.cu"
    tiles_of: ClassVar[str] = "k"

    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    arch: int
    bias: int
    dropout: bool
    smem_bytes: int

    @property
    def header(self) -> str:
        """That of the text, in which captures that learn are read with a derivative."""
        text = super().header
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
            '#include "attention/text/learning.cuh"\n'
            f"{text}namespace text {{\nconstexpr int NUM_READS = {len(reads)};\n"
            "__device__ __forceinline__ void start_reads(const Captures& captures) "
            f"{{ {' '.join(starts)} }}\n"
            "template <class Function> __device__ __forceinline__ void for_each_read(\n"
            f"    const Captures& captures, Function function) {{ {' '.join(reads)} }}\n}}\n"
        )

    @property
    def captures_size(self) -> int:
        return struct.calcsize(_format(self.text))


def _format(text: Any) -> str:
    parts = []
    for x in text.captures:
        learning = f"Q{max(1, x.rank)}q" * 2 + "16x"
        parts.append(NUMBERS.get(x.dtype) or (learning if x.learns else f"Q{x.rank}q"))
    return "=" + "".join(parts)


def kernel(kind: Kind) -> FlashBwdCapturesSm80 | None:
    """The kernel for a problem whose captures learn; None where there is none."""
    dtype, head_dim, features, capability = kind
    arch = architecture(capability)
    if dtype not in HALF or dtype not in arch.mma_dtypes:
        return None
    padded = padded_head_dim(head_dim)
    bias = features.bias
    for block_m, block_n, num_warps in TILES:
        smem_bytes = 4 * (block_m + block_n) * padded
        if smem_bytes <= arch.shared_memory * 1024 - CONSTANTS:
            options = (arch.mma, bias, features.dropout, smem_bytes)
            tile = (block_m, block_n, num_warps)
            return FlashBwdCapturesSm80(dtype, padded, *tile, *options, text=features.text)
    return None


def plan(problem: Problem, kind: Kind, wanted: Wanted) -> "CaptureGradients | None":
    """The gradients of the captures of a problem; None if none learns, or there is no kernel."""
    if not problem.learned or kind.features.bias >= KEY_MASK or problem.access < Access.VECTOR:
        return None
    config = kernel(kind)
    return None if config is None else CaptureGradients(config, problem, wanted)


class CaptureGradients:
    """The launch for one problem."""

    def __init__(self, config: FlashBwdCapturesSm80, problem: Problem, wanted: Wanted) -> None:
        params = backward_params(problem, wanted, Sharing())
        self.launch = AttentionLaunch(config, problem, params)
        self.semaphore = call_fields(params).index("dq_semaphore")
        self.text, self.views, self.learned = problem.text, problem.captures, problem.learned
        self.pack = struct.Struct(_format(problem.text)).pack

    def __call__(
        self, library: Any, stream: Any, like: Array, arguments: tuple, extras: Sequence
    ) -> tuple[Array | None, ...]:
        """Starts it; returns a float32 array for each capture that learns, None for the others.

        Args:
            extras: the addresses of `Extras`, and those of the captures behind them.
        """
        values = extras[len(NO_EXTRAS) :]
        packed, gradients = [], zeros_for(library, self.learned, like)
        for capture, view, value, gradient in zip(
            self.text.captures, self.views, values, gradients
        ):
            packed += [value, *(byte_strides(capture, view) or (0,) * capture.learns)]
            if gradient is not None:
                dense = dense_strides(view.shape, range(len(view.shape)))
                packed += [library.pointer(gradient), *(dense or (0,))]
        arguments = list(arguments)
        arguments[self.semaphore] = 0  # its blocks take no turns
        argument = self.launch.argument(*arguments)
        self.launch.start(stream, self.launch.with_captures(argument, self.pack(*packed)))
        return gradients
