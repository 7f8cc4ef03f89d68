"""Wrong calls and failing ranks end in an error on every rank, which names the rank."""

import datetime

import failing
import pytest
from ranks import TIMEOUT, Ranks

SHORT = datetime.timedelta(seconds=1)

REFUSED = {  # what the error says on rank 1, which makes the wrong call
    "tokens": "ValueError: parallel.attention: q must be (tokens of the rank, heads",
    "dtype": "TypeError: parallel.attention: k must be float32 like q, got float16",
    "no tensor": "TypeError: parallel.attention: v must be a torch tensor, got None",
    "rank": "ValueError: parallel.attention: q must be (tokens of the rank, heads",
    "heads": "ValueError: parallel.attention: the heads of q must be a multiple",
    "uneven": "ValueError: parallel.attention: heads of q must be a multiple of the 2 ranks",
    "key heads": "ValueError: parallel.attention: heads of q must be a multiple of the 2 ranks",
    "slopes": "ValueError: parallel.attention: alibi_slopes must be (heads,) or (2 sequences",
    "slopes learn": "NotImplementedError: parallel.attention: alibi_slopes have no gradient",
    "sinks": "ValueError: parallel.attention: sinks",
    "score": "TypeError: parallel.attention: f, which the score or mask reads, must be a torch",
    "mask": "TypeError: parallel.attention: mask must be a function or a cupyflash.Mask",
    "both": "ValueError: parallel.attention: softcap must be left out beside score=",
    "block mask": "NotImplementedError: parallel.attention: mask can be a BlockMask if",
    "seed": "ValueError: parallel.attention: dropout_seed must be at least 0",
    "bias": "NotImplementedError: parallel.attention: a bias spans all tokens",
    "lengths": "NotImplementedError: parallel.attention: the lengths of the shard say",
    "layout": "NotImplementedError: parallel.attention: q, k and v are (tokens, heads, head_dim)",
    "unknown": "TypeError: parallel.attention: got an unexpected keyword argument 'causual'",
    "move": "ValueError: parallel.attention: move of one group must be one of 'auto'",
    "option": "ValueError: parallel.attention: softcap must be 0, or positive",
}
DIFFERENT = ("other option", "other shape", "other seed", "other text", "gradient")


def test_a_wrong_call_of_one_rank_is_an_error_on_all(two):
    """Nothing has been sent: the next call of the same shard is right."""
    for name, text in REFUSED.items():
        first, second = two.run(failing.wrong, name)
        assert second is not None and second.startswith(text), (name, second)
        kind, _, rest = second.partition(": parallel.attention: ")
        assert first == f"{kind}: parallel.attention: rank 1: {rest}"


def test_a_wrong_call_of_one_rank_of_a_mesh(four):
    """Rank 1 shares the keys of rank 3 and the heads of rank 0; rank 2 hears of it through both."""
    for name in ("tokens", "score"):
        texts = four.run(failing.wrong, name, (1,), (2, 2))
        kind, _, rest = texts[1].partition(": parallel.attention: ")
        assert texts[1].startswith(REFUSED[name])
        assert [texts[rank] for rank in (0, 2, 3)] == [
            f"{kind}: parallel.attention: rank 1: {rest}"
        ] * 3


def test_a_function_of_one_rank_that_raises(two):
    """It raises while it is traced, when the other rank already waits."""
    first, second = two.run(failing.wrong, "raises")
    assert second == "KeyError: 'slopes'"
    assert first == "RankError: parallel.attention: rank 1 raised KeyError: 'slopes'"


@pytest.mark.parametrize("name", ["bias", "block mask", "move"])
def test_a_wrong_call_of_all_ranks(name, two):
    for text in two.run(failing.wrong, name, (0, 1)):
        assert text.startswith(REFUSED[name])


def test_other_options_on_other_ranks(two):
    for name in DIFFERENT:
        for text in two.run(failing.wrong, name):
            assert text.startswith("ValueError: parallel.attention: all ranks must have the same")
            assert "on rank 1" in text


def test_shards_of_other_lengths(two):
    for text in two.run(failing.shards, "other"):
        assert "on rank 0 lengths (40, 9)" in text and "on rank 1 lengths (41, 8)" in text
    for name, kind in (
        ("negative", "ValueError"), ("text", "TypeError"), ("float", "TypeError"),
        ("one", "TypeError"),
    ):  # fmt: skip
        first, second = two.run(failing.shards, name)
        assert second.startswith(f"{kind}: parallel.Shard: ")
        assert first.startswith(f"{kind}: parallel.Shard: rank 1: ")


@pytest.mark.parametrize("where", ["forward", "backward", "heads", "leaves", "absent"])
def test_a_rank_that_fails(where):
    """All ranks raise soon, with the number of the rank; one that is absent has a timeout."""
    timeout = SHORT if where == "absent" else TIMEOUT
    with Ranks(2, timeout) as ranks:
        first, second = ranks(failing.fail, where)
    text, seconds = first
    assert text.startswith("RankError: parallel.attention")
    assert "rank 1 " in text and seconds < 15
    if where in ("forward", "backward"):
        assert second[0] == "MemoryError: no room"
        assert "rank 1 raised MemoryError: no room" in text
    elif where == "heads":
        assert second[0].startswith("IndexError: cupyflash: table is read outside of its axis 0")
        assert f"rank 1 raised {second[0]}" in text
    else:
        assert "rank 1 has left or does not answer" in text


def test_a_rank_that_goes_on_behind_its_error():
    """Its next call would meet the collectives of the call that it left."""
    with Ranks(2) as ranks:
        first, second = ranks.run(failing.go_on)
    assert second[0] == "MemoryError: no room"
    out_of_step = "ranks may be out of step since a call in which this one raised"
    for text, function in zip(second[1:], ("attention", "Shard")):
        assert text.startswith(f"RankError: parallel.{function}: {out_of_step}")
        assert text.endswith("(make another group): MemoryError: no room")
    # The other rank had all keys when rank 1 failed, but waits for it in vain from then on.
    assert first[1].startswith("RankError: ") and first[2].startswith("RankError: ")
