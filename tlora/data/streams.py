"""Opens a data file as a stream of plain bytes, whatever it is packed with.

Damage that shows only while reading (a cut gzip file, a wrong checksum) becomes a DataError here,
so that the readers of formats need not know about packing.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from tlora.core.errors import DataError
from tlora.data.sources import FileSource

ByteStream = io.BufferedReader | gzip.GzipFile


@contextmanager
def open_bytes(source: FileSource) -> Iterator[ByteStream]:
    try:
        match source.compression:
            case None:
                with open(source.path, "rb") as stream:
                    yield stream
            case "gz":
                with gzip.open(source.path, "rb") as stream:
                    yield stream
            case "zst":
                with _zstandard_stream(source) as stream:
                    yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"the compressed file is damaged: {error}", path=source.name) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"the file cannot be read: {reason}", path=source.name) from error


@contextmanager
def _zstandard_stream(source: FileSource) -> Iterator[ByteStream]:
    try:
        import zstandard  # optional, and only for .zst
    except ImportError as error:
        raise DataError(
            "reading .zst needs the zstandard package: pip install 'tlora[data]'", path=source.name
        ) from error
    try:
        with open(source.path, "rb") as packed:
            reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
            with io.BufferedReader(cast(Any, reader)) as stream:  # a raw stream in all but type
                yield stream
    except zstandard.ZstdError as error:
        raise DataError(f"the compressed file is damaged: {error}", path=source.name) from error
