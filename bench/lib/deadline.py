"""The time that a run may take: what has not begun is left out, what takes too long is broken off.

torch.compile alone can take minutes for one call, so looking at the clock between calls is not
enough.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

AGAIN = 5.0  # seconds; an exception that a library swallows comes again


class Deadline:
    """A moment after which nothing begins within `enforced`, and what runs there is broken off.

    Args:
        seconds: from now on; infinity is no deadline.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.end = seconds, time.monotonic() + seconds

    @contextlib.contextmanager
    def enforced(self) -> Iterator[None]:
        """Context that ends with the deadline, where the system has timers (not Windows).

        Raises:
            TimeoutError: it is over; a call of a library in C is over when it returns.
        """

        def stop(*_: Any) -> None:
            raise TimeoutError(f"the {self.seconds:g} s of --seconds are over")

        left = self.end - time.monotonic()
        if left <= 0:
            stop()
        main = threading.current_thread() is threading.main_thread()
        if left == float("inf") or not main or not hasattr(signal, "setitimer"):
            yield
            return
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, left, AGAIN)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
