"""What a person sees of several tasks, or of one over several devices."""

from collections import Counter
from collections.abc import Mapping
from typing import TextIO

from tlora.runtime.figures import duration_figure, rate_figure
from tlora.runtime.sweeps.view import View, closing_lines
from tlora.schedule.tasks import TaskPlan, lanes
from tlora.tuning.results import TaskStudies
from tlora.tuning.study import Phase, StudyState


class TasksView(View):
    """Lines, with every task in each."""

    def __init__(self, out: TextIO | None = None) -> None:
        super().__init__(out)
        self.states: dict[str, StudyState] = {}

    def begin_tasks(self, states: Mapping[str, StudyState]) -> None:
        self.states = dict(states)
        self.begin(next(iter(self.states.values())))

    def task_of(self, state: StudyState) -> str:
        if len(self.states) < 2:
            return ""
        return next((f"{name}: " for name, each in self.states.items() if each is state), "")

    def counts(self) -> str:
        told = [f"{name}: {counted(state)}" for name, state in self.states.items()]
        return f"{rate_figure(self.rate())} tokens/s | {'; '.join(told)}"


def counted(state: StudyState) -> str:
    phases = Counter(trial.phase for trial in state.trials.values())
    parts = [f"{phases[each]} {each.value}" for each in Phase if phases[each]]
    best = state.best
    value = "" if best is None else f", best {state.value(best):.4f}"
    return ", ".join(parts) + value


def plan_lines(plan: TaskPlan, devices: int, trials: Mapping[str, str]) -> list[str]:
    """Which task goes where, and how long all of them take, before any has begun. `trials`: what is
    to be said of each task."""
    how = "the least possible" if plan.optimal else f"by {plan.solver}"
    where = lanes(plan, devices)
    lines = [f"plan for {devices} {'device' if devices == 1 else 'devices'}, {how}:"]
    for span in sorted(plan.spans, key=lambda each: (each.start, each.name)):
        on = ", ".join(map(str, where[span.name]))
        begins = "at once" if span.start == 0 else f"after {duration_figure(span.start)}"
        lines.append(
            f"  {span.name}: device {on} {begins}, for {duration_figure(span.seconds)} "
            f"({trials[span.name]})"
        )
    if len(plan.spans) == 1:
        return [*lines, f"predicted: done in {duration_figure(plan.makespan)}"]
    gain = plan.one_after_another / plan.makespan if plan.makespan else 1.0
    lines.append(
        f"predicted: all done in {duration_figure(plan.makespan)}, one task after another in "
        f"{duration_figure(plan.one_after_another)} ({gain:.2f} times as long)"
    )
    return lines


def closing_task_lines(done: TaskStudies) -> list[str]:
    if len(done.studies) == 1:
        return closing_lines(done.only)
    lines: list[str] = []
    for name, study in done.studies.items():
        own = closing_lines(study, most=1)
        lines += [f"{name}:", *(f"  {line}" for line in own if not line.startswith("report:"))]
    lines.append(
        f"{len(done.studies)} tasks on {done.devices} devices in {duration_figure(done.wall_s)}"
    )
    lines.append(f"report:  {done.output / 'report.html'}")
    return lines
