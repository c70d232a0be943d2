"""Datasets on the Hugging Face Hub, streamed through the optional `datasets` library."""

from collections.abc import Iterator
from types import ModuleType

from tlora.core.errors import DataError
from tlora.data.rows import Origin, Row
from tlora.data.sources import HubSource


def read_hub(source: HubSource) -> Iterator[Row]:
    datasets = _library(source)
    try:
        stream = datasets.load_dataset(source.dataset, split=source.split, streaming=True)
        for number, values in enumerate(stream, start=1):
            yield Row(values, Origin(source.name, number))
    except Exception as error:  # whatever the network, the Hub or a dataset's own files throw
        raise _unreachable(source, error) from error


def hub_revision(source: HubSource) -> str:
    """The commit that the dataset stands at, which changes when its content does."""
    datasets = _library(source)
    try:
        return str(datasets.load_dataset_builder(source.dataset).hash)
    except Exception as error:  # as above
        raise _unreachable(source, error) from error


def _library(source: HubSource) -> ModuleType:
    try:
        import datasets  # pyright: ignore[reportMissingImports]  # optional and heavy
    except ImportError as error:
        raise DataError(
            "there is no file or directory of this name; to read it as a Hugging Face dataset, "
            "install the datasets package: pip install 'tlora[data]'",
            path=source.dataset,
        ) from error
    return datasets


def _unreachable(source: HubSource, error: Exception) -> DataError:
    return DataError(
        "there is no file or directory of this name, and the Hugging Face dataset cannot be read "
        f"(split '{source.split}'): {error}",
        path=source.dataset,
    )
