"""JAX-style functional sharding for PyTorch: a plan is data, a step is a pure function."""

from shardwise import optim
from shardwise.launch import spawn
from shardwise.sharding import errors, rules
from shardwise.sharding.axes import Axes
from shardwise.sharding.lifted import Lifted, to_global
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Plan, Transform, plan
from shardwise.sharding.rules import Rules
from shardwise.sharding.simulation import simulate
from shardwise.sharding.spec import Spec
from shardwise.sharding.state import State
from shardwise.transforms.compose import chain, masked, partition, tree_at
from shardwise.transforms.initialise import from_module
from shardwise.transforms.loss import Mean
from shardwise.transforms.lower import Lowered, lower
from shardwise.transforms.metrics import Metrics
from shardwise.transforms.program import Program
from shardwise.transforms.trace import like
from shardwise.transforms.zero import (
    freeze,
    keep_gathered,
    prefetch,
    shard_grads,
    shard_optimizer,
    shard_params,
    zero,
)

__all__ = [
    "Axes",
    "Lifted",
    "Lowered",
    "Mean",
    "Mesh",
    "Metrics",
    "Plan",
    "Program",
    "Rules",
    "Spec",
    "State",
    "Transform",
    "chain",
    "errors",
    "freeze",
    "from_module",
    "keep_gathered",
    "like",
    "lower",
    "masked",
    "optim",
    "partition",
    "plan",
    "prefetch",
    "rules",
    "shard_grads",
    "shard_optimizer",
    "shard_params",
    "simulate",
    "spawn",
    "to_global",
    "tree_at",
    "zero",
]
