"""What replaying the edits of a plan gives: the four layouts of every parameter, and settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.sharding.boundaries import Cast
from shardwise.sharding.frames import Frame
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.rules import Rules
from shardwise.sharding.spec import Spec
from shardwise.sharding.tensor_cuts import TensorAxis
from shardwise.sharding.tiers import DEVICE, Tier
from shardwise.sharding.tree import FrozenMap
from shardwise.sharding.units import ParamInfo, Unit


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes beside those of the four layouts; see [Note: dtypes of a parameter] and [Note: casts].

    Args:
        gather: by parameter, what its gathers carry.
        reduce: by parameter, what its gradients are summed over ranks in.
        stochastic: parameters that are rounded stochastically, and have no master copy.
        casts: by module, what floating inputs and outputs are cast to; outer modules first.
        buffers: by buffer, the dtype it rests in, where that is not its own.
    """

    gather: FrozenMap[str, str] = field(default_factory=FrozenMap)
    reduce: FrozenMap[str, str] = field(default_factory=FrozenMap)
    stochastic: frozenset[str] = frozenset()
    casts: FrozenMap[str, Cast] = field(default_factory=FrozenMap)
    buffers: FrozenMap[str, str] = field(default_factory=FrozenMap)


@dataclass(frozen=True, slots=True)
class LossScale:
    """How the loss is scaled; `dynamic` False: always by `initial`."""

    initial: float = 2.0**16
    dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive_hysteresis: bool = False
    maximum: float = 2.0**32

    def __str__(self) -> str:
        return f"{'dynamic from' if self.dynamic else 'fixed at'} {self.initial:g}"


@dataclass(frozen=True, slots=True)
class Remat:
    """What is kept of a module that is recomputed in backward, and where.

    `names` belong to the policies `save` and `offload`, the text of a tier to `offload`.
    """

    policy: str
    names: tuple[str, ...] = ()
    tier: str = ""

    def __str__(self) -> str:
        verb = "offload" if self.policy == "offload" else "save"
        kept = f"{verb} {', '.join(self.names)}" if self.names else self.policy
        return f"{kept} on {self.tier}" if self.tier else kept


@dataclass(frozen=True, slots=True)
class Rests:
    """Where the parts of one parameter rest; `moments` and `masters` are the `opt` home."""

    params: Tier = DEVICE
    grads: Tier = DEVICE
    moments: Tier = DEVICE
    masters: Tier = DEVICE

    def __str__(self) -> str:
        named = {f: getattr(self, f) for f in ("params", "grads", "moments", "masters")}
        return ", ".join(f"{name} on {tier}" for name, tier in named.items() if tier != DEVICE)


HERE = Rests()
"""Wholly on the device."""


@dataclass(frozen=True, slots=True)
class Acts:
    """Where what a module saves for backward waits, and how many modules are fetched ahead."""

    tier: Tier
    prefetch: int = 1

    def __str__(self) -> str:
        return f"on {self.tier}, prefetch {self.prefetch}"


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How many passes a step takes, and what it keeps between them; see `accumulate`."""

    steps: int = 1
    reduce: str = "auto"
    gather: str = "micro"

    def __str__(self) -> str:
        return f"accumulate {self.steps} (reduce {self.reduce}, gather {self.gather})"


@dataclass(frozen=True, slots=True)
class Naming:
    """What is known of names beside the axes of the parameters.

    Args:
        sources: by parameter, where its axes come from, if they have names.
        guesses: by parameter without named axes, what they may be; `tensor_parallel` uses them.
        sizes: of names that shapes leave open.
        ints: by path of an attribute of a module, the names that its integer counts.
    """

    sources: FrozenMap[str, str] = field(default_factory=FrozenMap)
    guesses: FrozenMap[str, str] = field(default_factory=FrozenMap)
    sizes: FrozenMap[str, int] = field(default_factory=FrozenMap)
    ints: FrozenMap[str, str] = field(default_factory=FrozenMap)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """How layers are cut over mesh axes; see `tensor_parallel`.

    Args:
        axes: by the name that the user's mesh has for it.
        frames: by parameter that is cut.
        ints: by path of an attribute of a module, its value on every rank.
        logits: `auto`, `gathered` or `cut`.
        whole: by parameter that no axis cuts, why; for the table, not compared.
        guessed: parameters whose axes are guesses; likewise.
    """

    axes: FrozenMap[str, TensorAxis] = field(default_factory=FrozenMap)
    frames: FrozenMap[str, Frame] = field(default_factory=FrozenMap)
    ints: FrozenMap[str, int] = field(default_factory=FrozenMap)
    logits: str = "auto"
    whole: FrozenMap[str, str] = field(default_factory=FrozenMap, compare=False)
    guessed: frozenset[str] = field(default=frozenset(), compare=False)

    def block(self, info: ParamInfo) -> tuple[int, ...]:
        """The shape that a parameter has while its module runs."""
        frame = self.frames.get(info.path)
        return info.shape if frame is None else frame.block


@dataclass(frozen=True, slots=True)
class Base:
    """What a plan starts from, before any edit.

    `modules` are the paths of those with a forward, `buffers` those of floating buffers.
    """

    mesh: Mesh
    infos: tuple[ParamInfo, ...]
    units: tuple[Unit, ...]
    rules: Rules | None = None
    modules: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    naming: Naming = field(default_factory=Naming)


@dataclass(frozen=True, slots=True)
class Derived:
    """Everything lowering reads; equal when two plans lay every tensor out alike.

    `rests` has the parameters of which some part rests off the device, `fetch_ahead` how many units
    are fetched ahead where `params` do.
    """

    mesh: Mesh
    infos: tuple[ParamInfo, ...]
    units: tuple[Unit, ...]
    params: FrozenMap[str, Spec]
    grads: FrozenMap[str, Spec]
    opt: FrozenMap[str, Spec]
    compute: FrozenMap[str, Spec]
    batch: tuple[str, ...]
    keep: frozenset[str]
    prefetch: int
    accumulation: Accumulation
    precision: Precision
    loss_scale: LossScale | None
    remat: FrozenMap[str, Remat]
    tensor: TensorParallel = field(default_factory=TensorParallel)
    rests: FrozenMap[str, Rests] = field(default_factory=FrozenMap)
    acts: FrozenMap[str, Acts] = field(default_factory=FrozenMap)
    fetch_ahead: int = 0
