"""Streams rows from Parquet files by record batches.

Parquet is read from its end, so a packed file (`.parquet.gz`) is first unpacked into a temporary
file.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from tlora.core.errors import DataError
from tlora.data.rows import Origin, Row
from tlora.data.sources import FileSource
from tlora.data.streams import ByteStream, open_bytes

BATCH_ROWS = 64
BUFFER_BYTES = 1 << 20
"""Of each column; without it a whole row group is read before its first row is given."""


def read_parquet(source: FileSource) -> Iterator[Row]:
    try:
        import pyarrow  # optional and heavy
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "reading Parquet needs the pyarrow package: pip install 'tlora[data]'", path=source.name
        ) from error
    number = 0
    with _seekable(source) as file:
        try:
            table = pyarrow.parquet.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False)
            for batch in table.iter_batches(batch_size=BATCH_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(values, Origin(source.name, number))
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"not a readable Parquet file: {error}", path=source.name) from error


@contextmanager
def _seekable(source: FileSource) -> Iterator[ByteStream | IO[bytes]]:
    with open_bytes(source) as stream:
        if source.compression is None:
            yield stream
        else:
            with tempfile.TemporaryFile() as unpacked:
                shutil.copyfileobj(stream, unpacked)
                unpacked.seek(0)
                yield unpacked
