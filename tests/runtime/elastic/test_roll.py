"""Which jobs a run has, and which may join it."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from support.runs import job_file, write_rows

from tlora.config import dump_spec, load_spec
from tlora.core.errors import SpecError
from tlora.core.job import RunSpec
from tlora.runtime.elastic.roll import (
    Again,
    check_proven,
    command_to_go_on,
    enrol,
    newcomers,
    with_submitted,
)

ROOT = Path("runs/x")


@pytest.fixture
def spec(base: Path, tmp_path: Path) -> RunSpec:
    data = {"path": str(write_rows(tmp_path / "rows.jsonl", 4))}
    return load_spec(job_file(base, *({"name": name, "data": data} for name in "abc")))


def part(spec: RunSpec, names: str) -> RunSpec:
    return replace(spec, jobs=tuple(job for job in spec.jobs if job.name in names))


def test_jobs_that_a_run_has_already_do_not_join_it_again(spec: RunSpec) -> None:
    """A file to which a job was added can be submitted as it is."""
    assert newcomers(part(spec, "ab"), spec, root=ROOT) == part(spec, "c").jobs
    assert newcomers(spec, spec, root=ROOT) == ()


def test_what_cannot_be_of_this_run_is_refused_by_job_and_field(spec: RunSpec) -> None:
    """Another base, another job of the same name, bits that this run does not promise."""
    run, job = part(spec, "a"), spec.jobs[0]
    base = replace(spec.base, dtype="bfloat16")
    taken = replace(job, train=replace(job.train, seed=9))
    exact = replace(spec.engine, isolation="exact")
    for asked, where in (
        (replace(spec, base=base), (None, "base.dtype")),
        (replace(spec, jobs=(taken,)), ("a", "train.seed")),
        (replace(spec, engine=exact), (None, "engine.isolation")),
    ):
        with pytest.raises(SpecError) as caught:
            newcomers(run, asked, root=ROOT)
        assert (caught.value.job, caught.value.field) == where


def test_a_rank_that_nobody_looked_at_is_refused_where_bits_count(spec: RunSpec) -> None:
    """With those that were."""
    check_proven(spec.jobs, {2, 4})
    with pytest.raises(SpecError, match="is 2; exact isolation was shown for 4, 8 "):
        check_proven(spec.jobs, {8, 4})


def test_what_was_submitted_belongs_to_the_run_from_then_on(spec: RunSpec, tmp_path: Path) -> None:
    """The same file has it too; one that the file has, or that was left out of it, is as before."""
    (tmp_path / "resolved.yaml").write_text(dump_spec(part(spec, "ab")))
    (tmp_path / "run.json").write_text(json.dumps({"v": 1, "jobs": ["a"], "devices": 2}))
    assert with_submitted(part(spec, "a"), tmp_path) == part(spec, "a")
    whole = enrol(tmp_path, part(spec, "ab"), part(spec, "ac").jobs)
    assert whole == spec
    about = json.loads((tmp_path / "run.json").read_text())
    assert (about["jobs"], about["submitted"], about["v"]) == (["a", "c"], ["c"], 1)
    assert with_submitted(part(spec, "a"), tmp_path) == part(spec, "ac")
    assert with_submitted(part(spec, "c"), tmp_path) == part(spec, "c")
    enrol(tmp_path, whole, part(spec, "c").jobs)
    assert json.loads((tmp_path / "run.json").read_text()) == about


def test_the_command_that_goes_on_with_a_run_is_one_that_can_be_typed(tmp_path: Path) -> None:
    """Its own record is a job file; by whom it was started, and with what."""
    root = tmp_path / "my run"
    root.mkdir()
    torchrun = ("torchrun", "--nproc-per-node", "2", "-m", "tlora")
    for again in (Again(), Again(torchrun, ("--plan", "my plan.yaml"))):
        (root / "run.json").write_text(json.dumps(again.as_json()))
        words = ["train", f"{root}/resolved.yaml", "--output", str(root)]
        assert shlex.split(command_to_go_on(root)) == [*again.launcher, *words, *again.options]
