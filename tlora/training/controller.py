"""How large nano-batches should be: a decision over measured useful tokens/s, and nothing else.

The size climbs by doubling to the knee (slow start), then goes to where the measured sizes say that
the peak is (next_size.py). A size is judged against the best one known, by a margin that follows
the noise of the measures; where a device that grows slower or faster meanwhile could explain the
difference, the best is measured again before that, so that it was measured on both sides of the
other. On a plateau it stays, and looks beside it now and then at a bounded cost; a real loss at the
best size itself halves it. When the group of jobs changes the best is measured again, and if it
still holds nothing else happens. Sizes beyond the memory limit are never tried; an out-of-memory
lowers the limit.

It has no clock: the same measures give the same decisions, so a recorded run can be replayed.
"""

import math
from collections.abc import Iterable, Sequence

from tlora.training.next_size import DRIFT, next_size
from tlora.training.rates import Rates, Verdict
from tlora.training.size_search import Action, ControllerSettings, Decision, Measure

RECENT = 7
"""Latest measures that are held against those before, to see that the best size has changed. An odd
number: once the median has moved it is a measure from after the change."""

SAFE_SHARE = 0.75
"""Of the rows that did not fit: what may be tried afterwards, beside sizes that have run before.
Rows alone do not tell the memory, so the next size below would often fail as well."""

FAR = 0.1
"""A loss that need not be measured any better."""

GUESSED_LOSS = 0.3
"""Of the time of a size that was never tried, until its cost is known."""


class Controller:
    def __init__(self, settings: ControllerSettings) -> None:
        self.settings = settings
        self.best = settings.start
        self.limit = settings.limit
        self.rates = Rates()
        self._sizes = settings.sizes
        self._trial: int | None = None
        self._move: Action | None = None
        """What led to the trial; without one: None if settled, RESTART if the best is measured."""
        self._again: int | None = None
        """Measures of the best still to come before the trial is judged a second time; None before
        it was judged once."""
        self._search(None)
        self._move = Action.RESTART
        self._group: int | None = None
        self._changed = False
        """The group has, while a search was under way."""
        self._before: tuple[float, int] | None = None
        """Level of the best and its number of measures, before the group changed."""
        self._starved: int | None = None
        """No work fills this size."""
        self._unfilled = 0
        self._warmed: dict[int, int] = {}
        self._run: set[int] = set()
        """Rows that have fitted."""
        self._count = 0
        self._decisions: list[Decision] = []
        self._earned = 0.0
        self._warm_up_cost = 0.0
        self._trial_cost = 0.0
        self._probe_costs: dict[int, float] = {}
        self._probes = 0
        self._probe_wait = settings.probe_after
        self._quiet = 0

    @property
    def budget(self) -> int:
        """Tokens of the next nano-batch."""
        return self.best if self._trial is None or self._again else self._trial

    @property
    def is_settled(self) -> bool:
        return self._trial is None and self._move is None

    def buckets(self, budget: int) -> tuple[int, ...]:
        """Rows that a nano-batch of this budget may have, from an eighth of it on: sizes that other
        budgets use too. Those above it are for sequences that are longer."""
        return tuple(size for size in self._sizes if size >= budget // 8)

    def observe(self, measure: Measure) -> tuple[Decision, ...]:
        """Take note of a nano-batch; what was decided because of it."""
        self._count += 1
        self._decisions = []
        if measure.out_of_memory:
            self._lower_limit(measure.rows)
        elif measure.train and measure.seconds > 0:
            if self._group is not None and measure.group != self._group:
                self._change_group()
            self._group = measure.group
            if self._count_in(measure):
                self._decide()
        return tuple(self._decisions)

    # Taking note.

    def _count_in(self, measure: Measure) -> bool:
        """Whether there is anything to decide after it."""
        best = self.rates.tokens_per_s(self.best)
        lost = max(0.0, measure.seconds - measure.tokens / best) if best else 0.0
        self._quiet += 1
        if self._move is Action.PROBE:
            self._earned -= lost
            self._trial_cost += lost
        elif self.is_settled:
            self._earned += self.settings.probe_share * measure.seconds
        self._run.add(measure.rows)
        warmed = self._warmed.get(measure.rows, 0)
        if warmed < self.settings.warm_ups:
            self._warmed[measure.rows] = warmed + 1
            self._warm_up_cost = max(self._warm_up_cost, lost)
            return False
        if measure.full and measure.rows <= measure.budget:
            self.rates.add(measure.budget, measure.tokens / measure.seconds)
            self._unfilled = 0
            if self._again and measure.budget == self.best:
                self._again -= 1
        elif measure.budget == self.budget:
            self._unfilled += 1
        return True

    def _decide(self) -> None:
        if self._trial is not None:
            self._judge_trial(self._trial)
        elif self._move is Action.RESTART:
            self._measure_best()
        elif not self._watch_best():
            self._maybe_probe()

    # The trial of another size.

    def _judge_trial(self, trial: int) -> None:
        settings, rates = self.settings, self.rates
        if self._again and self._unfilled < settings.patience:
            return
        if self._unfilled >= settings.patience and rates.count(trial) < settings.least:
            self._starved = trial
            self._go_on(Verdict.ALIKE, f"there is not the work to fill {trial}")
            return
        if rates.count(trial) < settings.least and not self._is_far_worse(trial):
            return
        probing = self._move is Action.PROBE
        verdict = rates.compare(
            trial,
            self.best,
            worth=settings.worth,
            most=settings.most,
            deviations=settings.probe_deviations if probing else settings.deviations,
            bold=not probing,
        )
        if verdict is Verdict.OPEN and self._again is None:
            return
        gain = math.expm1(rates.level(trial) - rates.level(self.best))
        why = f"{trial} is {verdict.value} than {self.best} ({gain:+.1%})".replace(
            "alike than", "like"
        )
        if self._again is None and not probing and abs(gain) <= DRIFT:
            self._measure_again(trial, why)
        else:
            self._go_on(verdict, why)

    def _measure_again(self, trial: int, why: str) -> None:
        """The best, as often as the trial and as often as it counts from before."""
        count = min(self.rates.count(trial), self.rates.count(self.best))
        self.rates.trim(self.best, count)
        self._again, self._unfilled = count, 0
        self._say(Action.AGAIN, trial, self.best, why)

    def _is_far_worse(self, trial: int) -> bool:
        """Two measures are enough if both are; one may be a stumble."""
        if self.rates.count(trial) < 2:
            return False
        loss = self.rates.level(self.best) - self.rates.highest(trial)
        counts = self.rates.count(trial), self.rates.count(self.best)
        margin = self.rates.margin(*counts, deviations=self.settings.probe_deviations)
        return loss > max(margin, FAR)

    def _go_on(self, verdict: Verdict, why: str) -> None:
        """After a verdict on the trial: where the search goes next."""
        move, trial, rates = self._move, self._trial, self.rates
        assert move is not None and trial is not None
        self._judged |= {trial, self.best}
        if verdict is Verdict.BETTER:
            if move is Action.PROBE:
                self._probe_wait = self.settings.probe_after
            self.best = trial
        elif move is Action.PROBE:
            self._probe_costs[trial] = self._trial_cost
            self._settle(trial, why, action=Action.BACK)
            return
        size = next_size(
            verdict,
            best=self.best,
            levels={size: rates.level(size) for size in self._judged if rates.count(size)},
            allowed=self._allowed(),
            worth=self.settings.worth,
        )
        self._try(size, trial, why)

    def _try(
        self, size: int | None, measured: int, why: str, *, action: Action | None = None
    ) -> None:
        """Start a trial, or settle where there is none. The trace calls it by its way, or
        `action`."""
        if size is None:
            self._settle(measured, why, action=action or Action.SETTLE)
            return
        if size > self.best:
            move = Action.DOUBLE if size == 2 * self.best else Action.STEP_UP
        else:
            move = Action.HALVE if 2 * size == self.best else Action.STEP_DOWN
        self._say(action or move, measured, size, why)
        self._begin(move, size)

    def _begin(self, move: Action, size: int) -> None:
        self.rates.forget(size)
        self._move, self._trial, self._again = move, size, None
        self._unfilled, self._trial_cost = 0, 0.0

    def _target(self, move: Action) -> int | None:
        allowed = self._allowed()
        above = [size for size in allowed if size > self.best]
        below = [size for size in allowed if size < self.best]
        match move:
            case Action.DOUBLE:
                return max((size for size in above if size <= 2 * self.best), default=None)
            case Action.STEP_UP:
                return min(above, default=None)
            case Action.STEP_DOWN:
                return max(below, default=None)
            case _:
                return max((size for size in below if size <= self.best // 2), default=None)

    def _allowed(self) -> Sequence[int]:
        cap = self.limit if self._starved is None else min(self.limit, self._starved - 1)
        return [size for size in self._sizes if size <= cap]

    def _settle(self, measured: int, why: str, *, action: Action = Action.SETTLE) -> None:
        self._say(action, measured, self.best, why)
        self._search(None)
        if self._changed:
            self._changed = False
            self._confirm_best()

    def _search(self, move: Action | None) -> None:
        """Begin anew around the best size, or stay there."""
        self._trial, self._move, self._again = None, move, None
        self._judged: set[int] = set()
        self._quiet = 0

    # At the best size.

    def _measure_best(self) -> None:
        """At the start, and after the group has changed."""
        count = self.rates.count(self.best)
        if count < self.settings.least:
            if not count and self._before is None and self._unfilled >= self.settings.patience:
                self._rest()
            return
        if self._before is not None:
            level, earlier = self._before
            change = self.rates.level(self.best) - level
            margin = self.rates.margin(count, earlier, deviations=self.settings.probe_deviations)
            self._before = None
            if abs(change) <= max(margin, self.settings.worth):
                self._settle(self.best, f"{self.best} still holds", action=Action.HOLD)
                return
            why = f"{self.best} is at {math.expm1(change):+.1%}"
        else:
            why = f"{self.best} is measured"
        self._search_from_best(why)

    def _search_from_best(self, why: str) -> None:
        self.rates.keep(self.best, self.rates.count(self.best))
        self._search(None)
        self._probe_wait = self.settings.probe_after
        size = self._target(Action.DOUBLE) or self._target(Action.HALVE)
        self._try(size, self.best, why)

    def _rest(self) -> None:
        """Where nothing fills a nano-batch a larger size costs nothing, and evaluations, which
        always have work, run faster."""
        idle = max(size for size in self._sizes if size <= min(self.settings.idle, self.limit))
        if idle > self.best:
            why = f"there is not the work to fill {self.best}"
            self._say(Action.STEP_UP, self.best, idle, why)
            self.best = idle
            self._unfilled = 0

    def _watch_best(self) -> bool:
        """A real change at the best size starts a search; whether it did."""
        settings = self.settings
        shift = self.rates.shift(
            self.best,
            recent=RECENT,
            least=settings.least,
            deviations=settings.alarm_deviations,
        )
        if abs(shift) <= settings.worth:
            return False
        self.rates.keep(self.best, RECENT)
        self._search(None)
        self._probe_wait = max(settings.probe_after, self._probe_wait // 2)
        up, down = self._target(Action.DOUBLE), self._target(Action.HALVE)
        size = (down or up) if shift < 0 else (up or down)
        self._try(size, self.best, f"{self.best} has changed by {math.expm1(shift):+.1%}")
        return True

    def _maybe_probe(self) -> None:
        if self._quiet < self._probe_wait or self.rates.count(self.best) < self.settings.least:
            return
        moves = (Action.STEP_UP, Action.STEP_DOWN, Action.DOUBLE, Action.HALVE)
        size = self._target(moves[self._probes % len(moves)])
        if size is not None and self._expected_cost(size) > self._earned:
            return
        self._probe_wait = 2 * self._quiet
        self._probes += 1
        if size is None:
            self._quiet = 0
            return
        self._say(Action.PROBE, self.best, size, f"{self._quiet} nano-batches on a plateau")
        self._begin(Action.PROBE, size)

    def _expected_cost(self, size: int) -> float:
        """Seconds that a look at this size may lose."""
        if size in self._probe_costs:
            return self._probe_costs[size]
        rate = self.rates.tokens_per_s(self.best)
        assert rate is not None
        cold = max(0, self.settings.warm_ups - self._warmed.get(size, 0))
        return cold * self._warm_up_cost + self.settings.least * GUESSED_LOSS * size / rate

    # From outside.

    def _change_group(self) -> None:
        """Measure the best again. What other sizes gave stays until it turns out to have changed.
        A search under way is finished first, or jobs that come and go would keep it from ever
        ending."""
        self._starved = None
        self._unfilled = 0
        if self._trial is not None and self._move is not Action.PROBE:
            self._changed = True
        elif self.is_settled or self._trial is not None:
            if self._trial is not None:
                self._say(Action.RESTART, self.best, self.best, "the group has changed")
            self._confirm_best()
        elif self._before is not None:
            self.rates.forget(self.best)

    def _confirm_best(self) -> None:
        count = self.rates.count(self.best)
        self._before = (self.rates.level(self.best), count) if count else None
        self.rates.forget(self.best)
        self._search(Action.RESTART)

    def _lower_limit(self, rows: int) -> None:
        proven = [rows_run for rows_run in self._run if rows_run < rows]
        safe = max([SAFE_SHARE * rows, *proven])
        allowed = [size for size in self._sizes if size <= min(safe, self.limit)]
        if not allowed:
            # Below all that was meant: whatever still runs is right.
            allowed = [max(1, rows // 2)]
            self._sizes = tuple(allowed)
        self.limit = min(self.limit, allowed[-1])
        why = f"out of memory on {rows} rows; at most {self.limit}"
        if self.best <= self.limit and self._trial is not None and self._trial > self.limit:
            self._try(self._target(Action.STEP_UP), rows, why, action=Action.LIMIT)
        elif self.best > self.limit:
            known = [size for size in self.rates.sizes if size in allowed]
            half = [size for size in allowed if size <= rows // 2] or allowed[:1]
            self.best = max(known, key=self.rates.level) if known else half[-1]
            self._say(Action.LIMIT, rows, self.best, why)
            self._before = None
            self.rates.forget(self.best)
            self._search(Action.RESTART)
        else:
            self._say(Action.LIMIT, rows, self.budget, why)

    def _say(self, action: Action, measured: int, budget: int, why: str) -> None:
        rate = self.rates.tokens_per_s(measured)
        rounded = None if rate is None else float(f"{rate:.6g}")
        self._decisions.append(Decision(self._count, action, measured, rounded, budget, why))


def replay(settings: ControllerSettings, measures: Iterable[Measure]) -> list[Decision]:
    """The decisions that these measures lead to."""
    controller = Controller(settings)
    return [decision for measure in measures for decision in controller.observe(measure)]
