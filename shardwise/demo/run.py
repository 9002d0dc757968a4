"""The training main: the same function under `spawn`, under torchrun and in a world of one."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

import shardwise as sw
from shardwise.demo import engine, recovery
from shardwise.demo.gpt import GPT, GPTConfig, generate
from shardwise.demo.options import Options, Outcome
from shardwise.demo.reference import largest_difference, train_sharded
from shardwise.demo.show import printable, progress, summary
from shardwise.demo.text import standard_library, unigram_entropy
from shardwise.sharding.collectives import Collective
from shardwise.sharding.job import join_job

_PROMPT = b"def "
_SAMPLE_BYTES = 300
_TEMPERATURE = 0.7


def run(options: Options) -> Outcome:
    """Train, evaluate, save, sample and report; every rank runs all of it, rank 0 prints.

    Args:
        options: what to do.

    Raises:
        ShardwiseError: no text, or a plan that does not fit the job.
        SystemExit: nothing is left to do, or the job was asked to stop and has saved.
    """
    started = time.time()
    job = join_job()
    console = Console(quiet=job.rank != 0)
    corpus = standard_library()
    setup = engine.prepare(options)
    console.print(str(setup.plan), markup=False, highlight=False, soft_wrap=True)
    predicted_bytes = engine.rest_bytes(setup.lowered)
    trained = _train(setup, corpus.train, options, console, started)
    state = trained.state
    step_bytes = engine.measured_step_bytes(setup, corpus.train, options)
    plain = replace(
        options, precision="fp32", accumulate=1, remat=False, sequence=False, offload=()
    )
    eval_loss = engine.evaluate(setup, state, corpus.held_out, options)
    path = Path(options.out) / "weights.safetensors"
    weights = engine.full_weights(state)
    sample = _save_and_sample(weights, path) if job.rank == 0 else ""
    console.print(f"weights: {path}\nsample:\n{sample}\n", markup=False, highlight=False)
    difference, reference = None, ""
    if options.check:
        checked = train_sharded(corpus.train, options)
        reference = checked.reference
        if job.rank == 0:
            difference = largest_difference(checked, corpus.train)
    outcome = Outcome(
        ranks=job.world,
        train_loss=trained.losses[-1],
        eval_loss=eval_loss,
        unigram_nats=unigram_entropy(corpus.held_out),
        tokens_per_second=trained.tokens_per_second,
        predicted_bytes=predicted_bytes,
        measured_bytes=state.nbytes,
        predicted_step=engine.step_bytes(setup.lowered),
        measured_step=step_bytes,
        plain_step=engine.step_bytes(engine.lower(plain)),
        predicted=engine.traffic(setup.lowered.collectives()),
        executed=engine.traffic(trained.executed),
        same_collectives=trained.executed == tuple(setup.lowered.collectives()),
        largest_difference=difference,
        weights=str(path),
        sample=sample,
        reference=reference,
        losses=trained.losses,
        first_step=trained.first_step,
        recovery_seconds=trained.recovery_seconds,
    )
    console.print(summary(outcome))
    return outcome


class _Trained(NamedTuple):
    """A state after the last step, and how it got there."""

    state: sw.State
    tokens_per_second: float
    executed: tuple[Collective, ...]
    losses: tuple[float, ...]
    first_step: int
    recovery_seconds: float | None


def _train(
    setup: engine.Setup, text: Tensor, options: Options, console: Console, started: float
) -> _Trained:
    """Take the steps that are left, on a bar."""
    curve = recovery.Curve()
    if options.checkpoint:
        steps = recovery.train(setup, text, options, curve, started=started)
    else:
        state = setup.program.init(seed=options.seed)
        steps = engine.train(setup, state, text, options)
    state, executed, speed, losses = None, (), 0.0, list[float]()
    tokens = options.rows * GPTConfig().context
    predicted_bytes = setup.lowered.memory().rest_bytes
    start = time.perf_counter()
    with progress(console, steps=options.steps, predicted_bytes=predicted_bytes) as advance:
        for state, loss in steps:
            losses.append(loss)
            executed = setup.program.last_collectives
            speed = len(losses) * tokens / (time.perf_counter() - start)
            number = curve.first + len(losses)
            advance(step=number, loss=loss, tokens_per_second=speed, rest_bytes=state.nbytes)
            if curve.recovery and len(losses) == 1:
                console.print(str(curve.recovery), highlight=False, soft_wrap=True)
    if state is None or curve.stopped:
        taken = len(curve.losses)
        console.print(f"{taken} of {options.steps} steps are taken and saved.", highlight=False)
        raise SystemExit(0)
    whole = tuple(curve.losses or losses)
    seconds = curve.recovery.seconds if curve.recovery else None
    return _Trained(state, speed, executed, whole, curve.first, seconds)


def _save_and_sample(weights: dict[str, Tensor], path: Path) -> str:
    """Save whole weights, read them back into a plain GPT, and let it write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, path)
    model = GPT()
    model.load_state_dict(load_file(path))
    text = generate(model.eval(), _PROMPT, length=_SAMPLE_BYTES, temperature=_TEMPERATURE, seed=0)
    return printable(text)
