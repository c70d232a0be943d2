"""Plans of up to 1,024 ranks with a fake process group: collectives and bytes of a nano-batch are
those that the costs predict, to the byte.

A fake group answers every collective at once and moves nothing, and fake tensors hold nothing, so
one process stands for any number of ranks. It is a process of its own, for all meshes of this file:
this one may have a real group.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tlora.costs.layout import BaseLayout, gathers_of, llama_layout

SIZES = {
    "hidden": 96,
    "intermediate": 200,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 24,
    "vocabulary": 1000,
}
NANO_BATCHES = 2
SUMMED = 10_000
"""Numbers of a job's gradient."""

PROGRAM = Path(__file__).parent / "fake_group.py"


def layout(*, tied: bool = False) -> BaseLayout:
    return llama_layout("small", **SIZES, tied=tied)


class Mesh(NamedTuple):
    replicas: int
    fsdp: int
    kept_layers: int = 0
    tied: bool = False


MESHES = (Mesh(1, 2), Mesh(1, 7, tied=True), Mesh(2, 8), Mesh(128, 8), Mesh(16, 64, tied=True))
KEPT = Mesh(2, 8, kept_layers=3)


@pytest.fixture(scope="module")
def collectives() -> dict[Mesh, dict[str, int]]:
    """Of one rank, for two nano-batches: calls and bytes of each kind."""
    meshes = [*MESHES, KEPT]
    also = {"nano_batches": NANO_BATCHES, "summed": SUMMED}
    asked = [SIZES | mesh._asdict() | also for mesh in meshes]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(meshes, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_sharded_base_is_gathered_as_predicted_and_nothing_else(
    mesh: Mesh, collectives: dict[Mesh, dict[str, int]]
) -> None:
    """Each layer twice for a nano-batch, embeddings and head once; no gradient of the frozen base
    is reduced, over shards or over replicas. Odd numbers of ranks pad as predicted."""
    base = layout(tied=mesh.tied)
    expected = gathers_of(base, mesh.fsdp)
    found = {name: many for name, many in collectives[mesh].items() if "sum" not in name}
    assert found == {
        "all_gather_calls": NANO_BATCHES * expected.calls,
        "all_gather_bytes": NANO_BATCHES * expected.moved_bytes,
        "other_calls": 0,
    }
    # One more gathering of a norm would be seen.
    assert collectives[mesh]["all_gather_bytes"] != NANO_BATCHES * (
        expected.moved_bytes + base.gathered_bytes(base.root, mesh.fsdp)
    )


def test_kept_layers_are_gathered_once_for_all_nano_batches(
    collectives: dict[Mesh, dict[str, int]],
) -> None:
    """The first nano-batch gathers them, the second does not."""
    plain, kept = gathers_of(layout(), 8), gathers_of(layout(), 8, kept_layers=3)
    layer = layout().gathered_bytes(layout().layers[0], 8)
    found = collectives[KEPT]
    assert found["all_gather_calls"] == NANO_BATCHES * kept.calls + 3
    assert found["all_gather_bytes"] == NANO_BATCHES * kept.moved_bytes + 3 * layer
    assert found["all_gather_calls"] < NANO_BATCHES * plain.calls
    assert found["other_calls"] == 0


@pytest.mark.parametrize("mesh", MESHES)
def test_a_sum_brings_two_gradients_to_a_rank_however_many_there_are(
    mesh: Mesh, collectives: dict[Mesh, dict[str, int]]
) -> None:
    """Padded to a whole number for each rank, and one number of each rank beside."""
    ranks = mesh.replicas * mesh.fsdp
    padded = -(-SUMMED // ranks) * ranks
    assert collectives[mesh]["sum_calls"] == 2
    assert collectives[mesh]["sum_num_bytes"] == 2 * 4 * padded + 8 * ranks
