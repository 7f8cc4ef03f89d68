"""Who can change a file or a folder: a cubin is code, so nothing is loaded that others can change.

On Windows the user's folders are private and modes say nothing, so everything counts as safe.
"""

import os
import stat
from pathlib import Path


class UnsafeCacheError(RuntimeError):
    """The cache folder can be written by others, and a cubin is code; nothing is loaded from it."""


def fault(path: Path) -> str:
    """The mode and the owner of what others can change; "" if only the user and root can.

    A symbolic link counts as changeable: its mode is 777, and what it leads to may be anywhere.

    Raises:
        OSError: nothing is there, or it is out of reach.
    """
    status = path.lstat()
    if os.name == "nt" or (status.st_uid in (0, os.geteuid()) and not _shared(status)):
        return ""
    return f"mode {status.st_mode & 0o7777:o}, owner {status.st_uid}"


def fault_above(folder: Path) -> str:
    """The first folder above in which others can replace what lies there; "" if there is none.

    Args:
        folder: of a path that may have symbolic links, which must not be replaced either.

    Raises:
        OSError: as `fault`.
    """
    for above in sorted({*folder.parents, *folder.resolve(strict=True).parents}):
        status = above.stat()
        if os.name != "nt" and _shared(status) and not status.st_mode & stat.S_ISVTX:
            return f"{above} of mode {status.st_mode & 0o7777:o}"
    return ""


def refuse_shared(folder: Path) -> None:
    """Raise UnsafeCacheError where others can change this folder, or put another in its place."""
    try:
        changed = fault(folder.resolve(strict=True))
        above = fault_above(folder)
    except (OSError, RuntimeError):  # absent, out of reach, a loop of links: nothing is loaded
        return
    if changed:
        raise UnsafeCacheError(
            f"cupyflash: the cache folder {folder} must belong to you or root and be writable by "
            f"its owner alone, because it holds code; got {changed}, and you are user "
            f"{os.geteuid()}. Mend it (chown, chmod go-w) or set CUPYFLASH_CACHE_DIR to another "
            "folder"
        )
    if above:
        raise UnsafeCacheError(
            f"cupyflash: the cache folder {folder} must be where others cannot replace it, because "
            f"it holds code; got {above} above it. Mend that (chmod go-w, or chmod +t as "
            "/tmp has it) or set CUPYFLASH_CACHE_DIR to another folder"
        )


def _shared(status: os.stat_result) -> bool:
    """Whether others than the owner can write; members of the user's own group are not others."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)


def _is_own_group(number: int) -> bool:
    """Whether a group has the user's name and no other member: most systems make one for a user."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's nameless user
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}
