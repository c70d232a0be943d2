"""What must be right with jobs before they join a run: the same that is checked before a run."""

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from tlora.core.job import JobSpec, RunSpec
from tlora.data.prepare import PreparedData, Preparer
from tlora.model.loading import context_length
from tlora.model.targets import find_targets
from tlora.runtime.budget import nano_batch_tokens
from tlora.runtime.checking import check_targets, new_preparer, prepare_jobs


def newcomers_data(
    run: RunSpec, shape: PreTrainedModel, device: torch.device, preparer: Preparer | None = None
) -> Callable[[tuple[JobSpec, ...]], dict[str, PreparedData]]:
    """What gives the data of such jobs, or raises what is wrong with them. Whoever submits them has
    made their tokens before, so that a run finds them in the cache. Without a `preparer` there is
    one from the first time on: jobs at work wait for it."""
    targets, limit = find_targets(shape), context_length(shape.config)
    parameters = shape.num_parameters()

    def prepare(jobs: tuple[JobSpec, ...]) -> dict[str, PreparedData]:
        nonlocal preparer
        asked = replace(run, jobs=jobs)
        check_targets(asked, targets)
        preparer = preparer or new_preparer(run.base)
        data = prepare_jobs(asked, limit=limit, preparer=preparer.anew())
        # Where bits count, every row must fit the one size of nano-batches.
        nano_batch_tokens(asked, device, data, parameters)
        return data

    return prepare
