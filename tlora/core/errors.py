"""What can go wrong, sorted by whose fault it is and whom it stops.

Errors carry the job, the field or the row they speak of, so that every surface (terminal, file,
API) can name them. What a person got wrong in a file, a row or a directory is a `ValueError` too.
"""

from collections.abc import Sequence


class TloraError(Exception):
    """Anything tlora reports on purpose; its text is meant for a person."""


class SpecError(TloraError, ValueError):
    """A job file, a flag or a setting is wrong. Ends the command with exit code 2."""

    def __init__(self, message: str, *, job: str | None = None, field: str | None = None) -> None:
        self.job = job
        self.field = field
        self.message = message
        where = [f"job '{job}'"] if job else []
        where += [field] if field else []
        super().__init__(": ".join([*where, message]))


class SpecErrors(SpecError):
    """Several things are wrong in one job file or its data; the text has one line for each."""

    def __init__(self, problems: Sequence[TloraError]) -> None:
        self.problems = tuple(problems)
        lines = [f"{len(self.problems)} problems", *(f"  {problem}" for problem in self.problems)]
        super().__init__("\n".join(lines))


class DataError(TloraError, ValueError):
    """A dataset cannot be read or holds a row that cannot be trained on."""

    def __init__(
        self,
        message: str,
        *,
        job: str | None = None,
        path: str | None = None,
        line: int | None = None,
    ) -> None:
        self.job = job
        self.path = path
        self.line = line
        self.message = message
        place = f"{path}:{line}" if path and line else path
        where = [f"job '{job}'"] if job else []
        where += [place] if place else []
        super().__init__(": ".join([*where, message]))


class ModelError(TloraError, ValueError):
    """A base model cannot be found, loaded, or trained in packed rows."""


class AdapterError(TloraError, ValueError):
    """An adapter directory is damaged or does not fit its base model."""


class JobFailed(TloraError):
    """One job cannot go on; its neighbours can."""

    def __init__(self, message: str, *, job: str) -> None:
        self.job = job
        self.message = message
        super().__init__(f"job '{job}': {message}")
