"""The entry to this package: a job's data, ready to train on."""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tlora.core.errors import DataError, SpecError
from tlora.core.job import DataSpec, JobSpec
from tlora.data.cache import CacheWriter, TokenCache, open_cache
from tlora.data.cursor import WORD, order
from tlora.data.dataset import TokenDataset, split_rows
from tlora.data.examples import Example
from tlora.data.fingerprint import cache_key, tokenizer_fingerprint
from tlora.data.pairs import PairDataset
from tlora.data.reading import read_rows
from tlora.data.render import Renderer
from tlora.data.report import NAMED_EMPTY, DataReport, LengthQuantiles
from tlora.data.rows import Origin
from tlora.data.shapes import detect, read_examples
from tlora.data.sources import find_sources
from tlora.data.tokenise import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_ROWS = 64
"""Rows handed to the tokenizer at once; it works on several in parallel."""

Progress = Callable[[int], None]
Rows = TokenDataset | PairDataset


@dataclass(frozen=True, slots=True, eq=False)
class PreparedData:
    """What a job trains and is evaluated on."""

    train: Rows
    evaluation: Rows | None
    report: DataReport
    key: str = ""
    """Of the tokenised rows, held-out ones included: changes when the data do."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tokenised:
    cache: TokenCache
    was_there: bool


def prepare(
    job: JobSpec,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    cache_dir: Path,
    progress: Progress | None = None,
) -> PreparedData:
    """Reads, checks and tokenises the job's data, or finds it done before under `cache_dir`.

    `progress` is told the number of rows tokenised so far. Raises DataError, with the job's name,
    for data that cannot be read or trained on.
    """
    return Preparer(tokenizer, cache_dir=cache_dir, progress=progress).prepare(job)


class Preparer:
    """Prepares the data of several jobs, each dataset once however many jobs learn from it."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        cache_dir: Path,
        progress: Progress | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        # A large vocabulary takes a third of a second to write out: not for every job.
        self._fingerprint = tokenizer_fingerprint(tokenizer)
        self._cache_dir = cache_dir
        self._progress = progress
        self._known: dict[tuple[object, ...], _Tokenised] = {}

    def anew(self) -> "Preparer":
        """One that looks at all data again, which may have changed, with the tokenizer of this."""
        other = copy(self)
        other._known = {}
        return other

    def prepare(self, job: JobSpec) -> PreparedData:
        try:
            return _prepare(job, self._tokenised)
        except DataError as error:
            raise DataError(
                error.message, job=job.name, path=error.path, line=error.line
            ) from error

    def _tokenised(self, data: DataSpec, paths: tuple[str, ...]) -> "_Tokenised":
        columns = tuple(sorted(data.columns.items()))
        wanted = (paths, data.shape, columns, data.train_on, data.chat_template)
        if wanted not in self._known:
            self._known[wanted] = _tokenised(
                data, paths, self._tokenizer, self._fingerprint, self._cache_dir, self._progress
            )
        return self._known[wanted]


def _prepare(
    job: JobSpec, tokenised: Callable[[DataSpec, tuple[str, ...]], _Tokenised]
) -> PreparedData:
    main = tokenised(job.data, job.data.paths)
    _check_loss(job, main.cache)
    if job.data.eval_path is None:
        held_out = main
        split = split_rows(main.cache.num_units, job.eval.split, job.train.seed)
        train_index, eval_index = split.train, split.evaluation
    else:
        paths = job.data.eval_path
        paths = (paths,) if isinstance(paths, str) else paths
        held_out = tokenised(job.data, paths)
        _check_loss(job, held_out.cache)
        train_index = np.arange(main.cache.num_units)
        eval_index = np.arange(held_out.cache.num_units)

    train = _view(main.cache, train_index, job)
    if len(train) == 0:
        raise DataError(
            f"no row is left to train on: all {train.num_dropped} have more than "
            f"{job.train.max_length} tokens and over_length is drop"
        )
    evaluation = _view(held_out.cache, eval_index, job) if len(eval_index) else None
    if evaluation is not None and len(evaluation) == 0:
        raise DataError(
            f"no held-out row is left: all {evaluation.num_dropped} have more than "
            f"{job.train.max_length} tokens and over_length is drop"
        )
    if evaluation is not None:
        evaluation = _limited(evaluation, held_out.cache, job)
    key = f"{main.cache.key}:{held_out.cache.key}"
    return PreparedData(train, evaluation, _report(job, main, held_out, train, evaluation), key)


def _check_loss(job: JobSpec, cache: TokenCache) -> None:
    """Pairs are for one kind of job, and that kind of job is for pairs."""
    if cache.meta.pairs == job.train.on_pairs:
        return
    if job.train.on_pairs:
        problem = (
            f"dpo trains on preference pairs, and the rows are {cache.meta.detected}; give rows "
            "with prompt, chosen and rejected, or map their names in data.columns"
        )
    else:
        problem = (
            f"{job.train.loss} cannot train on preference pairs, and the rows are "
            f"{cache.meta.detected}; set train.loss to dpo, or give rows with one answer each"
        )
    raise SpecError(problem, job=job.name, field="train.loss")


def _view(cache: TokenCache, index: np.ndarray, job: JobSpec) -> Rows:
    rows = PairDataset if cache.meta.pairs else TokenDataset
    return rows(cache, index, max_length=job.train.max_length, over_length=job.train.over_length)


def _limited(rows: Rows, cache: TokenCache, job: JobSpec) -> Rows:
    """At most eval.batch_limit of the held-out rows, chosen among those that are not left out."""
    most = job.eval.batch_limit
    if most is None or len(rows) <= most:
        return rows
    chosen = order(job.train.seed, WORD, len(rows))[:most]
    limited = _view(cache, rows.index[np.sort(chosen)], job)
    limited.num_dropped = rows.num_dropped
    return limited


def _tokenised(
    data: DataSpec,
    paths: tuple[str, ...],
    tokenizer: "PreTrainedTokenizerBase",
    fingerprint: str,
    cache_dir: Path,
    progress: Progress | None,
) -> _Tokenised:
    sources = find_sources(paths)
    names = tuple(source.name for source in sources)
    template = resolve_template(data.chat_template)
    key_now = partial(
        cache_key,
        sources,
        data,
        template,
        tokenizer,
        memo_dir=cache_dir / "digests",
        fingerprint=fingerprint,
    )
    key = key_now()
    target = cache_dir / "tokens" / key
    cache = open_cache(target, names)
    if cache is not None:
        return _Tokenised(cache, was_there=True)

    rows = read_rows(sources)
    first = next(rows, None)
    if first is None:
        raise DataError(
            "the dataset holds no rows; name files that do in "
            f"{'data.path' if paths == data.paths else 'data.eval_path'}",
            path=", ".join(paths),
        )
    detection = detect(first, data)
    examples = read_examples(chain((first,), rows), data, detection)
    renderer = Renderer(tokenizer, template=template, train_on=data.train_on)
    encoder = Encoder(tokenizer, renderer)
    own_labels = detection.shape == "tokens"
    pairs = detection.shape == "preference"
    rendering = ""
    with CacheWriter(target, own_labels=own_labels, source_names=names) as writer:
        for batch in _batches(examples):
            rendering = rendering or renderer.describe(batch[0][0])
            for row in encoder.encode(batch):
                writer.add(row)
            if progress is not None:
                progress(len(writer) // 2 if pairs else len(writer))
        if key != key_now():
            raise DataError("the files changed while they were read", path=", ".join(paths))
        writer.publish(detected=detection.text, rendering=rendering, pairs=pairs)
    cache = open_cache(target, names)
    assert cache is not None, f"{target} was just published"
    return _Tokenised(cache, was_there=False)


def _batches(
    examples: Iterator[tuple[Example, Origin]],
) -> Iterator[list[tuple[Example, Origin]]]:
    while batch := list(islice(examples, BATCH_ROWS)):
        yield batch


def resolve_template(text: str | None) -> str | None:
    """data.chat_template is a template or the name of a file that holds one."""
    if text is None or "{{" in text or "{%" in text:
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template is neither a Jinja template nor a file that can be read: {error}"
        ) from error


def _report(
    job: JobSpec, main: _Tokenised, held_out: _Tokenised, train: Rows, evaluation: Rows | None
) -> DataReport:
    views = [train, evaluation] if evaluation is not None else [train]
    caches = [main.cache, held_out.cache][: len(views)]
    empty = [
        (cache, unit)
        for view, cache in zip(views, caches, strict=True)
        for unit in view.empty_answers().tolist()
    ]
    # As in the files, whatever was held out of them.
    empty.sort(key=lambda each: (each[0] is not main.cache, each[1]))
    return DataReport(
        detected=main.cache.meta.detected,
        rendering=main.cache.meta.rendering,
        pairs=main.cache.meta.pairs,
        rows_read=main.cache.num_units,
        rows_dropped=sum(view.num_dropped for view in views),
        rows_truncated=sum(view.num_truncated for view in views),
        rows_empty=len(empty),
        empty_at=tuple(cache.unit_origin(unit) for cache, unit in empty[:NAMED_EMPTY]),
        max_length=job.train.max_length,
        train_rows=len(train),
        train_tokens=int(train.lengths.sum()),
        train_targets=int(train.num_targets().sum()),
        eval_rows=len(evaluation) if evaluation is not None else 0,
        lengths=LengthQuantiles.of(main.cache.lengths),
        from_cache=main.was_there,
    )
