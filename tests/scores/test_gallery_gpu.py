"""The gallery of scores and masks on each backend of a GPU, both passes, against float64."""

import dataclasses

import pytest
from matrix import each

torch = pytest.importorskip("torch")

from cupyflash.testing.gallery import GALLERY, HEADS, LENGTH  # noqa: E402
from cupyflash.testing.scores import expected_scores, results  # noqa: E402

HEAD_DIMS = (64, 128, 32, 96, 256, 40)


@pytest.mark.parametrize("name", GALLERY)
@each(library="torch", device="cuda")
def test_gallery(target, name):
    case, number = GALLERY[name], list(GALLERY).index(name)
    for i, dtype in enumerate(target.dtypes):
        head_dim = HEAD_DIMS[(number + i) % len(HEAD_DIMS)]
        inputs = target.inputs(
            dtype, batch=2, seqlen_q=LENGTH, seqlen_k=LENGTH, heads_q=HEADS, heads_kv=2,
            head_dim=head_dim,
        )  # fmt: skip
        arrays = case.arrays(torch.Generator().manual_seed(number))
        kind = {"mask" if case.is_mask else "score": case.make}
        found = results(inputs, tuple(x.cuda() for x in arrays), **kind)
        of_host = {x: getattr(inputs, x).cpu() for x in ("q", "k", "v", "dout")}
        expected = expected_scores(dataclasses.replace(inputs, **of_host), **kind, arrays=arrays)
        expected.check(**found)


@pytest.mark.parametrize("name", ["alibi", "distance table", "gate", "temperature", "swin"])
@each(library="torch", device="cuda")
def test_gradients_in_exact_sums(target, name):
    """With deterministic=True equal calls give equal bits, of every gradient."""
    case = GALLERY[name]
    arrays = case.arrays(torch.Generator().manual_seed(0))
    for dtype in target.dtypes:
        inputs = target.inputs(
            dtype, batch=2, seqlen_q=LENGTH, seqlen_k=LENGTH, heads_q=HEADS, heads_kv=2, head_dim=64
        )
        moved = tuple(x.cuda() for x in arrays)
        calls = [results(inputs, moved, score=case.make, deterministic=True) for _ in range(5)]
        of_host = {x: getattr(inputs, x).cpu() for x in ("q", "k", "v", "dout")}
        host = dataclasses.replace(inputs, **of_host)
        expected_scores(host, score=case.make, arrays=arrays).check(**calls[0])
        for again in calls[1:]:
            assert all(torch.equal(x, again[result]) for result, x in calls[0].items())


@each(library="torch", device="cuda")
def test_long_masks(target):
    """Tiles that are empty, full and mixed; documents, a window and a mask by head."""
    length = 700
    document = (torch.arange(length) // 190).int()
    masks = {
        "documents": lambda of: lambda b, h, q, k: of[q] == of[k],
        "window": lambda of: lambda b, h, q, k: (q >= k) & (q - k < 100),
        "by head": lambda of: lambda b, h, q, k: (q >= k) | (h % 2 == 0),
        "nothing": lambda of: lambda b, h, q, k: q < 0,
    }
    for i, mask in enumerate(masks.values()):
        dtype = target.dtypes[i % len(target.dtypes)]
        inputs = target.inputs(
            dtype, batch=1, seqlen_q=length, seqlen_k=length, heads_q=4, heads_kv=2,
            head_dim=HEAD_DIMS[i],
        )  # fmt: skip
        found = results(inputs, (document.cuda(),), mask=mask)
        of_host = {x: getattr(inputs, x).cpu() for x in ("q", "k", "v", "dout")}
        host = dataclasses.replace(inputs, **of_host)
        expected_scores(host, mask=mask, arrays=(document,)).check(**found)
