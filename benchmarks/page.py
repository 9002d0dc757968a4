"""Pages of results: each benchmark owns one section of a page and writes it anew."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
_SECTION = "## "


def machine() -> str:
    """What the figures were measured on."""
    return (
        f"{os.cpu_count()} cores ({_processor()}), {platform.system()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}"
    )


def _processor() -> str:
    """The name of the processor; Linux tells it in a file only."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def sections(text: str) -> dict[str, str]:
    r"""What a page holds by heading; "" is what comes before the first.

    >>> sections("# Page\n\n## A\n\none\n\n## B\n\ntwo\n")
    {'': '# Page', 'A': 'one', 'B': 'two'}
    """
    found: dict[str, list[str]] = {"": []}
    heading = ""
    for line in text.splitlines():
        if line.startswith(_SECTION):
            heading = line.removeprefix(_SECTION)
            found[heading] = []
        else:
            found[heading].append(line)
    return {heading: "\n".join(lines).strip() for heading, lines in found.items()}


def put(page: Path, about: str, written: Mapping[str, str]) -> None:
    """Write some sections of a page, and leave the others as they are.

    Args:
        page: the file; made if it is not there.
        about: what comes before the first section.
        written: text by heading.
    """
    old = sections(page.read_text()) if page.exists() else {}
    new = {**old, **{heading: text.strip() for heading, text in written.items()}, "": about.strip()}
    parts = [new.pop(""), *(f"{_SECTION}{heading}\n\n{text}" for heading, text in new.items())]
    page.write_text("\n\n".join(parts) + "\n")
