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
from cupyflash.attention import params
from cupyflash.baselines import params as baseline_params
from cupyflash.decode import params as decode_params
from cupyflash.diffusion import params as diffusion_params
from cupyflash.jit import compiler, sources
from cupyflash.kernel_config import KernelConfig
from cupyflash.linear import params as linear_params
from cupyflash.norm import params as norm_params
from cupyflash.transformer import params as transformer_params

HEADERS = {
    "common/params.cuh": params,
    "common/norm_params.cuh": norm_params,
    "common/diffusion_params.cuh": diffusion_params,
    "common/baseline_params.cuh": baseline_params,
    "common/linear_params.cuh": linear_params,
    "common/decode_params.cuh": decode_params,
    "common/transformer_params.cuh": transformer_params,
}
CONSTANTS = {
    "common/params.cuh": "ACCUM_ROW_ALIGN",
    "common/norm_params.cuh": "ROW_AXES",
    "common/transformer_params.cuh": "MAX_BATCH",
}


def structs_of(module) -> list[type[ctypes.Structure]]:
    return [
        struct
        for _, struct in inspect.getmembers(module, inspect.isclass)
        if issubclass(struct, ctypes.Structure) and struct.__module__ == module.__name__
    ]


STRUCTS = [
    pytest.param(header, struct, id=struct.__name__)
    for header, module in HEADERS.items()
    for struct in structs_of(module)
]


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def text_of(header: str) -> str:
    return without_comments((sources.root() / header).read_text(encoding="utf-8"))


def kernel_configs() -> list[type[KernelConfig]]:
    """Every concrete configuration of the families of attention and of the ``kernels`` modules."""
    found = {}
    for module in pkgutil.walk_packages(cupyflash.__path__, "cupyflash."):
        if ".families." in module.name or module.name.endswith("kernels"):
            for member in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(member) and issubclass(member, KernelConfig):
                    found[f"{module.name}.{member.__name__}"] = member
    found = {name: config for name, config in found.items() if hasattr(config, "source")}
    return [pytest.param(config, id=name) for name, config in sorted(found.items())]


@pytest.mark.parametrize("header", HEADERS)
def test_every_struct_has_a_mirror(header):
    names = set(re.findall(r"^struct (?:alignas\(64\) )?(\w+)", text_of(header), re.MULTILINE))
    assert names == {struct.__name__ for struct in structs_of(HEADERS[header])} and names


@pytest.mark.parametrize(("header", "struct"), STRUCTS)
def test_field_names_and_order(header, struct):
    pattern = rf"^struct .*?\b{struct.__name__} \{{(.*?)^\}};"
    body = re.search(pattern, text_of(header), re.M | re.S)[1]
    body = re.sub(r"[^;{}]*\{(?:[^{}]|\{[^{}]*\})*\}", "", body)  # its member functions
    names = [name for name, _ in struct._fields_ if name != "padding"]  # C++ has alignas
    assert names == re.findall(r"(\w+)(?:\[\w+\])?\s*;", body)


@needs_nvrtc
@pytest.mark.parametrize("header", HEADERS)
def test_layout_and_constants(header):
    """NVRTC checks offset and size of every field and the constant that both sides spell out.

    NVRTC has neither <stddef.h> nor __builtin_offsetof; __INTADDR__ is how its own is spelled.
    """
    lines = [f'#include "{header}"']
    if constant := CONSTANTS.get(header):
        lines.append(f"static_assert({constant} == {getattr(HEADERS[header], constant)});")
    for struct in structs_of(HEADERS[header]):
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
        compile_program('#include "common/params.cuh"\nstatic_assert(sizeof(FlashFwdParams) == 8);')


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
