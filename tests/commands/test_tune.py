"""Tuned tiles: the file, the choice of a plan, the search, the command; and all of it on a GPU."""

import concurrent.futures
import json
import multiprocessing
import os
import re
import warnings
from types import SimpleNamespace

import numpy
import pytest
from fakes import fake_facts, fake_modules
from matrix import each
from passes import forward_backward

import cupyflash
from cupyflash import environment, jit, machine
from cupyflash.commands import cli, tune, tuner
from cupyflash.ops.attention import tuning as choices
from cupyflash.ops.attention.backends import BACKENDS
from cupyflash.ops.attention.problem import Access, Features, Kind
from cupyflash.runtime import tuning
from cupyflash.testing import expected
from cupyflash.testing.problem import Problem

HERE = {"gpu": "NVIDIA H200", "driver": "13000", "nvrtc": "13.0", "cupyflash": "0.1.0"}
HOPPER = (9, 0)
KIND = Kind("bfloat16", 64, Features(masked=True), HOPPER)
BUILT_IN = next(iter(BACKENDS["sm90"].forward_candidates(KIND)))
KEY = "attention fwd sm90 bfloat16 64 masked"
BUILT = jit.Built(None, "", "", "sm_90a", "13.0", 168, 0, 0, (), 0.1)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A tuning file on a machine that is `HERE`; nothing is compiled."""
    fake_facts(monkeypatch, tuning, machine=HERE)
    fake_facts(monkeypatch, choices, target_arch="sm_90a")
    fake_facts(monkeypatch, jit, build=BUILT)
    tuning._tiles.cache_clear()
    with environment.override(tuning=str(tmp_path / "folder" / "tiles.json"), cache_dir=tmp_path):
        yield environment.current().tuning_file
    tuning._tiles.cache_clear()


def write(file, content):
    file.parent.mkdir(exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


def chosen(kind=KIND, backward=False):
    return choices.tile_of("sm90", kind, 0, backward=backward)


def test_choice_without_a_file(file):
    assert tuning.tile(0, KEY) is None
    assert chosen() is None
    assert chosen(backward=True) is None


def test_saved_choice(file):
    assert tuning.save(0, KEY, (192, 112, 2, 3)) == file
    assert chosen() == (192, 112, 2, 3)
    config = BACKENDS["sm90"].forward_candidates(KIND)[192, 112, 2, 3]
    assert (config.block_m, config.block_n, config.q_stages, config.kv_stages) == (192, 112, 2, 3)
    assert chosen(KIND._replace(head_dim=72)) is None
    assert json.loads(file.read_text()) == {"machine": HERE, "tiles": {KEY: [192, 112, 2, 3]}}
    tuning.save(0, KEY, None)
    assert chosen() is None
    assert [path.name for path in file.parent.iterdir() if "lock" not in path.name] == [file.name]


def test_repeated_plans_do_not_read_it_again(file):
    assert chosen() is None
    write(file, {"machine": HERE, "tiles": {KEY: [192, 112, 2, 3]}})
    assert chosen() is None
    tuning._tiles.cache_clear()
    assert chosen() == (192, 112, 2, 3)


def test_no_file_is_read_where_there_is_to_be_none(file):
    write(file, "a warning if it is read")
    with environment.override(tuning="0"):
        assert environment.current().tuning_file is None
        assert chosen() is None
    with environment.override(tuning=None, cache_dir=None):
        assert environment.current().tuning_file is None


@pytest.mark.parametrize("name", HERE)
def test_file_of_another_machine(file, name):
    tuning.save(0, KEY, (192, 112, 2, 3))
    content = json.loads(file.read_text())
    content["machine"][name] = "another"
    write(file, content)
    with pytest.warns(RuntimeWarning, match=f"is ignored: it is for {name} 'another', and this is"):
        assert chosen() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert chosen() is None
    tuning._tiles.cache_clear()
    with pytest.warns(RuntimeWarning, match="is ignored"):
        tuning.save(0, "other", (1, 2))
    assert json.loads(file.read_text()) == {"machine": HERE, "tiles": {"other": [1, 2]}}


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", "3", "{}", '{"machine": {}}', '{"machine": 1, "tiles": {}}'),
        '{"machine": {}, "tiles": {"a": 3}}',
        '{"machine": {}, "tiles": {"a": ["64", 64]}}',
        '{"machine": {}, "tiles": {"a": [64.0, true]}}',
        '{"machine": {}, "tiles": []}',
        "[" * 10**5 + "]" * 10**5,
    ],
)
def test_damaged_file(file, content):
    write(file, content)
    with pytest.warns(RuntimeWarning, match=f"{file} is ignored: it is not what"):
        assert chosen() is None


def test_unreadable_file(file):
    file.mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="is ignored: it cannot be read"):
        assert chosen() is None
    file.rmdir()
    file.write_bytes(b"\xff\xfe\x00")
    tuning._tiles.cache_clear()
    with pytest.warns(RuntimeWarning, match="is ignored: it cannot be read"):
        assert chosen() is None


@pytest.mark.parametrize(
    "tile",
    [(), (64,), (192, 128), (256, 256, 2, 2), (0, 0, 0, 0), (192, 128, 2, 9), (-64, 64, 2, 2)],
)
def test_tile_that_the_kernel_does_not_have(file, tile):
    tuning.save(0, KEY, tile)
    with pytest.warns(
        RuntimeWarning, match=f"{KEY}' is ignored: {re.escape(str(tile))} is no tile"
    ):
        assert chosen() is None


@pytest.mark.parametrize(
    "fault, reason",
    [
        ({"spill_bytes": 8}, "it spills registers"),
        ({"stack_bytes": 8}, "it spills registers"),
        ({"warnings": ("C7512",)}, "the compiler complains"),
        (RuntimeError("CUPYFLASH_NO_JIT forbids\nit"), "CUPYFLASH_NO_JIT forbids$"),
    ],
)
def test_tile_that_does_not_compile_well(file, monkeypatch, fault, reason):
    def build(config, arch):
        if isinstance(fault, Exception):
            raise fault
        return jit.Built(**{**vars(BUILT), **fault})

    monkeypatch.setattr(jit, "build", build)
    tuning.save(0, KEY, (192, 112, 2, 3))
    with pytest.warns(RuntimeWarning, match=f"{KEY}' is ignored: {reason}"):
        assert chosen() is None


def _save(path, number):
    tuning.machine = lambda device: HERE
    with environment.override(tuning=path):
        tuning.save(0, f"key {number}", (number,))


def test_processes_that_save_at_once(file):
    """Each entry is there, and a reader never sees half a file."""
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(4, context) as pool:
        saved = [pool.submit(_save, str(file), number) for number in range(24)]
        while not all(x.done() for x in saved):
            if file.exists():
                json.loads(file.read_text())
        for x in saved:
            x.result()
    assert len(json.loads(file.read_text())["tiles"]) == 24


def test_save_that_fails(file, monkeypatch):
    tuning.save(0, KEY, (1,))
    before = file.read_text()
    monkeypatch.setattr(tuning.os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        tuning.save(0, KEY, (2,))
    assert file.read_text() == before
    assert not [path for path in file.parent.iterdir() if path.name.startswith(f".{file.name}-")]
    with environment.override(tuning="0"), pytest.raises(ValueError, match="must be a file or uns"):
        tuning.save(0, KEY, (1,))


def test_key_has_what_the_choice_depends_on():
    key = choices.key_of("sm80", KIND, True)
    assert key == "attention bwd sm80 bfloat16 64 masked"
    features = Features(softcap=True, bias=3, short=2)
    key = choices.key_of("sm90", KIND._replace(features=features), False)
    assert key == "attention fwd sm90 bfloat16 64 softcap short=2 bias=3"


@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "bwd"])
@pytest.mark.parametrize("name", ["sm90", "sm80", "fp16x3"])
def test_candidates(name, backward):
    """The built-in choice comes first and is what the backend picks; each fits shared memory."""
    backend, dtype = BACKENDS[name], "float32" if name == "fp16x3" else "float16"
    for head_dim in (32, 64, 72, 96, 128, 192, 256):
        for features in (Features(), Features(softcap=True), Features(short=3, masked=True)):
            kind = Kind(dtype, head_dim, features, HOPPER)
            if not backend.supports(kind, Access.TENSOR_MAP, backward=backward):
                continue
            found = choices.candidates(name, kind, backward)
            assert next(iter(found.values())) in backend.kernels(kind, backward=backward)
            assert len(found) == len(set(found.values()))
            assert all(config.shared_memory <= 224 * 1024 for config in found.values())
    assert choices.candidates("simt", KIND, backward) == {}


def checks(monkeypatch, kind):
    """The search takes its problem for one of this kind."""
    checked = SimpleNamespace(kind=lambda capability: kind, device=0, access=Access.TENSOR_MAP)
    fake_facts(monkeypatch, tuner, check=checked)


@pytest.fixture
def searched(monkeypatch, file):
    """`tuner.search` of NumPy arrays: candidates are compiled and timed by these stand-ins."""
    built, ms, results, rounds = {}, {}, {}, []

    class Call:
        def __init__(self, problem, direction, x, of_forward, tile):
            def run():
                found = of_forward
                if direction == "bwd":
                    arrays = x.dout, x.q, x.k, x.v, *of_forward
                    found = cupyflash.attention_backward(*arrays, **problem.options)[:3]
                return results.get(tile, lambda x: x)(found)

            self.run, self.tile = run, tile

    class Rounds:
        def __init__(self, calls):
            self.timed = dict.fromkeys(calls, 0)

        def run(self, names):
            for name in names:
                self.timed[name] += 1
            rounds[:] = self.timed.items()

        def timings(self):
            return {tile: SimpleNamespace(ms=ms.get(tile, 2.0)) for tile in self.timed}

    def build_all(tasks, progress):
        blocks = [(x.block_m, x.block_n) for x, _ in tasks]
        return [jit.Built(**{**vars(BUILT), "spill_bytes": built.get(x, 0)}) for x in blocks]

    cuda = SimpleNamespace(Device=lambda: SimpleNamespace(id=0))
    fake_modules(monkeypatch, cupy=SimpleNamespace(**vars(numpy), cuda=cuda))
    monkeypatch.setattr(tuner, "Call", Call)
    monkeypatch.setattr(tuner, "Rounds", Rounds)
    monkeypatch.setattr(jit, "build_all", build_all)
    monkeypatch.setattr(tuner.pool, "missing", list)
    fake_facts(monkeypatch, tuner.compiler, target_arch="sm_90a")
    fake_facts(monkeypatch, tuner, capability_of=HOPPER)
    checks(monkeypatch, KIND)
    with environment.override(backend=None):
        yield built, ms, results, rounds


PROBLEM = Problem("float16", 64, 1, 96, 2, 1, True)


def test_search_takes_the_fastest_that_is_right(searched):
    built, ms, results, rounds = searched
    built[128, 160] = 8
    ms |= {(192, 96, 2, 3): 1.0, (192, 112, 2, 3): 1.5, (128, 160, 2, 2): 0.1}
    found = tuner.search(PROBLEM, "fwd", 60)
    assert found.key == KEY and found.rounds == tuner.MOST_ROUNDS
    assert found.built_in.tile == BUILT_IN
    assert found.best.tile == (192, 96, 2, 3)
    slow = tuner.LEAST_ROUNDS  # those 1.1 times as slow as the fastest leave by then
    assert dict(rounds) == {x: slow for x, _ in rounds} | {(192, 96, 2, 3): tuner.MOST_ROUNDS}
    assert {x.tile: x.note for x in found.candidates}[128, 160, 2, 2] == "it spills registers"
    assert not any(x.wrong for x in found.candidates)

    results[192, 96, 2, 3] = lambda found: (found[0] * numpy.float16(1.1), found[1])
    found = tuner.search(PROBLEM, "fwd", 60)
    assert found.best.tile == (192, 112, 2, 3)
    (wrong,) = (x for x in found.candidates if x.wrong)
    assert wrong.tile == (192, 96, 2, 3) and wrong.ms is None and "out" in wrong.wrong


def test_search_keeps_the_built_in_choice(searched):
    _, ms, results, _ = searched
    built_in = BUILT_IN
    ms |= {built_in: 1.0, (192, 112, 2, 3): 0.995}
    assert tuner.search(PROBLEM, "fwd", 60).best.tile == built_in
    results[built_in] = lambda found: (found[0] + numpy.float16(1), found[1])
    with pytest.raises(RuntimeError, match="built-in choice must be right"):
        tuner.search(PROBLEM, "fwd", 60)


def test_search_of_a_backward(searched, monkeypatch):
    _, ms, results, _ = searched
    checks(monkeypatch, KIND._replace(head_dim=128))
    ms[64, 64, 2] = 1.0
    problem = Problem("float16", 64, 2, 70, 2, 2, False)
    assert tuner.search(problem, "bwd", 60).best.tile == (64, 64, 2)
    results[64, 64, 2] = lambda found: (*found[:2], found[2] * numpy.float16(0.9))
    assert tuner.search(problem, "bwd", 60).best.tile == (64, 128)


def test_search_stops_in_time(searched):
    found = tuner.search(PROBLEM, "fwd", 1e-9)
    assert found.rounds == tuner.LEAST_ROUNDS
    assert [x.note for x in found.candidates[1:]] == ["no time to compile it"] * 9
    match = "several kernels to choose from, got attention"
    with environment.override(backend="simt"), pytest.raises(NotImplementedError, match=match):
        tuner.search(PROBLEM, "fwd", 1)


def test_command(searched, file, monkeypatch, capsys):
    _, ms, results, _ = searched
    fake_facts(monkeypatch, machine, gpu_problem="")
    ms[192, 112, 2, 3] = 1.6
    line = "tune --head-dim 64 --seqlen 96 --batch 1 --heads 2 --causal --dtype fp16 --save"
    monkeypatch.setenv("COLUMNS", "40")  # columns are not cut
    assert cli.main(line.split()) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "192×112, 2, 3 best 168" in out and "1.6000 1.250" in out
    assert f"{KEY}: 192×112, 2, 3 is 25.0% faster than the built-in choice" in out
    assert f"saved to {file}" in out
    assert tuning.tile(0, KEY) == (192, 112, 2, 3)
    ms.clear()
    assert cli.main(line.split()) == 0
    assert "removed the older choice" in capsys.readouterr().out
    assert tuning.tile(0, KEY) is None
    results[192, 112, 2, 3] = lambda found: (found[0] * numpy.float16(2), found[1])
    assert cli.main(line.split()) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "WRONG RESULT" in out and "192×112, 2, 3 is wrong: out" in out and "nothing to save" in out
    )


@pytest.mark.parametrize("fault", ["its folder is a file", "it is a folder", "full", "none"])
def test_save_that_is_impossible_is_known_before_the_search(file, monkeypatch, capsys, fault):
    fake_facts(monkeypatch, machine, gpu_problem="")
    monkeypatch.setattr(tune, "_search", lambda *_: pytest.fail("it has searched"))
    path, text = str(file), "No space left"
    if fault == "its folder is a file":
        file.parent.write_text("")
        text = "File exists"
    elif fault == "it is a folder":
        file.mkdir(parents=True)
        text = "it is a folder"
    elif fault == "full":
        if not os.path.exists("/dev/full"):
            pytest.skip("this system has no /dev/full, a disk without room")
        full = lambda **_: (os.open("/dev/full", os.O_WRONLY), str(file))  # noqa: E731
        monkeypatch.setattr(tuning.tempfile, "mkstemp", full)
    else:
        path, text = "0", "tune: CUPYFLASH_TUNING must be a file or unset"
    with environment.override(tuning=path):
        assert cli.main(["tune", "--dtype", "fp16", "--save"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("cupyflash tune: ") and text.removeprefix("tune: ") in error
    if fault != "none":
        assert f"the tuning file must be one that you can write, got {file} (" in error
        assert error.endswith("set CUPYFLASH_TUNING to another file\n")
        with environment.override(tuning=path), pytest.raises(OSError, match="^tune: the tuning f"):
            tuning.save(0, KEY, (1,))


@pytest.mark.parametrize(
    "line, message",
    [
        ("--head-dim 100", "--head-dim must be a multiple of 8, got 100"),
        ("--head-dim 0", "argument --head-dim: must be a positive integer, got '0'"),
        ("--budget 0", "argument --budget: must be a positive number of seconds, got '0'"),
        ("--budget inf", "argument --budget: must be a positive number of seconds, got 'inf'"),
        ("--dtype int8", "argument --dtype: must be one of fp16, bf16, fp32, .*, got 'int8'"),
        ("--operation norm", "argument --operation: invalid choice: 'norm'"),
        ("--pass both", "argument --pass: invalid choice: 'both'"),
        ("", "needs a GPU to run on: there is none"),
    ],
)
def test_command_refuses(line, message, monkeypatch, capsys):
    fake_facts(monkeypatch, machine, gpu_problem="there is none")
    try:
        code = cli.main(["tune", *line.split()])
    except SystemExit as stopped:
        code = stopped.code
    assert code and re.search(message, capsys.readouterr().err)


@pytest.fixture
def tuned(tmp_path):
    """A function that puts a tile into the tuning file of this GPU, the only one in there."""
    tuning._tiles.cache_clear()
    with environment.override(tuning=str(tmp_path / "tiles.json")) as settings:

        def choose(key, tile):
            settings.tuning_file.unlink(missing_ok=True)
            tuning.save(0, key, tile)

        yield choose
    tuning._tiles.cache_clear()


@each(device="cuda")
@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "bwd"])
def test_tuned_choice_is_used_and_right(target, tuned, monkeypatch, backward):
    tile_of_kind, used, lengths = choices.tile_of, [], iter(range(350 if backward else 300, 400))

    def tile_of(backend, kind, device, **options):
        tile = tile_of_kind(backend, kind, device, **options)
        if options["backward"] == backward:
            used.append((backend, kind, tile))
        return tile

    monkeypatch.setattr(choices, "tile_of", tile_of)
    shape = {"batch": 1, "heads_q": 4, "heads_kv": 2, "head_dim": 128}

    def run():
        """Results of a length that no plan has been made for."""
        length = next(lengths)
        x = target.inputs(target.dtypes[0], seqlen_q=length, **shape)
        results = forward_backward(x, causal=True)
        expected(x, causal=True).check(**results)

    run()
    backend, kind, _ = used[-1]
    found = choices.candidates(backend, kind, backward)
    for tile, config in list(found.items())[1:3]:
        if choices.fault(jit.build(config, jit.arch_of(kind.capability))):
            continue
        tuned(choices.key_of(backend, kind, backward), tile)
        run()
        assert used[-1][2] == tile


@each("cupy", "cuda")
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_search_on_a_gpu(target, direction):
    problem = Problem(target.dtypes[0], 64, 1, 600, 4, 2, True)
    if target.backend == "simt":
        with pytest.raises(NotImplementedError, match="several kernels"):
            tuner.search(problem, direction, 1)
        return
    found = tuner.search(problem, direction, 20)
    assert found.key.startswith(f"attention {direction} {target.backend} ")
    assert found.rounds >= tuner.LEAST_ROUNDS and found.best.ms <= found.built_in.ms
    assert not any(x.wrong for x in found.candidates)
    assert all(x.note or x.ms > 0 for x in found.candidates)
