"""Rows of fused tensors that several ranks hold: gradients summed, each row once in norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.checkpoint.records import records_of
from shardwise.sharding.copies import copies_of
from shardwise.sharding.errors import PlanError
from shardwise.testing import measure
from shardwise.testing.echo import bind_alone
from tests.hf.zoo import batches, loss_of, transformers
from tests.oracles.one_process import assert_same, one_process, sharded

pytestmark = pytest.mark.simulated

QKV = "*qkv_proj*"


def phi3(kv: int, dtype: torch.dtype = torch.float64) -> Any:
    """q, k and v in one weight; norms are far from 1."""
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=kv,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.Phi3ForCausalLM(config).to(dtype)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1)


PLANS: dict[str, tuple[dict[str, int], list[sw.Transform]]] = {
    "alone": ({"tp": 4}, []),
    "sequence": ({"tp": 4}, [sw.sequence_parallel("tp")]),
    "zero 3 on the fused rows": (
        {"fsdp": 2, "tp": 4},
        [sw.zero(3, "fsdp"), sw.zero(3, "fsdp", on=0, pad=True, where=QKV)],
    ),
    "zero 2 on the other dimension": (
        {"tp": 4, "fsdp": 2},
        [sw.zero(2, "fsdp", on=1, where=QKV)],
    ),
}


@pytest.mark.parametrize(("kv", "kind"), [*((2, kind) for kind in PLANS), (1, "alone")])
def test_copied_rows_train_as_in_one_process(kv: int, kind: str) -> None:
    """Their sums are planned, and one kv head is whole on all ranks without an axis of its own."""
    axes, more = PLANS[kind]
    model, data, loss = phi3(kv), batches("llama", 2), loss_of("phi3")
    plan = sw.plan(model, sw.Mesh(**axes), sw.tensor_parallel("tp"), *more)
    want = one_process(model, loss, data, adamw, parts=axes.get("fsdp", 1))
    got = sharded(model, plan, loss, data, sw.optim.adamw(1e-2, weight_decay=0.1))
    assert_same(got, want)


def test_copies_stay_equal_in_bits_and_norms_count_them_once() -> None:
    model, data, loss = phi3(2), batches("llama", 2), loss_of("phi3")
    plan = sw.plan(model, sw.Mesh(tp=4), sw.tensor_parallel("tp"))
    optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(0.1), sw.optim.sgd(1.0, momentum=0.9))
    norms: list[Tensor] = []
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, loss, optimizer).bind()
        state = program.init(sw.from_module(model))
        for batch in data:
            state, metrics = program.step(state, program.shard_batch(batch))
            assert metrics.grad_norm is not None
            norms.append(metrics.grad_norm)
    stepper = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
    for batch, norm in zip(data, norms, strict=True):
        stepper.zero_grad()
        mean = loss(model, batch)
        (mean.total / mean.count).backward()
        whole = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(norm, whole, rtol=1e-9, atol=0.0)
        assert norm > 0.1
        stepper.step()
    # k and v of two heads: rows of parameters and momentum that two ranks hold
    assert count_copies(state, "qkv_proj") == 2 * (2 * 2 * 4 * 16)


def count_copies(state: Any, name: str) -> int:
    """Elements of some parameters that a second rank holds; all copies are the same in bits."""
    count = 0
    for records in zip(*(records_of(one) for one in state.ranks), strict=True):
        known: dict[tuple[int, ...], Tensor] = {}
        for rank, record in enumerate(records):
            for box, values in record.pieces(rank):
                assert torch.equal(known.setdefault(box.offsets, values), values), record.name
                if known[box.offsets] is not values and name in record.name:
                    count += values.numel()
    return count


def test_which_rows_are_copies() -> None:
    """Along `tp1` only, in both orders of q, k and v; none where kv heads suffice."""
    plan = sw.plan(phi3(2), sw.Mesh(fsdp=2, tp=4), sw.tensor_parallel("tp"))
    path = "model.layers.0.self_attn.qkv_proj.weight"
    assert repr(plan.mesh) == "Mesh(fsdp=2, tp0=2, tp1=2)"
    spec = plan.compute[path].with_(dtype="float32")
    assert str(spec) == "((heads/(tp0 tp1) + kv/tp0 + kv/tp0) hd) embed"
    assert copies_of(plan.tensor.frames[path], plan.mesh) == (("tp1",),)
    whole = sw.plan(phi3(4), sw.Mesh(tp=4), sw.tensor_parallel("tp"))
    assert copies_of(whole.tensor.frames[path], whole.mesh) == ()
    one = sw.plan(phi3(1), sw.Mesh(tp=4), sw.tensor_parallel("tp"))
    assert copies_of(one.tensor.frames[path], one.mesh) == (("tp",),)


def test_a_fused_weight_is_not_cut_in_one_part_only() -> None:
    """Its q over the ranks and its k and v whole: nothing says which rows belong together."""
    with pytest.raises(PlanError) as caught:
        sw.plan(phi3(2), sw.Mesh(tp=2), sw.tensor_parallel("tp", names=["heads", "mlp"]))
    text = str(caught.value)
    assert "cuts only some of the parts side by side in 1 of" in text
    assert "model.layers.0.self_attn.qkv_proj.weight" in text
    assert "cut: heads; whole: kv." in text
    assert "names= that cut kv as well" in caught.value.fix
    assert caught.value.numbers["whole"] == "kv"


class Grouped(nn.Module):
    """q heads beside the k and v that they share, kv head by kv head, as in Falcon."""

    def __init__(self, kv: int, group: int, hd: int = 4, width: int = 8) -> None:
        super().__init__()
        self.kv, self.group, self.hd = kv, group, hd
        self.qkv = nn.Linear(width, kv * (group + 2) * hd)
        self.out = nn.Linear(kv * group * hd, width)
        rows = "(kv (group + 1 + 1) hd)"
        self.axes = {
            "qkv.weight": f"{rows} embed",
            "qkv.bias": rows,
            "out.weight": "embed (heads hd)",
            "out.bias": "embed",
            "kv": "kv",
            "group": "group",
            "hd": "hd",
        }

    def attend(self, qkv: Tensor) -> Tensor:
        qkv = qkv.unflatten(-1, (self.kv, self.group + 2, self.hd)).movedim(1, -2)
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1:]
        y = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        return y.flatten(1, 2).transpose(1, 2).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        attend = sw.local(self.attend, in_specs=(None,), out_specs="batch seq heads/tp")
        return x + self.out(attend(self.qkv(x)))


def squares(model: nn.Module, x: Tensor) -> sw.Mean:
    out = model(x)
    return sw.Mean(out.square().sum(), x.shape[0])


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


GROUPED = {
    "kv heads suffice": (4, 2, {"tp": 2}, "(kv/tp (group + 1 + 1) hd) embed"),
    "two share one": (2, 4, {"fsdp": 2, "tp": 4}, "(kv/tp0 (group/tp1 + 1 + 1) hd) embed"),
    "all share one": (1, 4, {"tp": 4}, "(kv (group/tp + 1 + 1) hd) embed"),
}


@pytest.mark.parametrize("kind", GROUPED)
def test_heads_beside_the_kv_that_they_share(kind: str) -> None:
    """Ranks with copies of a kv head divide the heads of its group."""
    kv, group, axes, spec = GROUPED[kind]
    torch.manual_seed(0)
    model = nn.Sequential(Grouped(kv, group), Grouped(kv, group)).double()
    data = [torch.randn(4, 3, 8, dtype=torch.float64) for _ in range(2)]
    plan = sw.plan(
        model,
        sw.Mesh(**axes),
        sw.tensor_parallel("tp"),
        *([sw.zero(3, "fsdp")] if "fsdp" in axes else []),
        sizes={"heads": kv * group},
    )
    assert str(plan.compute["0.qkv.weight"].with_(dtype="float32")) == spec
    want = one_process(model, squares, data, momentum, parts=axes.get("fsdp", 1))
    assert_same(sharded(model, plan, squares, data, sw.optim.sgd(0.1, momentum=0.9)), want)


def test_a_group_that_ranks_cannot_divide_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        sw.plan(
            nn.Sequential(Grouped(2, 3)),
            sw.Mesh(tp=4),
            sw.tensor_parallel("tp", where="*qkv*"),
        )
    text = str(caught.value)
    assert "tensor_parallel('tp', where='*qkv*') cannot cut 'group' of 2 of" in text
    assert "group is 3; 2 ranks share one of kv; 3 % 2 == 1." in text
    assert "make the axis 'tp' smaller" in caught.value.fix
    assert caught.value.numbers["remainder"] == 1


def test_two_dimensions_of_one_weight_are_cut_for_states_only() -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    both = [sw.tensor_parallel("tp", names=["mlp"]), sw.tensor_parallel("ep", names=["embed"])]
    axes = {"weight": "mlp embed", "bias": "mlp"}
    plan = sw.plan(model, sw.Mesh(tp=2, ep=2), *both, axes=axes)
    with pytest.raises(PlanError) as caught:
        sw.lower(plan, squares, sw.optim.sgd(0.1), batch=torch.randn(2, 4))
    text = str(caught.value)
    assert "Tensor axes cut 2 dimensions of one parameter" in text
    assert "0.weight" in text
    assert "'mlp/tp embed/ep': 'mlp' and 'embed' are cut." in text
    assert "names= that leave 'mlp' or 'embed' whole" in caught.value.fix
    assert caught.value.numbers["dims"] == ("mlp", "embed")


@pytest.mark.parametrize("axes", [{"tp": 4}, {"fsdp": 2, "tp": 4}])
def test_the_peak_with_sums_of_copied_rows_is_the_predicted_one(axes: dict[str, int]) -> None:
    """Two of three rows of a block are copies here, and all layers are packed at once."""
    model = nn.Sequential(*(Grouped(2, 4, hd=128, width=512) for _ in range(4)))
    steps = [sw.tensor_parallel("tp")] + ([sw.zero(3, "fsdp")] if "fsdp" in axes else [])
    plan = sw.plan(model, sw.Mesh(**axes), *steps, sizes={"heads": 8})
    batch = torch.randn(1, 2, 512)
    lowered = sw.lower(plan, squares, sw.optim.sgd(0.1), batch=batch)
    (summed,) = lowered.tensor_sums
    packed = summed.item.buffer_bytes(2)
    rows = 2 * 128 // axes.get("fsdp", 1)
    assert packed >= 4 * rows * 512 * 4
    program = bind_alone(lowered)
    state, _ = program.step(program.init(0, None), batch)
    _, usage = measure(lambda: program.step(state, batch))
    memory = lowered.memory()
    assert memory.activations is not None
    measured = usage.peak - memory.grads - memory.activations
    assert memory.transient >= packed
    assert abs(measured - memory.transient) <= 0.05 * memory.transient + 2**18
