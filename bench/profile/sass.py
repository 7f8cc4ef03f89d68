"""Cubins without a GPU: shared memory of a kernel, and the instructions of its inner loop by kind.

The loops come from the text of nvdisasm or cuobjdump (jit/builder.py finds either). With tensor
instructions in a kernel, the inner loop is the one with the most of them among the loops that
contain no other such loop; of two loops with as many it is the shorter one, as the other also masks
the edges. Otherwise it is the loop with the most arithmetic, loads and stores among those that
touch memory and have no loop in them that does half of it. So neither loops that wait at a barrier
count, nor those that divide an index.
"""

import functools
import re
import struct
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cupyflash import jit
from cupyflash.jit import builder

KINDS = ("tensor", "mufu", "fp32", "integer", "shared", "global", "other")
# The beginnings of the mnemonics of a kind; the first kind that fits counts.
MNEMONICS = {
    "tensor": ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "DMMA"),
    "mufu": ("MUFU",),
    "fp32": ("FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2"),
    "shared": ("LDS", "STS", "ATOMS", "STAS"),  # LDSM and STSM among them
    "global": ("LDG", "STG", "ATOM", "RED", "UTMA", "UBLK", "LD.", "ST.", "LDL", "STL"),
    "integer": (
        *("IADD", "IMAD", "IMNMX", "ISETP", "IABS", "IDP", "LEA", "LOP", "SHF", "PRMT", "SEL"),
        *("VIADD", "VIMNMX", "POPC", "FLO", "BREV", "BMSK", "SGXT", "FMNMX", "FSEL", "FSETP"),
        *("FSET", "F2F", "F2I", "I2F", "HMNMX", "HSETP", "HSET"),
    ),
}
MEMORY = ("shared", "global")
WORK = ("mufu", "fp32", *MEMORY)
NO_DISASSEMBLER = (
    "instructions are left out: they need nvdisasm or cuobjdump (CUDA toolkit) on PATH, or the "
    "triton package, which brings them"
)

_LABEL = re.compile(r"^\s*(\.L_x_\w+):")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"^\s*(.*?)(?:`\((\.L_x_\w+)\)|\b0x([0-9a-f]+)\s*$)")


class Instruction(NamedTuple):
    """One instruction of a kernel.

    Attributes:
        kind: of `KINDS`.
        target: for a branch where to, a label or an address.
        falls: whether the next instruction may come after it.
    """

    address: int
    kind: str
    target: str | int | None
    falls: bool


class Loop(NamedTuple):
    """The instructions of a loop by kind; ``whole`` for those of a kernel that has no loop."""

    counts: dict[str, int]
    whole: bool


def kind_of(mnemonic: str) -> str:
    """The one of `KINDS` that an instruction such as "FFMA.FTZ" belongs to."""
    text = mnemonic + "."
    return next((kind for kind, begins in MNEMONICS.items() if text.startswith(begins)), "other")


def instructions(text: str) -> list[Instruction]:
    """The instructions of a disassembled kernel, targets as addresses."""
    found, labels, waiting = [], {}, []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            waiting.append(label[1])
        elif match := _INSTRUCTION.search(line):
            address, guard, mnemonic, operands = int(match[1], 16), *match.groups()[1:]
            labels |= dict.fromkeys(waiting, address)
            waiting, target, falls = [], None, True
            name = mnemonic.partition(".")[0]
            if name == "BRA" and (to := _TARGET.match(operands)):
                target = to[2] or int(to[3], 16)
                falls = bool(guard or to[1])  # a predicate, also as an operand
            elif name in ("EXIT", "RET", "BRX"):
                falls = bool(guard)
            found.append(Instruction(address, kind_of(mnemonic), target, falls))
    return [x._replace(target=labels.get(x.target, x.target)) for x in found]


def loops(found: Sequence[Instruction]) -> list[set[int]]:
    """The natural loops of a kernel: sets of numbers of instructions.

    A branch closes a loop if all ways to it lead through its target. So a slow path that is put
    behind the kernel and returns into its middle closes none.
    """
    number = {x.address: i for i, x in enumerate(found)}
    to = [number.get(x.target) for x in found]
    after = [
        [*([i + 1] if x.falls and i + 1 < len(found) else []), *([t] if t is not None else [])]
        for i, (x, t) in enumerate(zip(found, to))
    ]
    before: list[list[int]] = [[] for _ in found]
    for i, nexts in enumerate(after):
        for x in nexts:
            before[x].append(i)
    bodies: dict[int, set[int]] = {}
    for i, head in enumerate(to):
        if head is None or head > i or not _reaches(after, i):
            continue  # code that only calls lead to is not looked at
        if not _reaches(after, i, without=head):
            body = bodies.setdefault(head, {head})
            pending = [i]
            while pending:
                x = pending.pop()
                if x not in body:
                    body.add(x)
                    pending += before[x]
    return list(bodies.values())


def _reaches(after: Sequence[list[int]], last: int, without: int = -1) -> bool:
    """Whether a way leads from the start to last, past none that has to be avoided."""
    seen, pending = {without}, [0]
    while pending:
        x = pending.pop()
        if x == last and x not in seen:
            return True
        if x not in seen:
            seen.add(x)
            pending += after[x]
    return False


def inner_loop(text: str) -> Loop:
    """The inner loop of a disassembled kernel, as the module says."""
    found = instructions(text)
    whole = Counter(x.kind for x in found)
    wanted, needed = (("tensor",),) * 2 if whole["tensor"] else (WORK, MEMORY)
    working = []
    for body in loops(found):
        of = Counter(found[i].kind for i in body)
        if any(of[kind] for kind in needed):
            working.append((body, of, sum(of[kind] for kind in wanted)))
    enough = 0 if whole["tensor"] else 0.5
    inner = [x for x in working if not any(y[0] < x[0] and y[2] >= enough * x[2] for y in working)]
    if not inner:
        return Loop({kind: whole[kind] for kind in KINDS}, True)
    _, best, _ = max(inner, key=lambda x: (x[2], -len(x[0])))
    return Loop({kind: best[kind] for kind in KINDS}, False)


def loop_of(built: jit.Built, config: jit.compiler.Kernel) -> Loop | None:
    """`inner_loop` of a compiled kernel; None where nothing can disassemble it."""
    path = built.path.with_suffix(".sass")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builder.dump(("sass",), built, config)
    return inner_loop(path.read_text(errors="replace")) if path.exists() else None


def static_shared(cubin: bytes, kernel: str) -> int:
    """The static shared memory of a kernel (its mangled name) in bytes: an ELF section's size."""
    return dict(_sections(cubin)).get(f".nv.shared.{kernel}", 0)


def _sections(elf: bytes) -> Iterable[tuple[str, int]]:
    """(name, size) of the sections of an ELF file of 64 bits."""
    if elf[:4] != b"\x7fELF":
        raise ValueError(f"bench.profile.sass: a cubin must be an ELF file, got {elf[:4]!r}")
    (at,) = struct.unpack_from("<Q", elf, 0x28)
    step, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, at + i * step) for i in range(count)]
    first = headers[names][4]
    for header in headers:
        start = first + header[0]
        yield elf[start : elf.index(b"\0", start)].decode(), header[5]


@functools.cache
def static_facts(config: jit.compiler.Kernel, arch: str) -> dict[str, Any]:
    """What is known of a kernel without running it; compiles it if need be."""
    built = jit.build(config, arch)
    cubin = Path(built.path).read_bytes()
    loop = loop_of(built, config)
    return {
        "kernel": config.name,
        "expression": config.expression,
        "lowered_name": built.lowered_name,
        "registers": built.registers,
        "spill_bytes": built.spill_bytes,
        "threads": config.threads,
        "static_shared": static_shared(cubin, built.lowered_name),
        "dynamic_shared": config.shared_memory,
        "loop": loop and loop.counts,
        "no_loop": bool(loop and loop.whole),
    }
