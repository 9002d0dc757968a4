"""Gradient transforms: pure functions from gradients to updates, fused on flat groups."""

from shardwise.optim.adamw import AdamWState, adamw
from shardwise.optim.adaptive import (
    AdagradState,
    AdamState,
    LionState,
    RMSpropState,
    adagrad,
    adam,
    lion,
    rmsprop,
)
from shardwise.optim.base import (
    EmptyState,
    GradientTransform,
    Part,
    Scale,
    Tensors,
    apply_in_place,
    from_factor,
    scale_of,
)
from shardwise.optim.chain import chain
from shardwise.optim.clip import (
    clip_by_global_norm,
    clip_by_group_norm,
    clip_by_value,
    global_norm,
)
from shardwise.optim.curves import cosine, exponential, inverse_sqrt, linear, step_decay
from shardwise.optim.ema import EMAState, ema
from shardwise.optim.from_torch import FromTorchState, from_torch, schedule_from_torch
from shardwise.optim.inject import InjectState, inject, set_hyperparameters
from shardwise.optim.norms import Norm, power_sum, squared_norm
from shardwise.optim.partition import PartitionState, masked, partition
from shardwise.optim.phases import join, one_cycle, wsd
from shardwise.optim.rules import At, Rule, from_rule
from shardwise.optim.schedules import Schedule, constant, warmup_cosine
from shardwise.optim.sgd import SGDState, sgd
from shardwise.optim.whole import AdafactorState, LambState, MuonState, adafactor, lamb, muon

__all__ = [
    "AdafactorState",
    "AdagradState",
    "AdamState",
    "AdamWState",
    "At",
    "EMAState",
    "EmptyState",
    "FromTorchState",
    "GradientTransform",
    "InjectState",
    "LambState",
    "LionState",
    "MuonState",
    "Norm",
    "Part",
    "PartitionState",
    "RMSpropState",
    "Rule",
    "SGDState",
    "Scale",
    "Schedule",
    "Tensors",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "apply_in_place",
    "chain",
    "clip_by_global_norm",
    "clip_by_group_norm",
    "clip_by_value",
    "constant",
    "cosine",
    "ema",
    "exponential",
    "from_factor",
    "from_rule",
    "from_torch",
    "global_norm",
    "inject",
    "inverse_sqrt",
    "join",
    "lamb",
    "linear",
    "lion",
    "masked",
    "muon",
    "one_cycle",
    "partition",
    "power_sum",
    "rmsprop",
    "scale_of",
    "schedule_from_torch",
    "set_hyperparameters",
    "sgd",
    "squared_norm",
    "step_decay",
    "warmup_cosine",
    "wsd",
]
