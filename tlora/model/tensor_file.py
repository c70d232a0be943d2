"""Tensors into a safetensors file, piece by piece.

The library's own `save` makes the whole file in memory and holds Python's lock while it does, and
with it the thread that trains. Here every tensor is written and hashed where it lies, without the
lock. The bytes are the library's.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Written:
    num_bytes: int
    sha256: str


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Float32 tensors in host memory to a new file, which is on disk then. Raises OSError."""
    assert all(each.dtype == torch.float32 for each in tensors.values())
    names = sorted(tensors)
    digest, num_bytes = hashlib.sha256(), 0
    # Unbuffered: a buffer would copy the tensors once more.
    with path.open("wb", buffering=0) as file:
        for part in (_header(tensors, names, metadata), *map(tensors.__getitem__, names)):
            view = memoryview(part) if isinstance(part, bytes) else _bytes_of(part)
            digest.update(view)
            num_bytes += len(view)
            while len(view):
                # The system takes about two gigabytes at a time.
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return Written(num_bytes, digest.hexdigest())


def _header(
    tensors: Mapping[str, torch.Tensor], names: list[str], metadata: Mapping[str, str] | None
) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        first, end = end, end + 4 * tensors[name].numel()
        shape = list(tensors[name].shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [first, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).numpy().data.cast("B")
