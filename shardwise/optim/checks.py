"""Hyperparameters are checked once, when a transform is made, with one text for all of them."""

from __future__ import annotations

import math
from numbers import Real

from shardwise.sharding.errors import OptimError


def check_non_negative(call: str, name: str, value: float, *, usual: str) -> None:
    """Raise `OptimError` unless `0 <= value < inf`."""
    if not (_is_real(value) and 0 <= value < math.inf):
        raise _out_of_range(call, name, value, f"0 <= {name} < inf", usual)


def check_positive(call: str, name: str, value: float, *, usual: str) -> None:
    """Raise `OptimError` unless `0 < value`; infinity is allowed."""
    if not (_is_real(value) and value > 0):
        raise _out_of_range(call, name, value, f"0 < {name}", usual)


def check_fraction(call: str, name: str, value: float, *, usual: str) -> None:
    """Raise `OptimError` unless `0 <= value < 1`."""
    if not (_is_real(value) and 0 <= value < 1):
        raise _out_of_range(call, name, value, f"0 <= {name} < 1", usual)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _out_of_range(call: str, name: str, value: float, rule: str, usual: str) -> OptimError:
    return OptimError(
        f"{call}({name}={value!r}) is out of range.",
        where=f"argument {name} of {call}()",
        facts=f"{name} is {value!r}; allowed: {rule}.",
        why="Hyperparameters are checked when the transform is made, before any tensor moves.",
        fix=usual,
        **{name: value},
    )
