"""What a layer of Llama moves over a tensor axis, against the formula for tensor parallelism."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.sharding.collectives import Collective
from tests.hf.zoo import DECODER, transformers

pytestmark = pytest.mark.abstract

ROWS, LENGTH, WIDTH, LAYERS, VOCAB = 2, 8, 32, 3, 64


def loss_fn(model: Any, tokens: Tensor) -> sw.Mean:
    logits = model(input_ids=tokens, use_cache=False).logits
    return sw.Mean(sw.cross_entropy(logits, sw.shift_labels(tokens)), tokens.numel())


def collectives(ranks: int, *more: Any, rows: int = ROWS) -> list[Collective]:
    """Those of activations in one step, on the meta device."""
    sizes = DECODER | {"vocab_size": VOCAB, "num_hidden_layers": LAYERS, "num_key_value_heads": 4}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    plan = sw.plan(model, sw.Mesh(tp=ranks), sw.tensor_parallel("tp"), *more)
    batch = sw.like((rows, LENGTH), torch.int64)
    lowered = sw.lower(plan, loss_fn, sw.optim.sgd(0.1), batch=batch)
    return [item for item in lowered.collectives() if item.reason == "activations"]


def in_layers(items: list[Collective]) -> list[Collective]:
    return [item for item in items if ".layers." in item.unit and "(" not in item.unit]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_moves_8_bsh(ranks: int, dtype: torch.dtype) -> None:
    """Two all-reduces forward and two backward, each of 2 (T - 1) / T of an activation."""
    compute = str(dtype).rpartition(".")[2]
    inside = in_layers(collectives(ranks, sw.precision(params="float32", compute=compute)))
    assert Counter(item.kind for item in inside) == {"all_reduce": 4 * LAYERS}
    bsh = ROWS * LENGTH * WIDTH * dtype.itemsize
    assert sum(item.nbytes for item in inside) == LAYERS * 8 * bsh * (ranks - 1) // ranks
    assert {item.axis for item in inside} == {"tp"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_with_a_cut_sequence_it_moves_the_same(ranks: int) -> None:
    """An all-gather and a reduce-scatter in the place of each all-reduce."""
    items = collectives(ranks, sw.sequence_parallel("tp"))
    inside = [item for item in items if ".layers." in item.unit]
    assert {item.kind for item in inside} == {"all_gather", "reduce_scatter"}
    ends = {"begin": 0, "end": 0}
    for item in inside:
        for end in ends:
            ends[end] += item.nbytes * (f"({end})" in item.unit)
    bsh = ROWS * LENGTH * WIDTH * 4
    part = bsh * (ranks - 1) // ranks
    # The stack is cut once: nothing moves forward, and its gradient is made whole.
    assert ends == {"begin": part, "end": part}
    assert sum(item.nbytes for item in inside) - sum(ends.values()) == LAYERS * 8 * part


@pytest.mark.parametrize("passes", [2, 3])
def test_bytes_are_those_of_every_micro_batch(passes: int) -> None:
    one = sum(item.nbytes for item in collectives(2))
    several = collectives(2, sw.accumulate(passes), rows=ROWS * passes)
    assert sum(item.nbytes for item in several) == passes * one


def test_what_moves_outside_of_layers() -> None:
    """Rows of tokens are summed, as is the gradient of what goes into the head.

    The loss over a cut vocabulary gathers three numbers a token.
    """
    ranks = 4
    items = [item for item in collectives(ranks) if ".layers." not in item.unit]
    summed = 2 * ROWS * LENGTH * WIDTH * 4 * (ranks - 1) // ranks
    assert [(item.unit.split()[0], item.kind, item.nbytes) for item in items] == [
        ("model.embed_tokens", "all_reduce", summed),
        ("cross_entropy", "all_gather", (ranks - 1) * ROWS * LENGTH * 3 * 4),
        ("lm_head", "all_reduce", summed),
    ]
