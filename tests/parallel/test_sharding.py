"""What a rank makes of its own exceptions; shards themselves are in test_shard_loading.py."""

import pytest
import torch.distributed as dist

from tlora.parallel.sharding import GroupLost, follows_another


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (GroupLost("the ranks cannot agree any more"), True),
        # In a sum over ranks, whose other end was killed.
        (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed"), True),
        (dist.DistNetworkError("failed to recv"), True),
        (RuntimeError("shapes do not match"), False),
        (OSError("Connection to the disk was lost"), False),
    ],
)
def test_what_another_rank_did_is_not_taken_for_the_cause(error: Exception, follows: bool) -> None:
    """Of a lost group the cause is named: that of the rank that was lost first."""
    assert follows_another(error) == follows
