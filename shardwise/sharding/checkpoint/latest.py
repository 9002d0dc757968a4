"""Which directories are complete checkpoints, and which of them is the newest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from shardwise.sharding.checkpoint.folders import is_hidden, resolve
from shardwise.sharding.checkpoint.manifest import MANIFEST, Manifest
from shardwise.sharding.errors import CheckpointError


class Latest(NamedTuple):
    """The newest complete checkpoint of a directory.

    Args:
        path: of the checkpoint; None: there is none.
        step: that it was saved at; -1 for none.
        skipped: what newer or older was passed over, and why.
    """

    path: Path | None
    step: int
    skipped: tuple[str, ...]


def latest(directory: str | os.PathLike[str]) -> Latest:
    """The checkpoint of the highest step that has all its files, of the size they must have.

    Local: in a job, rank 0 asks and tells the others, so that all go by one answer. Elements are
    verified when they are read.

    Args:
        directory: that holds checkpoints; need not exist.
    """
    found: list[tuple[int, float, Path]] = []
    skipped = [f"{name}: this save was not completed" for name in _drafts(Path(directory))]
    for path in _candidates(Path(directory)):
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            skipped.append(f"{path.name}: {' '.join(error.facts) or error.what}")
            continue
        fault = _lacking(path, manifest)
        if fault:
            skipped.append(f"{path.name}: {fault}")
        else:
            found.append((manifest.step, (path / MANIFEST).stat().st_mtime, path))
    if not found:
        return Latest(None, -1, tuple(skipped))
    step, _, path = max(found)
    return Latest(path, step, tuple(skipped))


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a checkpoint; runs nothing.

    Args:
        path: of the checkpoint; see `folders.resolve`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    return Manifest.from_json(manifest_text(path), str(Path(path) / MANIFEST))


def manifest_text(path: str | os.PathLike[str]) -> str:
    """The manifest of a checkpoint as it was written.

    Args:
        path: of the checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return (Path(path) / MANIFEST).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _no_checkpoint(Path(path), error) from None


def why_incomplete(path: str | os.PathLike[str]) -> str:
    """Why a directory is no complete checkpoint; empty if it is one.

    Args:
        path: of the directory.

    >>> why_incomplete("/nowhere")
    'there is no such directory'
    """
    try:
        return _lacking(Path(path), read_manifest(path))
    except CheckpointError as error:
        return error.facts[0]


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _drafts(directory: Path) -> list[str]:
    """What a job that has died, or still lives, has not made a checkpoint."""
    return [name for name in _names(directory) if is_hidden(name) and ".saving-" in name]


def _candidates(directory: Path) -> list[Path]:
    """Directories that are, or claim to be, checkpoints; set aside ones stand for their name."""
    names = _names(directory)
    visible = {name for name in names if not is_hidden(name)}
    # A crash between the two renames of an overwrite leaves no directory of that name.
    aside = {name[1:].rpartition(".old-")[0] for name in names if ".old-" in name}
    paths = [resolve(directory / name) for name in sorted(visible | aside - {""})]
    return [path for path in paths if path.is_dir()]


def _lacking(path: Path, manifest: Manifest) -> str:
    for name, nbytes in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != nbytes:
            return f"{name} has {size} bytes, and must have {nbytes}"
    return ""


def _no_checkpoint(path: Path, error: Exception) -> CheckpointError:
    if not path.exists():
        fact = "there is no such directory"
    elif not (path / MANIFEST).exists():
        fact = f"it has no {MANIFEST}"
    else:
        fact = f"{MANIFEST} cannot be read: {error}"
    return CheckpointError(
        "There is no complete checkpoint at that path.",
        where=str(path),
        facts=fact,
        why=f"{MANIFEST} is written last, when all files are on disk; without it a save was not "
        "completed.",
        fix="pass the path that program.save was given, or take the newest complete one of a "
        "directory with sw.latest(directory)",
        path=str(path),
    )
