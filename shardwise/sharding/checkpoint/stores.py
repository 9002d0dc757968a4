"""Copies of checkpoints in the memory of nodes: what a store holds, and which copy is whole.

[Note: peer copies]
A store is a directory of one rank, `<root>/<run>/rank-<r>`, in a memory file system of its node.
Each generation in it is a checkpoint directory with two of the files: the rank's own, and that of
one peer, on another node where there is one. A generation is written beside its place, gets its
manifest last, and is renamed; so one that has its name is whole. The generation before it goes when
every rank has said that the new one is in place. After a restart ranks look at all stores that are
on their nodes, those of ranks that no longer exist too; the newest generation of which every file
is in some store is a checkpoint like any other, spread over nodes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.sharding.checkpoint.keeping import name_of, step_of
from shardwise.sharding.checkpoint.manifest import MANIFEST, Manifest
from shardwise.sharding.errors import CheckpointError

_STORE = "rank-"
_BESIDE = ".new-"


@dataclass(frozen=True)
class Copy:
    """One generation in one store.

    Args:
        path: its directory.
        step: of the state.
        key: the same for all stores that hold parts of one save.
        files: what it holds of the files.
        needs: all files of the save.
    """

    path: str
    step: int
    key: str
    files: tuple[str, ...]
    needs: tuple[str, ...]


class Store:
    """The directory in which one rank keeps its copies; see [Note: peer copies].

    Args:
        root: of the stores of this node.
        run: name of the run, so that other runs on the node are left alone.
        rank: whose store it is.
    """

    def __init__(self, root: Path, run: str, rank: int) -> None:
        self.path = root / run / f"{_STORE}{rank}"

    def begin(self, step: int) -> Path:
        """An empty directory to write a generation in; leftovers of earlier ones go."""
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(f"{_BESIDE}*"):
            shutil.rmtree(left)
        beside = self.beside(step)
        beside.mkdir()
        return beside

    def beside(self, step: int) -> Path:
        """Where a generation is written."""
        return self.path / f"{_BESIDE}{name_of(step)}"

    def complete(self, step: int, manifest: str) -> None:
        """Give a generation its manifest and its name; one of the same step makes room."""
        beside = self.beside(step)
        (beside / MANIFEST).write_text(manifest)
        place = self.path / name_of(step)
        if place.exists():
            # Renamed first: a directory that is half removed must not have the name.
            old = self.path / f"{_BESIDE}old-{name_of(step)}"
            os.rename(place, old)
            os.rename(beside, place)
            shutil.rmtree(old)
        else:
            os.rename(beside, place)

    def keep_only(self, step: int) -> None:
        """Remove every other generation."""
        for path in self.path.iterdir():
            if path.name != name_of(step):
                shutil.rmtree(path, ignore_errors=True)


def run_name(folder: str) -> str:
    """Name of a run by its directory on disk.

    >>> run_name("/data/run 7")
    'run_7-6f3cb628'
    """
    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in Path(folder).name)
    return f"{plain}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"


def copies_in(root: Path, run: str) -> tuple[list[Copy], list[str]]:
    """All generations in all stores that this process sees.

    Args:
        root: of the stores of this node.
        run: see `run_name`.

    Returns:
        The copies, and why others were left out.
    """
    found: list[Copy] = []
    left: list[str] = []
    for path in sorted((root / run).glob(f"{_STORE}*/*")):
        if step_of(path.name) is None:
            continue
        try:
            found.append(_read(path))
        except (CheckpointError, OSError) as error:
            left.append(f"{path}: {error}")
    return found, left


def _read(path: Path) -> Copy:
    text = (path / MANIFEST).read_text()
    manifest = Manifest.from_json(text, str(path / MANIFEST))
    files = tuple(file for file in manifest.files if _size(path / file) == manifest.files[file])
    return Copy(str(path), manifest.step, key_of(text), files, tuple(manifest.files))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def key_of(manifest: str) -> str:
    """What the stores that hold parts of one save have in common."""
    return hashlib.sha256(manifest.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Spread:
    """A save of which every file is in some store.

    Args:
        step: of the state.
        key: of the save.
        holders: for each file the ranks that see it, and the copy that each sees it in.
    """

    step: int
    key: str
    holders: Mapping[str, Mapping[int, str]]


def newest_whole(seen: Sequence[Sequence[Copy]]) -> tuple[Spread | None, dict[int, str]]:
    """The newest save of which every file is in some store.

    Args:
        seen: the copies that each rank sees, in rank order.

    Returns:
        The save, and what newer ones lack, by step.

    >>> copy = Copy("/dev/shm/rank-0/step-00000002", 2, "k", ("a",), ("a", "b"))
    >>> newest_whole([[copy], []])
    (None, {2: 'no store that is left holds b'})
    """
    saves: dict[tuple[int, str], Sequence[str]] = {}
    for copy in (copy for copies in seen for copy in copies):
        saves[copy.step, copy.key] = copy.needs
    lacking: dict[int, str] = {}
    for (step, key), needs in sorted(saves.items(), reverse=True):
        holders: dict[str, dict[int, str]] = {file: {} for file in needs}
        for rank, file, path in _held(seen, step, key):
            holders[file].setdefault(rank, path)
        without = [file for file, ranks in holders.items() if not ranks]
        if not without:
            return Spread(step, key, holders), lacking
        lacking[step] = f"no store that is left holds {', '.join(without)}"
    return None, lacking


def _held(seen: Sequence[Sequence[Copy]], step: int, key: str) -> Iterator[tuple[int, str, str]]:
    for rank, copies in enumerate(seen):
        for copy in copies:
            if (copy.step, copy.key) == (step, key):
                for file in copy.files:
                    yield rank, file, copy.path


def shift_between(nodes: Sequence[str]) -> int:
    """How far on the rank is that keeps a rank's copy: on another node for as many as possible.

    Args:
        nodes: where each rank runs.

    >>> shift_between(["a", "a", "b", "b"]), shift_between(["a", "b", "c"]), shift_between(["a"])
    (2, 1, 0)
    """
    ranks = len(nodes)
    if ranks == 1:
        return 0

    def apart(shift: int) -> int:
        return sum(nodes[rank] != nodes[(rank + shift) % ranks] for rank in range(ranks))

    return max(range(1, ranks), key=lambda shift: (apart(shift), -shift))
