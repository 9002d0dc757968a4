"""The directory of a checkpoint while it is written, and the rename that completes it.

[Note: names beside a checkpoint]
All ranks write `NAME` into `.NAME.saving-TOKEN` beside it, with a token of their job, so that two
jobs never share a file. Whoever writes there holds a shared lock on its `.lock`; a directory whose
lock is free was left by a job that died, and the next save of `NAME` removes it. The manifest is
written last, files and names are flushed, and one rename makes it `NAME`. If that exists, the two
names are exchanged in one step where the system can; else the old directory becomes
`.NAME.old-TOKEN` for the moment between two renames, and `resolve` finds it there. What is removed
loses its manifest first, so no reader takes what is left of it for a checkpoint.

On NFS the rename is atomic on the server, while other clients may see the old name for as long as
they cache attributes; locks need NFSv4 or lockd, and without them nothing is removed as a leftover.
Object stores mounted as file systems rename by copying: a checkpoint there is complete when it has
its manifest, and two jobs must not write one name.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.sharding.checkpoint.disk import disk_error, flush_folder
from shardwise.sharding.checkpoint.manifest import MANIFEST
from shardwise.sharding.checkpoint.placing import file_of
from shardwise.sharding.errors import CheckpointError, summarise

METADATA = ".metadata"
"""What torch's DCP reads."""

_LOCK = ".lock"
_TRIES = 16
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@dataclass(frozen=True)
class Target:
    """Where a checkpoint shall be, and who writes it.

    >>> Target(Path("/runs/step-10"), "a1.0").temporary.name
    '.step-10.saving-a1.0'
    """

    path: Path
    token: str

    @property
    def temporary(self) -> Path:
        """Where it is written."""
        return self.path.with_name(f".{self.path.name}.saving-{self.token}")

    @property
    def aside(self) -> Path:
        """Where a checkpoint of that name is put before it is removed."""
        return self.path.with_name(f".{self.path.name}.old-{self.token}")


class Draft:
    """The directory that a checkpoint is written in, locked as long as this lives.

    Args:
        target: what it will be.

    Raises:
        CheckpointError: it cannot be made.
    """

    def __init__(self, target: Target) -> None:
        self.path = target.temporary
        try:
            self._fd = _hold(self.path)
        except OSError as error:
            raise disk_error(error, self.path, "create", 0) from error

    def release(self) -> None:
        """Give up the lock; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def leave(self, rank: int) -> None:
        """Remove what this rank has written, and the directory if nobody else wrote in it."""
        _unlink(self.path / file_of(rank))
        try:
            others = [name for name in os.listdir(self.path) if name != _LOCK]
        except OSError:
            others = [""]
        if not others:
            shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def discard(self) -> None:
        """Remove it all, whoever wrote it."""
        discard(self.path)
        self.release()


def complete(target: Target, *, overwrite: bool) -> None:
    """Make what was written the checkpoint; it must be on disk with its manifest.

    Args:
        target: of the save.
        overwrite: whether a checkpoint of that name may be replaced.

    Raises:
        CheckpointError: there is one and it may not, or the system refuses.
    """
    flush_folder(target.temporary)
    try:
        if not _rename(target.temporary, target.path):
            check_free(target.path, overwrite=overwrite)
            _replace(target)
    except OSError as error:
        raise disk_error(error, target.path, "rename", 0) from error
    flush_folder(target.path.parent)
    _unlink(target.path / _LOCK)
    for name in _beside(target.path, "old"):
        discard(name)
    discard(target.temporary)


def check_free(path: Path, *, overwrite: bool) -> None:
    """Check that a checkpoint may be written under a name.

    Args:
        path: where it shall be.
        overwrite: whether a complete one may be replaced; an incomplete one always is.

    Raises:
        CheckpointError: something is there that may not be replaced.
    """
    if path.is_symlink():
        raise CheckpointError(
            "The path of a checkpoint is a symbolic link.",
            where=str(path),
            facts=f"it points to {os.readlink(path)}",
            why="A save ends by renaming a directory, which would replace the link and not what "
            "it points to.",
            fix="save under a name of its own, and let the link point there afterwards",
            path=str(path),
        )
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        return
    except OSError as error:
        raise disk_error(error, path, "list", 0) from error
    if MANIFEST in names:
        if overwrite:
            return
        raise CheckpointError(
            "There is a complete checkpoint of that name.",
            where=str(path),
            facts=f"it has {len(names)} files",
            why="A save replaces a checkpoint only if it is told to.",
            fix="save under another name, or save(..., overwrite=True)",
            path=str(path),
            files=len(names),
        )
    foreign = [name for name in names if not _is_ours(name)]
    if foreign:
        raise CheckpointError(
            f"The directory is no checkpoint: it holds {len(foreign)} files of others.",
            where=str(path),
            facts=summarise(foreign),
            why="A save makes the whole directory, and removes only what a save has left behind.",
            fix="save under another name, or move these files away",
            path=str(path),
            files=len(foreign),
        )


def clear_leftovers(target: Target) -> None:
    """Remove what dead jobs have left of saves of that name."""
    for path in _beside(target.path, "saving"):
        if path != target.temporary:
            _clear(path)
    if (target.path / MANIFEST).exists():
        for path in _beside(target.path, "old"):
            discard(path)


def remove(path: Path) -> None:
    """Remove a checkpoint; a crash leaves it complete or unreadable, never torn.

    Args:
        path: of the checkpoint.

    Raises:
        CheckpointError: the system refuses.
    """
    hidden = path.with_name(f".{path.name}.removed-{os.getpid()}")
    try:
        path.rename(hidden)
    except OSError as error:
        raise disk_error(error, path, "rename", 0) from error
    for left in path.parent.glob(".*.removed-*"):
        discard(left)


def discard(path: Path) -> None:
    """Remove a directory, its manifest first; what cannot be removed is left to the next save."""
    _unlink(path / MANIFEST)
    shutil.rmtree(path, ignore_errors=True)


def resolve(path: Path) -> Path:
    """Where the checkpoint of that name is: set aside, if a crash came between two renames.

    Args:
        path: that it was saved under.
    """
    if (path / MANIFEST).exists():
        return path
    aside = [one for one in _beside(path, "old") if (one / MANIFEST).exists()]
    return max(aside, key=lambda one: one.stat().st_mtime, default=path)


def is_hidden(name: str) -> bool:
    """Whether a name is one of [Note: names beside a checkpoint].

    >>> is_hidden(".step-10.saving-a1.0"), is_hidden("step-10")
    (True, False)
    """
    return name.startswith(".")


def _is_ours(name: str) -> bool:
    is_file = name.startswith("__") and name.endswith("_0.distcp")
    return is_file or name in (METADATA, _LOCK, MANIFEST)


def _beside(path: Path, kind: str) -> Iterator[Path]:
    prefix = f".{path.name}.{kind}-"
    try:
        names = os.listdir(path.parent)
    except OSError:
        names = []
    return (path.parent / name for name in sorted(names) if name.startswith(prefix))


def _hold(path: Path) -> int:
    """Make a directory and share its lock; the file descriptor holds it."""
    for _ in range(_TRIES):
        path.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            continue  # whoever clears leftovers was faster
        _flock(fd, fcntl.LOCK_SH)
        if _is_at(fd, path / _LOCK):
            return fd
        os.close(fd)
    raise OSError(errno.EBUSY, "others keep removing the directory")


def _clear(path: Path) -> None:
    """Remove a directory that nobody holds."""
    try:
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return
    try:
        if _flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_at(fd, path / _LOCK):
            discard(path)
    finally:
        os.close(fd)


def _flock(fd: int, kind: int) -> bool:
    """Lock; False where somebody else holds it or the file system has no locks."""
    try:
        fcntl.flock(fd, kind)
    except OSError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        there = path.stat()
    except OSError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _rename(source: Path, target: Path) -> bool:
    """Rename; False if something is in the way."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def _replace(target: Target) -> None:
    """Put what was written in the place of what is there."""
    if _exchange(target.temporary, target.path):
        return
    target.path.rename(target.aside)
    if not _rename(target.temporary, target.path):
        raise OSError(errno.EEXIST, "another job has saved under that name meanwhile")


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    paths = os.fsencode(one), os.fsencode(other)
    return not renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)


def _unlink(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        return
