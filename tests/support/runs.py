"""Small job files over a tiny base, for tests that go from files to adapters."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers


def write_rows(path: Path, count: int, *, seed: int = 0) -> Path:
    """Prompt and completion, of several lengths, no two alike."""
    rows = (
        {"prompt": f"{seed + i} and {i % 7} is ", "completion": f"{'x' * (i % 5)}{seed + 2 * i}"}
        for i in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def job_file(base: Path, *jobs: dict[str, object], **settings: object) -> dict[str, object]:
    """A job file as a mapping: rank 2, three steps of two rows unless a job says otherwise."""
    defaults = {
        "lora": {"r": 2, "lora_alpha": 4},
        "train": {"max_steps": 3, "batch_size": 2, "learning_rate": 1e-2, "max_length": 64},
    }
    return {
        "base": {"model": str(base)},
        "engine": {"device": "cpu"},
        "defaults": defaults,
        "jobs": list(jobs),
        **settings,
    }


def quiet_single_thread() -> Iterator[None]:
    """The body of a fixture: models so small that a second thread costs more than it brings."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
