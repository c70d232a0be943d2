"""Files of tensors are those that the safetensors library writes."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from tlora.model.tensor_file import write_tensors

TENSORS = {
    "model.b": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)),
    "model.a": torch.randn(7, 1, generator=torch.Generator().manual_seed(2)),
    "ä turned": torch.randn(4, 6, generator=torch.Generator().manual_seed(3)).T,
    "a part": torch.randn(9, 4, generator=torch.Generator().manual_seed(4))[2:5],
    "nothing": torch.zeros(0, 3),
}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_bytes_are_the_librarys(tmp_path: Path, metadata) -> None:
    """And what is said of them is true."""
    written = write_tensors(tmp_path / "file", TENSORS, metadata)
    found = (tmp_path / "file").read_bytes()
    whole = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    assert found == save(whole, metadata=metadata)
    assert (written.num_bytes, written.sha256) == (len(found), hashlib.sha256(found).hexdigest())


def test_the_library_reads_them_back(tmp_path: Path) -> None:
    """To the bit; another tensor is told apart."""
    write_tensors(tmp_path / "file", TENSORS)
    back = load((tmp_path / "file").read_bytes())
    assert back.keys() == TENSORS.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in TENSORS.items())
    assert not torch.equal(back["ä turned"], TENSORS["ä turned"] + 1e-6)


def test_a_place_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        write_tensors(tmp_path / "nowhere" / "file", TENSORS)
