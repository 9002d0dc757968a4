"""JAX-style functional sharding for PyTorch: a plan is data, a step is a pure function."""

from shardwise import optim
from shardwise.launch import spawn
from shardwise.sharding import errors, rules
from shardwise.sharding.axes import Axes
from shardwise.sharding.checkpoint.fingerprint import fingerprint
from shardwise.sharding.checkpoint.latest import latest
from shardwise.sharding.lifted import Lifted, to_global
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Plan, Transform, plan
from shardwise.sharding.rules import Rules
from shardwise.sharding.simulation import simulate
from shardwise.sharding.spec import Spec
from shardwise.sharding.state import State
from shardwise.sharding.tiers import Tier, disk
from shardwise.transforms.accumulate import accumulate
from shardwise.transforms.batch_sizes import BatchSizes, batch_sizes
from shardwise.transforms.carry import from_state
from shardwise.transforms.checkpointer import Checkpointer
from shardwise.transforms.compose import chain, masked, partition, tree_at
from shardwise.transforms.constrain import constrain
from shardwise.transforms.cross_entropy import cross_entropy, shift_labels
from shardwise.transforms.dropout import Dropout, dropout
from shardwise.transforms.exporting import export_safetensors
from shardwise.transforms.importing import (
    from_dcp,
    from_deepspeed,
    from_safetensors,
    from_torch_save,
)
from shardwise.transforms.initialise import from_module
from shardwise.transforms.local_regions import local
from shardwise.transforms.loss import Mean
from shardwise.transforms.loss_scale import loss_scale
from shardwise.transforms.lower import Lowered, lower
from shardwise.transforms.metrics import Metrics
from shardwise.transforms.micro import MicroBatches
from shardwise.transforms.offload import offload
from shardwise.transforms.precision import precision
from shardwise.transforms.program import Program
from shardwise.transforms.remat import name, offload_to, remat, save
from shardwise.transforms.resharding import reshard
from shardwise.transforms.restoring import from_checkpoint
from shardwise.transforms.tensor_parallel import sequence_parallel, tensor_parallel
from shardwise.transforms.tiled_loss import linear_cross_entropy
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
    "BatchSizes",
    "Checkpointer",
    "Dropout",
    "Lifted",
    "Lowered",
    "Mean",
    "Mesh",
    "Metrics",
    "MicroBatches",
    "Plan",
    "Program",
    "Rules",
    "Spec",
    "State",
    "Tier",
    "Transform",
    "accumulate",
    "batch_sizes",
    "chain",
    "constrain",
    "cross_entropy",
    "disk",
    "dropout",
    "errors",
    "export_safetensors",
    "fingerprint",
    "freeze",
    "from_checkpoint",
    "from_dcp",
    "from_deepspeed",
    "from_module",
    "from_safetensors",
    "from_state",
    "from_torch_save",
    "keep_gathered",
    "latest",
    "like",
    "linear_cross_entropy",
    "local",
    "loss_scale",
    "lower",
    "masked",
    "name",
    "offload",
    "offload_to",
    "optim",
    "partition",
    "plan",
    "precision",
    "prefetch",
    "remat",
    "reshard",
    "rules",
    "save",
    "sequence_parallel",
    "shard_grads",
    "shard_optimizer",
    "shard_params",
    "shift_labels",
    "simulate",
    "spawn",
    "tensor_parallel",
    "to_global",
    "tree_at",
    "zero",
]
