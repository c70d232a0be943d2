"""The leaderboard, on a terminal and as lines."""

import io
import re

from rich.console import Console
from support.waiting import until

from tlora.core.sweep import EarlyExitSpec, ObjectiveSpec
from tlora.runtime.sweeps.view import LiveView, View, leaderboard
from tlora.tuning.events import Added, Closed, Evaluated, Failed, TrialPlan
from tlora.tuning.exits import rule_of
from tlora.tuning.study import Limits, StudyState


def plan(name: str, rate: float, size: float = 1.0) -> TrialPlan:
    return TrialPlan(
        name=name,
        params={"train.learning_rate": rate, "lora.r": 4},
        total_steps=40,
        total_tokens=400,
        batch_size=1,
        adapter_bytes=size,
    )


def state_of(trials: int, view: View | None = None, *, room: float | None = None) -> StudyState:
    """Evaluated in the order of their names, the last one best, all but one given up."""
    spec = EarlyExitSpec(keep=0.01)
    state = StudyState(rule_of(spec, ObjectiveSpec()), ObjectiveSpec(), Limits(room_bytes=room))
    plans = tuple(plan(f"t{at}", 10.0**-at) for at in range(trials))
    events = [Added(plans), Closed()]
    for at in range(trials):
        metrics = {"loss": 9.0 - at, "eval_loss": 9.0 - at}
        events.append(Evaluated(trial=f"t{at}", step=2, tokens=20, metrics=metrics))
    for event in events:
        actions = state.on(event)
        if view is not None:
            view.on_turn(state, event, actions)
    return state


def drawn(state: StudyState, rows: int) -> list[str]:
    console = Console(file=io.StringIO(), width=120)
    console.print(leaderboard(state, {}, rows))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_best_is_first_and_everybody_has_a_fate() -> None:
    """Place, settings, value and status; what does not fit is counted."""
    lines = drawn(state_of(4), 10)
    assert re.search(r"trial\s+learning_rate\s+r\s+step\s+loss\s+eval_loss\s+status", lines[0])
    assert re.match(r"1\s+t3\s+0.001\s+4\s+2/40\s+-\s+6.000\s+running", lines[1])
    assert re.match(r"4\s+t0\s+1\s+4\s+2/40\s+-\s+9.000\s+underperforming", lines[4])
    short = drawn(state_of(4), 2)
    assert any("+ 2 more" in line for line in short) and "t3" in short[1]


def test_lines_tell_of_exits_and_of_what_fails() -> None:
    """A few exits one by one, many by their rule, refusals and failures with the reason."""
    few, many = View(io.StringIO()), View(io.StringIO())
    state = state_of(3, few)
    event = Failed(trial="t2", step=3, tokens=30, reason="the loss is not finite")
    few.on_turn(state, event, state.on(event))
    assert isinstance(few.out, io.StringIO) and isinstance(many.out, io.StringIO)
    said = few.out.getvalue()
    assert "t0: underperforming at step 2: eval_loss 9.0000" in said
    assert "all have warmed up: 1 of 3 trials go on" in said
    assert "t2: failed at step 3: the loss is not finite" in said
    state_of(12, many)
    assert "11 trials given up: underperforming" in many.out.getvalue()
    refused = View(io.StringIO())
    state_of(0, refused, room=1.0)
    state = StudyState(
        rule_of(EarlyExitSpec(), ObjectiveSpec()), ObjectiveSpec(), Limits(room_bytes=1.0)
    )
    big = Added((plan("big", 1.0, size=2.0),))
    refused.on_turn(state, big, state.on(big))
    assert isinstance(refused.out, io.StringIO)
    assert "big: cannot be tried: its adapter takes" in refused.out.getvalue()


def test_the_live_view_draws_and_leaves_the_terminal_as_it_was() -> None:
    """The leaderboard is on the screen while it runs; lines scroll by above it."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=20)
    view = LiveView(console)
    view.begin(state_of(4))
    out = console.file
    assert isinstance(out, io.StringIO)
    until(lambda: "underperforming" in out.getvalue())
    view.say("a word")
    view.close()
    view.close()
    said = out.getvalue()
    assert "t3" in said and "a word" in said and "best t3: eval_loss 6.0000" in said
