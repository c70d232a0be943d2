"""The proof before a run with exact isolation: on this machine, at this size of nano-batch, a
sequence has the same bits wherever it stands and whoever stands beside it.

First the frozen products, which get tiles of rows where they need them (model/row_probe.py). Then
the whole model, forward and backward: made-up jobs with adapters go through it alone, among others,
at the very end and cut in two, from other rows of the pool. Norms, attention, rotations, losses
and adapters are all in it; where their bits move the run is refused.

On a CPU all of it has one thread, as processes have that train for one device of several. Libraries
cut a product or a row of attention over threads by its size, and now and then it shows: no proof
tries every length.
"""

import itertools
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from tlora.core.errors import SpecError
from tlora.core.sequence import IGNORED, TokenSequence
from tlora.kernels import host_products
from tlora.kernels.attention import native as native_attention
from tlora.kernels.multi_lora import native
from tlora.model.adapters import AdapterWeights, LoraPair
from tlora.model.loading import context_length
from tlora.model.packing import PackedBatch, Share, pack
from tlora.model.routing import MIN_BOUNDARIES
from tlora.model.row_probe import same_bits, settle_products
from tlora.model.super_model import SuperModel
from tlora.training import loss
from tlora.training.optimiser import gradient_norm

COMPANY = "company of the probe"
"""No name that a job may have."""

MORE_COMPANY = "more company of the probe"
COMPANY_RANK = 3
DROPOUT = 0.1
SCALE = 2.0
SEQUENCES = 2
"""Of every made-up job."""

MANY = 2 * MIN_BOUNDARIES
"""Short sequences, where there is room for them."""

SHORTEST = 3
"""Tokens of a row that still predicts something behind its prompt."""

ROWS_OF_A_RANK = 32
"""Of a nano-batch, for each rank that is tried in it: with more ranks there would be no room for
the last of them, and nothing would be shown of it."""

MIN_ROWS = 6
"""Fewer have no room for two sequences that predict something, and one to move them."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """What was shown, and how long it took."""

    num_rows: int
    products: int
    tiled: list[str]
    seconds: float
    one_thread: bool = False
    """torch has one since, instead of several."""

    adapters: str = "torch"
    """Whose products they are on a CPU: torch's, or those of our C."""

    frozen: str = "torch"
    """Whose products with frozen weights are: oneDNN's, or those that torch chooses."""

    attention: str = "torch"
    """Whose attention is: torch's, or that of our C."""

    @property
    def line(self) -> str:
        tiles = f", {len(self.tiled)} of them in tiles of rows" if self.tiled else ""
        threads = "; with one thread, for several may give other bits" if self.one_thread else ""
        return (
            f"exact isolation: {self.products} products{tiles}, and the whole model, keep their "
            f"bits at {self.num_rows} rows (tried in {self.seconds:.1f} s){threads}"
        )


def prove_exact(
    model: SuperModel, num_rows: int, *, ranks: Collection[int], lengths: Collection[int]
) -> Exactness:
    """For nano-batches of `num_rows` rows, adapters of these ranks and rows of such lengths; no job
    may be attached. Leaves torch with one thread on a CPU. Raises SpecError where it cannot be
    had."""
    started = time.perf_counter()
    at_once = max(1, num_rows // ROWS_OF_A_RANK)
    wanted = sorted(set(ranks))
    groups = [wanted[start : start + at_once] for start in range(0, len(wanted), at_once)]
    try:
        found = _prove(model, num_rows, groups, lengths)
    except Exception as error:
        # Not for its bits but for want of a compiler: what runs without one is what is proven.
        if not model.runs_uncompiled(error):
            raise
        found = _prove(model, num_rows, groups, lengths)
    return replace(found, seconds=time.perf_counter() - started)


def _prove(
    model: SuperModel, num_rows: int, groups: list[list[int]], lengths: Collection[int]
) -> Exactness:
    one_thread = model.device.type == "cpu" and torch.get_num_threads() > 1
    if one_thread:
        torch.set_num_threads(1)
    before = calls_of_c(model.device)
    found = settle_products(model, num_rows)
    for group in groups:
        check_whole_model(model, num_rows, ranks=group, lengths=lengths)
    attention = "C" if calls_of_c(model.device) > before else "torch"
    group = model.groups[0]
    like = torch.empty(0, dtype=group.dtype, device=model.device)
    adapters = "C" if native.serving(like, group.pool.a.operand) else "torch"
    frozen = "oneDNN" if host_products.serving(like) else "torch"
    return Exactness(
        num_rows, found.probed, found.tiled, 0.0, one_thread, adapters, frozen, attention
    )


def calls_of_c(device: torch.device) -> int:
    """How often attention has gone by it. Nothing is compiled for another device than a CPU."""
    return native_attention.times_used() if device.type == "cpu" else 0


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A made-up job whose bits are watched."""

    name: str
    weights: AdapterWeights
    dropout: float
    sequences: list[TokenSequence]

    def share(self, picked: slice) -> Share:
        starts = [0, *itertools.accumulate(map(len, self.sequences))]
        sequences = self.sequences[picked]
        scales = [1.0 / 7.0] * len(sequences)
        return Share(self.name, sequences, starts[:-1][picked], scales, key=1)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The subjects in one or more nano-batches, with company, and their order in the pool."""

    name: str
    nano_batches: list[list[Share]]
    attached: list[str]
    evaluated: bool = False
    """Evaluate too: the same code but for gradients, so two arrangements are enough."""


def check_whole_model(
    model: SuperModel, num_rows: int, *, ranks: Collection[int], lengths: Collection[int]
) -> None:
    assert not model.jobs, "the probe needs the adapters' pool to itself"
    if num_rows < MIN_ROWS:
        return
    generator = np.random.default_rng(num_rows)
    subjects = make_subjects(model, num_rows, ranks, lengths, generator)
    first, *others = arrangements(model, subjects, num_rows, generator)
    expected = observe(model, first, subjects, num_rows)
    for other in others:
        found = observe(model, other, subjects, num_rows)
        for key, tensor in found.items():
            if not same_bits(tensor, expected[key]):
                raise SpecError(
                    f"exact isolation cannot be had on this machine with nano-batches of "
                    f"{num_rows} tokens: {key} of the same sequence has other bits {other.name} "
                    "than by itself; try engine.nano_batch_tokens that is a multiple of 64, or use "
                    "`isolation: default`, which is right to rounding",
                    field="engine.isolation",
                )


def make_subjects(
    model: SuperModel,
    num_rows: int,
    ranks: Collection[int],
    lengths: Collection[int],
    generator: np.random.Generator,
) -> list[Subject]:
    """One for each rank, with and without dropout in turn. The first has rows of the run's own
    lengths, the others share what room is left beside company, as far as it goes."""
    longest_first = itertools.cycle(sorted(set(lengths), reverse=True))
    subjects: list[Subject] = []
    room = num_rows * 3 // 4
    wanted = sorted(set(ranks))
    # Dropout is tried even where there is one rank only.
    wanted = wanted * 2 if len(wanted) == 1 else wanted
    for number, rank in enumerate(wanted):
        share = room // 2 if number == 0 else room // (len(wanted) - number)
        if subjects and share < SEQUENCES * SHORTEST:
            break
        sizes = [max(1, min(next(longest_first), share // SEQUENCES)) for _ in range(SEQUENCES)]
        sequences = [random_sequence(size, model.vocabulary, generator) for size in sizes]
        room -= sum(sizes)
        subjects.append(
            Subject(
                f"subject {number} of the probe",
                random_adapter(model, rank, generator),
                DROPOUT if number % 2 else 0.0,
                sequences,
            )
        )
    return subjects


def arrangements(
    model: SuperModel, subjects: list[Subject], num_rows: int, generator: np.random.Generator
) -> Iterator[Arrangement]:
    """By themselves first, then the ways in which neighbours can move them."""
    longest = context_length(model.model.config) or num_rows
    names = [subject.name for subject in subjects]
    whole = [subject.share(slice(None)) for subject in subjects]
    room = num_rows - sum(len(each) for subject in subjects for each in subject.sequences)

    def company(*lengths: int, name: str = COMPANY) -> list[Share]:
        # In rows that the model has positions for.
        fitting = [
            min(longest, length - start)
            for length in lengths
            for start in range(0, length, longest)
        ]
        sequences = [random_sequence(each, model.vocabulary, generator) for each in fitting]
        count = len(sequences)
        return [Share(name, sequences, [0] * count, [1.0] * count)] if sequences else []

    yield Arrangement("by itself", [whole], names, evaluated=True)
    yield Arrangement("a second time", [whole], names)
    yield Arrangement(
        "at the end of a nano-batch",
        [[*company(room // 2, room - room // 2), *reversed(whole)]],
        [COMPANY, *reversed(names)],
        evaluated=True,
    )
    gap = max(0, room // 2 - 1) | 1
    yield Arrangement(
        "in the middle of a nano-batch",
        [[*company(min(gap, room)), *whole, *company(min(3, room - gap))]],
        [*names[1:], COMPANY, names[0]],
    )
    yield Arrangement(
        "in two nano-batches",
        [
            [*company(min(1, room)), *(subject.share(slice(0, 1)) for subject in subjects)],
            [*(subject.share(slice(1, None)) for subject in reversed(subjects)), *company(room)],
        ],
        [COMPANY, *names],
    )
    yield Arrangement("each in a nano-batch of its own", [[share] for share in whole], names)
    # A vector of boundaries has room for a power of two of sequences: here it takes a larger one.
    short = [SHORTEST] * min(MANY, room // SHORTEST)
    half = len(short) // 2
    yield Arrangement(
        "among many short ones",
        [[*company(*short[:half]), *whole, *company(*short[half:], name=MORE_COMPANY)]],
        [MORE_COMPANY, *names, COMPANY],
    )


def observe(
    model: SuperModel, arrangement: Arrangement, subjects: list[Subject], num_rows: int
) -> dict[str, torch.Tensor]:
    """Losses in training and in evaluation, and gradients of the subjects."""
    by_name = {subject.name: subject for subject in subjects}
    found: dict[str, torch.Tensor] = {}
    for name in arrangement.attached:
        subject = by_name.get(name)
        weights = subject.weights if subject else company_adapter(subjects)
        model.attach(name, weights, scale=SCALE, dropout=subject.dropout if subject else 0.0)
    try:
        parts: dict[str, list[torch.Tensor]] = {}
        for shares in arrangement.nano_batches:
            batch = pack(shares, num_rows, model.device)
            for what, rows in run(model, batch, evaluate=arrangement.evaluated).items():
                for segment in batch.segments:
                    key = f"the {what} ({segment.job})"
                    parts.setdefault(key, []).append(rows[segment.targets])
        found |= {key: torch.cat(rows) for key, rows in parts.items()}
        for name in by_name:
            views = model.views(name)
            for matrix, rows in views.items():
                found[f"the gradient of {matrix} ({name})"] = rows.grad.clone()
            found[f"the norm of the gradient ({name})"] = gradient_norm(list(views.values()))
    finally:
        for name in model.jobs:
            model.detach(name)
    # Of the subjects alone.
    return {key: tensor for key, tensor in found.items() if "company of the probe" not in key}


def run(model: SuperModel, batch: PackedBatch, *, evaluate: bool) -> dict[str, torch.Tensor]:
    """A training pass, which adds to the gradients, and perhaps an evaluation."""
    with torch.enable_grad(), model.routed(batch, train=True):
        losses = model.token_losses(batch)
        loss.backward(losses, batch.loss_scales)
    found = {"losses": losses.detach()}
    if evaluate:
        with torch.no_grad(), model.routed(batch, train=False):
            found["held-out losses"] = model.token_losses(batch)
        with torch.no_grad(), model.routed(replace(batch, segments=[]), train=False):
            found["losses without adapters"] = model.token_losses(batch)
    return found


def random_sequence(length: int, vocabulary: int, generator: np.random.Generator) -> TokenSequence:
    """About a third of it a prompt."""
    ids = generator.integers(0, vocabulary, length).astype(np.int32)
    labels = ids.copy()
    labels[: length // 3] = IGNORED
    return TokenSequence(ids, labels)


def random_adapter(model: SuperModel, rank: int, generator: np.random.Generator) -> AdapterWeights:
    """On every linear; B is not zero, or A would have no gradient."""

    def noise(*shape: int) -> torch.Tensor:
        return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32) * 0.05)

    return {
        path: LoraPair(a=noise(rank, target.in_features), b=noise(target.out_features, rank))
        for path, target in model.targets.items()
    }


def company_adapter(subjects: list[Subject]) -> AdapterWeights:
    """The first rows of a subject's: odd in number if there are enough, to move others' rows."""
    return {
        path: LoraPair(a=pair.a[:COMPANY_RANK], b=pair.b[:, :COMPANY_RANK])
        for path, pair in subjects[-1].weights.items()
    }
