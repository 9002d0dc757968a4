"""What a rank says when its peers do not join a collective: they ended, or it waited too long."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from shardwise.sharding.errors import RankError


def is_lost(error: RuntimeError) -> bool:
    """Whether an error of a collective tells of the peers and not of this rank.

    gloo raises plain `RuntimeError`s that name its own source files.

    >>> is_lost(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    True
    >>> is_lost(RuntimeError("The size of tensor a (2) must match the size of tensor b (3)"))
    False
    """
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def lost_peers(
    text: str, *, rank: int, peers: Sequence[int], call: str, place: str, expected: str
) -> RankError:
    """The error of a rank whose peers did not join.

    Args:
        text: what the backend says.
        rank: this rank.
        peers: the ranks that it waited for.
        call: what the user has called.
        place: which collective of the call.
        expected: the collective that did not complete.

    >>> error = lost_peers("[gloo/..] Timed out waiting 500ms for recv operation to complete",
    ...                    rank=0, peers=(1, 2), call="step 3", place="collective 4 of 9",
    ...                    expected="all_gather fsdp")
    >>> print(error.what)
    Rank 0 waited in vain for rank 1 or 2 in step 3.
    """
    timed_out = "timed out" in text.lower()
    others = " or ".join(map(str, peers))
    verb = "waited in vain for" if timed_out else "lost the connection to"
    first = text.splitlines()[0] if text else ""
    return RankError(
        f"Rank {rank} {verb} rank {others} in {call}.",
        where=f"{call}, {place}",
        facts=[f"did not complete: {expected}", f"the backend says: {first[:200]}"],
        why="A collective completes when every rank of its axis has joined it. A peer has ended or "
        "failed outside of this call, is slower than the timeout, or makes another call.",
        fix="look at the output of those ranks first; if ranks have different numbers of batches, "
        "stop together with program.agree(...); bind(timeout=...) waits longer, bind(debug=True) "
        "names calls that differ",
        rank=rank,
        peers=tuple(peers),
        timed_out=timed_out,
    )
