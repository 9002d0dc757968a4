"""Gradient transforms: pure functions from gradients to updates, fused on flat groups."""

from shardwise.optim.adamw import AdamWState, adamw
from shardwise.optim.base import (
    EmptyState,
    GradientTransform,
    Tensors,
    apply_in_place,
    from_factor,
)
from shardwise.optim.chain import chain
from shardwise.optim.clip import clip_by_global_norm, global_norm
from shardwise.optim.flat import squared_norm
from shardwise.optim.schedules import Schedule, constant, warmup_cosine
from shardwise.optim.sgd import SGDState, sgd

__all__ = [
    "AdamWState",
    "EmptyState",
    "GradientTransform",
    "SGDState",
    "Schedule",
    "Tensors",
    "adamw",
    "apply_in_place",
    "chain",
    "clip_by_global_norm",
    "constant",
    "from_factor",
    "global_norm",
    "sgd",
    "squared_norm",
    "warmup_cosine",
]
