"""tlora makes of rows what Hugging Face TRL makes of them, and trains on them as TRL does: what TRL
did was recorded by support/trl_recorder.py (trl_recorded.json names the versions).

A difference that docs/migrating.md names is tested as such.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from support.trl_cases import (
    BASE,
    BROKEN_LINES_CASE,
    CURVES,
    RECORDED,
    ROWS,
    RowCase,
    job,
    marks_of,
)
from transformers import AutoTokenizer

import tlora
from tlora.core.job import DataSpec, JobSpec, TrainSpec
from tlora.core.sequence import IGNORED
from tlora.data.prepare import prepare

TRL = json.loads(RECORDED.read_text(encoding="utf-8"))

# Relative, after twelve steps in float32. Measured: at most 1e-6 in losses, gradient norms and
# learning rates, 6e-6 in rewards and in the adapters' products.
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def demo_tokenizer():
    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))


def write(rows: list[dict[str, Any]], path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows_of(case: RowCase, tokenizer: Any, folder: Path) -> list[tuple[list[int], list[int]]]:
    """Token ids and labels as jobs get them; of a pair, of each side."""
    spec = JobSpec(
        name="rows",
        data=DataSpec(path=write(case.rows, folder / "rows.jsonl"), **case.tlora),
        train=TrainSpec(max_length=case.max_length, loss="dpo" if case.pairs else "token_mean"),
    )
    train = prepare(spec, tokenizer, cache_dir=folder / "cache").train
    return [
        (sequence.input_ids.tolist(), counted(sequence.labels.tolist()))
        for place in range(len(train))
        for sequence in train[place].sequences
    ]


def counted(labels: list[int]) -> list[int]:
    """The label of the first token never counts, whatever it says."""
    return [IGNORED, *labels[1:]]


@pytest.mark.parametrize("name", ROWS)
def test_tokens_and_masks_are_those_of_trl(name, demo_tokenizer, tmp_path):
    theirs = [(ids, counted(labels)) for ids, labels in TRL["rows"][name]]
    assert rows_of(ROWS[name], demo_tokenizer, tmp_path) == theirs


def test_the_line_break_after_an_answer_is_all_that_trl_trains_on_besides(demo_tokenizer, tmp_path):
    ours = rows_of(BROKEN_LINES_CASE, demo_tokenizer, tmp_path)
    theirs = TRL["rows of broken lines"]["rows"]
    for (our_ids, our_labels), (their_ids, their_labels) in zip(ours, theirs, strict=True):
        assert our_ids == their_ids
        others = [
            place
            for place, (one, other) in enumerate(zip(our_labels, their_labels, strict=True))
            if one != other
        ]
        assert others == [len(our_ids) - 1]
        assert demo_tokenizer.decode(our_ids[-2:]) == "<|end|>\n"


def train(name: str, folder: Path, **changes: object) -> dict[str, Any]:
    """The same figures that are recorded of TRL."""
    case = CURVES[name]
    data = {"path": write(case.rows, folder / "train.jsonl")}
    if case.held_out:
        data["eval_path"] = write(case.held_out, folder / "held_out.jsonl")
    spec = tlora.load_spec({"base": str(BASE), "jobs": [job(case, data, **changes)]})
    result = tlora.train(spec, output=folder / "run")
    assert result.jobs["job"].status == "completed"
    lines = (folder / "run" / "job" / "metrics.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    held_out = [line["loss"] for line in told if line["kind"] == "eval"]
    weights = load_file(folder / "run" / "job" / "adapter" / "adapter_model.safetensors")
    products = {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): weights[
            name.replace("lora_A", "lora_B")
        ].double()
        @ a.double()
        for name, a in weights.items()
        if "lora_A" in name
    }
    return {
        "steps": [line for line in told if line["kind"] == "train"],
        "held_out": [held_out[0], held_out[-1]] if held_out else [],
        "adapter": {path: marks_of(product) for path, product in products.items()},
    }


def largest_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Relative: of any figure to its largest over the steps, of the adapter to its norms."""
    assert len(ours["steps"]) == len(theirs["steps"]) > 0
    assert ours["adapter"].keys() == theirs["adapter"].keys() != set()
    found = [0.0]

    def compare(one: list[float], other: list[float]) -> None:
        a, b = np.array(one), np.array(other)
        assert a.shape == b.shape and np.isfinite(a).all()
        found.append(float(np.abs(a - b).max() / np.abs(b).max()))

    for figure in theirs["steps"][0]:
        compare(*([step[figure] for step in run["steps"]] for run in (ours, theirs)))
    if theirs["held_out"]:
        compare(ours["held_out"], theirs["held_out"])
    for path, marks in theirs["adapter"].items():
        compare(list(ours["adapter"][path]), list(marks))
    return max(found)


@pytest.mark.parametrize("name", CURVES)
def test_a_job_trains_as_trl_trains_it(name, tmp_path):
    """Losses, gradient norms, learning rates and rewards by step, held-out losses and the adapter:
    with warm-up, weight decay, clipping, accumulation, and a smaller last batch in each epoch."""
    assert largest_difference(train(name, tmp_path), TRL["curves"][name]) <= ROUNDING


# Broken twins: the comparison above must see a small change of any setting.


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("supervised", {"weight_decay": 1.01}),
        ("supervised", {"max_grad_norm": 6.06}),
        ("supervised", {"adam_beta2": 0.9991}),
        ("preference", {"beta": 0.303}),
        ("preference", {"label_smoothing": 0.001}),
    ],
    ids=str,
)
def test_a_job_with_slightly_other_settings_is_refused(name, changes, tmp_path):
    ours = train(name, tmp_path, **changes)
    assert largest_difference(ours, TRL["curves"][name]) > ROUNDING
