"""Seven jobs on seven real datasets, on a real pre-trained model, through the public entry."""

from pathlib import Path

import pytest

import tlora

DATASETS = (
    "commonsense_mc",
    "nl2bash",
    "gpteacher_roleplay",
    "spider_dev",
    "gsm8k",
    "humaneval",
    "medquad",
)


def job_file(data: Path) -> dict[str, object]:
    """Jobs that differ in rank, dropout, targets, schedule, rate, batch and length."""
    different = [
        {"lora": {"r": 4}, "train": {"batch_size": 8}},
        {"lora": {"r": 8, "lora_dropout": 0.1}, "train": {"batch_size": 4}},
        {"lora": {"r": 16}, "train": {"batch_size": 2, "lr_scheduler_type": "linear"}},
        {"lora": {"r": 32, "target_modules": ["q_proj", "v_proj", "down_proj"]}},
        {"lora": {"r": 8, "use_rslora": True}, "train": {"learning_rate": 1e-3}},
        {"lora": {"r": 2, "lora_alpha": 8}, "train": {"batch_size": 1, "max_length": 384}},
        {"lora": {"r": 16, "lora_dropout": 0.05}, "train": {"lr_scheduler_type": "wsd"}},
    ]
    return {
        "base": {"model": str(data / "models" / "stories260K")},
        "defaults": {
            "train": {"max_steps": 30, "batch_size": 4, "max_length": 512, "learning_rate": 2e-3},
            "eval": {"split": 24, "steps": 15},
        },
        "jobs": [
            {"name": name, "data": {"path": str(data / "datasets" / f"{name}.jsonl.gz")}, **job}
            for name, job in zip(DATASETS, different, strict=True)
        ],
    }


@pytest.mark.real_data
def test_seven_jobs_on_real_data_each_lower_their_held_out_loss(real_data, tmp_path, monkeypatch):
    """Every job's held-out loss falls by at least a tenth within thirty steps."""
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    result = tlora.train(tlora.load_spec(job_file(real_data)), output=tmp_path / "run")
    assert list(result.jobs) and not result.failed
    for name, job in result.jobs.items():
        assert job.first_eval_loss is not None and job.eval_loss is not None
        assert job.eval_loss < 0.9 * job.first_eval_loss, name
        assert (tmp_path / "run" / name / "adapter" / "adapter_model.safetensors").is_file()
