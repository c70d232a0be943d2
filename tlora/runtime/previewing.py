"""Rows of a job as the model will see them, cut as training would cut them."""

from collections.abc import Iterator
from dataclasses import dataclass

from tlora.core.job import BaseSpec, JobSpec
from tlora.data.preview import preview_rows
from tlora.model.loading import load_tokenizer
from tlora.runtime.environment import quieten_libraries


@dataclass(frozen=True, slots=True)
class ShownRow:
    title: str
    pieces: list[tuple[str, bool]]
    """(text, trained?)"""


def preview_job(job: JobSpec, base: BaseSpec, rows: int) -> Iterator[ShownRow]:
    quieten_libraries()
    tokenizer = load_tokenizer(base)
    for row in preview_rows(job.data, tokenizer, limit=rows):
        length = f"{row.num_tokens} tokens"
        if row.num_tokens > job.train.max_length:
            policy = {"truncate": "will be cut", "drop": "will be left out", "raise": "refused"}
            length += f", over {job.train.max_length}: {policy[job.train.over_length]}"
        side = f" {row.side}" if row.side else ""
        yield ShownRow(
            f"{job.name}: {row.origin}{side} ({length}; {row.num_trained} trained)",
            [(piece.text, piece.trained) for piece in row.pieces],
        )
