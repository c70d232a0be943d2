"""How many devices a run may ask for, and what it is told where these are not there."""

from pathlib import Path

import pytest
import torch
import yaml
from support.runs import job_file
from support.sweeps import sweep_file

from tlora.cli.main import main
from tlora.core.errors import SpecError
from tlora.runtime import devices
from tlora.runtime.devices import check_count, device_names
from tlora.runtime.environment import usable_cores

CPU = torch.device("cpu")

COMMANDS = {
    "as planned": ("train", "jobs.yaml", "--devices", "9"),
    "workers": ("train", "jobs.yaml", "--devices", "9", "--policy", "solo"),
    "a group": ("train", "jobs.yaml", "--devices", "9", "--plan", "auto"),
    "a plan": ("train", "jobs.yaml", "--plan", "plan.yaml"),
    "a sweep": ("tune", "sweep.yaml", "--devices", "9"),
}


def cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: count)


@pytest.mark.parametrize(("there", "allowed"), [(1, 8), (2, 8), (8, 8), (48, 48)])
def test_a_cpu_has_as_many_as_cores_and_a_few_to_try(
    there: int, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more is refused, with what there is and what to ask for."""
    cores(monkeypatch, there)
    assert device_names(CPU, allowed) == ["cpu"] * allowed
    with pytest.raises(SpecError) as caught:
        device_names(CPU, allowed + 1)
    told = str(caught.value)
    assert told.startswith(f"--devices: {allowed + 1} were asked for, and there ")
    assert f"{there} core" in told and f"ask for {there}" in told
    assert ("up to 8 to try" in told) == (there < 8)


def test_ranks_may_share_gpus_but_not_a_cpu_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU for each unless they are to share; a thousand processes in no case."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cuda = torch.device("cuda")
    assert device_names(cuda, 2) == ["cuda:0", "cuda:1"]
    with pytest.raises(SpecError, match="--devices: 3 were asked for, and this machine has 2"):
        device_names(cuda, 3)
    check_count(cuda, 3, share=True)
    cores(monkeypatch, 2)
    with pytest.raises(SpecError, match="are 2 cores"):
        check_count(CPU, 1000, share=True)


def test_there_is_a_core_to_run_on() -> None:
    assert usable_cores() >= 1


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_too_many_are_refused_before_anything_starts(
    command: tuple[str, ...], base: Path, rows: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Whatever would use them: by the option that asked, and nothing is said or written before."""
    monkeypatch.chdir(tmp_path)
    cores(monkeypatch, 2)
    jobs = [{"name": f"j{at}", "data": {"path": str(rows)}} for at in range(9)]
    Path("jobs.yaml").write_text(yaml.safe_dump(job_file(base, *jobs)))
    sweep = sweep_file(base, rows, exact=False)
    sweep["search"] = {"space": {"lora.r": list(range(1, 10))}}
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    Path("plan.yaml").write_text("{replicas: 9, bucket: 128, adapters: rank_local}")
    with pytest.raises(SystemExit) as ended:
        main([*command, "-o", "max_steps=1", "--output", "run"])
    said = capsys.readouterr()
    assert ended.value.code == 2
    option = "--plan" if "plan.yaml" in command else "--devices"
    assert f"error: {option}: 9 were asked for, and there are 2 cores" in said.err
    assert said.out == "" and not Path("run").exists()
