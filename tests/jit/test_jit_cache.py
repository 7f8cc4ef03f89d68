"""The cache folder: races, damage, permissions."""

import json
import os
import re
import shutil
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_kernel
from fakes import fake_facts
from tiny_kernel import Scale, needs_nvrtc, run_python, start_python

from cupyflash import environment, jit
from cupyflash.jit import cache, ownership

pytestmark = needs_nvrtc
posix = pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")


@pytest.fixture
def folder(tmp_path):
    with tiny_kernel.workspace(tmp_path) as path:
        yield path


def healthy(built: jit.Built) -> bool:
    return cache.read_entry(built.path.parent) == built


def unfinished(folder: Path) -> list[Path]:
    return list((folder / "cache").glob(".building-*"))


def test_threads(folder, monkeypatch):
    calls = tiny_kernel.record_compilations(monkeypatch)
    barrier, results = threading.Barrier(8), []

    def work():
        barrier.wait()
        results.append(jit.build(Scale(), "sm_80"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and len(set(results)) == 1 and healthy(results[0])
    assert len(calls) == 1 and unfinished(folder) == []


PROCESS = """
from cupyflash import jit
from cupyflash.jit import compiler
from tiny_kernel import Scale
compiler.version()
print("ready", flush=True)
sys.stdin.readline()
built, compiled = jit.builder.find_or_compile(Scale(), "sm_80")
print(built.path, compiled)
"""


def test_processes(folder):
    processes = [start_python(PROCESS, folder) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60) for process in processes]
    assert [error for _, error in answers] == [""] * 3
    built = jit.build(Scale(), "sm_80")
    assert {output.split()[0] for output, _ in answers} == {str(built.path)}
    assert "True" in {output.split()[1] for output, _ in answers}
    assert healthy(built) and unfinished(folder) == []


@pytest.mark.parametrize("first", ["healthy", "damaged"])
def test_lost_race(folder, monkeypatch, first):
    """Another process publishes the entry while this one compiles."""
    other = jit.build(Scale(), "sm_80")
    if first == "damaged":
        other.path.write_bytes(b"damaged")
    shutil.move(other.path.parent, folder / "other")

    def slow(compiled):
        shutil.move(folder / "other", other.path.parent)
        return compiled

    tiny_kernel.record_compilations(monkeypatch, slow)
    built = jit.build(Scale(), "sm_80")
    assert built.path == other.path and unfinished(folder) == []
    assert cache.read_entry(built.path.parent) == (other if first == "healthy" else built)


def damage_cubin(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rename_kernel(path: Path) -> None:
    meta = path.with_name("meta.json")
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "lowered_name": "other"}))


DAMAGES = {
    "truncated cubin": lambda path: os.truncate(path, 100),
    "empty cubin": lambda path: os.truncate(path, 0),
    "one bit of the cubin": damage_cubin,
    "no cubin": os.unlink,
    "truncated meta": lambda path: os.truncate(path.with_name("meta.json"), 50),
    "no meta": lambda path: path.with_name("meta.json").unlink(),
    "meta of another shape": lambda path: path.with_name("meta.json").write_text("[]"),
    "deep meta": lambda path: path.with_name("meta.json").write_text("[" * 10**5 + "]" * 10**5),
    "another name": rename_kernel,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_entry_is_rebuilt(folder, damage):
    good = jit.build(Scale(), "sm_80")
    cubin = good.path.read_bytes()
    damage(good.path)
    assert jit.entries() == []
    mended, compiled = jit.builder.find_or_compile(Scale(), "sm_80")
    assert compiled and mended.path == good.path
    assert healthy(mended) and mended.path.read_bytes() == cubin and unfinished(folder) == []


def test_unwritable_cache_falls_back_with_one_warning(folder, recwarn):
    warnings.simplefilter("always")  # or Python itself would drop the second
    (folder / "cache").write_text("a file, where even root cannot create a folder\n")
    built = jit.build(Scale(), "sm_80")
    assert [str(warning.message).partition(" (")[0] for warning in recwarn] == [
        "cupyflash: cannot keep compiled kernels"
    ]
    assert "CUPYFLASH_CACHE_DIR" in str(recwarn[0].message)
    assert healthy(built) and built.path.parent.parent == cache._private
    assert jit.builder.find_or_compile(Scale(), "sm_80") == (built, False)
    assert healthy(jit.build(Scale(factor=5), "sm_80")) and len(recwarn) == 1
    with pytest.raises(OSError):
        jit.build_all([(Scale(), "sm_80")], progress=False)


def test_no_home_falls_back(folder):
    with environment.override(cache_dir=None):
        with pytest.warns(RuntimeWarning, match="you have no home folder"):
            assert healthy(jit.build(Scale(), "sm_80"))
        assert jit.cache_dir() is None and jit.entries() == [] and jit.clear() == 0


def test_fallback_is_removed_at_exit(folder):
    (folder / "cache").write_text("")
    status, output, error = run_python(PROCESS, folder)
    assert status == 0 and "RuntimeWarning: cupyflash: cannot keep compiled kernels" in error
    path = Path(output.split()[1])
    assert path.name == "kernel.cubin" and not path.parent.parent.exists()


@posix
def test_read_only_folder(recwarn):
    """A folder that root filled, used by somebody else: the kernels of a container image."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as path, tiny_kernel.workspace(Path(path)) as folder:
        kept = jit.build(Scale(), "sm_80")
        os.chmod(folder, 0o755)
        os.chmod(folder / "cache", 0o555)
        if root:
            os.seteuid(65534)  # root may write anywhere
        try:
            assert jit.build(Scale(), "sm_80") == kept
            assert len(recwarn) == 0
            other = jit.build(Scale(factor=9), "sm_80")
            assert healthy(other)
        finally:
            if root:
                os.seteuid(0)
            os.chmod(folder / "cache", 0o755)
        assert other.path.parent.parent == cache._private
        assert "Permission denied" in str(recwarn.pop(RuntimeWarning).message)
        shutil.rmtree(cache._private)


@posix
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777], ids=oct)
def test_folder_that_others_can_write_is_refused(folder, monkeypatch, mode):
    jit.build(Scale(), "sm_80")
    give_to_a_group(folder / "cache", monkeypatch)
    (folder / "cache").chmod(mode)
    for use in (jit.cache_dir, jit.entries, jit.clear, cache.require_writable):
        with pytest.raises(jit.UnsafeCacheError, match=f"mode {mode:o}, .*CUPYFLASH_CACHE_DIR"):
            use()
    with environment.override(no_jit=True), pytest.raises(jit.UnsafeCacheError):
        jit.build(Scale(), "sm_80")
    with pytest.raises(jit.UnsafeCacheError):
        jit.build_all([(Scale(), "sm_80")], progress=False)


def give_to_a_group(path, monkeypatch):
    """Let it belong to a group in which there may be others."""
    if os.geteuid() == 0:
        os.chown(path, -1, 54321)
    else:
        fake_facts(monkeypatch, ownership, _is_own_group=False)


@posix
def test_group_of_the_user_is_no_other(folder, monkeypatch):
    """With the umask 002 of many systems, folders have mode 775 and a group of the user alone."""
    import grp
    import pwd

    user = pwd.getpwuid(os.geteuid()).pw_name
    groups = [
        ((user, []), True),
        ((user, [user]), True),
        ((user, [user, "friend"]), False),
        (("staff", []), False),
        (None, False),
    ]
    built = jit.build(Scale(), "sm_80")
    for path in (folder, folder / "cache", built.path.parent):
        path.chmod(0o775)
    for found, allowed in groups:

        def group(number, found=found):
            if found is None:
                raise KeyError(number)
            return grp.struct_group((found[0], "x", number, found[1]))

        monkeypatch.setattr(grp, "getgrgid", group)
        if allowed:
            assert jit.cache_dir() == folder / "cache" and jit.entries() == [built]
        else:
            with pytest.raises(jit.UnsafeCacheError, match="got mode 775, owner"):
                jit.cache_dir()


OPEN = {
    "folder": lambda path: path.parent.chmod(0o777),
    "cubin": lambda path: path.chmod(0o666),
    "meta": lambda path: path.with_name("meta.json").chmod(0o646),
    "link to a folder": lambda path: move_and_link(path.parent, path.parents[2] / "open"),
    "link to a cubin": lambda path: move_and_link(path, path.parents[2] / "open"),
    "link to nothing": lambda path: link_to_nothing(path.parent),
}


def move_and_link(path: Path, place: Path) -> None:
    """Move it out of the cache to a place that everybody can write, and link it."""
    place.mkdir()
    place.chmod(0o777)
    path.rename(place / path.name)
    path.symlink_to(place / path.name)


def link_to_nothing(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(path.with_name("nothing"))


@posix
@pytest.mark.parametrize("leave_open", OPEN.values(), ids=OPEN)
def test_entry_that_others_can_write_is_not_loaded(folder, recwarn, leave_open):
    """Somebody may have made a checksum that fits: it is compiled anew, and takes its place."""
    kept = jit.build(Scale(), "sm_80")
    leave_open(kept.path)
    assert jit.entries() == []
    mended, compiled = jit.builder.find_or_compile(Scale(), "sm_80")
    assert compiled and mended.path == kept.path and healthy(mended)
    assert not kept.path.is_symlink() and not kept.path.parent.is_symlink()
    for path in (mended.path.parent, *mended.path.parent.iterdir()):
        assert path.stat().st_mode & 0o022 == 0
    assert jit.build(Scale(), "sm_80") == mended and len(recwarn) == 0
    assert [path.name for path in (folder / "cache").iterdir()] == [kept.path.parent.name]


@posix
def test_threads_replace_what_others_can_write(tmp_path):
    """Each finds it unsafe and moves it away, while others do so or have published theirs."""
    built = cache.Built(Path(), "scale", "scale<2>", "sm_80", "12.9", 8, 0, 0, (), 0.1)
    barrier = threading.Barrier(4, timeout=10)

    def publish(folder):
        barrier.wait()
        return cache._write(folder, built, b"ours", "")

    with ThreadPoolExecutor(4) as pool:
        for number in range(200):
            folder = tmp_path / f"scale.{number}"
            folder.mkdir()
            (folder / "kernel.cubin").write_bytes(b"theirs")
            folder.chmod(0o777)
            assert all(map(healthy, list(pool.map(publish, [folder] * 4))))
    assert len(list(tmp_path.iterdir())) == 200  # nothing unfinished


@posix
@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root gives files away")
def test_entry_of_another_user_is_not_loaded(folder):
    kept = jit.build(Scale(), "sm_80")
    for path in (kept.path, kept.path.parent):
        os.chown(path, 54321, -1)
        mended, compiled = jit.builder.find_or_compile(Scale(), "sm_80")
        assert compiled and mended.path == kept.path and healthy(mended)


@posix
@pytest.mark.parametrize("linked", [False, True])
def test_folder_above_that_others_can_write(folder, monkeypatch, recwarn, linked):
    """There they can put another folder in the place of the cache, unless the sticky bit is set."""
    open_folder = folder / "open"
    place = open_folder / "me" / "cache"
    jit.build(Scale(), "sm_80")
    place.parent.mkdir(parents=True)
    shutil.move(folder / "cache", place)
    if linked:
        (folder / "cache").symlink_to(place)
    give_to_a_group(open_folder, monkeypatch)
    with environment.override(cache_dir=folder / "cache" if linked else place):
        for mode in (0o755, 0o1777, 0o1775):
            open_folder.chmod(mode)
            assert len(jit.entries()) == 1
        for mode in (0o777, 0o775):
            open_folder.chmod(mode)
            match = f"must be where others cannot .* got {open_folder} of mode {mode:o} .*chmod"
            with pytest.raises(jit.UnsafeCacheError, match=match):
                jit.cache_dir()
        built, compiled = jit.builder.find_or_compile(Scale(), "sm_80")
        assert compiled and built.path.parent.parent == cache._private
    assert "cannot keep compiled kernels (the cache folder" in str(recwarn.pop().message)


def given_away(folder, monkeypatch):
    """Make the cache folder another user's, as a mounted ~/.cache is in a container."""
    if os.geteuid() == 0:
        os.chown(folder / "cache", 54321, -1)
    else:
        fake_facts(monkeypatch, os, geteuid=54321)


@posix
@pytest.mark.parametrize("whose", ["another's", "everybody's"])
def test_unsafe_folder_is_neither_read_nor_written(folder, monkeypatch, recwarn, whose):
    """What lies there may be anybody's code: this process compiles its own, and says why once."""
    warnings.simplefilter("always")
    there = jit.build(Scale(), "sm_80")
    if whose == "another's":
        given_away(folder, monkeypatch)
    else:
        (folder / "cache").chmod(0o777)
    before = {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*")}
    calls = tiny_kernel.record_compilations(monkeypatch)
    built = jit.build(Scale(), "sm_80")
    assert built.path != there.path and built.path.parent.parent == cache._private
    assert healthy(built) and len(calls) == 1
    assert jit.build(Scale(), "sm_80") == built and len(calls) == 1
    jit.build(Scale(factor=5), "sm_80")
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*")}
    (message,) = [str(warning.message) for warning in recwarn]
    assert message.startswith("cupyflash: cannot keep compiled kernels (the cache folder /")
    assert "must belong to you or root" in message and "set CUPYFLASH_CACHE_DIR" in message
    assert re.search(r"got mode \d+, owner \d+, and you are user \d+", message)


@posix
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077], ids=oct)
def test_entries_are_private_whatever_the_umask(folder, umask):
    before = os.umask(umask)
    try:
        with environment.override(cache_dir=folder / "new" / "cache"):
            built = jit.build(Scale(), "sm_80")
    finally:
        os.umask(before)
    for path in (*built.path.parents[:3], *built.path.parent.iterdir()):
        assert path.stat().st_mode & 0o022 == 0, path
    with environment.override(cache_dir=folder / "new" / "cache"):
        assert jit.build(Scale(), "sm_80") == built


@posix
def test_clear_deletes_links_and_not_what_they_lead_to(folder):
    built = jit.build(Scale(), "sm_80")
    photos = folder / "photos"
    photos.mkdir()
    (photos / "one").write_text("")
    for name in (".building-x", Scale().name + ".sm_80." + "0" * 16):
        (folder / "cache" / name).symlink_to(photos)
    (folder / "cache" / ".building-y").symlink_to(folder / "nothing")
    assert jit.entries() == [built]
    assert jit.clear() == 4 and list((folder / "cache").iterdir()) == []
    assert [path.name for path in photos.iterdir()] == ["one"]


def test_entries_and_clear(folder):
    built = [jit.build(Scale(factor=f), "sm_80") for f in (1, 2)]
    assert sorted(jit.entries(), key=lambda b: b.expression) == built
    built[0].path.unlink()  # damaged entries and
    (folder / "cache" / ".building-x").mkdir()  # unfinished ones go too,
    keep = folder / "cache" / "photos"  # but nothing that is not ours
    keep.mkdir()
    assert jit.entries() == built[1:]
    assert jit.clear() == 3
    assert list((folder / "cache").iterdir()) == [keep] and jit.entries() == []
