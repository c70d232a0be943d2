"""Checkpoints are whole or not used."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tlora.model.adapters import LoraPair
from tlora.training.checkpoint import (
    FILES,
    MANIFEST,
    Checkpoint,
    CheckpointDamaged,
    checkpoints,
    find_newest,
    load_checkpoint,
    prune,
    save_checkpoint,
)
from tlora.training.engine_job import JobState


def checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {path: LoraPair(a=matrix(2, 5), b=matrix(7, 2)) for path in ("m.q_proj", "m.o_proj")}
    keys = [f"{path}.lora_{side}" for path in weights for side in "AB"]
    state = JobState(
        step=step,
        weights=weights,
        exp_avg={key: matrix(2, 5) for key in keys},
        exp_avg_sq={key: matrix(2, 5) for key in keys},
    )
    return Checkpoint(state, {"epoch": 1, "position": step, "loss": 0.25, "best": [3, 0.5]})


def same(one: Checkpoint, other: Checkpoint) -> bool:
    p, q = one.state, other.state
    return (
        p.step == q.step
        and p.weights.keys() == q.weights.keys()
        and all(torch.equal(p.weights[key].a, q.weights[key].a) for key in p.weights)
        and all(torch.equal(p.weights[key].b, q.weights[key].b) for key in p.weights)
        and p.exp_avg.keys() == q.exp_avg.keys()
        and all(torch.equal(p.exp_avg[key], q.exp_avg[key]) for key in p.exp_avg)
        and all(torch.equal(p.exp_avg_sq[key], q.exp_avg_sq[key]) for key in p.exp_avg_sq)
        and {**one.progress, "v": 1} == {**other.progress, "v": 1}
    )


def test_what_is_loaded_is_what_was_saved_to_the_bit(tmp_path):
    """Weights, both moments and the driver's progress; another step's is not taken for it."""
    path = save_checkpoint(tmp_path, "sql", checkpoint(100))
    assert path.name == "step-00000100"
    assert sorted(each.name for each in path.iterdir()) == sorted([*FILES, MANIFEST])
    assert same(load_checkpoint(path), checkpoint(100))
    assert not same(load_checkpoint(path), checkpoint(101))


def test_every_flipped_bit_is_noticed(tmp_path):
    """Three hundred single-bit flips over all files."""
    path = save_checkpoint(tmp_path, "sql", checkpoint(1))
    generator = np.random.default_rng(0)
    unnoticed = 0
    for _ in range(300):
        file = path / generator.choice([*FILES, MANIFEST])
        clean = file.read_bytes()
        at = int(generator.integers(len(clean)))
        flipped = bytearray(clean)
        flipped[at] ^= 1 << int(generator.integers(8))
        file.write_bytes(flipped)
        with contextlib.suppress(CheckpointDamaged):
            # A flip in the manifest's white space changes nothing that it says.
            unnoticed += not same(load_checkpoint(path), checkpoint(1))
        file.write_bytes(clean)
    assert unnoticed == 0
    assert same(load_checkpoint(path), checkpoint(1))


@pytest.mark.parametrize("file", [*FILES, MANIFEST])
def test_a_cut_or_missing_file_is_named(tmp_path, file):
    """The message says which file of which checkpoint."""
    path = save_checkpoint(tmp_path, "sql", checkpoint(1))
    content = (path / file).read_bytes()
    (path / file).write_bytes(content[:-3])
    with pytest.raises(CheckpointDamaged, match=path.name):
        load_checkpoint(path)
    (path / file).unlink()
    with pytest.raises(CheckpointDamaged, match=path.name):
        load_checkpoint(path)


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    """Damaged ones are passed over, newest first, and said."""
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, "sql", checkpoint(step))
    (tmp_path / "step-00000030" / FILES[0]).write_bytes(b"rubbish")
    found = find_newest(tmp_path)
    assert found.checkpoint is not None and same(found.checkpoint, checkpoint(20))
    assert len(found.damaged) == 1 and "step-00000030" in found.damaged[0]


def test_nothing_to_find_is_not_an_error(tmp_path):
    """A job that never saved starts anew."""
    found = find_newest(tmp_path / "none")
    assert found.checkpoint is None and found.damaged == []


def test_a_half_written_checkpoint_is_never_seen(tmp_path):
    """What a crash leaves has another name, and the next prune removes it."""
    save_checkpoint(tmp_path, "sql", checkpoint(10))
    half = tmp_path / ".step-00000020.123"
    half.mkdir()
    (half / FILES[0]).write_bytes(b"half")
    found = find_newest(tmp_path)
    assert found.checkpoint is not None and found.checkpoint.state.step == 10
    prune(tmp_path, keep=1)
    assert not half.exists()


def test_only_the_newest_are_kept(tmp_path):
    """`save.total_limit`; null keeps all."""
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, "sql", checkpoint(step))
    prune(tmp_path, keep=None)
    assert len(checkpoints(tmp_path)) == 3
    prune(tmp_path, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000020", "step-00000030"]


def test_a_failed_save_leaves_what_was_there(tmp_path):
    """The target's parent is a file: nothing is written, the older checkpoint is untouched."""
    kept = save_checkpoint(tmp_path, "sql", checkpoint(10))
    blocked = tmp_path / ".step-00000020"
    parent = Path(kept / MANIFEST)
    with pytest.raises(OSError):
        save_checkpoint(parent, "sql", checkpoint(20))
    assert not blocked.exists()
    assert same(load_checkpoint(kept), checkpoint(10))


def test_the_manifest_names_job_and_step(tmp_path):
    """For people who look."""
    path = save_checkpoint(tmp_path, "sql", checkpoint(7))
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["job"], manifest["step"], set(manifest["files"])) == ("sql", 7, set(FILES))
