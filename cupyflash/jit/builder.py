"""A configuration becomes a function on a device: look it up, compile and publish it, load it."""

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

from .. import environment
from . import cache, compiler, messages, sources
from .cache import Built
from .compiler import Kernel, target_arch
from .function import Function

_functions: dict[tuple[Kernel, int], Function] = {}
_load_lock = threading.Lock()
# NVRTC compiles one program at a time anyway, so one lock for all kernels loses nothing.
_lock = threading.Lock()

_DISASSEMBLERS = {"nvdisasm": ("-c", "-g"), "cuobjdump": ("-sass",)}
_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame")
_SPILL = re.compile(r"(\d+) bytes spill (?:stores|loads)")
_WARNING = re.compile(r"\bwarning\s*[#:]|\(C75\d\d\)")


def build(config: Kernel, arch: str) -> Built:
    """The compiled kernel of ``config`` for ``arch`` (``"sm_90a"``), from the cache if it is there.

    Raises:
        CompileError: NVRTC rejects it.
        ImportError: CuPy or NVRTC is missing.
        RuntimeError: it would have to be compiled and CUPYFLASH_NO_JIT forbids that.
        UnsafeCacheError: the same, and others can write to the cache folder.
    """
    built, compiled = find_or_compile(config, arch)
    if compiled:
        messages.compiled(built)
    messages.details(built, compiled)
    return built


def find_or_compile(config: Kernel, arch: str) -> tuple[Built, bool]:
    """`build` without messages; also returns whether it was compiled now."""
    with _lock:
        name = entry_name(config, arch)
        found = cache.lookup(name)
        built = found or _compile(config, arch, name)
        if kinds := environment.current().dump:
            dump(kinds, built, config)
        return built, found is None


def entry_name(config: Kernel, arch: str, source_digest: str | None = None) -> str:
    """``kernel.arch.hash``; the hash covers all that decides what the cubin does.

    ``source_digest`` is that of the kernel's files, where many names are wanted at once.
    """
    key = (
        source_digest or sources.digest(config.source),
        compiler.stub(config),
        config.expression,
        arch,
        compiler.FLAGS,
        compiler.version(),
    )
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return f"{config.name}.{arch}.{digest[:16]}"


def _compile(config: Kernel, arch: str, name: str) -> Built:
    if environment.current().no_jit:
        raise RuntimeError(
            f"{config.name}: CUPYFLASH_NO_JIT forbids to compile {config.expression} for {arch}, "
            f"and the cache ({cache.cache_dir()}) lacks it; fill it with "
            f"`python -m cupyflash warmup --arch {arch} --everything`"
        )
    compiled = compiler.compile_kernel(config, arch)
    if entry_name(config, arch) != name:  # a source was edited meanwhile: which one was compiled?
        return _compile(config, arch, entry_name(config, arch))
    built = Built(
        path=Path(),
        lowered_name=compiled.lowered_name,
        expression=config.expression,
        arch=arch,
        nvrtc=compiler.version(),
        registers=max(_numbers(_REGISTERS, compiled.log), default=0),
        spill_bytes=sum(_numbers(_SPILL, compiled.log)),
        stack_bytes=max(_numbers(_STACK, compiled.log), default=0),
        warnings=tuple(line for line in compiled.log.splitlines() if _WARNING.search(line)),
        seconds=round(compiled.seconds, 3),
        has_text=bool(config.header),
    )
    return cache.publish(name, built, compiled.cubin, compiler.stub(config))


def _numbers(pattern: re.Pattern[str], log: str) -> list[int]:
    return [int(number) for number in pattern.findall(log)]


def dump(kinds: Sequence[str], built: Built, config: Kernel) -> None:
    """Write the files of ``kinds`` that are not there yet; warn of each that cannot be written."""
    makers = {"ptx": _ptx, "sass": _sass}
    for kind in kinds:
        path = built.path.with_suffix(f".{kind}")
        try:
            if not path.exists():
                path.write_bytes(makers[kind](built, config))
        except (OSError, subprocess.CalledProcessError) as error:
            warnings.warn(f"cupyflash: no {path}: {error}", RuntimeWarning, stacklevel=2)


def _ptx(built: Built, config: Kernel) -> bytes:
    # The cache keeps no PTX, which is larger than the cubin: compile once more.
    if environment.current().no_jit:
        raise PermissionError("it takes a compilation, which CUPYFLASH_NO_JIT forbids")
    return compiler.compile_kernel(config, built.arch).ptx


def _sass(built: Built, config: Kernel) -> bytes:
    for name, options in _DISASSEMBLERS.items():
        if tool := _find(name):
            command = (tool, *options, str(built.path))
            return subprocess.run(command, check=True, capture_output=True).stdout
    raise FileNotFoundError(
        "SASS needs nvdisasm or cuobjdump on PATH, or the triton package, which brings them"
    )


def _find(name: str) -> str | None:
    if tool := shutil.which(name):
        return tool
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    return shutil.which(name, path=str(Path(triton.origin).parent / "backends/nvidia/bin"))


def load(config: Kernel, device_id: int) -> Function:
    """The kernel of ``config``, loaded on a device and ready to launch with its shared memory.

    Compiles at most once a process, also when many threads ask at once. Raises as
    `cupyflash.jit.build` does, and RuntimeError for a GPU that NVRTC does not know.
    """
    function = _functions.get((config, device_id))
    if function is None:
        with _load_lock:
            function = _functions.get((config, device_id))
            if function is None:
                function = _functions[config, device_id] = _load(config, device_id)
    return function


def _load(config: Kernel, device_id: int) -> Function:
    import cupy

    device = cupy.cuda.Device(device_id)
    built = build(config, target_arch(divmod(int(device.compute_capability), 10)))
    messages.warn_of_slow(built)
    with device:
        kernel = cupy.RawModule(path=str(built.path)).get_function(built.lowered_name)
        kernel.max_dynamic_shared_size_bytes = config.shared_memory
        return Function(kernel.kernel, config.argument_size)
