"""Whether two caches of compiled kernels hold the same machine code; for changes that move sources.

    CUPYFLASH_CACHE_DIR=before python -m cupyflash warmup --arch sm_90a --everything   # old tree
    CUPYFLASH_CACHE_DIR=after python -m cupyflash warmup --arch sm_90a --everything    # new tree
    python tests/repository/compare_machine_code.py before after

It compares each kernel that both caches have: its mangled name, its instructions, its constants and
its static shared memory. Line tables do not count, as they change where code moves, nor does
`.nv.constant4`, the addresses of all constants that the included files define. It needs no GPU.
Exit status 1 if a kernel differs, or if one cache lacks kernels of the other.
"""

import argparse
import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

# Sections of a cubin: instructions, parameters and constants, shared memory.
COMPARED = (".text.", ".nv.constant", ".nv.shared.")
ADDRESSES = ".nv.constant4"  # zeros until the cubin is loaded, an entry for each constant
NO_DATA = 8  # SHT_NOBITS of ELF: the section has a size, and no bytes in the file

Sections = dict[str, bytes | int]


def sections(cubin: bytes) -> Sections:
    """The compared sections of a cubin, by name; the size of one without bytes.

    Source: ELF-64 object file format, "File header" and "Section header".
    """
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(number)]
    strings = headers[names][4]
    found = {}
    for name_offset, kind, _, _, offset, length in headers:
        start = strings + name_offset
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(COMPARED) and name != ADDRESSES:
            found[name] = length if kind == NO_DATA else cubin[offset : offset + length]
    return found


def kernels(cache: Path) -> dict[tuple[str, str], tuple[str, Sections]]:
    """(mangled name, sections) of each kernel in a cache, by (expression, architecture)."""
    found = {}
    for path in sorted(cache.glob("*/meta.json")):
        meta = json.loads(path.read_text())
        cubin = path.with_name("kernel.cubin").read_bytes()
        found[meta["expression"], meta["arch"]] = meta["lowered_name"], sections(cubin)
    return found


def different_parts(old: tuple[str, Sections], new: tuple[str, Sections]) -> list[str]:
    """The kinds of sections in which two builds of a kernel differ, "name" for the mangled name."""
    names = old[1].keys() | new[1].keys()
    parts = {"." + x.split(".")[1] for x in names if old[1].get(x) != new[1].get(x)}
    return sorted(parts | ({"name"} if old[0] != new[0] else set()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a cache folder")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("--common", action="store_true", help="compare only what both have")
    options = parser.parse_args(arguments)
    old, new = kernels(options.before), kernels(options.after)
    if not options.common:
        for title, only in (
            ("before", old.keys() - new.keys()),
            ("after", new.keys() - old.keys()),
        ):
            for expression, arch in sorted(only):
                print(f"only {title}: {expression} for {arch}")
    common = sorted(old.keys() & new.keys())
    changed = {key: parts for key in common if (parts := different_parts(old[key], new[key]))}
    for (expression, arch), parts in changed.items():
        print(f"differs: {expression} for {arch}: {', '.join(parts)}")
    print(f"{len(common) - len(changed)} of {len(common)} kernels have the same machine code")
    return int(not common or bool(changed) or (not options.common and old.keys() != new.keys()))


if __name__ == "__main__":
    sys.exit(main())
