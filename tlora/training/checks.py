"""What the engine refuses before it can break a nano-batch."""

from collections.abc import Iterable

from tlora.core.sequence import TokenPair, TokenSequence, Unit
from tlora.model.adapters import AdapterWeights
from tlora.training.engine_job import EngineJob, JobState


def check_units(job: EngineJob, units: Iterable[Unit], vocabulary: int) -> int:
    """Raises for what would break a nano-batch; how many tokens are trained."""
    targets: int | None = None
    for unit in units:
        targets = (targets or 0) + unit.num_targets
        if isinstance(unit, TokenPair) != (job.preference is not None):
            kind = "pairs, not sequences" if job.preference else "sequences, not pairs"
            raise ValueError(f"job '{job.name}' is fed {kind} {unit.origin}".rstrip())
        for sequence in unit.sequences:
            _check_sequence(job.name, sequence, vocabulary)
    if targets is None:
        raise ValueError(f"job '{job.name}' was given no sequences")
    return targets


def _check_sequence(name: str, sequence: TokenSequence, vocabulary: int) -> None:
    if not len(sequence):
        raise ValueError(f"job '{name}' was given an empty sequence {sequence.origin}".rstrip())
    # On a GPU such a token would end the whole process.
    if int(sequence.input_ids.max()) >= vocabulary or int(sequence.input_ids.min()) < 0:
        raise ValueError(
            f"job '{name}' was given a token beyond the base model's {vocabulary} "
            f"{sequence.origin}".rstrip()
        )


def check_state(name: str, weights: AdapterWeights, state: JobState) -> None:
    """The moments must have the shapes of the weights, B's transposed as in the pool."""
    shapes = {
        f"{path}.{side}": shape
        for path, pair in weights.items()
        for side, shape in (("lora_A", pair.a.shape), ("lora_B", pair.b.T.shape))
    }
    for moments in (state.exp_avg, state.exp_avg_sq):
        if {key: moment.shape for key, moment in moments.items()} != shapes:
            raise ValueError(f"job '{name}': the state belongs to another adapter")
