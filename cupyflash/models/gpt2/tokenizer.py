"""Text to tokens and back: GPT-2's byte-level BPE through the ``tokenizers`` library."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cupyflash import machine

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """Wraps what has ``encode`` and ``decode`` of the tokenizers library."""

    def __init__(self, library_tokenizer: Any) -> None:
        self.library_tokenizer = library_tokenizer

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        return self.library_tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; bytes that are no UTF-8 become replacement characters."""
        return self.library_tokenizer.decode(list(tokens), skip_special_tokens=False)


class ByteTokenizer:
    """A token is a byte: for random weights, which know no text."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; tokens that are no byte become their number."""
        return "".join(chr(t) if 32 <= t < 127 else f"<{t}>" for t in tokens)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder: ``tokenizer.json``, or vocab.json with merges.txt.

    Raises:
        ImportError: no tokenizers library.
        FileNotFoundError: neither is there.
        ValueError: a damaged file.
    """
    try:
        import tokenizers
    except ImportError:
        line = machine.pip_line("gpt2")
        raise ImportError(f"Gpt2: a tokenizer needs the tokenizers library; {line}") from None
    whole, vocabulary, merges = (
        Path(folder) / name for name in ("tokenizer.json", "vocab.json", "merges.txt")
    )
    try:
        if whole.is_file():
            return Tokenizer(tokenizers.Tokenizer.from_file(str(whole)))
        if vocabulary.is_file() and merges.is_file():
            return Tokenizer(tokenizers.ByteLevelBPETokenizer(str(vocabulary), str(merges)))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"Gpt2: the tokenizer in {folder} is damaged: {error}") from None
    fact = "must have tokenizer.json, or vocab.json and merges.txt"
    raise FileNotFoundError(f"Gpt2: {folder} {fact}, found neither")


class TextStream:
    """Text of tokens as they come: a character of several tokens waits for the last of them."""

    def __init__(self, tokenizer: Tokenizer | ByteTokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown = ""

    def add(self, token: int) -> str:
        """The text that became whole with this token."""
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens)
        if text.endswith(INCOMPLETE):
            return ""
        new = text[len(self.shown) :]
        # Tokens of finished lines cannot change what follows: decoding stays short.
        self.tokens, self.shown = ([], "") if text.endswith("\n") else (self.tokens, text)
        return new

    def rest(self) -> str:
        """What was held back, at the end."""
        return self.tokenizer.decode(self.tokens)[len(self.shown) :]


def texts(tokenizer: Tokenizer | ByteTokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Pieces of text, as the tokens come."""
    stream = TextStream(tokenizer)
    for token in tokens:
        if piece := stream.add(token):
            yield piece
    if piece := stream.rest():
        yield piece
