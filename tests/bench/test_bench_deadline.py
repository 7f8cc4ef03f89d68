"""The time that a benchmark may take (no GPU needed)."""

import signal
import time

import pytest

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
