"""Text to tokens and back: GPT-2's byte-level BPE through the ``tokenizers`` library."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cupyflash import packages

from ..checkpoint import checkpoint_folder
from .config import FUNCTION

END_OF_TEXT = "<|endoftext|>"
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A tokenizer of the tokenizers library."""

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

    Texts are neither padded nor cut, whatever tokenizer.json says. Beside vocab.json the tokens of
    added_tokens.json, special_tokens_map.json and tokenizer_config.json are known.

    Raises:
        ImportError: no tokenizers library.
        FileNotFoundError: neither is there, or no such folder.
        ValueError: a damaged file.
    """
    try:
        import tokenizers
    except ImportError:
        line = packages.pip_line("gpt2")
        raise ImportError(f"Gpt2: a tokenizer needs the tokenizers library; {line}") from None
    whole, vocabulary, merges = (
        checkpoint_folder(FUNCTION, folder) / name
        for name in ("tokenizer.json", "vocab.json", "merges.txt")
    )
    try:
        if whole.is_file():
            tokenizer = tokenizers.Tokenizer.from_file(str(whole))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            return Tokenizer(tokenizer)
        if vocabulary.is_file() and merges.is_file():
            tokenizer = tokenizers.ByteLevelBPETokenizer(str(vocabulary), str(merges))
            add_tokens(tokenizer, Path(folder))
            return Tokenizer(tokenizer)
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"Gpt2: the tokenizer in {folder} is damaged: {error}") from None
    fact = "must have tokenizer.json, or vocab.json and merges.txt"
    raise FileNotFoundError(f"Gpt2: {folder} {fact}, found neither")


def add_tokens(tokenizer: Any, folder: Path) -> None:
    """Give a tokenizer the tokens that the files beside vocab.json add to it.

    Raises:
        ValueError: an added token that would get another number than it has there.
    """
    from tokenizers import AddedToken

    found: dict[str, tuple[int | None, dict[str, Any]]] = {}
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        found[END_OF_TEXT] = None, {"special": True}
    config = _fields(folder / "tokenizer_config.json")
    for fields in (_fields(folder / "special_tokens_map.json"), config):
        for token in _special_tokens(fields):
            found[token.pop("content")] = None, token | {"special": True}
    for content, number in _fields(folder / "added_tokens.json").items():
        found[content] = number, found.get(content, (None, {}))[1]
    for number, token in config.get("added_tokens_decoder", {}).items():
        token = dict(token)
        found[token.pop("content")] = int(number), token
    known = ("special", "lstrip", "rstrip", "normalized", "single_word")
    last = tokenizer.get_vocab_size(with_added_tokens=False)
    for content, (number, options) in sorted(
        found.items(), key=lambda x: last if x[1][0] is None else x[1][0]
    ):
        options = {name: bool(options[name]) for name in known if name in options}
        add = tokenizer.add_special_tokens if options.get("special") else tokenizer.add_tokens
        add([AddedToken(content, **options)])
        got = tokenizer.token_to_id(content)
        if number not in (None, got):
            raise ValueError(f"added token {content!r} must be {number}, got {got}")


def _special_tokens(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Tokens with their options: those of fields like eos_token, and of lists of more."""
    for name, value in fields.items():
        if name in ("additional_special_tokens", "extra_special_tokens"):
            tokens = list(value.values()) if isinstance(value, dict) else value or []
        elif name.endswith("_token") and isinstance(value, str | dict):
            tokens = [value]
        else:
            continue
        for token in tokens:
            yield dict(token) if isinstance(token, dict) else {"content": token}


def _fields(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


class StopStrings:
    """Tells whether the text of a sequence has just come to one of several strings.

    Args:
        tokenizer: has ``decode``.
        strings: of at least one character.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self.tokenizer, self.strings = tokenizer, strings
        # A token has at least one byte, so as many tokens as bytes contain the whole string, behind
        # one more: the first token loses the space that it begins with where the decoder strips it.
        self.length = 1 + max(len(string.encode()) for string in strings)

    def end(self, tokens: Sequence[int]) -> bool:
        """Whether the text ends with the last of these new tokens; called for each of them."""
        text = self.tokenizer.decode(tokens[-self.length :])
        return any(string in text for string in self.strings)


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
        if text.endswith("\n"):
            # Tokens of finished lines need not be decoded again, but for one before the next line,
            # of which the decoder may strip the space that its first token begins with.
            self.tokens = [token]
            text = self.tokenizer.decode(self.tokens)
        self.shown = text
        return new

    def rest(self) -> str:
        """The text that was held back, at the end."""
        return self.tokenizer.decode(self.tokens)[len(self.shown) :]
