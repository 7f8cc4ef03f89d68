"""The time that a benchmark may take (no GPU needed)."""

import signal
import time

import pytest

from bench.lib import harness
from bench.lib.deadline import Deadline


def test_what_takes_too_long_is_broken_off():
    before = signal.getsignal(signal.SIGALRM)
    deadline, done = Deadline(0.2), []
    with (
        pytest.raises(TimeoutError, match=r"the 0\.2 s of --seconds are over"),
        deadline.enforced(),
    ):
        done.append("begun")
        time.sleep(20)
    assert time.monotonic() - deadline.end < 10 and done == ["begun"]
    with pytest.raises(TimeoutError, match="are over"), deadline.enforced():
        done.append("too late")
    assert done == ["begun"] and signal.getsignal(signal.SIGALRM) is before


@pytest.mark.parametrize("seconds", [0.3, float("inf")])
def test_what_ends_in_time_is_left_alone(seconds):
    with Deadline(seconds).enforced():
        pass
    time.sleep(0.5)  # a timer that were still set would end the process


def test_cells_of_a_run(capsys):
    """The one that takes too long and those behind it are left out, with one line why."""
    options = harness.parser("memory", None, repeats=None).parse_args([])
    run = harness.Run("memory", "", [], options, timed=False, on_gpu=False)
    deadline, done = Deadline(0.3), []
    begin = time.monotonic()
    for name, seconds in (("first", 0), ("second", 20), ("third", 0)):

        def step(name=name, seconds=seconds):
            time.sleep(seconds)
            done.append(name)

        run.within(deadline, name, step)
    assert done == ["first"] and time.monotonic() - begin < 10
    reason = "TimeoutError: the 0.3 s of --seconds are over"
    assert capsys.readouterr().out == f"everything left out from second on: {reason}\n"


@pytest.mark.parametrize("name", ["decode", "scores"])
def test_a_script_without_time(benchmarks, name, capsys):
    with pytest.raises(SystemExit, match="nothing was measured"):
        benchmarks.run(name, "--seconds", "0")
    assert "are over" in capsys.readouterr().out
