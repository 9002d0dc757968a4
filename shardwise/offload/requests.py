"""One request to a file, past the page cache, whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardwise.offload.files import Region
from shardwise.sharding.errors import OffloadError
from shardwise.sharding.host_pages import bytes_of


def read_bytes(region: Region, offset: int, data: Tensor) -> None:
    """Fill `data` from the file of a region.

    Raises:
        OffloadError: the drive has failed, or the file is shorter than it was.
    """
    _run(os.preadv, "read", region, offset, data)


def write_bytes(region: Region, offset: int, data: Tensor) -> None:
    """Write `data` to the file of a region.

    Raises:
        OffloadError: the drive has failed, or is full.
    """
    _run(os.pwritev, "write", region, offset, data)


def _run(
    call: Callable[[int, Sequence[Any], int], int],
    verb: str,
    region: Region,
    offset: int,
    data: Tensor,
) -> None:
    view, done = bytes_of(data), 0
    while done < len(view):
        try:
            moved = call(region.folder.direct_descriptor, [view[done:]], offset + done)
        except OSError as error:
            number = error.errno or errno.EIO
            raise _failed(verb, region, offset + done, len(view) - done, number) from error
        if not moved:
            raise _failed(verb, region, offset + done, len(view) - done, 0)
        done += moved


def _failed(verb: str, region: Region, offset: int, nbytes: int, number: int) -> OffloadError:
    cause = os.strerror(number) if number else "the file ends there"
    return OffloadError(
        f"Could not {verb} {nbytes:,} bytes of a file in {str(region.folder.path)!r}: {cause}.",
        facts=[f"at byte {offset:,} of the file; errno {number}"],
        why="State on disk is read and written in each update.",
        fix="check the drive; the last checkpoint is intact",
        path=str(region.folder.path),
        offset=offset,
        nbytes=nbytes,
        errno=number,
    )
