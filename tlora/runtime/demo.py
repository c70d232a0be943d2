"""`tlora demo`, after its training: what the jobs learnt and what fusing them gained."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.modeling_utils import PreTrainedModel

from tlora.core.job import JobSpec, RunSpec
from tlora.core.sequence import TokenSequence
from tlora.data.prepare import PreparedData
from tlora.model.loading import load_base, load_tokenizer, resolve_device
from tlora.model.peft_format import AdapterFile, read_adapter
from tlora.model.targets import find_targets
from tlora.runtime.answering import Answer, answer, right_answers
from tlora.runtime.budget import nano_batch_tokens
from tlora.runtime.checking import prepare_jobs
from tlora.runtime.comparing import Comparison, compare
from tlora.runtime.directory import JobResult
from tlora.runtime.training import RunResult, load_super_model

EXAMPLES = 3
"""Jobs whose answers are shown, from the top of the file."""

COMPARED_SHARE = 0.05
COMPARED_SECONDS = 8.0
"""Rounds begin until then, so the comparison takes a few seconds more."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """One job's held-out rows before and after."""

    result: JobResult
    rows: int
    right_before: int
    right_after: int


@dataclass(frozen=True, slots=True)
class Example:
    job: str
    before: Answer
    after: Answer


@dataclass(frozen=True, slots=True)
class DemoResult:
    run: RunResult
    learnt: list[Learnt]
    examples: list[Example]
    comparison: Comparison
    threads: int


def look_back(spec: RunSpec, run: RunResult) -> DemoResult:
    """What came of a finished run, and what it gained."""
    data = prepare_jobs(spec, limit=None)
    learnt, examples = look_at_answers(spec, data, run)
    device = resolve_device(spec.engine.device)
    model = load_super_model(spec, device)
    comparison = compare(
        model,
        spec.jobs,
        data,
        budget_tokens=nano_batch_tokens(spec, device, data, model.model.num_parameters()),
        share=COMPARED_SHARE,
        seconds=COMPARED_SECONDS,
    )
    return DemoResult(run, learnt, examples, comparison, torch.get_num_threads())


def look_at_answers(
    spec: RunSpec, data: dict[str, PreparedData], run: RunResult
) -> tuple[list[Learnt], list[Example]]:
    """Jobs that failed or have no held-out rows are left out."""
    model = load_base(spec.base, resolve_device(spec.engine.device)).eval()
    tokenizer = load_tokenizer(spec.base)
    learnt: list[Learnt] = []
    examples: list[Example] = []
    for job in spec.jobs:
        rows, adapter = held_out(data[job.name]), trained_adapter(job, run, model)
        if not rows or adapter is None:
            continue
        before, after = (right_answers(model, rows, put_on) for put_on in (None, adapter))
        learnt.append(Learnt(run.jobs[job.name], len(rows), sum(before), sum(after)))
        if len(examples) < EXAMPLES:
            # One that it learnt, where there is one; the counts tell how many there are.
            row = rows[after.index(True) if any(after) else 0]
            answers = [answer(model, tokenizer, row, put_on) for put_on in (None, adapter)]
            examples.append(Example(job.name, *answers))
    return learnt, examples


def held_out(data: PreparedData) -> Sequence[TokenSequence]:
    rows = data.evaluation
    return [row for i in range(len(rows)) for row in rows[i].sequences] if rows is not None else []


def trained_adapter(job: JobSpec, run: RunResult, model: PreTrainedModel) -> AdapterFile | None:
    path = run.jobs[job.name].adapter
    return read_adapter(run.output / path, find_targets(model)) if path else None
