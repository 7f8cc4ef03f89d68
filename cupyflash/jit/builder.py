"""Look a kernel up in the cache; compile and publish it if it is not there."""

import hashlib
import json
import re
import threading
from pathlib import Path

from .. import environment
from . import cache, compiler, messages, sources
from .entry import Built
from .kernel import Kernel

# NVRTC compiles one program at a time anyway, so one lock for all kernels loses nothing.
_lock = threading.Lock()

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
            from . import dump

            dump.write(kinds, built, config)
        return built, found is None


def entry_name(config: Kernel, arch: str, source_digest: str | None = None) -> str:
    """``kernel.arch.hash``; the hash covers all that decides what the cubin does.

    ``source_digest`` is that of the kernel's file, where many names are wanted at once.
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
    )
    return cache.publish(name, built, compiled.cubin, compiler.stub(config))


def _numbers(pattern: re.Pattern[str], log: str) -> list[int]:
    return [int(number) for number in pattern.findall(log)]
