"""A Boolean bias as a mask of the library's own text, behind the same argument.

A kernel that takes a Boolean bias reads it for each head anew. For a text one launch before the
pass reads it once for all heads (masks.py), at every call: then empty tiles are skipped, and a lane
reads the bits of 64 scores with two loads. On an H200 a call takes 0.63 to 0.76 of the time in the
forward and 0.59 to 0.85 in the backward (bench/notes/scores.md).
"""

import dataclasses
import math

from ..kind import BOOL, Features
from ..masks import PLACES_BYTES
from ..problem import Problem
from ..score_text import Capture, Text
from ..score_text.checks import MOST_STEPS

# No name of a caller's own has two underscores. Any byte but 0 is True.
SEEN = Capture("seen__", "uint8", 3)
TEXT = Text("", "seen__(batch, query, key) != 0", (SEEN,))

# Finding the bits of a score takes less time than a text saves in so many heads.
LEAST_HEADS = 8
# From so many scores of all heads on, the saving exceeds the time of a launch.
LEAST_SCORES = 2**27
MOST_HEAD_DIM = 128  # wider ones were not timed
# So many bits of a mask, in whole tiles of TILE rows and columns, all have places: words of 64
# columns and of 32 tiles take up to four times as many. A tile without a place is slow.
TILE, MOST_BITS = 128, 8 * PLACES_BYTES // 4


def can_be_text(features: Features) -> bool:
    """Whether there is a Boolean bias, beside nothing with which the text was not measured."""
    return features.bias == BOOL and not features.changes_scores


def is_text(problem: Problem) -> bool:
    """Whether a text computes the bias of a problem faster than the kernels that read one.

    All heads must share it.
    """
    shape, bias, features = problem.shape, problem.extras.bias, problem.features
    if not can_be_text(features) or shape.head_dim > MOST_HEAD_DIM or bias.strides[1]:
        return False
    scores = shape.batch * shape.heads_q * shape.seqlen_q * shape.seqlen_k
    many = shape.heads_q >= LEAST_HEADS and scores >= LEAST_SCORES
    bits = math.prod(-(-n // TILE) * TILE for n in (shape.seqlen_q, shape.seqlen_k))
    bits *= 1 if as_text(problem).mask_is_shared else shape.batch
    return many and bits <= MOST_BITS and abs(bias.strides[3]) < MOST_STEPS


def features_as_text(features: Features) -> Features:
    return features._replace(bias=0, text=TEXT)


def as_text(problem: Problem) -> Problem:
    """The same problem with a text in the place of its Boolean bias, which is its capture."""
    shape, bias = problem.shape, problem.extras.bias
    seen = bias._replace(
        shape=(shape.batch, shape.seqlen_q, shape.seqlen_k),
        strides=(bias.strides[0], *bias.strides[2:]),
    )
    extras = dataclasses.replace(problem.extras, bias=None)
    return dataclasses.replace(problem, extras=extras, text=TEXT, captures=(seen,))
