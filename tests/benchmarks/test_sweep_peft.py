"""The script that compares a sweep with PEFT: a few trials of a tiny model, and what it reckons."""

import importlib
from pathlib import Path

import pytest

from tlora.core.job import DataSpec, JobSpec, LoraSpec, TrainSpec

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.real_data
def test_three_ways_do_the_same_work_and_their_shares_make_the_whole(run_script, real_data) -> None:
    """Held-out losses of the gentle trials are PEFT's, all see the same tokens, and what fusing and
    early exit gain multiplies to what both gain."""
    pytest.importorskip("peft")
    found = run_script(
        "sweep_peft", "--model", str(real_data / "models" / "stories260K"),
        "--data", str(real_data / "datasets"), "--datasets", "nl2bash", "--rows", "16",
        "--length", "64", "--rates", "2",
    )  # fmt: skip
    (line,) = found["sweeps"]
    assert found["complete"] and not line["peft_reckoned"] and line["trials"] == 12
    assert line["peft_tokens"] == line["fused_tokens"] > line["early_exit_tokens"]
    assert line["speedup"] == pytest.approx(line["speedup_fusion"] * line["speedup_early_exit"])
    # Half of the trials have a learning rate of 1, at which rounding grows: the median is gentle.
    assert line["difference"]["trials"] >= 6 and line["difference"]["median"] < 1e-3


def test_trials_that_peft_had_no_time_for_are_reckoned_from_their_like(monkeypatch) -> None:
    """By hand: rank 2 took 3 s and 5 s, so its third trial counts 4 s; rank 8 took 1 s. The mean of
    all three, 3 s, would make 12."""
    monkeypatch.syspath_prepend(str(FOLDER))
    one_by_one = importlib.import_module("sweep_one_by_one")
    seconds_of = importlib.import_module("sweep_trials").Seconds
    jobs = [
        JobSpec(
            name=f"t{at}",
            data=DataSpec(path="rows.jsonl"),
            lora=LoraSpec(r=rank),
            train=TrainSpec(batch_size=4),
        )
        for at, rank in enumerate((2, 2, 2, 8))
    ]
    done = one_by_one.OneByOne()
    for name, seconds in (("t0", 3.0), ("t1", 5.0), ("t3", 1.0)):
        done.train[name] = seconds_of(seconds - 0.5, seconds / 2 - 0.25)
        done.evaluate[name] = seconds_of(0.5, 0.25)
    found = done.seconds(jobs)
    assert (found.wall, found.cpu) == (13.0, 6.5)
