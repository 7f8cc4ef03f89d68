"""The launches around a main kernel of the backend ``fp16x3``."""

import ctypes
import itertools
import math
import struct
from typing import Any

from ....runtime.config import KernelConfig
from ....runtime.gpu import capability_of
from ....runtime.launch import Launch, call_fields, pointer_of
from ....runtime.scratch import NULL
from ....runtime.structs import header
from ..kernels import AttentionLaunch
from ..problem import Problem

split_structs = header("attention/fp16x3/params.cuh")

pack_two = struct.Struct("2Q").pack
pack_seven = struct.Struct("7Q").pack


class SplitInputsLaunch(AttentionLaunch):
    """A kernel that reads float16 parts: after those that make them in a workspace, and before
    those that end the pass.
    """

    def __init__(self, config: KernelConfig, problem: Problem, params: ctypes.Structure) -> None:
        super().__init__(config, problem, params)
        shape, names = params.shape, call_fields(params)
        self.after = [AttentionLaunch(x, problem, params) for x in config.after]
        is_backward = "dout" in names
        strides = {
            x: getattr(params, x)
            for x, _ in split_structs.Fp16x3SplitParams._fields_
            if x.endswith("_strides") and hasattr(params, x)
        }
        splitting = split_structs.Fp16x3SplitParams(
            **strides,
            accum_rows=params.accum_rows if is_backward else 0,
            shape=shape,
        )
        self.before = [
            Launch(x, problem.device, x.grid(shape, is_backward), splitting) for x in config.before
        ]
        fields = call_fields(splitting)
        self.inputs = [names.index(name) if name in names else None for name in fields]
        start = len(NULL) * len(fields)
        self.splitting = bytes(splitting)[start : type(splitting).split.offset]
        rows_q = math.prod(problem.sizes("q")[:2])
        rows_k = math.prod(problem.sizes("k")[:2])
        self.rows = pack_two(rows_q, rows_k)
        self.lengths_size = 16 * -(-shape.batch // 4)
        self.ranges_size = shape.batch * shape.heads_kv * ctypes.sizeof(split_structs.HeadRange)
        width = 2 * config.parts * config.head_dim
        size_q, size_k = rows_q * shape.heads_q * width, rows_k * shape.heads_kv * width
        sizes = (self.ranges_size, size_q, size_k, size_k, size_q if is_backward else 0)
        sizes += (self.lengths_size, self.lengths_size)
        *self.offsets, end = itertools.accumulate(sizes, initial=0)
        capability = capability_of(problem.device)
        # The kernels for CUDA cores compute the sequences that cannot be split. The others have no
        # rows for them.
        self.fallback = [AttentionLaunch(x, problem, params) for x in config.fallback(capability)]
        self.params, self.semaphores_size = config.params, 0
        if is_backward:
            self.semaphores_size = 4 * (1 + shape.heads_q * params.accum_rows // 16)
        self.workspace_size = end // 4

    def argument(
        self, *pointers: int, stream: Any = None, workspace: int = 0, bias: int = 0
    ) -> bytes:
        """The argument, after the launches of the kernels that make the parts."""
        import cupy

        cupy.cuda.runtime.memsetAsync(workspace, 0, self.ranges_size, pointer_of(stream))
        parts = [workspace + offset for offset in self.offsets]
        split = pack_seven(*parts) + self.rows
        inputs = [0 if x is None else pointers[x] for x in self.inputs]
        for before in self.before:
            before.start(stream, before.pack(*inputs) + self.splitting + split)
        return self.pack(*pointers) + self.tail + split

    def start(self, stream: Any, params: bytes) -> None:
        """Launches the kernel, then those that end the pass and those for what cannot be split."""
        import cupy

        super().start(stream, params)
        captures = params[self.captures_at : self.captures_end]
        params = self.without_captures(params)
        for launch in self.after:
            launch.start(stream, params)
        argument = self.params.from_buffer_copy(params)
        base, left = argument.base, argument.split
        if self.semaphores_size and base.dq_semaphore:
            # Tickets start from 0 again; so do the flags, as tiles have other sizes now.
            cupy.cuda.runtime.memsetAsync(
                base.dq_semaphore, 0, self.semaphores_size, pointer_of(stream)
            )
        base.seqused_q, base.seqused_k = left.left_q, left.left_k
        for launch in self.fallback:
            launch.start(stream, launch.with_captures(bytes(base), captures))
