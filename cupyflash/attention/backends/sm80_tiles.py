"""Tiles of backend ``sm80``, by head dim and by what the GPU has.

That is shared memory (A100, H100 and B200 have twice that of consumer cards) and, on Turing, no
asynchronous copies. They were measured on an H200 for head dims 64 and 128 (bench/NOTES.md); the
others, and those with a bias or dropout, are the largest that compile without spills.
"""

from ...runtime.gpu import Capability, architecture
from ..features import Features

Tiles = dict[int, tuple[int, ...]]

HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256)  # head dims of the tiles; others are rounded up

# head dim: block_m, block_n, num_warps
FORWARD_TILES = {
    "large": {
        32: (128, 128, 4),
        64: (128, 96, 4),
        96: (128, 64, 4),
        128: (128, 64, 4),
        160: (128, 64, 8),
        192: (128, 64, 8),
        256: (128, 64, 8),
    },
    "small": {
        32: (128, 128, 4),
        64: (128, 96, 4),
        96: (128, 64, 4),
        128: (128, 64, 8),
        160: (128, 64, 8),
        192: (128, 64, 8),
        256: (64, 64, 4),
    },
    "turing": {
        32: (64, 64, 4),
        64: (64, 64, 4),
        96: (64, 64, 4),
        128: (64, 64, 4),
        160: (64, 32, 4),
        192: (64, 32, 4),
        256: (64, 16, 4),
    },
}
# The softcap takes the last registers of the widest tile, on Turing ALiBi as well.
FORWARD_TILES_SOFTCAP = {64: (128, 64, 4)}
FORWARD_TILES_SCORE_TURING = {64: (64, 48, 4)}

# head dim: block_m, block_n, num_warps, num_stages
BACKWARD_TILES = {
    "large": {
        32: (128, 128, 8, 2),
        64: (128, 128, 8, 2),
        96: (64, 128, 8, 2),
        128: (64, 128, 8, 2),
        160: (64, 64, 8, 2),
        192: (64, 64, 8, 1),
        256: (64, 64, 8, 1),
    },
    "small": {
        32: (64, 128, 8, 2),
        64: (64, 128, 8, 2),
        96: (64, 64, 8, 2),
        128: (64, 64, 8, 1),
        160: (64, 64, 8, 1),
        192: (64, 32, 8, 1),
        256: (32, 32, 4, 1),
    },
    # No entry for 256: its smallest tiles need more than Turing's 64 KB, and simt serves.
    "turing": {
        32: (64, 64, 4, 1),
        64: (64, 64, 4, 1),
        96: (64, 32, 4, 1),
        128: (64, 32, 4, 1),
        160: (32, 32, 4, 1),
        192: (32, 32, 4, 1),
    },
}
# For Blackwell ptxas needs a few more registers: narrower tiles, where the others would spill. The
# smallest tiles of head dim 256 spill on sm_120 all the same, and simt serves.
FORWARD_TILES["sm100"] = FORWARD_TILES["large"] | {64: (128, 64, 4), 128: (128, 64, 8)}
FORWARD_TILES["sm120"] = FORWARD_TILES["small"]
BACKWARD_TILES["sm100"] = {
    32: (64, 64, 8, 2),
    64: (64, 128, 8, 2),
    96: (64, 64, 8, 2),
    128: (64, 64, 8, 2),
    160: (64, 64, 8, 2),
    192: (64, 64, 8, 1),
    256: (64, 32, 8, 1),
}
BACKWARD_TILES["sm120"] = BACKWARD_TILES["small"] | {32: (128, 64, 8, 2)}
del BACKWARD_TILES["sm120"][256]

# The derivative of the softcap, and ALiBi, need registers that the widest tiles do not leave.
BACKWARD_TILES_SCORE = {64: (64, 128, 8, 2), 96: (64, 64, 8, 2), 128: (64, 64, 8, 2)}

# With a bias or dropout, whatever else: their addresses, values and random numbers need registers.
FORWARD_TILES_BIAS = {
    "large": {
        32: (128, 64, 8),
        64: (128, 64, 4),
        96: (128, 32, 8),
        128: (128, 64, 8),
        160: (128, 64, 8),
        192: (128, 64, 8),
        256: (128, 64, 8),
    },
    "turing": FORWARD_TILES["turing"] | {64: (64, 48, 4), 96: (64, 48, 4)},
}
FORWARD_TILES_BIAS["small"] = FORWARD_TILES_BIAS["large"] | {256: (128, 32, 8)}
FORWARD_TILES_BIAS["sm100"] = FORWARD_TILES_BIAS["large"] | {32: (128, 96, 4)}
FORWARD_TILES_BIAS["sm120"] = FORWARD_TILES_BIAS["small"] | {32: (128, 96, 4)}
BACKWARD_TILES_BIAS = {
    "large": BACKWARD_TILES["large"] | BACKWARD_TILES_SCORE | {32: (64, 128, 8, 2)},
    "small": BACKWARD_TILES["small"],
    "turing": BACKWARD_TILES["turing"],
    "sm100": BACKWARD_TILES["sm100"],
    "sm120": BACKWARD_TILES["sm120"] | {32: (64, 128, 8, 2)},
}


def forward_tiles(features: Features, capability: Capability) -> Tiles:
    """Head dim: (block_m, block_n, num_warps), for every head dim of the forward."""
    if features.bias or features.dropout:
        return FORWARD_TILES_BIAS[architecture(capability).tiles]
    tiles = FORWARD_TILES[architecture(capability).tiles]
    if architecture(capability).tiles == "turing":
        return tiles | FORWARD_TILES_SCORE_TURING if features.softcap or features.alibi else tiles
    return tiles | FORWARD_TILES_SOFTCAP if features.softcap else tiles


def backward_tiles(features: Features, capability: Capability) -> Tiles:
    """Head dim: (block_m, block_n, num_warps, num_stages), for every head dim of the backward."""
    if features.bias or features.dropout:
        return BACKWARD_TILES_BIAS[architecture(capability).tiles]
    tiles = BACKWARD_TILES[architecture(capability).tiles]
    if (features.softcap or features.alibi) and architecture(capability).tiles == "large":
        return tiles | BACKWARD_TILES_SCORE
    return tiles
