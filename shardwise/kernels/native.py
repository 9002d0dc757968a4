"""Builds the C kernels at their first use, and loads them; absent without a compiler.

[Note: a build at first use]
The source is plain C without torch's headers, so any compiler builds it at once. The library is
kept in the user's cache under a name that its source, its flags and its compiler make, and written
under another name first: ranks that build at the same moment all end with a whole one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "csrc" / "step.c"

FLAGS = (
    "-O3",
    "-std=gnu11",
    # A fused product rounds once where two operations round twice: vectors and the elements that
    # are left over would differ.
    "-ffp-contract=off",
    # Without these two no root is vectorised.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
)

_SECONDS = 60


@functools.cache
def library() -> Any:
    """The loaded library, or None: no compiler, or it has failed. Said once, in the log."""
    log = logging.getLogger("shardwise")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        log.warning("No C compiler: optimizers take several passes of torch instead of one.")
        return None
    try:
        return load(build(compiler))
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", b"") or str(error).encode()
        log.warning("The C kernels cannot be built, torch is used: %s", told.decode()[-300:])
        return None


def build(compiler: str, *, flags: tuple[str, ...] = FLAGS, folder: Path | None = None) -> Path:
    """The library's path; compiled unless it is there.

    Args:
        compiler: of C.
        flags: for it; threads are asked for beside them, if it has them.
        folder: where to keep it; default: the user's cache.

    Raises:
        SubprocessError: the compiler has failed.
    """
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=_SECONDS
    ).stdout
    made_of = (SOURCE.read_bytes(), " ".join(flags).encode(), version, platform.machine().encode())
    name = f"step-{hashlib.sha256(b'|'.join(made_of)).hexdigest()[:16]}.so"
    folder = folder or cache_folder()
    target = folder / name
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as place:
        made = Path(place) / name
        for threads in (("-fopenmp",), ()):
            command = [compiler, *flags, *threads, str(SOURCE), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, check=False, timeout=_SECONDS)
            if not done.returncode:
                break
        else:
            raise subprocess.CalledProcessError(done.returncode, command, stderr=done.stderr)
        os.replace(made, target)
    return target


def load(path: Path) -> Any:
    """The library at a path, with the types of its functions.

    Args:
        path: from `build`.
    """
    found = ctypes.CDLL(str(path))
    pointers = ctypes.POINTER(ctypes.c_void_p)
    numbers, lengths = ctypes.POINTER(ctypes.c_double), ctypes.POINTER(ctypes.c_int64)
    found.sw_step.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        pointers,
        lengths,
        *[ctypes.c_int] * 3,
        ctypes.c_double,
        numbers,
        *[ctypes.c_int] * 2,
    ]
    found.sw_step.restype = None
    found.sw_squares.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    found.sw_squares.restype = ctypes.c_double
    return found


def cache_folder() -> Path:
    """Where libraries are kept; one of this process where the user's cache cannot be written to."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "shardwise" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _own_folder()
    return folder if os.access(folder, os.W_OK) else _own_folder()


@functools.cache
def _own_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="shardwise-kernels-"))
