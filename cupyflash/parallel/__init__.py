"""Attention over the tokens of several GPUs, by torch.distributed; see docs/parallel.md."""

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
