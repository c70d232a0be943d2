"""What a rank computes on and talks by, from its place and the GPUs there are."""

import pytest
import torch
import torch.distributed as dist

from tlora.core.errors import SpecError
from tlora.parallel.mesh import join, link_of

NCCL = "cuda:nccl,cpu:gloo"


@pytest.mark.parametrize(
    ("local", "gpus", "share", "device", "backend"),
    [
        (1, 2, False, "cuda:1", NCCL),
        (1, 0, False, "cpu", "gloo"),
        (0, 0, True, "cpu", "gloo"),
        (1, 1, True, "cuda:0", "gloo"),
        (3, 2, True, "cuda:1", "gloo"),
        (0, 2, True, "cuda:0", "gloo"),
    ],
)
def test_ranks_speak_by_nccl_only_where_each_has_a_gpu(
    local: int, gpus: int, share: bool, device: str, backend: str
) -> None:
    """Where some share one all of them speak by gloo: a group has one language."""
    link = link_of(local, gpus, ranks=max(local + 1, 2), share=share)
    assert (str(link.device), link.backend) == (device, backend)


@pytest.mark.parametrize("local", [0, 1, 2])
def test_more_ranks_than_gpus_are_refused_on_every_rank_alike(local: int) -> None:
    """Those that have a GPU would wait by nccl for those that speak by gloo."""
    with pytest.raises(SpecError, match=r"3 ranks, and each sees 2 GPUs.*TLORA_SHARE_GPUS"):
        link_of(local, 2, ranks=3, share=False)
    assert link_of(local, 3, ranks=3, share=False).backend == NCCL


def test_ranks_that_need_no_gpu_are_not_refused_for_want_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two on a node with one GPU: by engine.device: cpu both compute there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for name, value in (("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TLORA_SHARE_GPUS", raising=False)
    assert join("cpu") == torch.device("cpu")
    with pytest.raises(SpecError, match="2 ranks, and each sees 1 GPU"):
        join("auto")
