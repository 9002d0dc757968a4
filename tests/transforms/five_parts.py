"""How tests look at an error: five parts in their order, and numbers by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.sharding.errors import ShardwiseError


def check(
    error: BaseException, kind: type[ShardwiseError], *texts: str, **numbers: Any
) -> ShardwiseError:
    """All five parts are there in their order, and the numbers are attributes as well as text."""
    assert isinstance(error, kind), repr(error)
    assert error.what
    assert error.why
    assert error.fix
    assert error.where or error.facts
    text = str(error)
    parts = [error.what, error.where, *error.facts, error.why, f"Fix: {error.fix}"]
    lines = [line for part in parts for line in part.splitlines() if line]
    assert [line.strip() for line in text.splitlines()] == [line.strip() for line in lines]
    for part in texts:
        assert part in text, f"{part!r} is not in:\n{text}"
    for name, value in numbers.items():
        assert error.numbers.get(name) == value, (name, error.numbers)
    return error


def check_all(
    errors: Sequence[BaseException], kind: type[ShardwiseError], *texts: str, **numbers: Any
) -> None:
    assert errors
    for error in errors:
        check(error, kind, *texts, **numbers)
