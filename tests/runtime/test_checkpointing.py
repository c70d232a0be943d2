"""The background writer tells what it could not save, and never leaves the run waiting."""

import pytest

from tlora.runtime import checkpointing
from tlora.runtime.checkpointing import CheckpointWriter
from tlora.training.checkpoint import Checkpoint, checkpoints
from tlora.training.engine_job import JobState


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(JobState(step, {}, {}, {}), {"step": step})


def test_what_was_handed_over_is_on_disk_after_a_flush(tmp_path):
    """And only the newest are kept."""
    writer = CheckpointWriter()
    for step in (1, 2, 3):
        writer.submit("job", tmp_path, checkpoint(step), keep=2)
        writer.flush()
    writer.close()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    assert writer.failures() == []


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), MemoryError("none left")]
)
def test_whatever_keeps_a_checkpoint_from_the_disk_is_told(tmp_path, monkeypatch, error):
    """Once, with the job's name; the writer goes on with the next."""

    def failing(parent, job, checkpoint):
        raise error

    writer = CheckpointWriter()
    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "save_checkpoint", failing)
        writer.submit("job", tmp_path, checkpoint(1), keep=2)
        writer.flush()
    (failure,) = writer.failures()
    assert failure.job == "job" and "cannot save a checkpoint" in failure.reason
    assert writer.failures() == []
    writer.submit("job", tmp_path, checkpoint(2), keep=2)
    writer.close()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002"]
