"""What bench profile reads from cubins: the inner loop by kinds of instructions, and memory."""

import pytest
from tiny_kernel import needs_nvrtc

from bench.profile import sass
from cupyflash.ops.baselines.baselines import VectorAdd

# A kernel with a loop over tiles, in it a loop with products, whose wait has a slow path behind the
# kernel, and a subroutine with a loop that nothing but a call leads to.
SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E R0, [R2.64] ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT ;
.L_x_2:
        /*0030*/                   SYNCS.PHASECHK.TRANS64 P0, [UR4], R3 ;
        /*0040*/              @!P0 BRA `(.L_x_7) ;
.L_x_3:
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*0060*/                   MUFU.EX2 R4, R4 ;
        /*0070*/                   FFMA.FTZ R5, R4, R4, R5 ;
        /*0080*/                   IADD3 R6, R6, -0x1, RZ ;
        /*0090*/                   STS [R7], R5 ;
        /*00a0*/               @P1 BRA `(.L_x_2) ;
        /*00b0*/              @!P2 BRA P3, `(.L_x_1) ;
        /*00c0*/                   EXIT ;
.L_x_7:
        /*00d0*/                   SYNCS.PHASECHK.TRANS64 P0, [UR4], R3 ;
        /*00e0*/              @!P0 BRA `(.L_x_7) ;
        /*00f0*/                   BRA `(.L_x_3) ;
.L_x_8:
        /*0100*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*0110*/                   BRA `(.L_x_8);
"""


def test_inner_loop():
    counts, whole = sass.inner_loop(SASS)
    assert not whole
    assert counts == {
        **{"tensor": 1, "mufu": 1, "fp32": 1, "integer": 1, "shared": 1, "global": 0},
        "other": 6,  # the branches and waits, with those of the slow path
    }
    as_cuobjdump = SASS
    for label, address in (("7", "d0"), ("2", "30"), ("1", "10"), ("3", "50"), ("8", "100")):
        as_cuobjdump = as_cuobjdump.replace(f"`(.L_x_{label})", f"0x{address}")
    as_cuobjdump = "\n".join(x for x in as_cuobjdump.splitlines() if not x.startswith(".L"))
    assert sass.inner_loop(as_cuobjdump) == (counts, False)


def test_inner_loop_of_a_kernel_without_tensor_cores():
    divides = """
.L_x_1:
        /*0000*/                   MUFU.RCP R4, R4 ;
        /*0010*/               @P0 BRA `(.L_x_1) ;
        /*0020*/                   LDG.E.128 R0, [R2.64] ;
        /*0030*/                   FADD R0, R0, R1 ;
        /*0040*/                   EXIT ;
"""
    counts, whole = sass.inner_loop(divides)
    assert whole and (counts["global"], counts["fp32"], counts["mufu"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("mnemonic", "kind"),
    [
        *[("HMMA.16816.F32.BF16", "tensor"), ("MUFU.EX2", "mufu"), ("FMNMX", "integer")],
        *[("FFMA.FTZ", "fp32"), ("HFMA2.MMA", "fp32"), ("LDSM.16.M88.4", "shared")],
        *[("LDGSTS.E.BYPASS.128", "global"), ("UTMALDG.4D", "global"), ("LD.E", "global")],
        *[("LDL", "global"), ("LDC", "other"), ("BAR.SYNC.DEFER_BLOCKING", "other")],
    ],
)
def test_kinds(mnemonic, kind):
    assert sass.kind_of(mnemonic) == kind


@needs_nvrtc
def test_static_facts(monkeypatch):
    monkeypatch.setattr(sass, "loop_of", lambda built, config: None)  # no disassembler
    facts = sass.static_facts.__wrapped__(VectorAdd("float32"), "sm_90a")
    assert facts["threads"] == 256 and 0 < facts["registers"] < 64 and facts["loop"] is None
    assert (facts["static_shared"], facts["dynamic_shared"], facts["spill_bytes"]) == (0, 0, 0)


def test_static_shared():
    with pytest.raises(ValueError, match="must be an ELF file"):
        sass.static_shared(b"no cubin", "kernel")
