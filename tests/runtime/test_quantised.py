"""Runs on a base whose linears are held in fewer bits, from the file to the adapter."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import save_base
from support.runs import job_file

import tlora
from tlora.config import load_spec
from tlora.core.errors import SpecError
from tlora.core.job import BaseSpec, RunSpec
from tlora.core.plan import Plan
from tlora.model.loading import load_shape
from tlora.model.quantising import saved_bytes
from tlora.model.targets import find_targets
from tlora.runtime import planning
from tlora.runtime.checking import check_run
from tlora.runtime.elastic.roll import newcomers
from tlora.runtime.group.plans import check_plan
from tlora.runtime.group.running import train_in_group
from tlora.runtime.planning import choose_profile, look_into
from tlora.runtime.room import room_bytes
from tlora.runtime.scheduled import train_on_devices

CPU = torch.device("cpu")


def spec_of(base: Path, rows: Path, how: str = "nf4", **engine: object) -> RunSpec:
    jobs = [
        {"name": name, "data": {"path": str(rows)}, "eval": {"split": 4}, "train": {"seed": seed}}
        for seed, name in enumerate("ab")
    ]
    file = job_file(base, *jobs)
    return load_spec(
        {
            **file,
            "base": {"model": str(base), "quantization": how},
            "engine": {"device": "cpu", **engine},
        }
    )


@pytest.mark.parametrize("how", ["nf4", "fp8"])
def test_jobs_train_on_it_and_leave_ordinary_adapters(how: str, base, rows, tmp_path: Path) -> None:
    """They are those of this base, neither of the one in full nor of the other format."""
    plain = tlora.train(spec_of(base, rows, "none"), output=tmp_path / "plain")
    found = tlora.train(spec_of(base, rows, how), output=tmp_path / how)
    assert not found.failed
    assert json.loads((tmp_path / how / "run.json").read_text())["quantization"] == how
    assert f", linears in {how}" in (tmp_path / how / "report.html").read_text()
    assert ", linears in" not in (tmp_path / "plain" / "report.html").read_text()
    for job in "ab":
        files = sorted(path.name for path in (tmp_path / how / job / "adapter").iterdir())
        assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
        ours, theirs = found.jobs[job].eval_loss, plain.jobs[job].eval_loss
        assert ours is not None and theirs is not None
        assert 1e-4 < abs(ours - theirs) < 0.2 * theirs


def test_it_goes_on_with_the_same_bits_and_not_with_others(base, rows, tmp_path: Path) -> None:
    """What is quantised anew at every start is the same; another format is refused by field."""
    spec = spec_of(base, rows)
    tlora.train(spec, output=tmp_path)
    longer = replace(spec, base=BaseSpec(model=str(base)))
    with pytest.raises(SpecError, match=r"was started with base .*quantization nf4") as caught:
        tlora.train(longer, output=tmp_path)
    assert caught.value.field == "base"
    assert not tlora.train(spec, output=tmp_path).failed


def test_a_job_for_another_base_may_not_join(base, rows) -> None:
    """Also where only the bits are others."""
    run = spec_of(base, rows)
    asked = replace(run, base=replace(run.base, quantization="fp8"))
    with pytest.raises(SpecError) as caught:
        newcomers(run, asked, root=Path("runs/x"))
    assert caught.value.field == "base.quantization"


@pytest.mark.multi_process
def test_workers_and_ranks_have_the_same_base(base, rows, tmp_path: Path) -> None:
    """With exact isolation the same bits on one device, over two workers, and in a group."""
    spec = spec_of(base, rows, isolation="exact", nano_batch_tokens=128)
    tlora.train(spec, output=tmp_path / "alone")
    train_on_devices(spec, output=tmp_path / "workers", devices=2)
    plan = Plan(replicas=2, bucket=128, adapters="rank_local")
    train_in_group(spec, output=tmp_path / "group", plan=plan)
    for job in "ab":
        bits = {
            way: (tmp_path / way / job / "adapter" / "adapter_model.safetensors").read_bytes()
            for way in ("alone", "workers", "group")
        }
        assert bits["workers"] == bits["group"] == bits["alone"]


def test_what_cannot_be_is_refused_before_anything_is_loaded(base, rows, tmp_path) -> None:
    """Shards, exact isolation in FP8, a model whose matrices lie the other way round."""
    with pytest.raises(SpecError, match="not laid over GPUs in shards") as caught:
        check_plan(Plan(replicas=1, fsdp=2, bucket=64), spec_of(base, rows))
    assert caught.value.field == "base.quantization"
    with pytest.raises(SpecError, match="which exact isolation needs") as caught:
        spec_of(base, rows, "fp8", isolation="exact")
    assert caught.value.field == "base.quantization"
    gpt2 = save_base(tmp_path / "gpt2", "gpt2")
    with pytest.raises(SpecError, match="has no linear whose weight can be held in nf4"):
        check_run(spec_of(gpt2, rows))


def test_plans_know_what_it_takes(base, rows) -> None:
    """Memory of the weights, and that nothing is sharded."""
    shape = load_shape(BaseSpec(model=str(base)))
    saved = saved_bytes(find_targets(shape).values(), "nf4", 4)
    assert saved > 0
    plain, held = spec_of(base, rows, "none"), spec_of(base, rows)
    full = choose_profile(plain, None, CPU).profile.memory.weights_bytes
    assert choose_profile(held, None, CPU).profile.memory.weights_bytes == full - saved
    assert look_into(plain).planner(2).may_shard
    assert not look_into(held).planner(2).may_shard


def test_a_profile_of_another_format_loses_what_it_holds(base, rows, monkeypatch) -> None:
    """A base in float32, planned on figures that were measured in bfloat16."""
    full = choose_profile(spec_of(base, rows, "none"), None, CPU).profile
    memory = replace(full.memory, weights_bytes=full.memory.weights_bytes // 2)
    measured = replace(full, dtype="bfloat16", memory=memory)
    monkeypatch.setattr(planning, "find_profile", lambda _: measured)
    saved = saved_bytes(find_targets(load_shape(BaseSpec(model=str(base)))).values(), "nf4", 2)
    found = choose_profile(spec_of(base, rows), "measured", CPU).profile.memory.weights_bytes
    assert found == memory.weights_bytes - saved > 0


def test_more_adapters_have_room_beside_it(base, rows, monkeypatch) -> None:
    """By what its weights take less."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**9, 10**9))
    shape = load_shape(BaseSpec(model=str(base)))
    cuda = torch.device("cuda")
    found = {
        how: room_bytes(
            BaseSpec(model=str(base), quantization=how),
            shape,
            cuda,
            budget_tokens=64,
            recompute=False,
        )
        for how in ("none", "nf4")
    }
    saved = saved_bytes(find_targets(shape).values(), "nf4", 4)
    assert found["nf4"] - found["none"] == pytest.approx(saved)
