"""Accumulation as a transform of plans: a step in several passes over micro-batches."""

from __future__ import annotations

from shardwise.sharding.edits import AccumulateEdit
from shardwise.sharding.errors import strict_keywords
from shardwise.sharding.plan import Transform, named
from shardwise.sharding.scope import call_site


@strict_keywords
def accumulate(n: int, *, reduce: str = "auto", gather: str = "micro") -> Transform:
    """Run each step as n passes over micro-batches; the result is that of one big batch.

    Use it where the activations of the whole batch do not fit. `program.step` then cuts this rank's
    batch into n parts along dimension 0, or takes `MicroBatches`. Losses, gradients and metrics
    are weighted by what each part counts, so uneven parts, a short last window and ranks without
    any part are exact. Buffers that a forward pass writes (BatchNorm) pass from one part to the
    next; on a mesh, ranks that have run at least one part are averaged. Dropout draws anew for each
    part. `eval` takes a batch in one pass.

    A step of a model with P elements in units, per rank, in elements moved:

    - replicated: 2 P, whatever the options.
    - `zero(1)`: P + P, since gradients are scattered once; `reduce="each"`: n P + P.
    - `zero(2)`: n P + P; `reduce="once"`: P + P.
    - `zero(3)`: 3 n P; `gather="step"`: P + n P; with `reduce="once"` as well: 2 P.

    Where gradients are cut over some axes and replicated over others (hybrid plans), they are
    scattered as above, and replicas are summed once a step, since waiting takes no memory.

    Args:
        n: passes of a step.
        reduce: `"each"`: scatter gradients after every pass and add to the shards, so that whole
            gradients never rest; `"once"`: add whole gradients on every rank, in the dtype that
            they land in, and scatter them in the last pass. `"auto"`: once where the `grads` home
            is whole and each time where it is cut. That is what users of each level expect: with
            replicas and ZeRO-1 whole gradients are part of the deal and a step reduces once; ZeRO-2
            and 3 are chosen so that they do not rest.
        gather: `"micro"`: every pass gathers weights again, with the memory of ZeRO-3 and FSDP;
            `"step"`: weights are gathered in the first forward and kept until the last backward.

    Raises:
        PlanError: n is no positive number, an unknown word, or (when applied) inside of `masked` or
            `partition`.

    References:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
        2020, section 7 (communication of each level).

    >>> accumulate(4, reduce="once").__name__
    "accumulate(4, reduce='once')"
    """
    options = {"reduce": (reduce, "auto"), "gather": (gather, "micro")}
    shown = [f", {key}={value!r}" for key, (value, default) in options.items() if value != default]
    by = f"accumulate({n!r}{''.join(shown)})"
    edit, site = AccumulateEdit(steps=n, reduce=reduce, gather=gather, by=by), call_site()
    return named(lambda plan: plan.edit(edit, site=site), by)
