"""Where an edit was written, and what the combinators around it add to it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import PurePath
from typing import NamedTuple

from shardwise.sharding.edits import Clauses, Edit


class Scope(NamedTuple):
    """What a combinator adds to every edit made inside of it.

    With `unfinished` more edits follow: a plan is checked when all of them are there, so that the
    order of transforms cannot matter.
    """

    clauses: Clauses = ()
    name: str = ""
    unfinished: bool = False


OUTERMOST = Scope()
"""Outside of all combinators."""


def call_site() -> str:
    """The nearest line outside of this package, as `file.py:12 in train`."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] == "shardwise" and frame.f_back:
        frame = frame.f_back
    code = frame.f_code
    return f"{PurePath(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


def scoped(edit: Edit, scope: Scope) -> Edit:
    """The edit with what a scope adds."""
    inner = edit.within(scope.clauses) if scope.clauses else edit
    return replace(inner, by=": ".join((scope.name, edit.by))) if scope.name else inner
