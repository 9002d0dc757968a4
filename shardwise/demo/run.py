"""The training main: the same function under `spawn`, under torchrun and in a world of one."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.demo import engine
from shardwise.demo.gpt import GPT, GPTConfig, generate
from shardwise.demo.options import Options, Outcome
from shardwise.demo.reference import largest_difference, train_sharded
from shardwise.demo.show import printable, progress, summary
from shardwise.demo.text import standard_library, unigram_entropy
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
    """
    job = join_job()
    console = Console(quiet=job.rank != 0)
    corpus = standard_library()
    setup = engine.prepare(options)
    console.print(str(setup.plan), markup=False, highlight=False, soft_wrap=True)
    predicted_bytes = setup.lowered.memory().rest_bytes
    state = setup.program.init(seed=options.seed)
    tokens = options.rows * GPTConfig().context
    loss = speed = 0.0
    start = time.perf_counter()
    with progress(console, steps=options.steps, predicted_bytes=predicted_bytes) as advance:
        for number, step in enumerate(engine.train(setup, state, corpus.train, options), 1):
            state, loss = step
            speed = number * tokens / (time.perf_counter() - start)
            advance(loss=loss, tokens_per_second=speed, rest_bytes=state.nbytes)
    executed = setup.program.last_collectives
    step_bytes = engine.measured_step_bytes(setup, corpus.train, options)
    plain = replace(options, precision="fp32", accumulate=1, remat=False)
    eval_loss = engine.evaluate(setup, state, corpus.held_out, options)
    path = Path(options.out) / "weights.safetensors"
    weights = engine.full_weights(state)
    sample = _save_and_sample(weights, path) if job.rank == 0 else ""
    console.print(f"weights: {path}\nsample:\n{sample}\n", markup=False, highlight=False)
    difference = None
    if options.check:
        trained = train_sharded(corpus.train, options)
        if job.rank == 0:
            difference = largest_difference(trained, corpus.train)
    outcome = Outcome(
        ranks=job.world,
        train_loss=loss,
        eval_loss=eval_loss,
        unigram_nats=unigram_entropy(corpus.held_out),
        tokens_per_second=speed,
        predicted_bytes=predicted_bytes,
        measured_bytes=state.nbytes,
        predicted_step=engine.step_bytes(setup.lowered),
        measured_step=step_bytes,
        plain_step=engine.step_bytes(engine.lower(plain)),
        predicted=engine.traffic(setup.lowered.collectives()),
        executed=engine.traffic(executed),
        same_collectives=tuple(executed) == tuple(setup.lowered.collectives()),
        largest_difference=difference,
        weights=str(path),
        sample=sample,
    )
    console.print(summary(outcome))
    return outcome


def _save_and_sample(weights: dict[str, Tensor], path: Path) -> str:
    """Save whole weights, read them back into a plain GPT, and let it write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, path)
    model = GPT()
    model.load_state_dict(load_file(path))
    text = generate(model.eval(), _PROMPT, length=_SAMPLE_BYTES, temperature=_TEMPERATURE, seed=0)
    return printable(text)
