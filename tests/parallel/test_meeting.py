"""Ranks that a launcher started, perhaps again: those of one attempt find each other."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from support import rank_work
from support.ranks import Ranks

from tlora.parallel.meeting import meet
from tlora.runtime.group.supervisor import hold_port

SECONDS = timedelta(seconds=300)


def connection(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=SECONDS)


def test_the_ranks_of_an_attempt_have_a_part_of_the_store_to_themselves() -> None:
    """Though it remembers an earlier attempt, and a question of a rank that died unanswered."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SECONDS)
    store.set("tlora/asks/2", "of nobody any more")

    def attempt(number: int) -> list[list[str]]:
        def enter(rank: int) -> list[str]:
            found = meet(connection(store.port), rank, 3, timeout_s=300.0)
            assert not found.check([f"address of {rank}"])
            found.set(f"address of {rank}", f"{rank} of attempt {number}")
            return [found.get(f"address of {other}").decode() for other in range(3)]

        with ThreadPoolExecutor(3) as ranks:
            return list(ranks.map(enter, range(3)))

    for number in (1, 2):
        assert attempt(number) == 3 * [[f"{rank} of attempt {number}" for rank in range(3)]]


def test_a_rank_that_does_not_come_is_named() -> None:
    """By the one that waits for it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SECONDS)
    with pytest.raises(dist.DistStoreError, match=r"ranks \[1\] have not come"):
        meet(store, 0, 2, timeout_s=0.1)


def test_ranks_that_came_to_different_plans_are_refused(ranks: Ranks) -> None:
    """On all of them, with both plans; otherwise they have a name, and know whether any of them was
    started again."""
    told = ranks.call(rank_work.compared, 2, buckets=[64, 128], attempts=[0, 0])
    assert told[0] == told[1]
    assert "rank 0 has '2 replicas, nano-batches of 64 tokens' and rank 1 '2 replicas, " in told[0]
    for attempts, is_first in (([0, 0], True), ([1, 0], False), ([0, 1], False)):
        (name, first), other = ranks.call(
            rank_work.compared, 2, buckets=[64, 64], attempts=attempts
        )
        assert (name, first) == other and name and first == is_first


RANK = """
import os, sys, time
import torch, torch.distributed as dist
from tlora.parallel.mesh import join
folder = sys.argv[1]
join(timeout_s=300.0)
counted = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
dist.all_gather(counted, torch.tensor([int(os.environ["TORCHELASTIC_RESTART_COUNT"])]))
attempts = [int(each) for each in counted]
if not any(attempts):
    if os.environ["NODE"] == "0":
        sys.exit(1)
    # It does not notice: its launcher does, that another node comes again.
    time.sleep(600)
print(attempts, file=open(f"{folder}/{dist.get_rank()}", "w"))
dist.destroy_process_group()
"""


@pytest.mark.multi_process
def test_launchers_of_two_nodes_that_count_differently_start_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of one node fails: its launcher starts it for the second time, and the other node's
    counts no restart. They meet all the same."""
    (tmp_path / "rank.py").write_text(RANK)
    meeting = hold_port()
    endpoint = f"localhost:{meeting.getsockname()[1]}"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
        *(str(tmp_path / "rank.py"), str(tmp_path)),
    ]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    launchers = []
    for node in range(2):
        monkeypatch.setenv("NODE", str(node))
        launchers.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    try:
        errors = [each.communicate(timeout=600)[1] for each in launchers]
    finally:
        for each in launchers:
            each.terminate()
        meeting.close()
    assert [each.returncode for each in launchers] == [0, 0], errors
    attempts = {(tmp_path / str(rank)).read_text().strip() for rank in range(2)}
    assert len(attempts) == 1 and attempts <= {"[0, 1]", "[1, 0]"}
