"""Which ranks are taken for lost."""

from multiprocessing import Pipe
from multiprocessing.process import BaseProcess

from tlora.runtime.group import supervisor
from tlora.runtime.listening import Listener


class Watched(supervisor.Ranks):
    """One rank that says nothing."""

    def __init__(self) -> None:
        ours, self.theirs = Pipe()
        self.rank = supervisor._Rank(0, BaseProcess(), ours)
        self._ranks, self._listener = [self.rank], Listener()

    def look(self) -> None:
        self._receive(0.0, lambda rank, message: None)


def test_a_supervisor_that_was_stopped_itself_takes_nobody_for_lost() -> None:
    """Ctrl-Z stops the ranks too: when all go on, nobody has listened while they were silent."""
    ranks, minutes = Watched(), 2 * supervisor.HANG_S
    ranks.rank._heard._at -= minutes
    ranks._listener._looked_at -= minutes
    ranks.look()
    assert ranks.rank.loss is None
    ranks.rank._heard._at -= minutes
    ranks.look()
    assert ranks.rank.loss is not None
    assert "it has not been heard of for" in ranks.rank.loss.cause
