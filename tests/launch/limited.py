"""A process that trains under a limit of its memory; run by test_offload_limits.py.

    python -m tests.launch.limited KIND FOLDER STEPS LIMIT_MB [--kill]

Prints one line of JSON: resident memory that no file is behind, in bytes, as it went.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw

WIDTHS = {"large": 2048, "small": 128}
LAYERS = 12


class Model(nn.Module):
    """Twelve units; the large one has 50 million parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def anonymous() -> int:
    """Resident bytes that no file is behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def data_bytes() -> int:
    """What RLIMIT_DATA counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def transforms(kind: str, folder: str) -> list[sw.Transform]:
    on_disk = sw.disk(folder)
    return {
        "plain": [],
        "disk": [sw.offload("opt", on_disk)],
        "all": [
            sw.offload("opt", on_disk),
            sw.offload("params", "pinned_host"),
            sw.offload("acts", "pinned_host"),
        ],
    }[kind]


def main() -> None:
    kind, folder, steps, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    width = WIDTHS["large" if limit else "small"]
    with torch.device("meta"):
        model = Model(width)
    plan = sw.plan(model, sw.Mesh(fsdp=1), *transforms(kind, folder))
    program: Any = sw.lower(plan, loss_fn, sw.optim.adamw(1e-3)).bind()
    if limit:
        most = data_bytes() + (limit << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    batch = torch.randn(64 if not limit else 4, width, generator=torch.Generator().manual_seed(0))
    state = program.init(seed=0)
    seen: list[int] = []
    losses: list[float] = []
    for step in range(steps):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics.loss))
        seen.append(anonymous())
        if "--kill" in sys.argv and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps({"anonymous": seen, "losses": losses, "state": state.nbytes}))


if __name__ == "__main__":
    main()
