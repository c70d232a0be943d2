"""How many tokens nano-batches hold: as many as was said, or as a controller finds best, and fewer
where memory has no room for them."""

from dataclasses import replace

from tlora.training.compose import Composition, Kind, buckets_for
from tlora.training.controller import Controller
from tlora.training.in_flight import InFlight
from tlora.training.outcome import Outcome
from tlora.training.size_search import Measure

MIN_BUDGET = 64
CPU_BUCKET_STEP = 64


class Sizing:
    def __init__(
        self,
        budget_tokens: int,
        *,
        bucket_step: int | None,
        exact: bool,
        controller: Controller | None,
    ) -> None:
        """With a controller the budget is its own, and `budget_tokens` where it begins."""
        if budget_tokens < 1:
            raise ValueError(f"a nano-batch needs room for a token, got {budget_tokens}")
        if exact and controller is not None:
            raise ValueError("exact isolation runs nano-batches of one size: no controller")
        self.budget_tokens = budget_tokens
        self.controller = controller
        self._bucket_step = bucket_step
        self._exact = exact

    @property
    def largest_tokens(self) -> int:
        """A controller may come to it."""
        return self.budget_tokens if self.controller is None else self.controller.limit

    @property
    def is_least(self) -> bool:
        return self.budget_tokens <= MIN_BUDGET

    def renew(self) -> int:
        """The budget of the next nano-batch."""
        if self.controller is not None:
            self.budget_tokens = self.controller.budget
        return self.budget_tokens

    def buckets(self, budget: int) -> tuple[int, ...]:
        """The numbers of rows that a nano-batch may be padded to."""
        if self._exact:
            return (budget,)
        controller = self.controller
        if controller is not None and not controller.is_settled and self._bucket_step is None:
            return controller.buckets(budget)
        return buckets_for(budget, step=self._bucket_step)

    def measured(self, arrived: InFlight, outcome: Outcome) -> Outcome:
        """Tell the controller, if there is one, of a nano-batch that took its time."""
        if self.controller is None or arrived.composition is None or not arrived.settled:
            return outcome
        return self._observed(arrived.composition, outcome, group=arrived.group)

    def lowered(self, composition: Composition, outcome: Outcome, *, group: int) -> Outcome:
        """This nano-batch did not fit in memory."""
        if self.controller is not None:
            return self._observed(composition, outcome, group=group, out_of_memory=True)
        self.budget_tokens = max(MIN_BUDGET, self.budget_tokens // 2)
        return outcome

    def _observed(
        self, composition: Composition, outcome: Outcome, *, group: int, out_of_memory: bool = False
    ) -> Outcome:
        assert self.controller is not None
        measure = Measure(
            budget=composition.budget,
            rows=composition.rows,
            tokens=sum(outcome.tokens.values()),
            seconds=round(outcome.seconds, 6),
            train=composition.kind is Kind.TRAIN,
            full=composition.full,
            group=group,
            out_of_memory=out_of_memory,
        )
        decisions = self.controller.observe(measure)
        self.budget_tokens = self.controller.budget
        return replace(outcome, measure=measure, decisions=decisions)
