"""The grammar of axes patterns: text to a tree of named dimensions, with a caret under every fault.

    pattern := dim*
    dim     := atom | "(" item+ ")"
    item    := atom | "(" item+ ")" | sum
    sum     := item ("+" item)+
    atom    := NAME | INT

`+` binds tighter than juxtaposition, and parentheses around one item vanish: `"(a b + c)"` is
`"(a (b + c))"`. A spec is the same text with marks: `/axis` or `/(axis axis)` behind a dimension
or any part of one names the mesh axes that shard it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardwise.sharding.errors import ShardwiseError

Position: TypeAlias = tuple[int, ...]
"""Where a node is: dimension, then child, then child of that child."""

Marks: TypeAlias = Mapping[Position, tuple[str, ...]]
"""Mesh axes behind nodes, by position."""

_TOKEN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|\S")
_WORD = re.compile(r"[A-Za-z0-9_]+")
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Atom:
    """A name, or a fixed size written as a number."""

    text: str

    @property
    def fixed(self) -> int | None:
        """The size when it is written in the pattern."""
        return int(self.text) if self.text.isdigit() else None

    @property
    def children(self) -> tuple[Node, ...]:
        """An atom has no parts."""
        return ()


@dataclass(frozen=True, slots=True)
class Product:
    """Several parts merged into one dimension, the first one major: `(heads hd)`."""

    children: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """Several parts laid one after the other in one dimension: `(heads + kv + kv)`."""

    children: tuple[Node, ...]


Node: TypeAlias = Atom | Product | Sum


class Fault(NamedTuple):
    """How to report a text that does not parse: the call as written, and the error class."""

    call: str
    kind: type[ShardwiseError]

    def at(self, text: str, column: int, *, expected: str) -> ShardwiseError:
        """The error for `column`, with the pattern and a caret under the fault."""
        found = _TOKEN.match(text, column)
        seen = repr(found.group()) if found else "the end"
        return self.kind(
            f"{self.call}({text!r}) does not parse at column {column}.",
            facts=[
                # One column per character, whatever kind of space the text uses.
                re.sub(r"\s", " ", text),
                f"{' ' * column}^",
                f"expected {expected}, found {seen}.",
            ],
            why="Dimensions are names, numbers, or parts in parentheses: '(heads hd) embed'.",
            fix="correct the text at the caret",
            column=column,
        )


class Reader:
    """A cursor over the tokens of one text."""

    def __init__(self, text: str, fault: Fault) -> None:
        self.text = text
        self.fault = fault
        self._tokens = [(m.group(), m.start()) for m in _TOKEN.finditer(text)]
        self._next = 0

    @property
    def token(self) -> str:
        """The token under the cursor; empty at the end."""
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    @property
    def column(self) -> int:
        """Where that token starts."""
        return self._tokens[self._next][1] if self._next < len(self._tokens) else len(self.text)

    def take(self) -> str:
        """Return the token under the cursor and step over it."""
        token = self.token
        self._next += 1
        return token

    def accept(self, token: str) -> bool:
        """Step over `token` if it is under the cursor."""
        if self.token != token:
            return False
        self._next += 1
        return True

    def expected(self, what: str) -> ShardwiseError:
        """The error for a token that should be `what`."""
        return self.fault.at(self.text, self.column, expected=what)

    def word(self, what: str) -> str:
        """Take a name (or number), else raise."""
        if not _WORD.fullmatch(self.token):
            raise self.expected(what)
        return self.take()


class _Part(NamedTuple):
    """A node and the marks inside it, by position relative to it."""

    node: Node
    marks: dict[Position, tuple[str, ...]]


def read_dims(reader: Reader) -> tuple[tuple[Node, ...], Marks]:
    """Read dimensions and their marks up to the first token that starts none."""
    parts = list(_read_dims(reader))
    return tuple(part.node for part in parts), _below(parts)


def _read_dims(reader: Reader) -> Iterator[_Part]:
    while reader.token == "(" or _WORD.fullmatch(reader.token):
        yield _read_operand(reader)


def _read_operand(reader: Reader) -> _Part:
    """An atom or a parenthesis, with the mark behind it."""
    part = _read_group(reader) if reader.token == "(" else _read_atom(reader)
    if reader.token == "/":
        if () in part.marks:
            raise reader.expected("one mark: these parentheses hold a single part, marked already")
        reader.take()
        part.marks[()] = _read_mark(reader)
    return part


def _read_atom(reader: Reader) -> _Part:
    if not _NUMBER.fullmatch(reader.token):
        return _Part(Atom(reader.word("a name, a number or '('")), {})
    if int(reader.token) == 0:
        raise reader.expected("a name, a number from 1 or '('")
    return _Part(Atom(str(int(reader.take()))), {})


def _read_group(reader: Reader) -> _Part:
    opened = reader.column
    reader.take()
    items: list[_Part] = []
    while not reader.accept(")"):
        if not reader.token:
            raise reader.expected(f"')' for the '(' at column {opened}")
        items.append(_read_item(reader))
    if not items:
        raise reader.fault.at(reader.text, opened, expected="parts between '(' and ')'")
    return items[0] if len(items) == 1 else _Part(Product(_nodes(items)), _below(items))


def _read_item(reader: Reader) -> _Part:
    terms = [_read_operand(reader)]
    while reader.accept("+"):
        terms.append(_read_operand(reader))
    return terms[0] if len(terms) == 1 else _Part(Sum(_nodes(terms)), _below(terms))


def _read_mark(reader: Reader) -> tuple[str, ...]:
    if not reader.accept("("):
        return (read_axis(reader),)
    axes = [read_axis(reader)]
    while not reader.accept(")"):
        axes.append(read_axis(reader))
    return tuple(axes)


def read_axis(reader: Reader) -> str:
    """Read the name of a mesh axis."""
    if _NUMBER.fullmatch(reader.token):
        raise reader.expected("the name of a mesh axis")
    return reader.word("the name of a mesh axis")


def _nodes(parts: list[_Part]) -> tuple[Node, ...]:
    return tuple(part.node for part in parts)


def _below(parts: list[_Part]) -> dict[Position, tuple[str, ...]]:
    return {(i, *at): axes for i, part in enumerate(parts) for at, axes in part.marks.items()}


def render(node: Node, marks: Marks, at: Position) -> str:
    """Canonical text of the node at position `at`; the inverse of `read_dims`."""
    if isinstance(node, Atom):
        text = node.text
    else:
        glue = " + " if isinstance(node, Sum) else " "
        parts = [render(child, marks, (*at, i)) for i, child in enumerate(node.children)]
        text = f"({glue.join(parts)})"
    axes = marks.get(at, ())
    if not axes:
        return text
    return f"{text}/{axes[0]}" if len(axes) == 1 else f"{text}/({' '.join(axes)})"
