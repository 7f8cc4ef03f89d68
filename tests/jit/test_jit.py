"""Run-time compilation without a GPU: sources, stub, key, NVRTC and its errors."""

import ctypes
import dataclasses
import pickle
import re
import struct
from pathlib import Path

import pytest
import tiny_kernel
from fakes import fake_facts, fake_modules
from tiny_kernel import Scale, needs_nvrtc

from cupyflash import environment, jit
from cupyflash.jit import compiler, sources
from cupyflash.ops.attention.backends import BACKENDS
from cupyflash.ops.attention.problem import Features, Kind


@pytest.fixture
def folder(tmp_path):
    with tiny_kernel.workspace(tmp_path) as path:
        yield path


@pytest.fixture
def compilations(monkeypatch):
    return tiny_kernel.record_compilations(monkeypatch)


def test_cuda_sources_are_found():
    assert (sources.root() / "common" / "types.cuh").is_file()


def test_stub(folder):
    text = compiler.stub(Scale())
    assert text.splitlines()[0] == "// scale<float, 2>"
    assert '#include "tiny/scale.cu"' in text
    assert "static_assert(sizeof(ScaleParams) == 16," in text


@needs_nvrtc
def test_build(folder, compilations):
    built = jit.build(Scale(), "sm_90a")
    assert re.fullmatch(r"scale\.sm_90a\.[0-9a-f]{16}", built.path.parent.name)
    assert built.path.parent.parent == folder / "cache"
    cubin = built.path.read_bytes()
    assert cubin[:4] == b"\x7fELF" and built.lowered_name.encode() in cubin
    sections, size, count = struct.unpack_from("<Q", cubin, 40) + struct.unpack_from(
        "<HH", cubin, 58
    )
    segments, step, number = struct.unpack_from("<Q", cubin, 32) + struct.unpack_from(
        "<HH", cubin, 54
    )
    assert len(cubin) == max(sections + size * count, segments + step * number)  # not a byte less
    assert (built.expression, built.arch) == ("scale<float, 2>", "sm_90a")
    assert (built.nvrtc, built.spill_bytes, built.warnings) == (compiler.version(), 0, ())
    assert 4 <= built.registers <= 64 and built.seconds > 0
    assert (built.path.parent / "stub.cu").read_text() == compiler.stub(Scale())
    assert jit.build(Scale(), "sm_90a") == built
    assert compilations == [(Scale(), "sm_90a")]


@needs_nvrtc
@pytest.mark.parametrize("name", tiny_kernel.FILES)
def test_edited_source_recompiles(folder, compilations, name):
    first = jit.build(Scale(), "sm_80")
    source = folder / "cuda_src" / name
    source.write_bytes(source.read_bytes() + b";")  # a token that changes nothing
    second = jit.build(Scale(), "sm_80")
    assert first.path != second.path and len(compilations) == 2


@needs_nvrtc
@pytest.mark.parametrize("name", tiny_kernel.FILES)
def test_edited_comments_do_not_recompile(folder, compilations, name):
    first = jit.build(Scale(), "sm_80")
    source = folder / "cuda_src" / name
    text = source.read_text().replace("(", "(/* a */ ").replace(";\n", ";  // b\n\n")
    source.write_text(f"/* it's {name}\n */\n{text}")
    assert jit.build(Scale(), "sm_80") == first and len(compilations) == 1


# SAME compiles to what BASE compiles to. OTHER may not, and each text of it to something else.
BASE = b'int f(int a) {\n  return a + g("a  b");\n}\n'
SAME = {
    "line comment": b'// f\nint f(int a) {\n  return a + g("a  b");  // "\n}\n',
    "block comment": b'int f(int /* a // " */ a) {\n  return a + g(/*x=*/"a  b");\n}\n/*\n*/',
    "continued comment": b'int f(int a) { // \\\n it\'s\n  return a + g("a  b");\n}\n',
    "white space": b'int  f( int a )\t{\r\n\r\n return a +\n g("a  b"); }',
    "continued line": b'int f(int a) {\n  return a \\\n+ g("a\\\n  b");\n}\n',
}
OTHER = {
    "token": BASE.replace(b"a +", b"a -"),
    "name": BASE.replace(b"int a", b"inta"),
    "operator": BASE.replace(b"+", b"+ +"),
    "space in a string": BASE.replace(b"a  b", b"a b"),
    "// in a string": BASE.replace(b"a  b", b"a//b"),
    "other // in a string": BASE.replace(b"a  b", b"a//c"),
    "/* in a string": BASE.replace(b"a  b", b"/*") + b"// */",
    "quote in a string": BASE.replace(b"a  b", rb"\"//"),
    "backslash in a string": BASE.replace(b"a  b", b"\\\\"),
    "character": BASE.replace(b'"a  b"', rb"'\'', '\"', /* '\"' */ '//'"),
    "prefix": BASE.replace(b'"a', b'L"a'),
    "raw string": BASE.replace(b'"a  b"', b'R"x(")")x"'),
    "comment in a raw string": BASE.replace(b'"a  b"', b'R"x(")//")x"'),
    "digit separator": BASE.replace(b'"a  b"', b"1'0, '\"', \"//\""),
    "other digit separator": BASE.replace(b'"a  b"', b"1'0, '\"', \"///\""),
    "directive": b"#define F (x)\n" + BASE,
    "space in a directive": b"#define F(x)\n" + BASE,
    "line of a directive": b"#define F (x) int\n" + BASE.removeprefix(b"int"),
    "// in a directive": b'#define F "//x"\n' + BASE,
    "other // in a directive": b'#define F "//y"\n' + BASE,
}


@pytest.mark.parametrize("name", SAME)
def test_code_is_without_comments_and_white_space(name):
    assert sources.code(SAME[name]) == sources.code(BASE)


def test_code_keeps_all_else():
    assert len({sources.code(text) for text in (BASE, *OTHER.values())}) == len(OTHER) + 1


def test_code_of_a_directive():
    text = b'#include "a.cuh"  // why\n  #define A(x) \\\n  // none\n#if 1 // "\nint x;\n'
    assert sources.code(text) == b'#include "a.cuh"\n#define A(x)\n#if 1\nint\nx\n;'


@needs_nvrtc
def test_code_is_the_same_program(tmp_path, monkeypatch):
    """One token a line: but for the numbers of lines, NVRTC makes the same of it.

    In about one of 50 compilations NVRTC 12.9 makes something else of the very same text.
    """
    monkeypatch.setattr(compiler, "FLAGS", [x for x in compiler.FLAGS if x != "-lineinfo"])
    kind = Kind("float16", 64, Features(), (9, 0))
    config = next(x for x in BACKENDS["sm90"].kernels(kind, backward=False) if "fwd" in x.name)
    for path, data in sources.closure(config.source).items():
        copy = tmp_path / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(sources.code(data))
        assert sources.code(data) != data
    found = {sources.root(): set(), tmp_path: set()}
    for root in [*found] * 3:
        monkeypatch.setattr(sources, "root", lambda root=root: root)
        found[root].add(compiler.compile_kernel(config, "sm_90a").cubin)
        if set.intersection(*found.values()):
            return
    pytest.fail("the programs differ")


@needs_nvrtc
def test_source_edited_during_compilation(folder, monkeypatch):
    header, compile_kernel = folder / "cuda_src/common/offset.cuh", compiler.compile_kernel

    def edit_after(compiled):
        header.write_text("constexpr float OFFSET = 7.0f;\n")
        return compiled

    calls = tiny_kernel.record_compilations(monkeypatch, edit_after)
    built = jit.build(Scale(), "sm_80")
    assert [entry.path for entry in jit.entries()] == [built.path]
    assert compile_kernel(Scale(), "sm_80").cubin == built.path.read_bytes() and len(calls) == 2


@needs_nvrtc
def test_key_covers_what_decides(folder, monkeypatch):
    from cupyflash.jit.builder import entry_name

    names = {entry_name(Scale(), "sm_80"), entry_name(Scale(), "sm_90a")}
    names.add(entry_name(Scale(factor=3), "sm_80"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-ftz=true"))
        names.add(entry_name(Scale(), "sm_80"))
    with pytest.MonkeyPatch.context() as patch:
        fake_facts(patch, compiler, version="99.9")
        names.add(entry_name(Scale(), "sm_80"))
    assert len(names) == 5


@needs_nvrtc
def test_current_folder_is_not_searched(folder, monkeypatch):
    decoy = folder / "decoy" / "tiny" / "scale.cu"
    decoy.parent.mkdir(parents=True)
    decoy.write_text("#error this file must not be compiled\n")
    monkeypatch.chdir(folder / "decoy")
    jit.build(Scale(), "sm_80")


def test_include_by_macro_is_refused(folder):
    header = folder / "cuda_src/common/offset.cuh"
    header.write_text('#define NAME "x.cuh"\n  # include NAME\n')
    with pytest.raises(ValueError, match=r"offset.cuh: an include must name .*'# include NAME'"):
        sources.digest(Scale.source)


@dataclasses.dataclass(frozen=True)
class WrongParams(Scale):
    params = type("ScaleParams", (ctypes.Structure,), {"_fields_": [("x", ctypes.c_void_p)]})


@needs_nvrtc
def test_struct_mismatch(folder):
    with pytest.raises(jit.CompileError) as raised:
        jit.build(WrongParams(), "sm_80")
    text, error = str(raised.value), raised.value
    assert "scale: NVRTC" in text and "scale<float, 2> for sm_80" in text
    assert "the host has read another ScaleParams from its header" in text
    assert Path(error.stub).read_text() == compiler.stub(WrongParams()) and error.stub in text
    assert str(pickle.loads(pickle.dumps(error))) == text


@needs_nvrtc
def test_compile_error_names_file_and_line(folder):
    (folder / "cuda_src/common/offset.cuh").write_text("#pragma once\nconstexpr float OFFSET;\n")
    with pytest.raises(jit.CompileError, match=r"common/offset\.cuh\(2\): error"):
        jit.build(Scale(), "sm_80")
    assert jit.entries() == []


@needs_nvrtc
def test_spills_and_warnings_are_kept(folder):
    kernel = folder / "cuda_src/tiny/scale.cu"
    text = kernel.read_text().replace("__global__ void", "__global__ void __maxnreg__(24)")
    body = "float a[64]; int unused;\n  for (int i = 0; i < 64; ++i) a[i] = params.x[i];\n"
    body += "  __syncthreads();\n  for (int i = 0; i < 64; ++i) params.x[63 - i] = a[i];\n  "
    kernel.write_text(text.replace("params.x[thr", body + "params.x[thr", 1))
    built = jit.build(Scale(), "sm_80")
    assert built.spill_bytes >= 64 and built.stack_bytes > 0 and built.registers <= 24
    assert len(built.warnings) == 1 and '"unused" was declared' in built.warnings[0]


@needs_nvrtc
def test_no_jit(folder, compilations):
    with environment.override(no_jit=True):
        with pytest.raises(RuntimeError, match=r"^scale: .*scale<float, 2> for sm_80") as raised:
            jit.build(Scale(), "sm_80")
        assert "python -m cupyflash warmup --arch sm_80" in str(raised.value)
        assert compilations == []
    built = jit.build(Scale(), "sm_80")
    with environment.override(no_jit=True):
        assert jit.build(Scale(), "sm_80") == built


@pytest.mark.parametrize("missing", ["cupy", "nvrtc"])
def test_missing_compiler(folder, monkeypatch, missing):
    if missing == "cupy":
        fake_modules(monkeypatch, cupy=None)
    else:
        if not tiny_kernel.has_nvrtc():
            pytest.skip("needs CuPy and NVRTC")
        nvrtc = compiler.nvrtc()
        error = RuntimeError("No such file: libnvrtc.so.12")
        monkeypatch.setattr(nvrtc, "getVersion", lambda: (_ for _ in ()).throw(error))
    compiler.version.cache_clear()
    with pytest.raises(ImportError, match=r"; pip install .*nvidia-cuda-nvrtc") as raised:
        jit.build(Scale(), "sm_80")
    reason = "CuPy is not installed" if missing == "cupy" else "No such file: libnvrtc.so.12"
    assert reason in str(raised.value)
