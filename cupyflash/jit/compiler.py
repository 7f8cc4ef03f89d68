"""NVRTC: one kernel configuration becomes one cubin. Needs CuPy and NVRTC, but no GPU."""

import ctypes
import dataclasses
import functools
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Protocol

from .. import packages
from . import sources

# No -ftz and no fast-math. Adds and multiplications of denormals cost nothing on these GPUs; what
# does cost is the fix-up around ex2, lg2 and rcp, and the sources write those as PTX (.approx.ftz)
# where they want them. So float32 results keep their denormals, as NumPy's and PyTorch's do.
# -default-device lets helper functions go unannotated; -lineinfo costs nothing at run time and
# shows profilers the source line.
FLAGS = ("-std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v")

# Cubins of the integrated (Jetson, DRIVE) GPUs are not promised to run on others.
_INTEGRATED = (53, 62, 72, 87, 101)

# The oldest NVRTC that knows the C++ of the sources, and for each major number the package of NVRTC
# and the newest version whose kernels CI has found without a fault.
OLDEST = (12, 3)
_FAULTLESS = {"12": ("nvidia-cuda-nvrtc-cu12", "12.9"), "13": ("nvidia-cuda-nvrtc", "13.5")}

_MISSING = "cupyflash: compiling a kernel needs CuPy and NVRTC, {reason}; {pip_line}"


CUPY_FOLDER_REMEDY = "set CUPY_CACHE_DIR to a folder that you can write to"


class Kernel(Protocol):
    """One instantiation of one ``__global__`` template; `cupyflash.runtime.config` makes them.

    Attributes:
        source: path of its file below ``cuda_src/``.
        params: the structure that it takes by value.
        name: of the ``__global__`` function.
        expression: NVRTC's name expression, ``flash_fwd_sm80<bfloat16_t, 128, …>``.
        shared_memory: dynamic shared memory of a block, in bytes.
        header: C++ before the source, or "".
        argument_size: bytes of ``params``, with what ``header`` adds to it.
    """

    source: str
    params: type[ctypes.Structure]
    name: str
    expression: str
    shared_memory: int
    header: str
    argument_size: int


class CompileError(RuntimeError):
    """NVRTC rejected a kernel. The text holds everything a bug report needs."""

    def __init__(self, expression: str, arch: str, nvrtc: str, stub: str, log: str) -> None:
        super().__init__(expression, arch, nvrtc, stub, log)
        self.expression, self.arch, self.nvrtc, self.stub, self.log = self.args

    def __str__(self) -> str:
        kernel = self.expression.partition("<")[0]
        return (
            f"{kernel}: NVRTC {self.nvrtc} could not compile {self.expression} for {self.arch}; "
            f"the stub is kept in {self.stub}\n{self.log}"
        )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """NVRTC's output for one configuration; ``seconds`` is its wall time."""

    cubin: bytes
    ptx: bytes
    lowered_name: str
    log: str
    seconds: float


def nvrtc() -> ModuleType:
    """CuPy's binding of NVRTC.

    Raises:
        ImportError: either is missing, and the text names the pip line; or `cupy_folder_problem`.
    """
    if problem := cupy_folder_problem():
        raise ImportError(f"cupyflash: {problem}; {CUPY_FOLDER_REMEDY}")
    try:
        from cupy.cuda import nvrtc as module

        found = tuple(module.getVersion())  # CuPy opens the library at the first call
        if found < OLDEST:
            needed, got = (".".join(map(str, numbers)) for numbers in (OLDEST, found))
            raise RuntimeError(f"NVRTC {got}, which must be {needed} or newer")
    except (ImportError, OSError, RuntimeError) as error:
        reason = "CuPy is not installed" if _lacks_cupy(error) else f"got {error}"
        line = packages.cuda_line()
        raise ImportError(_MISSING.format(reason=reason, pip_line=line)) from error
    return module


def cupy_folder_problem() -> str:
    """Why CuPy cannot be imported for lack of a folder, or "".

    It creates the folder of its own kernels when it is imported. If that fails in the middle of the
    import, CuPy cannot be imported later in this process either: so it is tried before, as CuPy
    does it.
    """
    if "cupy" in sys.modules or not importlib.util.find_spec("cupy"):
        return ""
    folder = os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        return f"CuPy must be able to create the folder of its own kernels, {folder}, got {error}"
    return ""


@functools.cache
def version() -> str:
    """NVRTC's version, ``"12.9"``."""
    return "{}.{}".format(*nvrtc().getVersion())


def cure(nvrtc_version: str) -> str:
    """The advice for a kernel that this version has compiled badly."""
    package, faultless = _FAULTLESS.get(nvrtc_version.partition(".")[0], ("", nvrtc_version))
    if nvrtc_version == faultless:
        return "please report it"
    return f"pip install '{package}=={faultless}.*'"


def supported_archs() -> tuple[int, ...]:
    """The targets of NVRTC, as 10 * major + minor of the compute capability, ascending."""
    return tuple(sorted(nvrtc().getSupportedArchs()))


def stub(config: Kernel) -> str:
    """The program: the kernel's file, and a check that host and device agree on its argument."""
    params = config.params
    return (
        f"// {config.expression}\n"
        f'{config.header}#include "{config.source}"\n'
        f"static_assert(sizeof({params.__name__}) == {config.argument_size},\n"
        f'              "the host has read another {params.__name__} from its header");\n'
    )


def compile_kernel(config: Kernel, arch: str) -> Compiled:
    """Compile for ``arch`` (``"sm_90a"``); raises `CompileError`, or ImportError without NVRTC."""
    module, text, start = nvrtc(), stub(config), time.perf_counter()
    root = sources.root()
    # The name places the stub into cuda_src. A bare "stub.cu" would make NVRTC search the current
    # folder first, and compile whatever file of the same name lies there.
    program = module.createProgram(text, str(root / "stub.cu"), (), ())
    try:
        module.addNameExpression(program, config.expression)
        try:
            module.compileProgram(program, (f"-arch={arch}", *FLAGS, f"-I{root}"))
            lowered_name = module.getLoweredName(program, config.expression)
        except module.NVRTCError as error:
            log = module.getProgramLog(program).strip() or str(error)
            raise CompileError(
                config.expression, arch, version(), _keep(config.name, text), log
            ) from None
        return Compiled(
            cubin=_whole(module.getCUBIN(program)),
            ptx=module.getPTX(program),
            lowered_name=lowered_name,
            log=module.getProgramLog(program),
            seconds=time.perf_counter() - start,
        )
    finally:
        module.destroyProgram(program)


def _whole(cubin: bytes) -> bytes:
    """Put back the last byte, which CuPy cuts off as if a cubin ended on a NUL like PTX.

    It is the upper byte of a 64-bit table entry, 0, and ends a file of whole 8-byte words. The
    driver does not miss it, but disassemblers do.
    """
    return cubin + bytes(-len(cubin) % 8)


def _keep(name: str, text: str) -> str:
    """The file that keeps the text, or why there is none: an error must not hide the log."""
    try:
        path = Path(tempfile.mkdtemp(prefix=f"cupyflash-{name}-")) / "stub.cu"
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"no file ({error})"
    return str(path)


def _lacks_cupy(error: BaseException) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name in ("cupy", "cupy.cuda")


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture's name: ``sm_90a`` for (9, 0), whose wgmma needs it, else ``sm_XY``."""
    major, minor = capability
    return "sm_90a" if capability == (9, 0) else f"sm_{major}{minor}"


def target_arch(capability: tuple[int, int]) -> str:
    """The best architecture that NVRTC knows for a GPU of this compute capability.

    A cubin also runs on GPUs of the same major number and a higher minor one, so a GPU that is
    younger than NVRTC gets the newest of those.

    Raises:
        RuntimeError: NVRTC knows none; names the pip line.
    """
    wanted = capability[0] * 10 + capability[1]
    known = supported_archs()
    if wanted in known:
        return arch_of(capability)
    usable = [a for a in known if a // 10 == capability[0] and a < wanted and a not in _INTEGRATED]
    if usable:
        return arch_of(divmod(max(usable), 10))
    line = packages.pip_line("cuda13" if wanted > max(known) else "cuda12")
    raise RuntimeError(
        f"cupyflash: NVRTC {version()} compiles for compute capability "
        f"{', '.join(f'{a // 10}.{a % 10}' for a in known)}, this GPU has "
        f"{capability[0]}.{capability[1]}; {line}"
    )
