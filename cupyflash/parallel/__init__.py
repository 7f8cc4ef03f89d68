"""Attention over the tokens of several GPUs, by torch.distributed; see docs/parallel.md.

==================  ================================================================================
shard.py            `Shard`: which tokens a rank has, by the arithmetic of tokens.py and of
                    placement.py, which leaves sequences whole
attention.py        `attention`; checks.py and agreement.py compare the calls of all ranks
choice.py           the move that has fewer bytes to wait for; moves.py makes it
heads.py            heads that travel, by collectives, and copied_heads.py by copies
over_keys.py        keys that travel: gathered.py by collectives (exchange.py), copied.py by copies
                    (routes.py); pieces.py computes attention over what has arrived
apart.py            calls of sequences that lie on one rank each, for which nothing travels
peers.py            memory that GPUs of one host write for each other
transport.py        collectives, and what becomes of them when a rank fails
texts.py            scores and masks, which see the numbers and places of one GPU
context.py          models and SDPA over a shard; buffers.py is torch's `context_parallel`
sharded.py          DTensors
==================  ================================================================================

Sources: moving heads, DeepSpeed Ulysses, arXiv:2309.14509; gathering keys, and two parts of each
sequence a rank, Llama 3, arXiv:2407.21783, section 3.3.2; both together, USP, arXiv:2405.07719.
"""

import importlib

from ..packages import importing

with importing(__name__, "torch>=2.7"):
    importlib.import_module("torch")

from .attention import attention as attention  # noqa: E402
from .buffers import context_parallel as context_parallel  # noqa: E402
from .context import context as context  # noqa: E402
from .shard import Shard as Shard  # noqa: E402
from .transport import RankError as RankError  # noqa: E402

__all__ = ["RankError", "Shard", "attention", "context", "context_parallel"]
