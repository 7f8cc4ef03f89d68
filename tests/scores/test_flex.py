"""`cupyflash.flex_attention` beside torch's own, with BlockMasks of all kinds."""

import collections
import functools
import gc
import math
import weakref

import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

from torch._higher_order_ops.flex_attention import math_attention  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash.ops.attention.options import Extras, plain_options  # noqa: E402
from cupyflash.ops.attention.score_text.arguments import with_text  # noqa: E402
from cupyflash.ops.attention.score_text.tiles import FoundTiles  # noqa: E402
from cupyflash.testing import make_inputs  # noqa: E402
from cupyflash.testing.gallery import GALLERY, HEADS, LENGTH  # noqa: E402
from cupyflash.testing.scores import expected_scores  # noqa: E402

AUX = getattr(flex, "AuxRequest", None)  # since torch 2.9
Aux = collections.namedtuple("Aux", ("lse", "max_scores"))


def tensors(**sizes):
    sizes = {"batch": 2, "heads_q": HEADS, "heads_kv": HEADS, "head_dim": 16} | sizes
    return make_inputs("torch", "float32", layout="bhsd", **sizes)


def by_torch(inputs, score_mod=None, block_mask=None):
    """(out, lse) of torch's function step by step; its kernels have no gradient on a CPU."""
    blocks = block_mask or flex._create_empty_block_mask(inputs.q, inputs.k)
    scale, score_mod = inputs.q.shape[3] ** -0.5, score_mod or (lambda s, *_: s)
    qkv = inputs.q, inputs.k, inputs.v
    out, lse, *_ = math_attention(*qkv, score_mod, blocks.as_tuple(), scale, {})
    return out, lse * math.log(2)


@pytest.mark.parametrize("name", [name for i, name in enumerate(GALLERY) if i % 3 == 0])
def test_as_torch(name):
    """The function as torch takes it; a mask also as the BlockMask that torch makes of it."""
    case = GALLERY[name]
    arrays = case.arrays(torch.Generator().manual_seed(1))
    function = case.make(*arrays)
    inputs = tensors(seqlen_q=LENGTH, seqlen_k=LENGTH)
    qkv = inputs.q, inputs.k, inputs.v
    if not case.is_mask:
        wanted = by_torch(inputs, function)
        found = cupyflash.flex_attention(*qkv, function, return_lse=True)
    else:
        blocks = flex.create_block_mask(function, 2, HEADS, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
        wanted = by_torch(inputs, block_mask=blocks)
        found = cupyflash.flex_attention(*qkv, block_mask=blocks, return_lse=True)
        assert torch.equal(found[0], cupyflash.flex_attention(*qkv, block_mask=function))
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mask_mod", [None, lambda b, h, q, k: q >= k])
def test_blocks_that_the_caller_selects(mask_mod):
    """A BlockMask whose blocks say more than its function: full, partial and absent ones."""
    counts = torch.tensor([2, 1, 0]).expand(1, 2, 3).int()
    indices = torch.tensor([[3, 0, 0, 0], [1, 0, 0, 0], [0] * 4]).expand(1, 2, 3, 4).int()
    full = torch.tensor([0, 1, 1]).expand(1, 2, 3).int()
    of_full = torch.tensor([[0] * 4, [2, 0, 0, 0], [0] * 4]).expand(1, 2, 3, 4).int()
    blocks = flex.BlockMask.from_kv_blocks(
        counts, indices, full, of_full, BLOCK_SIZE=16, mask_mod=mask_mod, seq_lengths=(40, 56)
    )
    inputs = tensors(seqlen_q=40, seqlen_k=56, heads_q=2, heads_kv=2)
    seen = torch.zeros(40, 56, dtype=torch.bool)
    rows, cols = torch.arange(40)[:, None], torch.arange(56)
    inside = torch.ones(40, 56, dtype=torch.bool) if mask_mod is None else rows >= cols
    for row, col, kind in ((0, 3, 1), (0, 0, 1), (1, 1, 1), (1, 2, 2), (2, 0, 2)):
        at = slice(16 * row, 16 * row + 16), slice(16 * col, 16 * col + 16)
        seen[at] = inside[at] | (kind == 2)
    exact = expected_scores(inputs, mask=lambda x: lambda b, h, q, k: x[q, k], arrays=(seen,))
    found = cupyflash.flex_attention(inputs.q, inputs.k, inputs.v, None, blocks)
    exact.check(out=found.transpose(1, 2))
    bshd = [x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v)]
    assert torch.equal(cupyflash.attention(*bshd, mask=blocks).transpose(1, 2), found)


def test_tiles_are_remembered_for_whole_sequences_alone():
    """Other lengths beside one BlockMask have other empty tiles."""
    causal = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 24, 24, "cpu")
    options, lengths = plain_options("attention"), torch.tensor([3, 24], dtype=torch.int32)
    for tensors_, names in ((3, ()), (3, ("seqused_q",)), (7, ("seqused_k",)), (7, ())):
        qkv = (torch.zeros(2, 24, 2, 16),) * tensors_
        extras = Extras(**dict.fromkeys(names, lengths))
        _, arrays = with_text("attention", options, (*qkv, *extras), tensors_, None, causal)
        assert isinstance(arrays[-1], FoundTiles) == (not names)


class Causal:
    """An object that has the BlockMask of its own method."""

    def __init__(self):
        mask_mod = lambda b, h, q, k: self.sees(q, k)
        self.blocks = flex.create_block_mask(mask_mod, None, None, 24, 24, "cpu")

    def sees(self, query, key):
        return query >= key


class Slots:
    """A mask_mod that weak references cannot name."""

    __slots__ = ()

    def __call__(self, b, h, q, k):
        return q >= k


def test_what_a_block_mask_keeps():
    """It is found once, and anew where the function is another one, or names something else."""
    left, document = 9, torch.arange(24) // 7
    near = lambda b, h, q, k: (q >= k) & (q - k < left) & (document[q] == document[k])
    inputs = tensors(seqlen_q=24, seqlen_k=24)
    qkv = inputs.q, inputs.k, inputs.v
    blocks = flex.create_block_mask(near, None, None, 24, 24, "cpu")

    def tiles():
        """The tiles that a call gets; its result is that of torch."""
        found = cupyflash.flex_attention(*qkv, block_mask=blocks, return_lse=True)
        torch.testing.assert_close(found, by_torch(inputs, block_mask=blocks), rtol=2e-5, atol=2e-5)
        options = plain_options("attention", layout="bhsd")
        return with_text("attention", options, qkv, 3, None, blocks)[1][-1]

    kept = [tiles()]
    assert tiles() is kept[0]
    left = 2
    kept.append(tiles())
    document = document.flip(0) // 2
    kept.append(tiles())
    document.zero_()
    kept.append(tiles())
    blocks.mask_mod = lambda b, h, q, k: q >= k
    kept.append(tiles())
    blocks.mask_mod = Slots()
    kept.append(tiles())
    assert tiles() is kept[-1]
    assert len(set(map(id, kept))) == 6
    blocks.kv_num_blocks.zero_()  # which torch's function step by step does not read
    assert not cupyflash.flex_attention(*qkv, block_mask=blocks).any()


def same_document(document, b, h, q, k):
    return document[q] == document[k]


@pytest.mark.parametrize("kind", ("partial", "loop", "object", "keyword"))
def test_changes_within_arrays_that_no_name_tells(kind):
    """What such functions name is not known, but the arrays that they have read are."""
    document = torch.arange(24) // 7
    partial = functools.partial(same_document, document)
    mask_mod = {
        "partial": partial,
        "loop": flex.and_masks(partial, lambda b, h, q, k: q >= k),
        "object": Reader(document),
        "keyword": lambda b, h, q, k, *, of=document: of[q] == of[k],
    }[kind]
    inputs = tensors(seqlen_q=24, seqlen_k=24)
    blocks = flex.create_block_mask(mask_mod, None, None, 24, 24, "cpu")

    def tiles():
        options, qkv = plain_options("attention", layout="bhsd"), (inputs.q, inputs.k, inputs.v)
        return with_text("attention", options, qkv, 3, None, blocks)[1][-1]

    first = tiles()
    assert tiles() is first
    document.zero_()
    assert tiles() is not first


class Reader:
    """A mask_mod that reads an array of its own."""

    def __init__(self, document):
        self.document = document

    def __call__(self, b, h, q, k):
        return self.document[q] == self.document[k]


def test_a_block_mask_that_its_function_holds_ends():
    inputs, causal = tensors(seqlen_q=24, seqlen_k=24), Causal()
    cupyflash.flex_attention(inputs.q, inputs.k, inputs.v, None, causal.blocks)
    blocks = weakref.ref(causal.blocks)
    del causal
    gc.collect()
    assert blocks() is None


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
def test_first_calls_that_leave_nothing_behind(mode):
    """What a BlockMask keeps is of use to calls with a gradient, and is no fake."""
    causal = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 24, 24, "cpu")
    inputs = tensors(seqlen_q=24, seqlen_k=24)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    with mode(allow_non_fake_inputs=True) if mode is FakeTensorMode else mode():
        cupyflash.flex_attention(inputs.q, inputs.k, inputs.v, None, causal)
    out = cupyflash.flex_attention(*leaves, None, causal)
    right = cupyflash.attention(*leaves, layout="bhsd", causal=True)
    found, wanted = (torch.autograd.grad(x, leaves, inputs.dout) for x in (out, right))
    assert all(map(torch.equal, (out, *found), (right, *wanted)))


def test_gradients_heads_and_statistics():
    inputs = tensors(seqlen_q=24, seqlen_k=24, heads_kv=2)
    table = torch.randn(HEADS, 47)
    causal = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 24, 24, "cpu")
    score = lambda x: lambda s, b, h, q, k: s + x[h, q - k + 23]
    exact = expected_scores(inputs, score, lambda _: lambda b, h, q, k: q >= k, arrays=(table,))
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, table)]
    out, aux = cupyflash.flex_attention(
        *leaves[:3], score(leaves[3]), causal, enable_gqa=True,
        **{"return_aux": AUX(lse=True)} if AUX else {"return_lse": True},
    )  # fmt: skip
    names = ("dq", "dk", "dv", "d0")
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    actual = dict(zip(names, gradients)) | {"out": out}
    exact.check(lse=aux.lse if AUX else aux, **{
        name: x if name == "d0" else x.transpose(1, 2) for name, x in actual.items()
    })  # fmt: skip
    half = cupyflash.flex_attention(*leaves[:3], scale=0.125, enable_gqa=True)
    assert torch.equal(half, cupyflash.attention(*leaves[:3], scale=0.125, layout="bhsd"))


def test_wrong_calls():
    inputs = tensors(seqlen_q=24, seqlen_k=24)
    qkv = inputs.q, inputs.k, inputs.v
    causal = lambda b, h, q, k: q >= k
    blocks = lambda *sizes: flex.create_block_mask(causal, *sizes, "cpu", BLOCK_SIZE=16)
    narrow = (inputs.q, inputs.k[:, :2], inputs.v[:, :2])
    for arguments, options, kind, fact in (
        ((*qkv, None, blocks(None, None, 24, 32)), {}, ValueError, "got a BlockMask of (24, 32)"),
        ((*qkv, None, blocks(3, 1, 24, 24)), {}, ValueError, "got a BlockMask of (3, 1)"),
        (narrow, {}, ValueError, "the same number of heads without enable_gqa"),
        (qkv, {"return_aux": Aux(False, True)}, NotImplementedError, "largest"),
        ((*qkv, causal), {}, TypeError, "a function must take (score, batch, head, query, key)"),
        ((*qkv, "score"), {}, TypeError, "flex_attention: score_mod must be a function or a"),
        ((inputs.q, 3, inputs.v), {}, TypeError, "flex_attention: key must be"),
    ):
        with pytest.raises(kind) as error:
            cupyflash.flex_attention(*arguments, **options)
        assert fact in str(error.value), str(error.value)
    ends = torch.tensor([0, 24], dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in qkv]
    with pytest.raises(NotImplementedError, match="cannot be a BlockMask beside packed sequences"):
        cupyflash.flash_attn_varlen_func(
            *packed, ends, ends, 24, 24, mask=blocks(None, None, 24, 24)
        )
