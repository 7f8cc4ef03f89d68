"""Launches for a bias beside the main kernels: a key mask before them, a gradient after them.

`KeyMaskLaunch` packs a key mask to bits. A kernel with a key mask gets the address of a record in
the place of the bias. The record holds the address of the bias and a bit for each key
(``cuda_src/attention/mask_record.cuh``).

`BiasGradient` sums the gradient of a bias that all sequences share, in registers and in a fixed
order. Without its kernels the main kernel of the backward pass adds to the gradient by atomics, or
stores a gradient of which each element belongs to one score.
"""

import ctypes
import math
from typing import Any

from ..runtime.array import Array
from ..runtime.gpu import multiprocessors
from ..runtime.launch import Launch
from ..runtime.structs import header
from .backends import simt, sm80
from .backends.config import FlashBwdPreprocess, MaskRecord
from .backends.sm80 import FlashBwdDbiasSm80, FlashBwdDbiasSum
from .options import BIAS, KEY_MASK, SEQUSED_K, caller_name
from .problem import Problem

structs = header("attention/mask_record.cu")

# Of the kernel that sums the gradient of a bias: blocks that a multiprocessor runs at the same
# time, pairs of a sequence and a head that a block should have, and rounds of blocks, as each share
# leaves sums in memory.
BLOCKS, LEAST_PAIRS, MOST_ROUNDS = 2, 4, 4


class KeyMaskLaunch:
    """Packs the key mask of one problem.

    Args:
        trim: whether the kernels may take the keys up to the last seen one for the whole sequence.
    """

    def __init__(self, problem: Problem, trim: bool = False) -> None:
        shape, mask = problem.shape, problem.extras.key_mask
        keys = shape.seqlen_k + structs.MASK_PADDING
        words = -(-keys // 128) * 4
        self.trim = trim
        self.lengths_offset = ctypes.sizeof(structs.MaskRecord) + 4 * words * shape.batch
        self.size = self.lengths_offset // 4 + shape.batch
        params = structs.MaskRecordParams(
            batch_stride=mask.strides[0],
            key_stride=mask.strides[1],
            words=words,
            seqlen_k=shape.seqlen_k,
            trim=trim,
        )
        config = MaskRecord()
        self.launch = Launch(config, problem.device, config.grid(shape), params)

    def __call__(
        self, library: Any, stream: Any, like: Array, extras: list[int]
    ) -> tuple[Array, int]:
        """Writes the record, and puts it into the pointers of `Extras` where the kernels read it.

        Returns:
            The memory of the record, which the caller holds until the last launch that reads it,
            and the address of the bias, for its tensor map.
        """
        memory = library.empty_float32((self.size,), like)
        record = library.pointer(memory)
        mask, bias = extras[KEY_MASK], extras[BIAS]
        if not mask:  # the mask is a bool bias
            mask, bias = bias, 0
        lengths = record + self.lengths_offset
        self.launch.start(stream, self.launch.argument(mask, bias, record, lengths))
        extras[BIAS] = record
        if self.trim:
            extras[SEQUSED_K] = lengths
        return memory, bias


class BiasGradient:
    """The launches for one problem, after `prepare`; they follow all others of the pass.

    Attributes:
        partial_floats: the floats of workspace, in ``dkv_partial``.
    """

    def __init__(self, problem: Problem, config: FlashBwdDbiasSm80) -> None:
        self.device, self.config = problem.device, config
        bias = problem.extras.bias
        _, heads, queries, keys = bias.shape
        self.tiles = -(-queries // config.block_m) * -(-keys // config.block_n) * heads
        self.size = math.prod(bias.shape)
        at_once = BLOCKS * multiprocessors(problem.device)
        pairs = problem.shape.batch * problem.shape.heads_q // heads
        self.shares = shares_of_tiles(self.tiles, at_once, pairs // LEAST_PAIRS)
        self.partial_floats = self.shares * self.size if self.shares > 1 else 0

    def prepare(self, params: ctypes.Structure) -> None:
        """Loads the kernels, for the parameters of the pass."""
        params = type(params).from_buffer_copy(params)
        params.shape.group_shares = self.shares
        blocks = self.tiles * self.shares
        self.launches = [Launch(self.config, self.device, blocks, params)]
        if self.shares > 1:
            config = FlashBwdDbiasSum()
            blocks = -(-self.size // config.threads)
            self.launches.append(Launch(config, self.device, blocks, params))

    def __call__(self, stream: Any, *pointers: int) -> None:
        for launch in self.launches:
            launch.start(stream, launch.argument(*pointers))


def shares_of_tiles(tiles: int, at_once: int, most: int) -> int:
    """How many blocks divide the sequences of a tile, at most ``most``.

    As few as keep 9 of 10 places for blocks (``at_once``) busy until the last block ends, or else
    those that keep the most of them busy.
    """

    def busy(shares: int) -> float:
        blocks = tiles * shares
        return blocks / (-(-blocks // at_once) * at_once)

    possible = range(1, max(1, min(most, MOST_ROUNDS * at_once // tiles)) + 1)
    return next((shares for shares in possible if busy(shares) >= 0.9), max(possible, key=busy))


def bias_gradient(
    function: str, problem: Problem, backend: Any, arguments: tuple, deterministic: str
) -> BiasGradient | None:
    """The launches that sum the gradient of the bias; None leaves it to the main kernel.

    Args:
        arguments: of ``backward`` of the backend.
        deterministic: "error" where atomics are refused.

    Raises:
        NotImplementedError: they are refused, and there is no kernel.
    """
    if not problem.bias_is_broadcast:  # each element has one term, which the main kernel knows
        return None
    config = None
    if problem.bias_gradient_fits_registers and backend is not simt:
        config = sm80.dbias(*arguments)
    if config is not None and type(backend.backward(*arguments)[0]) is FlashBwdPreprocess:
        return BiasGradient(problem, config)
    if deterministic == "error":
        fact = f"the gradient of a {caller_name(function, 'bias')} that is broadcast has a "
        fact += "deterministic sum only where tensor cores compute the backward pass"
        got = f"{problem.dtype}, head_dim {problem.head_dims[0]}"
        raise NotImplementedError(f"{function}: {fact}, got {got}")
    return None
