"""Small trees of parameters with named axes, and random plans of them over tensor and data axes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.checkpoint.records import records_of

SIZES = {"heads": 8, "kv": 2, "group": 4, "hd": 3}
KINDS: dict[str, tuple[tuple[int, ...], str]] = {
    "column": ((8, 6), "mlp embed"),
    "column_bias": ((8,), "mlp"),
    "row": ((6, 8), "embed mlp"),
    "row_bias": ((6,), "embed"),
    "vocabulary": ((33, 6), "vocab embed"),
    "queries": ((24, 6), "(heads hd) embed"),
    "keys": ((6, 6), "(kv hd) embed"),
    "fused": ((36, 6), "((heads + kv + kv) hd) embed"),
    "fused_bias": ((36,), "((heads + kv + kv) hd)"),
    "transposed": ((6, 36), "embed ((heads + kv + kv) hd)"),
    "interleaved": ((72, 6), "(heads 3 hd) embed"),
    "grouped": ((36, 6), "(kv (group + 1 + 1) hd) embed"),
    "gated": ((16, 6), "(2 mlp) embed"),
    "experts": ((3, 6, 8), "experts embed mlp"),
    "norm": ((6,), "embed"),
    "gain": ((), ""),
}
"""Shapes and axes by kind; two kv heads are fewer than four ranks, 33 rows divide by nothing."""


class Leaf(nn.Module):
    """One parameter, in what a model is made of."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self) -> Tensor:
        return (self.weight.square() + self.weight).sum()


class Block(nn.Module):
    """A unit of several parameters."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        for kind in kinds:
            self.add_module(kind, Leaf(KINDS[kind][0]))

    def forward(self, x: Tensor) -> Tensor:
        for leaf in self.children():
            x = x * 0.9 + torch.sin(leaf() * x)
        return x


class Tree(nn.Module):
    """Two blocks alike and one more, so that there are units and a root."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(kinds) for _ in range(2))
        self.last = Block(("vocabulary", "norm", "gain"))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return self.last(x)


def tree(kinds: tuple[str, ...], dtype: torch.dtype = torch.float32) -> Tree:
    torch.manual_seed(0)
    return Tree(kinds).to(dtype)


def axes_of(module: nn.Module) -> dict[str, str]:
    """Names of the dimensions of every parameter that has any."""
    kinds = {path: path.split(".")[-2] for path, _ in module.named_parameters()}
    return {path: KINDS[kind][1] for path, kind in kinds.items() if KINDS[kind][1]}


@dataclass(frozen=True)
class Drawn:
    """A plan of any tree.

    `on` is the dimension that data axes cut of tensors with two dimensions and more; None: any.
    """

    mesh: sw.Mesh
    level: int = 0
    axes: tuple[str, ...] = ()
    on: int | None = None
    half: bool = False
    frozen: bool = False

    def plan(self, module: nn.Module) -> sw.Plan:
        found: list[sw.Transform] = []
        axes = axes_of(module)
        known = " ".join(axes.values())
        if "ep" in self.mesh:
            cut = [name for name in ("heads", "kv", "mlp", "vocab") if name in known]
            found.append(sw.tensor_parallel("ep", names=["embed"]))
            found.append(sw.tensor_parallel("tp", names=cut))
        elif "tp" in self.mesh:
            found.append(sw.tensor_parallel("tp"))
        if self.level:
            found.append(sw.zero(self.level, self.axes))
            matrices = [path for path, p in module.named_parameters() if p.ndim > 1]
            if self.on is not None and len(self.axes) == 1:
                found.append(sw.zero(self.level, self.axes, on=self.on, pad=True, where=matrices))
        if self.half:
            found.append(sw.precision(params="bfloat16", compute="bfloat16"))
        if self.frozen:
            found.append(sw.freeze("layers.1"))
        used = {name: size for name, size in SIZES.items() if name in known}
        return sw.plan(module, self.mesh, *found, axes=axes, sizes=used)


ALONE = Drawn(sw.Mesh(fsdp=1))
"""One rank that has everything."""

SHAPES: tuple[dict[str, int], ...] = (
    {"tp": 2},
    {"fsdp": 2},
    {"tp": 4},
    {"fsdp": 2, "tp": 2},
    {"tp": 2, "fsdp": 2},
    {"fsdp": 4},
    {"fsdp": 3, "tp": 2},
    {"tp": 8},
    {"tp": 4, "fsdp": 2},
    {"replica": 2, "fsdp": 2, "tp": 2},
    {"fsdp": 2, "tp": 2, "replica": 2},
    {"tp": 2, "replica": 2, "fsdp": 2},
    {"ep": 2, "tp": 2},
    {"tp": 4, "ep": 2},
)
"""Axis `ep` cuts what `tp` leaves whole, so that both cut one tensor."""


@st.composite
def plans(draw: st.DrawFn, *, ranks: int | None = None, half: bool, max_ranks: int = 8) -> Drawn:
    """A plan on some mesh, or on one of so many ranks."""
    fitting = [
        shape
        for shape in SHAPES
        if ranks in (None, math.prod(shape.values())) and math.prod(shape.values()) <= max_ranks
    ]
    mesh = sw.Mesh(**draw(st.sampled_from(fitting)))
    data = [axis for axis in mesh if axis not in ("tp", "ep")]
    if not data:
        return Drawn(mesh, half=half)
    axes = draw(
        st.permutations(data).flatmap(lambda a: st.integers(1, len(a)).map(lambda n: a[:n]))
    )
    return Drawn(
        mesh,
        draw(st.integers(0, 3)),
        tuple(axes),
        draw(st.sampled_from([None, 0, 1])),
        half,
    )


kinds = (
    st.sets(
        st.sampled_from(sorted(set(KINDS) - {"vocabulary", "norm", "gain"})), min_size=1, max_size=3
    )
    .map(sorted)
    .map(tuple)
)
"""What blocks are made of."""


def assert_padding_is_zero(state: Any) -> None:
    """Nothing but elements of whole tensors is other than 0, on any rank."""
    for rank, one in enumerate(state.ranks):
        for record in records_of(one):
            if record.block.is_floating_point():
                rest = record.block.clone()
                for _, values in replace(record, block=rest).pieces(rank):
                    values.zero_()
                assert not rest.any(), (rank, record.name)
