"""`tlora train --devices N` from the command line: workers or a group, as the planner says."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import group_faults
from support.costs import TIME, known_points
from support.group_faults import lose
from support.runs import job_file

from tlora.cli.main import main
from tlora.config import dump_spec, load_spec
from tlora.core.errors import TloraError
from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.costs.groups import MEMORY_MARGIN
from tlora.costs.memory import Memory
from tlora.costs.profile import Profile, write_profile
from tlora.runtime.group import supervisor
from tlora.runtime.group.running import train_in_group
from tlora.runtime.planning import choose_profile, look_into
from tlora.runtime.training import RunResult

pytestmark = pytest.mark.multi_process

STEPS = 4
SLOW = replace(TIME, row_s=1e-3, flat_s=1e-3, fixed_s=0.0, segment_s=0.0)


def jobs_of(base: Path, rows: Path, batches: list[int], *overrides: str) -> RunSpec:
    jobs = [
        {"name": f"j{at}", "data": {"path": str(rows)}, "train": {"batch_size": batch}}
        for at, batch in enumerate(batches)
    ]
    return load_spec(job_file(base, *jobs), overrides or [f"max_steps={STEPS}"])


def slow(spec: RunSpec) -> Profile:
    """Of a device on which computing takes so long that links do not matter."""
    found = choose_profile(spec, None, torch.device("cpu")).profile
    points = tuple(known_points(noise_pct=0.0, time=SLOW))
    return replace(found, points=points, time=SLOW, heldout_error_pct=0.0)


def limited(profile: Profile, device_bytes: int) -> Profile:
    """And that has so much memory."""
    memory = Memory(
        weights_bytes=profile.memory.weights_bytes,
        device_bytes=device_bytes,
        outside_bytes=0,
        fixed_bytes=0.0,
        row_bytes=1.0,
        reserve_bytes=0.0,
    )
    return replace(profile, memory=memory)


def between(spec: RunSpec) -> int:
    """More than shards need, less than whole copies."""
    ground = look_into(spec)
    large = replace(ground.chosen, profile=limited(slow(spec), 2**30))
    planner = replace(ground, chosen=large).planner(2)
    needed = [
        planner.price(Plan(bucket=128, replicas=2 // fsdp, fsdp=fsdp, adapters="rank_local"))
        for fsdp in (1, 2)
    ]
    whole, sharded = (each.memory.total or 0.0 for each in needed)
    assert sharded < whole
    return round((whole + sharded) / 2 / (1 - MEMORY_MARGIN))


def tlora_train(spec: RunSpec, profile: Profile, folder: Path, *more: str) -> int:
    (folder / "jobs.yaml").write_text(dump_spec(spec))
    write_profile(profile, folder / "profile.json")
    command = ["train", str(folder / "jobs.yaml"), "--devices", "2", "--output", str(folder / "r")]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--profile", str(folder / "profile.json"), *more])
    return int(ended.value.code or 0)


def about(folder: Path) -> dict:
    return json.loads((folder / "r" / "run.json").read_text())


def completed(folder: Path) -> set[str]:
    found = folder.glob("r/*/result.json")
    return {path.parent.name for path in found if '"completed"' in path.read_text()}


def test_one_large_job_goes_to_a_group(base: Path, rows: Path, tmp_path: Path, capsys) -> None:
    """Over both devices, by data-parallel adapters; a run that is over is not planned again."""
    spec = jobs_of(base, rows, [16])
    assert tlora_train(spec, slow(spec), tmp_path) == 0
    out = capsys.readouterr().out
    assert "plan: one group, 2 replicas" in out and "times what it would be" in out
    assert about(tmp_path)["plan"]["adapters"] == "data_parallel"
    ranks = json.loads((tmp_path / "r" / "group.json").read_text())["ranks"]
    # Two for each sum: its parts are dealt out, and the sums are gathered.
    assert [each["collectives"]["gradient"]["calls"] for each in ranks] == [2 * STEPS] * 2
    assert completed(tmp_path) == {"j0"}
    assert tlora_train(spec, slow(spec), tmp_path) == 0
    assert "completed before" in capsys.readouterr().out


def test_many_small_jobs_stay_with_workers(base: Path, rows: Path, tmp_path: Path, capsys) -> None:
    """The scheduler's, each job on one device."""
    spec = jobs_of(base, rows, [2] * 6)
    assert tlora_train(spec, slow(spec), tmp_path) == 0
    assert "plan: a worker on each device" in capsys.readouterr().out
    assert "plan" not in about(tmp_path) and about(tmp_path)["policy"] == "tlora"
    assert completed(tmp_path) == {f"j{at}" for at in range(6)}


def test_a_base_that_fits_no_device_is_sharded(
    base: Path, rows: Path, tmp_path: Path, capsys
) -> None:
    """The profile says how much memory there is; with too little for any plan it is refused, with
    numbers, and nothing is left on disk."""
    spec = jobs_of(base, rows, [2] * 2)
    assert tlora_train(spec, limited(slow(spec), 30_000), tmp_path) == 2
    refusal = capsys.readouterr().err
    assert "--devices: nothing fits on 2 GPUs: the least, " in refusal
    assert re.search(r"needs 0.\d MiB of 0.0 on a GPU", refusal)
    assert not (tmp_path / "r").exists()
    assert tlora_train(spec, limited(slow(spec), between(spec)), tmp_path) == 0
    out = capsys.readouterr().out
    assert "2 x fsdp" in out and "a whole copy of the base with its jobs needs" in out
    assert about(tmp_path)["plan"]["fsdp"] == 2
    assert completed(tmp_path) == {"j0", "j1"}


def test_a_group_that_cannot_shrink_ends_with_its_jobs_saved(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is killed and the base fits no single device: the message has the numbers, and the
    same command goes on."""
    spec = jobs_of(base, rows, [2] * 2, "max_steps=60", "save.steps=2")
    write_profile(limited(slow(spec), between(spec)), tmp_path / "profile.json")
    metrics = tmp_path / "r" / "j0" / "metrics.jsonl"
    plan = Plan(bucket=128, fsdp=2, adapters="rank_local")

    def train(on_start=lambda ranks: None) -> RunResult:
        profile = str(tmp_path / "profile.json")
        return train_in_group(
            spec, output=tmp_path / "r", plan=plan, profile=profile, on_start=on_start
        )

    lost: list[float] = []
    with monkeypatch.context() as patch, pytest.raises(TloraError) as ended:
        patch.setattr(supervisor, "serve", group_faults.unhurried_to_the_end)
        train(lose(metrics, signal.SIGKILL, 1, lost))
    assert "rank 1: its process was ended by SIGKILL; nothing fits on 1 GPU: " in str(ended.value)
    assert re.search(r"needs 0.\d MiB of 0.\d on a GPU", str(ended.value))
    assert "The jobs are saved" in str(ended.value)
    assert list(tmp_path.glob("r/j0/checkpoints/step-*"))
    result = train()
    assert {job.status for job in result.jobs.values()} == {"completed"}
    assert [each["step"] for each in map(json.loads, metrics.read_text().splitlines())] == [
        *range(1, 61)
    ]
