"""Host and device agree: every field of every parameter struct, every template parameter."""

import ctypes
import dataclasses
import re

import pytest
from tiny_kernel import needs_nvrtc

from cupyflash.jit import compiler, sources
from cupyflash.ops.attention.backends import BACKENDS
from cupyflash.precompile import TOPICS
from cupyflash.runtime.config import KernelConfig
from cupyflash.runtime.gpu import ARCHITECTURES
from cupyflash.runtime.structs import header

HEADERS = sorted(
    path.relative_to(sources.root()).as_posix() for path in sources.root().rglob("params.cuh")
)


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def text_of(header: str) -> str:
    return without_comments((sources.root() / header).read_text(encoding="utf-8"))


def kernel_configs() -> dict[str, KernelConfig]:
    """One of each kind that a backend of attention or a topic can launch, by the kind's name."""
    kinds = {
        type(config): config
        for module in (*BACKENDS.values(), *TOPICS.values())
        for capability in ARCHITECTURES
        for config in module.configurations(capability)
    }
    named = {f"{kind.__module__}.{kind.__name__}": config for kind, config in kinds.items()}
    return dict(sorted(named.items()))


CONFIGS = kernel_configs()
OWN_STRUCTS = {
    x.source for x in CONFIGS.values() if f"struct {x.params.__name__} " in text_of(x.source)
}


@needs_nvrtc
@pytest.mark.parametrize("path", [*HEADERS, *sorted(OWN_STRUCTS)])
def test_layout(path):
    """NVRTC checks offset and size of every field that the host has read from a header.

    A kernel's source counts as a header where it defines the struct itself. NVRTC has neither
    <stddef.h> nor __builtin_offsetof; __INTADDR__ is how its own is spelled.
    """
    names = re.findall(r"^struct (?:alignas\(64\) )?(\w+)", text_of(path), re.MULTILINE)
    assert names
    lines = [f'#include "{path}"']
    for name in names:
        struct = getattr(header(path), name)
        fields = [name for name, _ in struct._fields_ if not name.startswith("padding_")]
        assert fields
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(struct)});")
        for field in fields:
            slot = getattr(struct, field)
            lines += [
                f"static_assert(__INTADDR__(&(({name}*)0)->{field}) == {slot.offset});",
                f"static_assert(sizeof({name}::{field}) == {slot.size});",
            ]
    compile_program("\n".join(lines))


@needs_nvrtc
@pytest.mark.parametrize(
    "path, name",
    [
        ("attention/params.cuh", "ACCUM_ROW_ALIGN"),
        ("norm/params.cuh", "ROW_AXES"),
        ("linear/small_m_rows.cuh", "STAGE_BYTES"),
        ("linear/small_m_rows.cuh", "MAX_SUM_ROWS"),
        ("attention/bias.cuh", "BIAS_LIMIT"),
    ],
)
def test_constants(path, name):
    value = getattr(header(path), name)
    compile_program(f'#include "{path}"\nstatic_assert({name} == {value});', "sm_90a")


def test_what_a_header_does_not_have():
    with pytest.raises(
        AttributeError, match="attention/params.cuh: has no struct, constant or enum"
    ):
        header("attention/params.cuh").Nothing  # noqa: B018


@needs_nvrtc
def test_layout_check_can_fail():
    with pytest.raises(RuntimeError):
        compile_program(
            '#include "attention/params.cuh"\nstatic_assert(sizeof(FlashFwdParams) == 8);'
        )


def compile_program(text: str, arch: str = "sm_80") -> None:
    """Raises RuntimeError with NVRTC's log unless the program compiles."""
    nvrtc, root = compiler.nvrtc(), sources.root()
    program = nvrtc.createProgram(text, str(root / "layout.cu"), (), ())
    try:
        nvrtc.compileProgram(
            program, (f"-arch={arch}", "-std=c++17", "-default-device", f"-I{root}")
        )
    except nvrtc.NVRTCError:
        raise RuntimeError(nvrtc.getProgramLog(program)) from None
    finally:
        nvrtc.destroyProgram(program)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_template_parameters(config):
    """The dataclass is the instantiation: the same names in the same order (dtype is T)."""
    name = config.source.rsplit("/", 1)[-1].removesuffix(".cu")
    text = without_comments((sources.root() / config.source).read_text(encoding="utf-8"))
    pattern = rf"template\s*<([^<>]*)>\s*__global__\s[^{{;]*?\b{name}\s*\(\s*const\s+([^)]*)\)"
    parameters, argument = re.search(pattern, text).groups()
    names = [parameter.split("=")[0].split()[-1].lower() for parameter in parameters.split(",")]
    fields = [field.name for field in dataclasses.fields(config) if not field.kw_only]
    assert ["dtype" if name == "t" else name for name in names] == fields
    assert config.params.__name__ in argument.split()


def threads_in_source(config: KernelConfig) -> int | None:
    """Threads of a block by ``__launch_bounds__``, if the host can read that constant."""
    bounds = re.search(r"__launch_bounds__\((\w+)[,)]", text_of(config.source))
    return getattr(header(config.source), bounds[1], None) if bounds else None


def test_threads():
    """A kernel that is launched with more or fewer would compute something else."""
    threads = {name: (x.threads, threads_in_source(x)) for name, x in CONFIGS.items()}
    threads = {name: pair for name, pair in threads.items() if pair[1]}
    assert len(threads) > 15
    assert [name for name, (host, source) in threads.items() if host != source] == []


def test_instructions_are_defined_once():
    """A function of ptx/ with the same types of arguments is in one header."""
    found: dict[tuple[str, str], str] = {}
    for path in sorted((sources.root() / "ptx").glob("*.cuh")):
        text = without_comments(path.read_text(encoding="utf-8"))
        for name, arguments in re.findall(r"(\w+)\(([^()]*)\) \{$", text, re.M):
            types = re.sub(r" \w+(?=,|$)", "", arguments)
            other = found.setdefault((name, types), path.name)
            assert other == path.name, f"{name}({types}) is in {other} and in {path.name}"
    assert len(found) > 50
