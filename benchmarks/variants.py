"""The systems that are compared: each trains the same GPT on this rank's batches with AdamW."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.demo.gpt import GPT, GPTConfig

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
Batch = dict[str, Tensor]


@dataclass
class Variant:
    """One system: a step on a local batch, the bytes it holds, and its whole weights."""

    name: str
    step: Callable[[Batch], float]
    held: Callable[[], int]
    weights: Callable[[], dict[str, Tensor]] | None = None
    traffic: Callable[[], tuple[int, int]] | None = None
    keep: list[Any] = field(default_factory=list)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the next byte; all ranks have as many."""
    logits = model(batch["tokens"]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch["labels"].flatten())


def make_model(config: GPTConfig) -> GPT:
    """The same weights in every system and on every rank."""
    torch.manual_seed(0)
    return GPT(config)


def held_by(*things: Any) -> int:
    """Bytes of the storages behind tensors of modules, optimizers and states."""
    storages: dict[int, int] = {}
    for thing in things:
        for tensor in _tensors(thing):
            local = getattr(tensor, "_local_tensor", tensor)
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(thing: Any) -> list[Tensor]:
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, nn.Module):
        grads = [p.grad for p in thing.parameters() if p.grad is not None]
        return [*thing.parameters(), *thing.buffers(), *grads]
    if isinstance(thing, dict):
        return [tensor for value in thing.values() for tensor in _tensors(value)]
    if isinstance(thing, list):
        return [tensor for value in thing for tensor in _tensors(value)]
    return []


def _torch_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Batch], float]:
    def step(batch: Batch) -> float:
        loss = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )


def plain(config: GPTConfig) -> Variant:
    """One process and no communication: what the arithmetic costs while each rank does it alone."""
    model = make_model(config)
    optimizer = _adamw(model)
    return Variant(
        "plain", _torch_step(model, optimizer), lambda: held_by(model, dict(optimizer.state))
    )


def ddp(config: GPTConfig) -> Variant:
    """DDP of torch with fused AdamW: the baseline of all ratios."""
    model = make_model(config)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = _adamw(wrapped)
    return Variant(
        "DDP",
        _torch_step(wrapped, optimizer),
        lambda: held_by(model, dict(optimizer.state)),
        lambda: {name: p.detach() for name, p in model.named_parameters()},
        keep=[wrapped],
    )


def fsdp2(config: GPTConfig, *, reshard: bool) -> Variant:
    """FSDP2, one group per block and the root, with fused AdamW on DTensors."""
    model = make_model(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = _adamw(model)
    return Variant(
        f"FSDP2 ZeRO-{3 if reshard else 2}",
        _torch_step(model, optimizer),
        lambda: held_by(model, dict(optimizer.state)),
        lambda: {name: p.full_tensor().detach() for name, p in model.named_parameters()},
    )


def shardwise(config: GPTConfig, level: int, *transforms: sw.Transform) -> Variant:
    """This project; level 0 is the replicated plan."""

    def loss_fn(model: nn.Module, batch: Batch) -> sw.Mean:
        return sw.Mean.of_tokens(mean_loss(model, batch), batch["labels"])

    model = make_model(config)
    plan = sw.plan(model, sw.Mesh(fsdp=dist.get_world_size()), sw.zero(level, "fsdp"), *transforms)
    optimizer = sw.optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    program = sw.lower(plan, loss_fn, optimizer).bind(device="cpu")
    states = [program.init(sw.from_module(model))]
    del model
    gc.collect()

    def step(batch: Batch) -> float:
        states[0], metrics = program.step(states[0], batch)
        return metrics.loss.item()

    def traffic() -> tuple[int, int]:
        items = program.last_collectives
        return len(items), sum(item.nbytes for item in items)

    return Variant(
        f"shardwise ZeRO-{level}" if level else "shardwise replicated",
        step,
        lambda: states[0].nbytes,
        lambda: sw.to_global(states[0].params),
        traffic,
    )


def deepspeed(config: GPTConfig, stage: int, rows: int, nvme: str | None = None) -> Variant:
    """DeepSpeed with its default buckets, torch's fused AdamW and no clipping.

    With its optimizer on a drive it steps with a kernel of its own, and reads and writes ahead.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed as ds  # noqa: PLC0415 - an optional peer that takes seconds to import

    model = make_model(config)
    zero: dict[str, Any] = {"stage": stage}
    optimizer: Any = _adamw(model)
    if nvme:
        optimizer = ds.ops.adam.DeepSpeedCPUAdam(
            model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
        zero["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": nvme,
            "pin_memory": False,
            "pipeline_read": True,
            "pipeline_write": True,
        }
    engine, *_ = ds.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": rows,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
        },
    )

    def step(batch: Batch) -> float:
        loss = mean_loss(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    name = f"DeepSpeed ZeRO-{stage}{' NVMe' if nvme else ''}"
    return Variant(name, step, lambda: held_by(model, _state_of(engine)))


def _state_of(engine: Any) -> dict[str, Any]:
    """Tensors that a DeepSpeed optimizer holds beside the module's."""
    optimizer = engine.optimizer
    return {"state": _dicts(optimizer.state), "own": list(_own_tensors(vars(optimizer)))}


def _dicts(state: Any) -> dict[str, Any]:
    return {str(index): value for index, value in enumerate(state.values())}


def _own_tensors(values: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values.values():
        parts = value if isinstance(value, list | tuple) else [value]
        for part in parts:
            inner = part if isinstance(part, list | tuple) else [part]
            found += [tensor for tensor in inner if isinstance(tensor, Tensor)]
    return found
