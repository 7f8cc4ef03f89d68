"""The launch before all others of a pass whose kernels take a key mask: it packs the mask to bits.

Such a kernel gets the address of a record in the place of the bias. The record holds the address of
the bias and a bit for each key (``cuda_src/attention/mask_record.cuh``).
"""

import ctypes
from typing import Any

from ...runtime.array import Array
from ...runtime.launch import Launch
from ...runtime.structs import header
from .kernels import MaskRecord
from .options import BIAS, KEY_MASK, SEQUSED_K
from .problem import Problem

structs = header("attention/mask_record.cu")


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
