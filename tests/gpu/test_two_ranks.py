"""Two ranks that share one GPU, by gloo: whole runs under plans, each beside a run of one process.

nccl refuses two ranks on one device; gloo carries the same sums and gatherings by way of the host.
So this shows that they are right on a GPU, and nothing of their speed. The same code runs without a
GPU where TLORA_TEST_DEVICE=cpu.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models import save_base
from support.runs import job_file, write_rows

pytest.importorskip("pydantic", reason="job files are read by pydantic, which is not installed")
from tlora.config import dump_spec, load_spec

DEVICE = os.environ.get("TLORA_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no CUDA device"
    ),
]
JOBS = ("spans", "stays")
# Of losses, relative: float32 by sums in another order, with tf32; bfloat16 keeps 8 bits.
CLOSE = {"float32": 1e-3, "bfloat16": 1e-2}
PLANS = {
    "rank-local": ("float32", "replicas: 2\nadapters: rank_local\n"),
    "data-parallel": ("float32", "replicas: 2\nadapters: mixed\nspread: [spans]\n"),
    "shards": ("float32", "fsdp: 2\nadapters: mixed\nspread: [spans]\n"),
    "shards kept in part, compiled": (
        "bfloat16",
        "fsdp: 2\nkept_layers: 1\nadapters: rank_local\n",
    ),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A job file for each precision. The jobs have one rank and dropout each, so that few kernels
    are compiled."""
    folder = tmp_path_factory.mktemp("jobs")
    base = save_base(folder / "base")
    data = {"path": str(write_rows(folder / "rows.jsonl", 24))}
    settings = {
        "data": data,
        "lora": {"r": 8, "lora_dropout": 0.1},
        "train": {"max_steps": 8, "batch_size": 5, "adam_epsilon": 1e-3},
    }
    files = {}
    for dtype in CLOSE:
        found = job_file(
            base,
            *({"name": name, **settings} for name in JOBS),
            engine={"device": DEVICE, "nano_batch_tokens": 128},
        )
        spec = load_spec({**found, "base": {"model": str(base), "dtype": dtype}})
        files[dtype] = folder / f"{dtype}.yaml"
        files[dtype].write_text(dump_spec(spec))
    return files


@pytest.fixture(scope="module")
def alone(jobs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of this precision in one process."""

    @functools.cache
    def run(dtype: str) -> Path:
        return trained(jobs[dtype], tmp_path_factory.mktemp("alone") / dtype)

    return run


def trained(jobs: Path, output: Path, *options: str) -> Path:
    command = (sys.executable, "-m", "tlora", "train", str(jobs), "--output", str(output), *options)
    environment = os.environ | {"TLORA_SHARE_GPUS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return output


def losses(output: Path, job: str) -> list[float]:
    lines = (output / job / "metrics.jsonl").read_text().splitlines()
    return [each["loss"] for each in map(json.loads, lines) if each["kind"] == "train"]


@pytest.mark.parametrize("kind", PLANS)
def test_two_ranks_on_one_device_train_as_one_process(
    kind: str, jobs: dict[str, Path], alone: Callable[[str], Path], tmp_path: Path
) -> None:
    """Every job's losses; no group was lost on the way, and both ranks took part."""
    dtype, plan = PLANS[kind]
    (tmp_path / "plan.yaml").write_text(f"bucket: 128\n{plan}")
    run = trained(jobs[dtype], tmp_path / "run", "--plan", str(tmp_path / "plan.yaml"))
    group = json.loads((run / "group.json").read_text())
    assert not group["lost"], group["lost"]
    assert [each["rank"] for each in group["ranks"]] == [0, 1]
    assert all(each["tokens"] for each in group["ranks"])
    kinds = set(group["ranks"][0]["collectives"])
    assert ("gradient" in kinds) == ("spread" in plan) and ("backbone" in kinds) == ("fsdp" in plan)
    for job in JOBS:
        found, expected = losses(run, job), losses(alone(dtype), job)
        assert found == pytest.approx(expected, rel=CLOSE[dtype]), job
        wrong = [each * (1 + 3 * CLOSE[dtype]) for each in found]
        assert wrong != pytest.approx(expected, rel=CLOSE[dtype])
