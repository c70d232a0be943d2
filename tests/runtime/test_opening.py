"""Two commands for one run: the second reads nothing before it has the directory, and writes over
nothing that the first has left."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.runs import job_file

from tlora.config import dump_spec, load_spec
from tlora.core.errors import SpecError
from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.runtime import scheduled, training
from tlora.runtime.directory import RunDirectory
from tlora.runtime.elastic.roll import Again, enrol, submitted_names
from tlora.runtime.group import whole
from tlora.runtime.group.running import train_in_group
from tlora.runtime.opening import open_run
from tlora.runtime.scheduled import train_on_devices
from tlora.runtime.training import train

PLAN = Plan(bucket=128, replicas=2, adapters="rank_local")

WAYS = {
    "one device": (train, training, {}),
    "workers": (train_on_devices, scheduled, {"devices": 2}),
    "a group": (train_in_group, whole, {"plan": PLAN}),
}


@pytest.fixture
def spec(base: Path, rows: Path) -> RunSpec:
    jobs = ({"name": name, "data": {"path": str(rows)}} for name in ("one", "two"))
    return load_spec(job_file(base, *jobs))


def first(spec: RunSpec) -> RunSpec:
    return replace(spec, jobs=spec.jobs[:1])


def begun(root: Path, spec: RunSpec) -> Path:
    root.mkdir(exist_ok=True)
    (root / "resolved.yaml").write_text(dump_spec(spec))
    (root / "run.json").write_text(json.dumps({"v": 1, "jobs": [job.name for job in spec.jobs]}))
    return root


class Looked(BaseException):
    """Instead of the rest of the run."""


@pytest.mark.parametrize("way", WAYS)
def test_nobody_can_join_unseen_once_a_run_is_read(
    way: str, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its first look at the jobs and its first write: the directory is taken by then, by
    who was there before or by this one. What joined just before that is gone on with."""
    start, module, options = WAYS[way]
    root = begun(tmp_path / "run", first(spec))
    taken = RunDirectory.take_if_there

    def take(self: RunDirectory) -> None:
        # The last that the run before does.
        enrol(root, first(spec), spec.jobs[1:])
        taken(self)

    def looked(base) -> None:
        with pytest.raises(SpecError, match="another tlora is at work"):
            RunDirectory(root).take()
        raise Looked

    monkeypatch.setattr(RunDirectory, "take_if_there", take)
    monkeypatch.setattr(module, "load_shape", looked)
    with pytest.raises(Looked):
        start(first(spec), output=root, **options)
    begun(root, first(spec))
    found = open_run(first(spec), RunDirectory(root), fresh=False, again=Again())
    assert [job.name for job in found.spec.jobs] == ["one", "two"] and found.submitted == ("two",)
    found.directory.close()


def test_a_run_that_began_meanwhile_is_not_written_over(spec: RunSpec, tmp_path: Path) -> None:
    """Its directory was not there to be taken: one that submitted jobs may be in it by now."""
    root = tmp_path / "run"
    second = open_run(first(spec), RunDirectory(root), fresh=False, again=Again())
    enrol(begun(root, first(spec)), first(spec), spec.jobs[1:])
    with pytest.raises(SpecError, match=r"has begun a run in .* meanwhile; give the same command"):
        second.create()
    second.directory.close()
    assert submitted_names(root) == ["two"]
    again = open_run(first(spec), RunDirectory(root), fresh=False, again=Again())
    again.create()
    assert again.recorded == spec
    again.directory.close()


def test_a_sweep_is_not_gone_on_with_as_a_run(spec: RunSpec, tmp_path: Path) -> None:
    """Its trials and the jobs would be one muddle; started over, it is gone."""
    root = begun(tmp_path / "run", spec)
    (root / "study.json").touch()
    with pytest.raises(
        SpecError, match=r"holds a sweep, which tlora tune goes on with; .* --fresh"
    ):
        open_run(spec, RunDirectory(root), fresh=False, again=Again())
    over = open_run(spec, RunDirectory(root), fresh=True, again=Again())
    over.create()
    assert not over.directory.is_sweep
    over.directory.close()


def test_a_run_that_is_refused_lets_its_directory_go(spec: RunSpec, tmp_path: Path) -> None:
    """Another base, here: the same process may try again."""
    root = begun(tmp_path / "run", spec)
    other = replace(spec, base=replace(spec.base, dtype="bfloat16"))
    with pytest.raises(SpecError, match="was started with base"):
        train(other, output=root)
    directory = RunDirectory(root)
    directory.take()
    directory.close()
