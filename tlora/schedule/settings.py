"""What can be set of a policy; a policy takes what it knows."""

from dataclasses import dataclass

from tlora.schedule.tolls import HORIZON_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    max_replicas: int | None = None
    """GPUs that a group may have; None: as many as help. 1 where executors run single GPUs."""

    horizon_s: float = HORIZON_S
    """A regrouping must earn its cost within so long."""

    min_stay_s: float = 60.0
    """A running job is not moved again before."""

    moves_per_hour: float = 4.0
    """A job may be moved so often per hour of its life, and twice besides."""

    patience_s: float = 900.0
    """A job that has waited so long at a stretch may take the GPUs of jobs that are less urgent;
    one that needs less than twice this, after half of what it needs."""

    budget: int = 100
    """Prices that a turn may ask for to improve on what was placed: this for each job that was, and
    32 times this in all (8 times where hundreds are placed at once)."""

    audit: bool = False
    """Count how often a scan would have found a better cut than the binary search; slower."""

    def __post_init__(self) -> None:
        assert self.patience_s > 0, "a job must wait for some time before others make way"
