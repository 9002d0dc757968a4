"""The stage that a program's trace runs on: a template of its own, thrown away afterwards."""

from __future__ import annotations

import torch

from shardwise.sharding.functional import make_template
from shardwise.transforms.binding import Guide, Stage
from shardwise.transforms.buffer_sync import Sites, bind_buffers, find_buffers, read_buffers
from shardwise.transforms.casts import cast_buffers
from shardwise.transforms.lowering import Lowering


def stage_for_trace(
    lowering: Lowering, guide: Guide, buffers: Sites, device: torch.device
) -> tuple[Stage, Sites]:
    """A fresh stage and where it holds its buffers.

    A trace runs the user's code on fake tensors, and modules cache what they compute.

    Args:
        lowering: gives the module and the plan.
        guide: of the program.
        buffers: where the program holds the values that the trace starts from.
        device: where tensors live.
    """
    plan = lowering.plan
    template = make_template(lowering.module, plan.infos, device)
    sites = find_buffers(template.module)
    values = cast_buffers(read_buffers(buffers), plan.precision.buffers)
    bind_buffers(sites, values, ())
    casts = plan.precision.casts
    return Stage(template, plan.units, guide, plan.remat, casts, plan=plan), sites
