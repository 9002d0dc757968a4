"""Host memory that begins at a page, and the bytes of host tensors."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

PAGE_BYTES = 4096
"""What requests past the page cache are multiples of."""


def padded(nbytes: int) -> int:
    """Whole pages.

    >>> padded(1), padded(4096)
    (4096, 4096)
    """
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def host_pages(nbytes: int, *, pin: bool = False) -> Tensor:
    """Bytes of host memory that begin at a page, as requests past the page cache need them.

    Args:
        nbytes: how many.
        pin: for copies to an accelerator.

    >>> host_pages(10).data_ptr() % 4096
    0
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if pin:
        block = torch.empty(padded(nbytes) + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
        skipped = -block.data_ptr() % PAGE_BYTES
        return block[skipped : skipped + nbytes]
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a shared one is not counted as this process's
    pages = mmap.mmap(-1, padded(nbytes), flags=private)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor.

    >>> bytes_of(torch.tensor([1, 2], dtype=torch.uint8)).tolist()
    [1, 2]
    """
    raw: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)
