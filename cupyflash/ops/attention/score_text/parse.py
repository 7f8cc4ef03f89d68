"""The parser of texts, which makes a tree by the precedence of C++.

A text is an expression; ``name = expression;`` before it names a part that it uses::

    gap = abs(query - key); score - slopes(head) * gap
"""

import re
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from . import tree
from .functions import FUNCTIONS
from .tree import Capture, Kind, Node, Place, TextError

TOKEN = re.compile(
    r"\s*(?:(?P<number>0[xX][0-9a-fA-F]+|(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?[fF]?)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<symbol><<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>=!~&|^?:(),;]))"
)
PRECEDENCE = {
    operator: level
    for level, operators in enumerate(
        ("||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %"), start=1
    )
    for operator in operators.split()
}
UNARY = {"-": "neg", "!": "!", "~": "~"}
MOST_CHARACTERS = 100_000


class Token(NamedTuple):
    kind: str  # "number", "name", "symbol" or "end"
    text: str
    place: tuple[int, int]


def parse(text: str, captures: Sequence[Capture], mask: bool = False) -> Node:
    """The tree of a text.

    Args:
        mask: the text is a condition of batch, head, query and key; else it is a score.

    Raises:
        TextError: the text means nothing, or is no score (no mask).
    """
    parser = _Parser(text, captures, mask)
    try:
        return require_result(parser.statements(), mask)
    except RecursionError:
        raise TextError(ValueError, "the text is nested too deeply") from None


def require_result(tree_: Node, mask: bool) -> Node:
    """The tree itself, of a mask or a score.

    Raises:
        TextError: it is of another kind.
    """
    if mask and tree_.kind != Kind.BOOL:
        fact = "a mask must be a condition (True where the query sees the key)"
        raise TextError(TypeError, f"{fact}, got a {tree_.kind.name.lower()}", tree_.place)
    if not mask and tree_.kind == Kind.BOOL:
        fact = "a score must be a number, and a condition belongs into mask="
        raise TextError(TypeError, f"{fact}, got a condition", tree_.place)
    return tree_ if mask else tree.as_float(tree_)


class _Parser:
    def __init__(self, text: str, captures: Sequence[Capture], mask: bool) -> None:
        if len(text) > MOST_CHARACTERS:
            fact = f"a text has at most {MOST_CHARACTERS} characters"
            raise TextError(ValueError, f"{fact}, got {len(text)}")
        self.tokens, self.at = _tokens(text), 0
        self.captures, self.mask = {x.name: x for x in captures}, mask
        self.named: dict[str, Node] = {}
        self.bracketed: dict[int, Node] = {}  # by their ids, those in parentheses, and parts

    @property
    def next(self) -> Token:
        return self.tokens[self.at]

    def take(self, text: str = "") -> Token:
        token = self.next
        if text and token.text != text:
            self.refuse(token, f"expected {text}")
        self.at += 1
        return token

    def refuse(self, token: Token, fact: str) -> NoReturn:
        got = f"{token.text!r}" if token.kind != "end" else "the end of the text"
        raise TextError(ValueError, f"{fact}, got {got}", token.place)

    def statements(self) -> Node:
        while self.next.kind == "name" and self.tokens[self.at + 1].text == "=":
            token = self.take()
            if token.text in tree.RESERVED | self.captures.keys() | self.named.keys():
                self.refuse(token, "a part needs a name that nothing else has")
            self.take("=")
            part = self.named[token.text] = self.expression()
            self.bracketed[id(part)] = part
            self.take(";")
        result = self.expression()
        if self.next.kind != "end":
            self.refuse(self.next, "expected an operator or the end of the text")
        return result

    def expression(self, least: int = 0) -> Node:
        """An expression of operators that bind at least as tightly as this level."""
        left = self.operand()
        while self.next.kind == "symbol":
            operator = self.next.text
            level = PRECEDENCE.get(operator)
            if level is None or level < max(least, 1):
                break
            self.take()
            right = self.expression(level + 1)
            self.refuse_mixed(operator, left, right)
            left = self.apply(operator, [left, right], (_begin(left), _end(right)))
        if least == 0 and self.next.text == "?":
            self.take()
            first = self.expression()
            self.take(":")
            second = self.expression()
            left = self.apply("where", [left, first, second], (_begin(left), _end(second)))
        return left

    def apply(self, op: str, args: list[Node], place: Place) -> Node:
        return tree.apply(op, args, place)

    def refuse_mixed(self, operator: str, *sides: Node) -> None:
        """Refuses ``a & b == c``, which C++ and Python read differently."""
        for x in sides:
            bare = x.op in tree.COMPARISONS and id(x) not in self.bracketed
            if bare and operator in (*tree.BITWISE, *tree.COMPARISONS):
                fact = f"a comparison beside {operator} needs parentheses"
                raise TextError(ValueError, fact, x.place)

    def operand(self) -> Node:
        token = self.take()
        if token.text in UNARY:
            x = self.operand()
            return self.apply(UNARY[token.text], [x], (token.place[0], _end(x)))
        if token.text == "+":
            return self.operand()
        if token.text == "(":
            inside = self.expression()
            end = self.take(")").place[1]
            x = Node(inside.op, inside.kind, inside.args, inside.value, (token.place[0], end))
            self.bracketed[id(x)] = x
            return x
        if token.kind == "number":
            return _number(token)
        if token.kind == "name":
            return self.of_name(token)
        return self.refuse(token, "expected a number, a name or a parenthesis")

    def of_name(self, token: Token) -> Node:
        """A variable, a part, an element of a capture, or a call of a function."""
        name = token.text
        arguments, end = None, token.place[1]
        if self.next.text == "(":
            arguments, end = self.arguments()
        place = (token.place[0], end)
        if name in self.captures:
            return tree.read(self.captures[name], arguments or [], place)
        if arguments is not None:
            if name in FUNCTIONS or name in tree.CASTS or name == "where":
                return self.apply(name, arguments, place)
            known = ", ".join((*FUNCTIONS, *tree.CASTS, "where"))
            self.refuse(token, f"an unknown function or capture; functions are {known}")
        if name in self.named:
            return self.named[name]
        if name in tree.CONSTANTS:
            return tree.literal(tree.CONSTANTS[name], place)
        if name in tree.NAMES and not (self.mask and name == "score"):
            return tree.name(name, place)
        known = ", ".join((tree.allowed_names(self.mask), *self.captures, *self.named))
        return self.refuse(token, f"an unknown name; names are {known}")

    def arguments(self) -> tuple[list[Node], int]:
        self.take("(")
        found: list[Node] = []
        while self.next.text != ")":
            if found:
                self.take(",")
            found.append(self.expression())
        return found, self.take(")").place[1]


def _tokens(text: str) -> list[Token]:
    tokens, at, end = [], 0, len(text.rstrip())
    while at < end:
        match = TOKEN.match(text, at)
        if match is None:
            place = len(text) - len(text[at:].lstrip())
            fact = f"a text has no {text[place]!r}"
            raise TextError(ValueError, fact, (place, place + 1))
        kind = match.lastgroup or ""
        tokens.append(Token(kind, match[kind], match.span(kind)))
        at = match.end()
    tokens.append(Token("end", "", (end, end + 1)))
    return tokens


def _number(token: Token) -> Node:
    text = token.text.lower()
    if text.startswith("0x"):
        return tree.literal(int(text, 16), token.place)
    if text.isdigit():
        if len(text) > 1 and text[0] == "0":
            fact = "C++ takes a number that begins with 0 for an octal one"
            raise TextError(ValueError, fact, token.place)
        return tree.literal(int(text), token.place)
    return tree.literal(float(text.removesuffix("f")), token.place)


def _begin(x: Node) -> int:
    return x.place[0] if x.place else 0


def _end(x: Node) -> int:
    return x.place[1] if x.place else 0
