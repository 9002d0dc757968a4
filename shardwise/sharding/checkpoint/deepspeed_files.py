"""Checkpoints of DeepSpeed's ZeRO-1, 2 and 3: where masters, moments and frozen parameters lie.

[Note: what DeepSpeed writes]
`latest` names the tag, a directory. Stages 1 and 2: one `mp_rank_00_model_states.pt` has the module
in the dtype of the computation; each rank's `..._optim_states.pt` has one flat float32 partition of
masters and moments by parameter group, and which run of it belongs to which parameter; a parameter
may go on in the next rank's partition. Stage 3: every rank cuts each parameter into as many parts
as there are ranks, padded to equal length; a flat buffer of a group holds this rank's parts in the
order of `param_shapes`, and each rank's model file has its parts of frozen parameters. A tie is
stored by one name. Only files are read that the training job itself has written.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.sharding.checkpoint.foreign import Foreign, Run, from_runs, run_of
from shardwise.sharding.checkpoint.manifest import Stored
from shardwise.sharding.checkpoint.torch_zip import (
    Inert,
    load_without_elements,
    number_in,
    place_of,
)
from shardwise.sharding.errors import CheckpointError

_STAND_INS: Mapping[str, Any] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Inert,
    "deepspeed.utils.tensor_fragment.fragment_address": Inert,
}
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt$")
_MASTER = "master"
_PARTITIONED_PARAMS = 3  # the stage


def read_deepspeed(directory: Path, tag: str | None = None) -> Foreign:
    """What a checkpoint of DeepSpeed holds; no element is read.

    Args:
        directory: that `save_checkpoint` was called with.
        tag: of the checkpoint; None: what `latest` names.

    Raises:
        CheckpointError: files are missing, were cut by tensor parallelism, or hold something else.
    """
    return _Folder(_tagged(directory, tag)).read()


def _tagged(directory: Path, tag: str | None) -> Path:
    latest = directory / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    if tag is None and not any(directory.glob("*_states.pt")):
        raise _unfit(directory, "it has no file `latest`", fix="pass tag=, a directory in it")
    found = directory / tag if tag else directory
    outside = bool(tag) and found.resolve().parent != directory.resolve()
    if outside or not found.is_dir():
        tags = sorted(path.name for path in directory.glob("*/") if path.is_dir())
        raise _unfit(directory, f"it has no tag {tag!r}; there are {tags}", fix="pass another tag=")
    return found


class _Folder:
    """The files of one tag."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._optim = self._of_ranks("optim")
        if not self._optim:
            raise _unfit(
                root, "it has no *_optim_states.pt", fix="pass the directory of ZeRO-1 to 3"
            )
        self._states = [self._load(path)["optimizer_state_dict"] for path in self._optim]
        counts = self._states[0]["partition_count"]
        world = max(counts) if isinstance(counts, list) else int(counts)
        if world != len(self._optim):
            fault = f"{len(self._optim)} of {world} files *_optim_states.pt are there"
            raise _unfit(root, fault, fix="copy the files of all ranks")
        self._stage = int(self._states[0]["zero_stage"])
        self._models = (
            self._of_ranks("model") if self._stage == _PARTITIONED_PARAMS else self._whole_model()
        )
        self._model = [self._load(path) for path in self._models]

    def _of_ranks(self, kind: str) -> list[Path]:
        found: dict[int, Path] = {}
        for path in self._root.glob(f"*_{kind}_states.pt"):
            parts = _RANK.search(path.name)
            if parts is None:
                continue
            if int(parts.group(2)):
                fault = f"{path.name} is of a second tensor-parallel rank"
                raise _unfit(self._root, fault, fix="merge it with DeepSpeed's ds_to_universal")
            found[int(parts.group(1))] = path
        return [found[rank] for rank in sorted(found)]

    def _whole_model(self) -> list[Path]:
        path = self._root / "mp_rank_00_model_states.pt"
        if not path.exists():
            raise _unfit(self._root, f"it has no {path.name}", fix="copy all files")
        return [path]

    def _load(self, path: Path) -> Any:
        return load_without_elements(path, stand_ins=_STAND_INS)

    def read(self) -> Foreign:
        model = self._model[0]
        shapes = [dict(group) for group in model["param_shapes"]]
        runs = (
            self._runs_by_part(shapes)
            if self._stage == _PARTITIONED_PARAMS
            else self._runs_by_slice(shapes)
        )
        flat = [shape for group in shapes for shape in group.items()]
        dtypes = {kind: one.dtype for group in self._flats(0) for kind, one in group.items()}
        weights: dict[str, Stored] = {}
        slots: dict[str, dict[str, Stored]] = {}
        for name, shape in flat:
            for kind, found in runs[name].items():
                stored = from_runs(f"{kind} of {name}", tuple(shape), dtypes[kind], found)
                (weights if kind == _MASTER else slots.setdefault(kind, {}))[name] = stored
        weights |= self._others(set(weights))
        return Foreign(
            where=str(self._root),
            root=self._root,
            weights=weights,
            slots=slots,
            steps=self._steps(shapes),
            step=int(model["global_steps"]) - int(model["skipped_steps"]),
            loss_scale=self._loss_scale(),
        )

    # -- flat partitions ----------------------------------------------------------------------

    def _flats(self, rank: int) -> list[dict[str, Stored]]:
        """Masters and moments of one rank, by group."""
        state = self._states[rank]
        key = (
            "fp32_flat_groups"
            if self._stage == _PARTITIONED_PARAMS
            else "single_partition_of_fp32_groups"
        )
        moments = self._base(rank)["state"]
        found: list[dict[str, Stored]] = []
        for number, master in enumerate(state[key]):
            tensors = {_MASTER: master} | {
                name: value
                for name, value in moments.get(number, {}).items()
                if isinstance(value, torch.Tensor) and value.ndim == 1
            }
            path = self._optim[rank]
            found.append(
                {
                    name: place_of(value.detach(), f"{path.name}, {name}", path, self._root)
                    for name, value in tensors.items()
                }
            )
        return found

    def _base(self, rank: int) -> Any:
        """The state of the torch optimizer inside."""
        state = self._states[rank]
        found = state.get("base_optimizer_state") or state.get("optimizer_state_dict")
        if not isinstance(found, dict) or "state" not in found:
            fault = f"{self._optim[rank].name} has its moments in an elastic form"
            raise _unfit(self._root, fault, fix="save it with elastic_checkpoint: false")
        return found

    def _runs_by_slice(
        self, shapes: Sequence[Mapping[str, Any]]
    ) -> dict[str, dict[str, list[Run]]]:
        """Stages 1 and 2: each rank says which run of its partition is whose."""
        runs: dict[str, dict[str, list[Run]]] = {name: {} for group in shapes for name in group}
        for rank, state in enumerate(self._states):
            slices = state.get("param_slice_mappings")
            if slices is None:
                fault = f"{self._optim[rank].name} has no param_slice_mappings"
                raise _unfit(
                    self._root, fault, fix="load it with a newer DeepSpeed, and save it with that"
                )
            for group, flats in zip(slices, self._flats(rank), strict=True):
                for name, address in group.items():
                    for kind, flat in flats.items():
                        run = run_of(flat, int(address.start), int(address.numel))
                        runs[name].setdefault(kind, []).append(run)
        return runs

    def _runs_by_part(self, shapes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Run]]]:
        """Stage 3: each rank has an equal part of every parameter."""
        ranks = len(self._states)
        runs: dict[str, dict[str, list[Run]]] = {name: {} for group in shapes for name in group}
        for rank in range(ranks):
            groups = self._flats(rank)
            at = 0
            for group in shapes:
                for name, shape in group.items():
                    part = -(-math.prod(shape) // ranks)
                    for kind, run in _over_groups(groups, at, part):
                        runs[name].setdefault(kind, []).append(run)
                    at += part
        return runs

    # -- what is not in flat partitions ---------------------------------------------------------

    def _others(self, trained: set[str]) -> dict[str, Stored]:
        """Frozen parameters and buffers."""
        model, path = self._model[0], self._models[0]
        shared = dict(model.get("shared_params") or {})
        found: dict[str, Stored] = {}
        frozen = (
            dict(model.get("frozen_param_shapes") or {})
            if self._stage == _PARTITIONED_PARAMS
            else {}
        )
        for name, shape in frozen.items():
            runs: list[Run] = []
            for other, file in zip(self._model, self._models, strict=True):
                value = other["frozen_param_fragments"][name].detach().reshape(-1)
                flat = place_of(value, f"{file.name}, {name}", file, self._root)
                runs.append(run_of(flat, 0, flat.shape[0]))
            dtype = model["frozen_param_fragments"][name].dtype
            found[name] = from_runs(name, tuple(shape), dtype, runs)
        for name, value in model["module"].items():
            known = name in trained or name in found or name in shared
            if not known and isinstance(value, torch.Tensor):
                found[name] = place_of(value.detach(), name, path, self._root)
        return found

    def _steps(self, shapes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        found: dict[str, int] = {}
        state, path = self._base(0)["state"], self._optim[0]
        for number, group in enumerate(self._members(shapes)):
            value = state.get(number, {}).get("step")
            if isinstance(value, torch.Tensor):
                value = number_in(place_of(value, "step", path, self._root), self._root)
            if value is not None:
                found |= dict.fromkeys(group, int(value))
        return found

    def _members(self, shapes: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        """Parameters by flat group: stage 3 cuts the groups of the optimizer into smaller ones."""
        if self._stage != _PARTITIONED_PARAMS:
            return [list(group) for group in shapes]
        ends = [*itertools.accumulate(one[_MASTER].shape[0] for one in self._flats(0))]
        found: list[list[str]] = [[] for _ in ends]
        at = 0
        for name, shape in ((n, s) for group in shapes for n, s in group.items()):
            found[min(bisect.bisect_right(ends, at), len(ends) - 1)].append(name)
            at += -(-math.prod(shape) // len(self._states))
        return found

    def _loss_scale(self) -> float | None:
        scaler = self._states[0].get("loss_scaler")
        scale = getattr(scaler, "cur_scale", None)
        half = (self._model[0].get("ds_config") or {}).get("fp16") or {}
        return float(scale) if scale is not None and half.get("enabled") else None


def _over_groups(
    groups: Sequence[Mapping[str, Stored]], start: int, numel: int
) -> Iterator[tuple[str, Run]]:
    """Elements of flat groups that are read as one after the other."""
    for flats in groups:
        size = flats[_MASTER].shape[0]
        count = min(start + numel, size) - max(start, 0)
        if count > 0:
            for kind, flat in flats.items():
                yield kind, run_of(flat, max(start, 0), count)
        start -= size


def _unfit(where: Path, fault: str, *, fix: str) -> CheckpointError:
    return CheckpointError(
        "The directory is no checkpoint of DeepSpeed that can be read.",
        where=str(where),
        facts=fault,
        why="Parameters and moments are put together from the files of all data-parallel ranks.",
        fix=fix,
        path=str(where),
    )
