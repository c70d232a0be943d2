"""A nano-batch as tensors: whole sequences of several jobs, one after another, padded once at the
tail."""

from dataclasses import dataclass

import numpy as np
import torch

from tlora.core.sequence import IGNORED, TokenSequence


@dataclass(frozen=True, slots=True)
class Share:
    """What one job contributes to a nano-batch."""

    job: str
    sequences: list[TokenSequence]
    row_offsets: list[int]
    """Per sequence: the place of its first token in the job's own batch, which keys dropout."""

    loss_scales: list[float]
    """Per sequence: what the loss of each of its trained tokens counts."""

    key: int = 0
    """The dropout key of the job's step (kernels/streams.py)."""

    zero_grad: bool = False
    """Nothing was added to its gradients since they were cleared: kernels need not read them."""


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """The rows and the targets of one job, each contiguous."""

    job: str
    start: int
    stop: int
    key: int
    targets: slice
    sequence_stops: list[int]
    """Per sequence: the row after its last token."""

    sequence_targets: list[int]
    """Per sequence: how many of its tokens carry loss."""

    zero_grad: bool = False


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """T rows of tokens; N of them predict a token that is trained on."""

    input_ids: torch.Tensor
    """int64 [1, T]."""

    position_ids: torch.Tensor
    """int64 [1, T], counted from each sequence's start."""

    rows: torch.Tensor
    """int32 [T]: each token's place in its job's batch."""

    lengths: list[int]
    """Of the sequences, in order; what is missing to T is padding."""

    segments: list[PackedSegment]
    predicting: torch.Tensor
    """int64 [N]: the rows whose output predicts a trained token."""

    targets: torch.Tensor
    """int64 [N]: the tokens to be predicted."""

    loss_scales: torch.Tensor
    """float32 [N]: what each token's loss counts in its job's loss."""

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[1]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def pack(shares: list[Share], num_rows: int, device: torch.device | str = "cpu") -> PackedBatch:
    """Lay the shares out in order over `num_rows` rows."""
    num_tokens = sum(len(sequence) for share in shares for sequence in share.sequences)
    assert num_tokens <= num_rows, f"{num_tokens} tokens do not fit in {num_rows} rows"
    input_ids = np.zeros(num_rows, dtype=np.int64)
    positions = np.zeros(num_rows, dtype=np.int64)
    rows = np.zeros(num_rows, dtype=np.int32)
    lengths: list[int] = []
    segments: list[PackedSegment] = []
    predicting: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    scales: list[np.ndarray] = []
    start = num_targets = 0
    for share in shares:
        segment_start, first_target = start, num_targets
        stops: list[int] = []
        counts: list[int] = []
        for sequence, row_offset, loss_scale in zip(
            share.sequences, share.row_offsets, share.loss_scales, strict=True
        ):
            length = len(sequence)
            place = slice(start, start + length)
            input_ids[place] = sequence.input_ids
            positions[place] = np.arange(length)
            rows[place] = np.arange(row_offset, row_offset + length)
            trained = np.flatnonzero(sequence.labels[1:] != IGNORED)
            predicting.append(trained + start)
            targets.append(sequence.labels[trained + 1])
            scales.append(np.full(len(trained), loss_scale))
            lengths.append(length)
            start += length
            num_targets += len(trained)
            stops.append(start)
            counts.append(len(trained))
        segments.append(
            PackedSegment(
                job=share.job,
                start=segment_start,
                stop=start,
                key=share.key,
                targets=slice(first_target, num_targets),
                sequence_stops=stops,
                sequence_targets=counts,
                zero_grad=share.zero_grad,
            )
        )

    def gather(parts: list[np.ndarray], dtype: type) -> torch.Tensor:
        joined = np.concatenate(parts) if parts else np.zeros(0)
        return on_device(device, joined.astype(dtype))

    return PackedBatch(
        input_ids=on_device(device, input_ids)[None],
        position_ids=on_device(device, positions)[None],
        rows=on_device(device, rows),
        lengths=lengths,
        segments=segments,
        predicting=gather(predicting, np.int64),
        targets=gather(targets, np.int64),
        loss_scales=gather(scales, np.float32),
    )


def pack_all(sequences: list[torch.Tensor], device: torch.device) -> PackedBatch:
    """Sequences of no job, every token of which predicts the next."""
    tokens = [ids.cpu().numpy() for ids in sequences]
    count = len(tokens)
    share = Share("", [TokenSequence(ids, ids) for ids in tokens], [0] * count, [1.0] * count)
    return pack([share], sum(map(len, tokens)), device)


def on_device(device: torch.device | str, values: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    # From pinned memory the host need not wait for what is running.
    return tensor.pin_memory().to(device, non_blocking=True)
