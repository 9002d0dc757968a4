"""Copies in the memory of nodes: which loss they survive, what moves, and what they leave."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.sharding.checkpoint import gathering
from shardwise.sharding.checkpoint.latest import why_incomplete
from shardwise.sharding.errors import CheckpointError
from shardwise.transforms import peers
from tests.checkpoints.runs import batch, bits, lowered, train

pytestmark = pytest.mark.simulated

LAST = 5
"""Steps that were taken; copies are made every step, checkpoints every third."""


@dataclass
class Cluster:
    """Memory file systems of nodes, and one disk."""

    root: Path

    def dirs(self, nodes: Sequence[str]) -> sw.Lifted:
        return sw.Lifted([self.root / node for node in nodes])

    def checkpointer(self, program: sw.Program, nodes: Sequence[str]) -> sw.Checkpointer:
        return sw.Checkpointer(
            program, self.root / "disk", every=3, peer_dir=self.dirs(nodes), peer_every=1
        )

    def stores(self, node: str) -> dict[str, list[str]]:
        """By rank: steps that are there, of which the last is the newest."""
        found = sorted((self.root / node).glob("*/rank-*"))
        return {path.name: sorted(one.name for one in path.iterdir()) for path in found}

    def lose(self, node: str, rank: int) -> None:
        (store,) = (self.root / node).glob(f"*/rank-{rank}")
        shutil.rmtree(store)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def trained(cluster: Cluster, nodes: Sequence[str], level: int = 3) -> dict[str, list[Any]]:
    """Train on as many ranks as there are names of nodes; every element of the last state."""
    mesh = sw.Mesh(fsdp=len(nodes))
    with sw.simulate(mesh):
        program = lowered(mesh, level).bind()
        checkpointer = cluster.checkpointer(program, nodes)
        state = checkpointer.resume_or_init(0)
        for step in range(checkpointer.step, LAST):
            state, _ = program.step(state, program.shard_batch(batch(step)))
            checkpointer.after_step(state)
        return bits(state)


def resumed(cluster: Cluster, nodes: Sequence[str], level: int = 3) -> tuple[Any, Any]:
    mesh = sw.Mesh(fsdp=len(nodes))
    with sw.simulate(mesh):
        checkpointer = cluster.checkpointer(lowered(mesh, level).bind(), nodes)
        state = checkpointer.resume_or_init(0)
        return checkpointer, bits(state)


@pytest.mark.parametrize(("nodes", "level"), [("abcd", 3), ("abd", 3), ("aabd", 3), ("abd", 0)])
def test_a_lost_node_of_four(nodes: str, level: int, cluster: Cluster) -> None:
    """Node c is gone: its part comes from node d, for as many ranks or fewer."""
    before = trained(cluster, "abcd", level)
    cluster.lose("c", 2)
    checkpointer, state = resumed(cluster, nodes, level)
    assert checkpointer.resumed_from == "peer copies"
    assert checkpointer.step == LAST
    assert checkpointer.skipped == ()
    assert state == before


@pytest.mark.parametrize("nodes", ["aabb", "aab", "ab", "b"])
def test_nodes_of_two_ranks_lose_a_rank_or_a_node(nodes: str, cluster: Cluster) -> None:
    before = trained(cluster, "aabb")
    if "b" in nodes and "a" in nodes:
        cluster.lose("b", 2)
    checkpointer, state = resumed(cluster, nodes)
    assert checkpointer.resumed_from == "peer copies"
    assert state == before


def test_what_goes_on_keeps_copies_for_the_ranks_that_are_left(cluster: Cluster) -> None:
    trained(cluster, "aabb")
    with sw.simulate(sw.Mesh(fsdp=2)):
        program = lowered(sw.Mesh(fsdp=2)).bind()
        checkpointer = cluster.checkpointer(program, "ab")
        state = train(program, checkpointer.resume_or_init(0), range(LAST, LAST + 2))
        checkpointer.after_step(state)
        after = bits(state)
    assert cluster.stores("a") == {"rank-0": ["step-00000007"]}
    assert cluster.stores("b") == {"rank-1": ["step-00000007"]}
    assert resumed(cluster, "ba")[1] == after


def test_a_rank_and_its_neighbour_are_too_many_so_the_disk_serves(cluster: Cluster) -> None:
    trained(cluster, "abcd")
    cluster.lose("c", 2)
    cluster.lose("d", 3)
    words = r"goes on from step 3 .*peer copies of step 5: no store that is left holds __2_0.distcp"
    with pytest.warns(RuntimeWarning, match=words):
        checkpointer, state = resumed(cluster, "abcd")
    assert checkpointer.resumed_from == str(cluster.root / "disk" / "step-00000003")
    mesh = sw.Mesh(fsdp=4)
    with sw.simulate(mesh):
        program = lowered(mesh).bind()
        assert state == bits(train(program, program.init(0), range(3)))


def test_a_damaged_copy_is_noticed_and_the_disk_serves(cluster: Cluster) -> None:
    trained(cluster, "ab")
    for path in cluster.root.glob("[ab]/*/rank-*/step-00000005/__1_0.distcp"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="peer copies of step 5: "):
        checkpointer, _ = resumed(cluster, "ab")
    assert checkpointer.step == 3


def test_a_newer_checkpoint_on_disk_wins(cluster: Cluster) -> None:
    trained(cluster, "ab")
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program = lowered(mesh).bind()
        state = train(program, program.restore(cluster.root / "disk/step-00000003"), range(3, 8))
        program.save(cluster.root / "disk" / "step-00000008", state)
    checkpointer, _ = resumed(cluster, "ab")
    assert checkpointer.step == 8


def test_a_generation_that_was_not_completed_everywhere_gives_way(cluster: Cluster) -> None:
    """The older one is whole until all ranks have the newer one."""
    trained(cluster, "abc")
    mesh = sw.Mesh(fsdp=3)
    with sw.simulate(mesh):
        program = lowered(mesh).bind()
        before = bits(train(program, program.init(0), range(LAST)))
    torn = next(cluster.root.glob("a/*/rank-0/step-00000005"))
    shutil.copytree(torn, torn.with_name("step-00000006"))
    text = (torn / "shardwise.json").read_text()
    body = text.partition("\n")[2].replace('"step": 5,', '"step": 6,')
    crc = zlib.crc32(body[:-2].encode())
    new = torn.with_name("step-00000006") / "shardwise.json"
    new.write_text(f'{{"crc32": {crc},\n{body}')
    with pytest.warns(RuntimeWarning, match="peer copies of step 6: no store that is left holds"):
        checkpointer, state = resumed(cluster, "abc")
    assert checkpointer.step == LAST
    assert state == before


def test_copies_hold_what_a_checkpoint_holds(cluster: Cluster) -> None:
    """On two nodes every store has both files: each is a complete checkpoint."""
    trained(cluster, "ab")
    for node, rank in (("a", 0), ("b", 1)):
        (path,) = (cluster.root / node).glob(f"*/rank-{rank}/*")
        assert not why_incomplete(path)
        with sw.simulate(sw.Mesh(fsdp=1)):
            restored = lowered(sw.Mesh(fsdp=1)).bind().restore(path)
            assert int(sw.to_global(restored.step)) == LAST


def test_other_runs_of_the_node_are_left_alone(cluster: Cluster) -> None:
    other = cluster.root / "a" / "other-run" / "rank-7"
    other.mkdir(parents=True)
    trained(cluster, "ab")
    assert other.is_dir()


def test_a_node_without_room_fails_the_copy_on_all_ranks_and_not_the_save(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = cluster.root / "b"
    blocked.write_text("a file, so that no store can be made in it")
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program = lowered(mesh).bind()
        checkpointer = sw.Checkpointer(
            program, cluster.root / "disk", every=1, peer_dir=cluster.dirs("ab")
        )
        state = train(program, program.init(0), range(1))
        with pytest.raises(CheckpointError) as caught:
            checkpointer.after_step(state)
    text = str(caught.value)
    assert "Rank 1 of 2 has no peer copy of step 1, so no rank has." in text or "ENOTDIR" in text
    assert not why_incomplete(cluster.root / "disk" / "step-00000001")
    assert not list(cluster.root.glob("a/*/rank-0/step-*"))


def test_a_rank_that_has_no_copy_is_named_with_its_cause() -> None:
    with pytest.raises(CheckpointError) as caught:
        peers.check_all(None, ["", "write of 8 bytes failed with ENOSPC"], 7, "/dev/shm/a")
    assert str(caught.value).splitlines() == [
        "Rank 1 of 2 has no peer copy of step 7, so no rank has.",
        "  /dev/shm/a",
        "  write of 8 bytes failed with ENOSPC",
        "  Copies of all ranks make one checkpoint. Earlier copies and the disk are unchanged.",
        "  Fix: give the memory file system room for four times a rank's part of a state, or leave "
        "out peer_dir=",
    ]
    assert (caught.value.numbers["rank"], caught.value.numbers["step"]) == (1, 7)


def test_ranks_that_copy_other_steps_are_told(cluster: Cluster) -> None:
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program = lowered(mesh).bind()
        early = program.init(0)
        late = train(program, program.init(0), range(2))
        mixed = sw.Lifted([early.ranks[0], late.ranks[1]])
        checkpointer = sw.Checkpointer(
            program, cluster.root / "disk", every=9, peer_dir=cluster.dirs("ab"), peer_every=1
        )
        with pytest.raises(CheckpointError) as caught:
            checkpointer.after_step(mixed)
    text = str(caught.value)
    assert "Ranks do not copy the same state." in text
    assert "rank 0: step 0, layout" in text
    assert "rank 1: step 2, layout" in text
    assert "Fix: call after_step with the state of the same step on every rank" in text


def test_bytes_move_in_bounded_rounds(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a rank reads and its node lacks; the same bits in many small rounds."""
    monkeypatch.setattr(gathering, "ROUND_BYTES", 200)
    monkeypatch.setattr(gathering, "_PIECE_BYTES", 64)
    monkeypatch.setattr(peers, "PIECE_BYTES", 100)
    before = trained(cluster, "abcd")
    received: list[int] = []
    move = gathering.move

    def counted(place: Path, rounds: Any, *, rank: int, **rest: Any) -> Any:
        received.extend(sum(one.nbytes for one in group if one.target == rank) for group in rounds)
        return move(place, rounds, rank=rank, **rest)

    monkeypatch.setattr(peers, "move", counted)
    cluster.lose("c", 2)
    assert resumed(cluster, "abcd")[1] == before
    assert 0 < max(received) <= 200 + 64
    whole = sum(torch.tensor(values).numel() * 8 for values in before.values())
    # Rank 2 lacks all it needs; others only the replicated tensors that others wrote.
    assert sum(received) < whole
