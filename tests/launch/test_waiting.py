"""Whether ranks wait for ever: judged from looks at their stacks and their CPU time."""

from __future__ import annotations

import pytest

from shardwise._waiting import Seen, Watch

pytestmark = pytest.mark.abstract

WAITS = (
    '  File "/x/torch/distributed/distributed_c10d.py", line 7 in all_reduce\n  File "a.py", line 1'
)
OURS = '  File "/x/shardwise/sharding/movement.py", line 7 in wait\n  File "a.py", line 1'
COMPUTES = '  File "/x/model.py", line 3 in forward\n' + WAITS


def looks(*seen: dict[int, Seen]) -> list[bool]:
    watch = Watch()
    return [watch.all_wait(one) for one in seen]


def test_ranks_that_sit_in_collectives_without_using_the_cpu_wait_for_ever() -> None:
    still = {0: Seen(WAITS, 50), 2: Seen(OURS, 70)}
    assert looks(*[still] * 5) == [False] * 4 + [True]


@pytest.mark.parametrize(
    "other",
    [
        Seen(WAITS, 60),  # data arrives: that costs CPU time
        Seen(WAITS.replace("line 7", "line 8"), 50),
        Seen(COMPUTES, 50),  # innermost frame first
        Seen("", 50),  # it starts
        Seen(WAITS, None),  # nobody knows
    ],
    ids=["uses the CPU", "another line", "computes", "starts", "unknown"],
)
def test_a_sign_of_life_of_any_rank_begins_the_count_anew(other: Seen) -> None:
    still = {0: Seen(WAITS, 50), 1: Seen(WAITS, 50)}
    busy = {**still, 1: other}
    found = looks(*[still] * 4, busy, *[still] * 3)
    assert not any(found)


def test_a_rank_that_returns_begins_the_count_anew() -> None:
    still = {0: Seen(WAITS, 50), 1: Seen(WAITS, 50)}
    assert not any(looks(*[still] * 4, {0: still[0]}, *[{0: still[0]}] * 3))
    assert looks(*[still] * 4, *[{0: still[0]}] * 5)[-1]
