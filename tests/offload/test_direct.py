"""Reads past host memory, with files and without the GPU: a stand-in for kvikio reads to memory."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.offload import direct
from shardwise.offload.direct import DirectReads, direct_reads
from shardwise.offload.files import Folder
from shardwise.offload.store import Store
from shardwise.sharding.errors import OffloadError
from shardwise.sharding.host_pages import PAGE_BYTES, bytes_of


class File:
    """`kvikio.CuFile` as far as it is used, on memory of the host."""

    opened = 0
    short = False
    broken = False

    def __init__(self, path: str, flags: str) -> None:
        assert flags == "r"
        File.opened += 1
        self._file = os.open(path, os.O_RDONLY)

    def pread(self, buf: Tensor, size: int, file_offset: int) -> Any:
        assert file_offset % PAGE_BYTES == size % PAGE_BYTES == 0
        assert buf.dtype == torch.uint8

        def get() -> int:
            if File.broken:
                raise RuntimeError("KvikIO failure at: posix_io.cpp: EIO")
            moved = os.preadv(self._file, [bytes_of(buf)], file_offset)
            return moved - 1 if File.short else moved

        return SimpleNamespace(get=get)


class HostRoom:
    """Targets in host memory; counts what is handed over."""

    handed = 0

    def take(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 7, dtype=torch.uint8)

    def hand_over(self, tensor: Tensor) -> None:
        self.handed += 1


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    monkeypatch.setattr(File, "opened", 0)
    with tempfile.TemporaryDirectory() as path:
        yield Folder(path)


def reads() -> DirectReads:
    return DirectReads(SimpleNamespace(CuFile=File), HostRoom())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("start", "stop"), [(0, 5000), (3, 4999), (4096, 5000), (17, 18)])
def test_a_tensor_of_a_file_without_a_name(
    folder: Folder, dtype: torch.dtype, start: int, stop: int
) -> None:
    whole = folder.empty(5000, dtype).copy_(torch.randn(5000))
    part = whole[start:stop]
    region = folder.region(part)
    assert region is not None
    gpu = reads()
    for _ in range(2):
        assert torch.equal(gpu.fetch(region, part).take(), part)
    gpu.fetch(region, part).drop()
    assert File.opened == 1


@pytest.mark.parametrize("fault", ["short", "broken"])
def test_a_drive_that_fails(folder: Folder, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    flat = folder.empty(100, torch.float32).zero_()
    region = folder.region(flat)
    assert region is not None
    monkeypatch.setattr(File, fault, True)
    with pytest.raises(OffloadError, match=r"Could not read 4,096 bytes .* to a GPU") as caught:
        reads().fetch(region, flat).take()
    assert caught.value.numbers["path"] == str(folder.path)
    reads().fetch(region, flat).drop()


def test_the_store_reads_so_where_it_can() -> None:
    with tempfile.TemporaryDirectory() as path:
        store = Store(torch.device("cpu"))
        store._direct, store._looked = reads(), True
        flat = store.folder(path).empty(300, torch.float32).copy_(torch.randn(300))
        assert torch.equal(store.fetch(flat).take(), flat)
        assert store.engine.read_bytes == 0


@pytest.mark.parametrize("copies", [True, False])
def test_kvikio_that_copies_through_the_host_is_not_used(
    monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    kvikio = ModuleType("kvikio")
    kvikio.__spec__ = SimpleNamespace()  # type: ignore[assignment]
    kvikio.defaults = SimpleNamespace(is_compat_mode_preferred=lambda: copies)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvikio", kvikio)
    monkeypatch.setattr(direct, "StreamRoom", lambda device: HostRoom())
    assert (direct_reads(torch.device("cuda")) is None) is copies
    assert direct_reads(torch.device("cpu")) is None
