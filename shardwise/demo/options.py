"""What a run of the demo is asked to do, and what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the demo; plain data, so that it can be sent to every rank.

    Args:
        mesh: axes with sizes; `tp` cuts layers, the others split the batch.
        zero: ZeRO level, 0 (replicated) to 3, over the axis `fsdp`, else the last one that splits
            the batch.
        sequence: cut activations along the sequence over `tp`.
        precision: `fp32`, or the dtype in which modules compute: `bf16`, `fp16`.
        accumulate: micro-batches of a step.
        remat: recompute every layer in backward.
        offload: what goes off the device, and where: pairs such as `("opt", "disk")`; files lie in
            the system's folder for temporary ones.
        steps: optimizer steps.
        rows: rows of the global batch, cut over the ranks.
        seed: of weights and batches.
        learning_rate: peak of the schedule.
        check: repeat the first steps against one process.
        out: folder for the weights, relative to where the demo was started.
        checkpoint: folder that the run is saved in, and from which it goes on; empty: neither.
        every: steps from one checkpoint to the next.
        peers: folder in a memory file system for copies of each checkpoint; empty: none.
        kill_at: step in which a rank ends itself, unless one has before; 0: none.
        kill_rank: that rank.
    """

    mesh: tuple[tuple[str, int], ...] = (("fsdp", -1),)
    zero: int = 3
    sequence: bool = False
    precision: str = "fp32"
    accumulate: int = 1
    remat: bool = False
    offload: tuple[tuple[str, str], ...] = ()
    steps: int = 200
    rows: int = 64
    seed: int = 0
    learning_rate: float = 3e-3
    check: bool = False
    out: str = "runs/demo"
    checkpoint: str = ""
    every: int = 20
    peers: str = ""
    kill_at: int = 0
    kill_rank: int = 0


class Traffic(NamedTuple):
    """Collectives of one step and their payload on one rank."""

    count: int
    payload_bytes: int


class Outcome(NamedTuple):
    """Figures of a finished run; losses in nats per byte.

    The same on every rank, but for the speed each has seen, and for `largest_difference` and
    `sample`, which rank 0 alone works out. Bytes of a step are the most beyond rest, activations
    included; plain ones are those of float32, one micro-batch, whole sequences and no
    recomputation. Losses are those of all steps of a run, those that were taken before it went on
    at `first_step` too. `reference` is what `largest_difference` is from.
    """

    ranks: int
    train_loss: float
    eval_loss: float
    unigram_nats: float
    tokens_per_second: float
    predicted_bytes: int
    measured_bytes: int
    predicted_step: int
    measured_step: int
    plain_step: int
    predicted: Traffic
    executed: Traffic
    same_collectives: bool
    largest_difference: float | None
    weights: str
    sample: str
    reference: str = ""
    losses: tuple[float, ...] = ()
    first_step: int = 0
    recovery_seconds: float | None = None
