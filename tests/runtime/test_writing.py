"""The background writer keeps the order, tells what it could not write, and never leaves the run
waiting."""

import gc
import threading
import weakref

import pytest
from support.waiting import PATIENCE_S, until

from tlora.runtime.writing import Order, Writer


class Desk:
    """Orders that write down what happens to them."""

    def __init__(self, **settings: int) -> None:
        self.writer = Writer(**settings)
        self.written: list[str] = []
        self.told: list[tuple[str, str | None]] = []
        self.gate = threading.Event()
        """Orders wait for it while they are carried out."""

    def submit(self, name: str, job: str = "job", error: Exception | None = None, **more) -> None:
        def write() -> None:
            assert self.gate.wait(PATIENCE_S)
            if error is not None:
                raise error
            self.written.append(name)

        def then(failure: Exception | None) -> None:
            assert threading.current_thread() is threading.main_thread()
            self.told.append((name, str(failure) if failure else None))

        self.writer.submit(Order(job, write, then, **more))


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.gate.set()
    desk.writer.close()


def test_orders_are_carried_out_and_told_in_order(desk: Desk) -> None:
    """Of all jobs; told by whoever settles, once, and not before they are over."""
    names = [f"{number}" for number in range(20)]
    for number, name in enumerate(names):
        desk.submit(name, job=f"job {number % 3}")
    desk.writer.settle()
    assert desk.told == []
    desk.gate.set()
    desk.writer.flush()
    assert desk.written == names and desk.told == []
    desk.writer.settle()
    desk.writer.settle()
    assert desk.told == [(name, None) for name in names]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), MemoryError("none left"), KeyError("what")]
)
def test_whatever_keeps_an_order_from_the_disk_is_told(desk: Desk, error: Exception) -> None:
    """With the error; the writer goes on with the next."""
    desk.gate.set()
    desk.submit("lost", error=error)
    desk.submit("kept")
    desk.writer.flush()
    desk.writer.settle()
    assert desk.told == [("lost", str(error)), ("kept", None)]
    assert desk.written == ["kept"]


def wait_until_current(desk: Desk) -> None:
    until(lambda: desk.writer._current is not None)


def test_a_newer_checkpoint_of_a_job_takes_the_place_of_one_that_waits(desk: Desk) -> None:
    """At the end of the queue, so that what it knows of is there before it. Not of another job's,
    not of one under way, and not of what is no checkpoint."""
    desk.submit("first", replaceable=True)
    wait_until_current(desk)
    desk.submit("void", replaceable=True)
    desk.submit("best")
    desk.submit("other", job="other", replaceable=True)
    desk.submit("newest", replaceable=True)
    desk.gate.set()
    desk.writer.flush()
    assert desk.written == ["first", "best", "other", "newest"]
    desk.writer.settle()
    assert [name for name, _ in desk.told] == desk.written


def test_a_full_queue_waits() -> None:
    """Until what is in flight is below the limit; without it nothing would."""
    desk = Desk(in_flight_bytes=100)
    desk.submit("one", num_bytes=60)
    desk.writer.make_room()
    desk.submit("two", num_bytes=60)
    passed = threading.Event()

    def later() -> None:
        desk.writer.make_room()
        passed.set()

    thread = threading.Thread(target=later)
    thread.start()
    assert not passed.wait(0.1)
    desk.gate.set()
    assert passed.wait(PATIENCE_S)
    thread.join()
    desk.writer.close()


def test_a_checkpoint_that_would_be_void_does_not_take_up_room() -> None:
    """A disk that is slower than one job's checkpoints holds nobody up."""
    desk = Desk(in_flight_bytes=100)
    desk.submit("current", num_bytes=60, replaceable=True)
    wait_until_current(desk)
    for name in ("void", "void too", "newest"):
        desk.writer.make_room(replacing="job")
        desk.submit(name, num_bytes=60, replaceable=True)
    desk.gate.set()
    desk.writer.close()
    assert desk.written == ["current", "newest"]


def test_what_was_written_is_let_go_before_it_is_told(desk: Desk) -> None:
    """Its memory is free once it is on disk; after a failure too."""

    class Large:
        pass

    def order(large: Large, error: Exception | None) -> Order:
        def write() -> None:
            assert large is not None
            if error is not None:
                raise error

        return Order("job", write, lambda failure: None)

    for error in (None, OSError(28, "No space left on device")):
        large = Large()
        watched = weakref.ref(large)
        desk.writer.submit(order(large, error))
        del large
        desk.writer.flush()
        desk.submit("the next one")
        wait_until_current(desk)
        gc.collect()
        assert watched() is None
        desk.gate.set()
        desk.writer.flush()
        desk.gate.clear()


def test_closing_writes_what_waits() -> None:
    desk = Desk()
    for name in "abc":
        desk.submit(name)
    desk.gate.set()
    desk.writer.close()
    assert desk.written == ["a", "b", "c"]


def test_a_checkpoint_that_waits_is_kept_until_the_newer_one_is_there() -> None:
    """The newer one may never come: its snapshot may fail."""
    desk = Desk(in_flight_bytes=100)
    desk.submit("current", num_bytes=60, replaceable=True)
    wait_until_current(desk)
    desk.submit("waits", num_bytes=60, replaceable=True)
    desk.writer.make_room(replacing="job")
    desk.gate.set()
    desk.writer.close()
    assert desk.written == ["current", "waits"]


def test_all_are_told_whoever_cannot_hear_it(desk: Desk) -> None:
    """What the first one raises is raised when the others know."""

    def deaf(failure: Exception | None) -> None:
        raise BrokenPipeError("nobody reads")

    desk.writer.submit(Order("job", lambda: None, deaf))
    desk.submit("other", job="other")
    desk.gate.set()
    desk.writer.flush()
    with pytest.raises(BrokenPipeError):
        desk.writer.settle()
    assert desk.told == [("other", None)]


class Panic(BaseException):
    """As a library that is not Python's may raise."""


def test_no_error_ends_the_writer(desk: Desk) -> None:
    """It would leave the run waiting for ever."""
    desk.gate.set()
    desk.submit("lost", error=Panic("what"))  # type: ignore[arg-type]
    desk.submit("kept")
    desk.writer.flush()
    desk.writer.settle()
    assert desk.told == [("lost", "Panic: what"), ("kept", None)]
