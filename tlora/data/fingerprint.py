"""What the tokens of a dataset depend on, as one key.

Files count by their bytes, not by their names, so a copy elsewhere shares the cache. Hashing a
large file takes time, so its digest is remembered under (path, size, time of change).
"""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tlora.core.job import DataSpec
from tlora.data.hub import hub_revision
from tlora.data.sources import FileSource, HubSource, Source
from tlora.data.streams import open_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 6
"""Raised when rows would be tokenised or stored differently."""

BLOCK_BYTES = 1 << 20
KEY_CHARACTERS = 32


def cache_key(
    sources: tuple[Source, ...],
    data: DataSpec,
    template: str | None,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    memo_dir: Path,
    fingerprint: str | None = None,
) -> str:
    """The same for all jobs whose rows give the same tokens and labels. `fingerprint` is the
    tokenizer's, where it is known already."""
    parts = {
        "format": FORMAT_VERSION,
        "sources": [source_fingerprint(source, memo_dir=memo_dir) for source in sources],
        "template": template or tokenizer.chat_template,
        "tokenizer": fingerprint or tokenizer_fingerprint(tokenizer),
        "columns": dict(sorted(data.columns.items())),
        "shape": data.shape,
        "train_on": data.train_on,
    }
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_CHARACTERS]


def source_fingerprint(source: Source, *, memo_dir: Path) -> list[str]:
    match source:
        case HubSource():
            return ["hub", source.dataset, source.split, hub_revision(source)]
        case FileSource():
            return [source.format, source.compression or "", file_digest(source, memo_dir=memo_dir)]


def file_digest(source: FileSource, *, memo_dir: Path) -> str:
    path = source.path.resolve()
    memo = memo_dir / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:KEY_CHARACTERS]}.json"
    state = file_state(path)
    try:
        remembered = json.loads(memo.read_text())
        if remembered["state"] == state:
            return remembered["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not remembered, or not readable: hash again
    digest = _sha256(source)
    memo.parent.mkdir(parents=True, exist_ok=True)
    draft = memo.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps({"state": state, "sha256": digest}))
    draft.replace(memo)
    return digest


def file_state(path: Path) -> list[int]:
    """Changes whenever the file does: size, time of change, inode."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _sha256(source: FileSource) -> str:
    digest = hashlib.sha256()
    as_stored = FileSource(source.path, source.format)
    with open_bytes(as_stored) as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Vocabulary, merges, normalisation and special tokens; not what a call may leave behind in
    it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # A call with truncation or padding leaves its settings in the tokenizer; they come first.
        content = backend.to_str()
        content = content[content.index('"added_tokens"') :]
    else:
        content = json.dumps(sorted(tokenizer.get_vocab().items()))
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    text = f"{type(tokenizer).__name__}\n{special}\n{content}"
    return hashlib.sha256(text.encode()).hexdigest()
