"""The environment variables."""

import dataclasses
import re
from pathlib import Path

import pytest

from cupyflash import environment


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No variable set and nothing read yet; what a test reads is forgotten again."""
    for name in ("CACHE_DIR", "DEBUG", "DUMP", "BACKEND", "NO_JIT", "TUNING"):
        monkeypatch.delenv(f"CUPYFLASH_{name}", raising=False)
    forget(monkeypatch)


def forget(monkeypatch):
    """What was read of the variables; they are read again."""
    monkeypatch.setattr(environment, "_current", None)


def test_defaults(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = environment.Environment(cache_dir=tmp_path / ".cache" / "cupyflash")
    assert environment.current() == expected
    assert dataclasses.astuple(expected)[1:] == (False, (), None, False, None)
    assert expected.tuning_file == tmp_path / ".cache" / "cupyflash" / "tuning.json"


def test_values_are_read_once(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUPYFLASH_DEBUG", "1")
    monkeypatch.setenv("CUPYFLASH_DUMP", "sass, ptx")
    monkeypatch.setenv("CUPYFLASH_BACKEND", "simt")
    monkeypatch.setenv("CUPYFLASH_NO_JIT", "1")
    monkeypatch.setenv("CUPYFLASH_TUNING", "0")
    read = environment.Environment(tmp_path, True, ("sass", "ptx"), "simt", True, "0")
    assert environment.current() == read
    monkeypatch.setenv("CUPYFLASH_BACKEND", "sm80")
    assert environment.current() == read


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("CUPYFLASH_DEBUG", "yes", "must be 0 or 1"),
        ("CUPYFLASH_NO_JIT", "2", "must be 0 or 1"),
        ("CUPYFLASH_DUMP", "ptx,cubin", "must list ptx, sass or both"),
        ("CUPYFLASH_BACKEND", "sm70", "must be one of sm90, sm80, fp16x3, simt"),
        ("CUPYFLASH_CACHE_DIR", "~nobody-here/x", "must be a folder, and ~ must be the home of"),
        ("CUPYFLASH_TUNING", "~nobody-here/x", "must be a file, and ~ must be the home of"),
    ],
)
def test_invalid_values(monkeypatch, name, value, allowed):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}: {allowed}.*'{value.split(',')[-1]}'"):
        environment.current()


def test_misspelt_names(monkeypatch, recwarn):
    """A guard such as CUPYFLASH_NO_JIT must not be lost in silence."""
    monkeypatch.setenv("CUPYFLASH_NOJIT", "1")
    assert not environment.current().no_jit
    (warning,) = recwarn
    assert str(warning.message).startswith("CUPYFLASH_NOJIT: no such variable, must be of ")
    for name in re.findall(r"^(CUPYFLASH_\w+)", environment.__doc__, re.MULTILINE):
        assert name in str(warning.message)


@pytest.mark.parametrize("name", ["DEBUG", "DUMP", "BACKEND", "NO_JIT", "CACHE_DIR", "TUNING"])
def test_empty_means_unset(monkeypatch, name):
    before = environment.current()
    forget(monkeypatch)
    monkeypatch.setenv(f"CUPYFLASH_{name}", "")
    assert environment.current() == before


@pytest.mark.parametrize(
    "variables, folder",
    [
        ({"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/cupyflash")),
        ({"XDG_CACHE_HOME": "relative"}, Path("/home/me/.cache/cupyflash")),
        ({"XDG_CACHE_HOME": "/xdg", "CUPYFLASH_CACHE_DIR": "~/k"}, Path("/home/me/k")),
        ({"CUPYFLASH_CACHE_DIR": "k"}, Path.cwd() / "k"),
        ({"HOME": "relative"}, Path.cwd() / "relative/.cache/cupyflash"),
    ],
)
@pytest.mark.skipif(environment.os.name == "nt", reason="POSIX folders")
def test_cache_dir(monkeypatch, variables, folder):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.current().cache_dir == folder


@pytest.mark.skipif(environment.os.name == "nt", reason="POSIX folders")
def test_tuning_file(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "/cache")
    for value, file in [
        ("~/t.json", "/home/me/t.json"),
        ("/t", "/t"),
        ("0", None),
        ("", "/cache/tuning.json"),
    ]:
        forget(monkeypatch)
        monkeypatch.setenv("CUPYFLASH_TUNING", value)
        assert environment.current().tuning_file == (file and Path(file))


def test_no_home(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert environment.current().cache_dir is None
    assert environment.current().tuning_file is None


def test_override_ends_with_its_block():
    before = environment.current()
    with pytest.raises(KeyError), environment.override(backend="simt", debug=True) as inner:
        assert environment.current() is inner
        assert (inner.backend, inner.debug, inner.dump) == ("simt", True, ())
        raise KeyError
    assert environment.current() is before
    with pytest.raises(ValueError, match="CUPYFLASH_BACKEND"), environment.override(backend="sm1"):
        pass
    assert environment.current() is before
