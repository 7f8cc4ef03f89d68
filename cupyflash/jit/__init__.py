"""Run-time compilation: a kernel configuration becomes a function on a GPU.

============  ===================================================================
sources.py    where ``cuda_src`` is, and the digest of the code that a kernel includes
compiler.py   architectures, and NVRTC: one configuration to one cubin
cache.py      the folder of compiled kernels
ownership.py  who can change what is in a folder
builder.py    look up, else compile and publish; load on a device; PTX and SASS beside the cubin
function.py   a loaded kernel, launched with the bytes of its argument
pool.py       many kernels at once, in processes, without a GPU
messages.py   texts that are logged and printed
============  ===================================================================

CuPy is imported when NVRTC or a device is first needed, not before.
"""

from .builder import build, load
from .cache import Built, cache_dir, clear, entries
from .compiler import CompileError, arch_of
from .ownership import UnsafeCacheError
from .pool import build_all

__all__ = [
    "Built",
    "CompileError",
    "UnsafeCacheError",
    "arch_of",
    "build",
    "build_all",
    "cache_dir",
    "clear",
    "entries",
    "load",
]
