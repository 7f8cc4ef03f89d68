"""What run-time compilation logs, prints and dumps."""

import dataclasses
import logging
import os
import sys

import pytest
import tiny_kernel
from fakes import fake_facts
from tiny_kernel import Scale, needs_nvrtc

from cupyflash import environment, jit
from cupyflash.jit import builder

pytestmark = needs_nvrtc


@pytest.fixture
def folder(tmp_path):
    with tiny_kernel.workspace(tmp_path) as path:
        yield path


def test_log_line(folder, caplog, capfd):
    jit.build(Scale(factor=1), "sm_80")
    assert caplog.messages == [] and capfd.readouterr() == ("", "")  # silent by default
    with caplog.at_level(logging.INFO, "cupyflash"):
        built = jit.build(Scale(), "sm_80")
        jit.build(Scale(), "sm_80")
    assert caplog.messages == [f"compiled scale<float, 2> for sm_80 in {built.seconds:.1f} s"]


@pytest.mark.parametrize(
    "seconds, terminal, line",
    [
        (1.2, True, "cupyflash: compiled scale<float, 2> for sm_80 in 1.2 s\n"),
        (0.9, True, ""),
        (1.2, False, ""),
    ],
)
def test_slow_compilation_shows_on_terminals(folder, monkeypatch, capsys, seconds, terminal, line):
    in_seconds = lambda compiled: dataclasses.replace(compiled, seconds=seconds)  # noqa: E731
    tiny_kernel.record_compilations(monkeypatch, in_seconds)
    fake_facts(monkeypatch, sys.stderr, isatty=terminal)
    jit.build(Scale(), "sm_80")
    jit.build(Scale(), "sm_80")
    assert capsys.readouterr().err == line


def test_debug(folder, capsys):
    with environment.override(debug=True):
        built = jit.build(Scale(), "sm_80")
        first = capsys.readouterr().err
        jit.build(Scale(), "sm_80")
    assert f"scale<float, 2> for sm_80, compiled in {built.seconds:.2f} s: " in first
    assert f"{built.registers} registers, 0 bytes spilled, {built.path.parent}" in first
    assert "sm_80, from the cache: " in capsys.readouterr().err


def test_dump(folder, monkeypatch, recwarn):
    built = jit.build(Scale(), "sm_90a")
    assert not built.path.with_suffix(".ptx").exists()
    tool = folder / "bin" / "nvdisasm"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "sass of $@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    with environment.override(dump=("ptx", "sass")):
        assert jit.build(Scale(), "sm_90a") == built
    assert b".target sm_90a" in built.path.with_suffix(".ptx").read_bytes()
    assert built.path.with_suffix(".sass").read_text() == f"sass of -c -g {built.path}\n"
    assert len(recwarn) == 0


def test_dump_without_disassembler(folder, monkeypatch):
    fake_facts(monkeypatch, builder, _find=None)
    warned = pytest.warns(RuntimeWarning, match=r"kernel\.sass: SASS needs nvdisasm")
    with environment.override(dump=("sass",)), warned:
        jit.build(Scale(), "sm_80")
