"""Standard output as people have it: pipes that close early, and encodings with few characters."""

import codecs
import io
import os
import sys

READABLE = {"≥": ">=", "×": "x", "→": "->", "…": "...", "─": "-"}
ERRORS = "cupyflash.readable"


def readable(error: UnicodeError) -> tuple[str, int]:
    """The text for a character that the encoding lacks: another one, or an escape such as \\xe9."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    escaped = (READABLE.get(x) or x.encode("ascii", "backslashreplace").decode() for x in text)
    return "".join(escaped), error.end


def never_fail_to_encode() -> None:
    """Make streams print characters that their encoding lacks by `readable`."""
    codecs.register_error(ERRORS, readable)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ERRORS)


def discard_rest() -> None:
    """Discard what can no longer be written, to a closed pipe say, without another error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
