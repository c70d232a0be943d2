"""Plans: what would be grouped with what, and on which figures."""

import json
from pathlib import Path

import pytest
import torch
from support.costs import new_profile
from support.runs import job_file
from support.scheduling import request

from tlora.config import load_spec
from tlora.core.cluster import uniform_cluster
from tlora.core.errors import SpecError
from tlora.costs.layout import NAMED
from tlora.costs.profile import write_profile
from tlora.runtime.planning import ChosenProfile, choose_profile, plan_requests, plan_run

CPU = torch.device("cpu")


@pytest.fixture
def spec(base: Path, rows: Path):
    jobs = [
        {"name": name, "data": {"path": str(rows)}, "train": {"batch_size": batch}}
        for name, batch in (("a", 1), ("b", 2), ("c", 4))
    ]
    return load_spec(job_file(base, *jobs))


def test_every_job_is_placed_once_and_gpus_are_not_shared(spec) -> None:
    """With what each is predicted to get, and why, also as JSON."""
    found = plan_run(spec, gpus=2)
    placed = [job for group in found.groups for job in group.jobs]
    assert sorted(placed) == ["a", "b", "c"]
    gpus = [gpu for group in found.groups for gpu in group.gpus]
    assert len(set(gpus)) == len(gpus)
    assert set(gpus) <= {0, 1}
    for job in found.jobs:
        assert job.tokens_per_s is not None and job.tokens_per_s > 0
        assert job.slowdown is not None and job.slowdown <= 1.5
    assert "assumed" in found.profile.source
    data = json.loads(json.dumps(found.as_json()))
    assert (data["kind"], data["gpus"]) == ("plan", 2)
    assert all(each["sentence"] for each in data["decisions"])


def test_a_plan_alone_leaves_the_others_waiting(spec) -> None:
    """As many jobs run as there are GPUs."""
    found = plan_run(spec, gpus=1, policy="solo")
    assert [group.jobs for group in found.groups] == [("a",)]
    assert found.waiting == ("b", "c")
    [alone] = [job for job in found.jobs if job.name == "a"]
    assert alone.tokens_per_s == pytest.approx(alone.solo_tokens_per_s)


def test_what_does_not_fit_is_refused_with_its_reason() -> None:
    """On a GPU whose memory is smaller than the base."""
    cluster = uniform_cluster(1, memory_bytes=1000)
    chosen = ChosenProfile(new_profile(), "a test")
    found = plan_requests([request("large")], cluster, chosen, policy="tlora")
    assert found.refused == ("large",)
    assert found.waiting == ()
    assert "refused" in str(found.decisions[0])


@pytest.mark.parametrize(
    ("asked", "fsdp"), [({}, {1, 2, 4}), ({"whole": True}, {1}), ({"exact": True}, {1})]
)
def test_no_group_is_offered_shards_that_its_run_refuses(
    asked: dict[str, bool], fsdp: set[int]
) -> None:
    """Neither for all jobs as one group nor inside of each."""
    jobs = [request("large", gpus=2, batch=64)]
    chosen = ChosenProfile(new_profile(), "a test")
    found = plan_requests(
        jobs, uniform_cluster(4), chosen, policy="tlora", layout=NAMED["llama-8b"], **asked
    )
    [group] = found.groups
    assert len(group.gpus) == 4
    for choice in (group.inside, found.one_group):
        assert choice is not None
        assert {each.price.plan.fsdp for each in choice.candidates} == fsdp


def test_profiles_of_other_bases_and_unknown_policies_are_refused(spec, tmp_path: Path) -> None:
    """Rather than used in silence."""
    path = tmp_path / "other.json"
    write_profile(new_profile(), path)
    with pytest.raises(SpecError, match="other linears"):
        choose_profile(spec, str(path), CPU)
    with pytest.raises(SpecError, match="none of"):
        plan_run(spec, gpus=1, policy="best")


def test_a_size_of_nano_batches_in_the_file_holds(spec) -> None:
    """The plan never has larger ones."""
    small = load_spec(
        {
            "base": {"model": spec.base.model},
            "engine": {"device": "cpu", "nano_batch_tokens": 128},
            "jobs": [{"name": "a", "data": {"path": spec.jobs[0].data.paths[0]}}],
        }
    )
    assert choose_profile(small, None, CPU).profile.budget_tokens == 128
    [group] = plan_run(small, gpus=1).groups
    assert group.plan.bucket <= 128
