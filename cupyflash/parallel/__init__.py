"""Attention over the tokens of several GPUs, by torch.distributed; see docs/parallel.md.

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
