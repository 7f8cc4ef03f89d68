"""Host and device agree: every field of every parameter struct, every template parameter."""

import ctypes
import dataclasses
import importlib
import inspect
import pkgutil
import re

import pytest
from tiny_kernel import needs_nvrtc

import cupyflash
from cupyflash import params
from cupyflash.jit import compiler, sources
from cupyflash.kernel_config import KernelConfig

HEADER = "common/params.cuh"
STRUCTS = [
    struct
    for _, struct in inspect.getmembers(params, inspect.isclass)
    if issubclass(struct, ctypes.Structure) and struct.__module__ == params.__name__
]


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def header() -> str:
    return without_comments((sources.root() / HEADER).read_text(encoding="utf-8"))


def kernel_configs() -> list[type[KernelConfig]]:
    """Every concrete configuration of the modules in ``cupyflash.families``."""
    folders = [f"{folder}/families" for folder in cupyflash.__path__]
    found = {}
    for module in pkgutil.iter_modules(folders):
        members = vars(importlib.import_module(f"cupyflash.families.{module.name}")).values()
        for member in members:
            if inspect.isclass(member) and issubclass(member, KernelConfig):
                found[f"{module.name}.{member.__name__}"] = member
    found = {name: config for name, config in found.items() if hasattr(config, "source")}
    return [pytest.param(config, id=name) for name, config in sorted(found.items())]


def test_every_struct_has_a_mirror():
    names = set(re.findall(r"^struct (?:alignas\(64\) )?(\w+)", header(), re.MULTILINE))
    assert names == {struct.__name__ for struct in STRUCTS} and len(names) >= 4


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_field_names_and_order(struct):
    body = re.search(rf"^struct .*?\b{struct.__name__} \{{(.*?)^\}};", header(), re.M | re.S)[1]
    body = re.sub(r"[^;{}]*\{[^{}]*\}", "", body)  # its member functions
    names = [name for name, _ in struct._fields_ if name != "padding"]  # C++ has alignas
    assert names == re.findall(r"(\w+)(?:\[\d+\])?\s*;", body)


@needs_nvrtc
def test_layout_and_constants():
    """NVRTC checks offset and size of every field and the constant that both sides spell out.

    NVRTC has neither <stddef.h> nor __builtin_offsetof; __INTADDR__ is how its own is spelled.
    """
    lines = [f'#include "{HEADER}"', f"static_assert(ACCUM_ROW_ALIGN == {params.ACCUM_ROW_ALIGN});"]
    for struct in STRUCTS:
        name = struct.__name__
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(struct)});")
        for field, _ in struct._fields_:
            if field == "padding":
                continue
            slot = getattr(struct, field)
            lines += [
                f"static_assert(__INTADDR__(&(({name}*)0)->{field}) == {slot.offset});",
                f"static_assert(sizeof({name}::{field}) == {slot.size});",
            ]
    compile_program("\n".join(lines))


@needs_nvrtc
def test_layout_check_can_fail():
    with pytest.raises(RuntimeError):
        compile_program(f'#include "{HEADER}"\nstatic_assert(sizeof(FlashFwdParams) == 8);')


def compile_program(text: str) -> None:
    """Raises RuntimeError with NVRTC's log unless the program compiles."""
    nvrtc, root = compiler.nvrtc(), sources.root()
    program = nvrtc.createProgram(text, str(root / "layout.cu"), (), ())
    try:
        nvrtc.compileProgram(program, ("-arch=sm_80", "-std=c++17", f"-I{root}"))
    except nvrtc.NVRTCError:
        raise RuntimeError(nvrtc.getProgramLog(program)) from None
    finally:
        nvrtc.destroyProgram(program)


@pytest.mark.parametrize("config", kernel_configs())
def test_template_parameters(config):
    """The dataclass is the instantiation: the same names in the same order (dtype is T)."""
    name = config.source.rsplit("/", 1)[-1].removesuffix(".cu")
    text = without_comments((sources.root() / config.source).read_text(encoding="utf-8"))
    pattern = rf"template\s*<([^<>]*)>\s*__global__\s[^{{;]*?\b{name}\s*\(\s*const\s+([^)]*)\)"
    parameters, argument = re.search(pattern, text).groups()
    names = [parameter.split("=")[0].split()[-1].lower() for parameter in parameters.split(",")]
    fields = [field.name for field in dataclasses.fields(config)]
    assert ["dtype" if name == "t" else name for name in names] == fields
    assert config.params.__name__ in argument.split()
