"""Tuning: a few settings of each kernel are timed, and the best are kept on disk (choices.py).

Only warps, stages and programs are tried. They change no bit, which is checked: a setting that
gives another result than the usual one is not taken.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tlora.kernels.multi_lora import choices, devices, settings
from tlora.kernels.multi_lora.devices import Choice
from tlora.kernels.multi_lora.settings import Device, Shape, Tuning

logger = logging.getLogger(__name__)

SECONDS = 10.0
"""After so long no other setting is begun, and what was not tried keeps the usual one."""

GAIN = 0.02
"""A setting that is faster by less may be so by chance."""

Timer = Callable[[Callable[[], None]], float]
GroupShape = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Trial:
    """A kernel on inputs of its own."""

    kernel: str
    shape: Shape
    run: Callable[[Tuning], None]
    results: Callable[[Tuning], list[torch.Tensor]]
    """What the kernel writes, over zeros."""

    @property
    def name(self) -> str:
        return devices.choice_name(self.kernel, self.shape)


def known_or_tuned(
    folder: Path,
    key: Mapping[str, str],
    names: set[str],
    make_trials: Callable[[], Sequence[Trial]],
    timer: Timer,
    device: Device,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Choice]:
    """The choices of these names from the file, which has them all afterwards. None where tuning is
    not possible."""
    known = choices.read(folder, key)
    if names <= known.keys():
        return {name: known[name] for name in names}
    if not choices.can_write(folder):
        # It would be done again at every start.
        return {}
    began = clock()
    try:
        trials = [t for t in make_trials() if t.name in names and t.name not in known]
        found = tune(trials, timer, device, deadline=began + SECONDS, clock=clock)
        choices.write(folder, key, found)
    except Exception as error:  # Training goes on as it would without a tuner.
        logger.warning("kernels keep their usual settings: %s", error)
        return {}
    logger.info("kernels tuned for this device in %.1f s", clock() - began)
    return {name: choice for name, choice in {**found, **known}.items() if name in names}


def tune(
    trials: Sequence[Trial],
    timer: Timer,
    device: Device,
    *,
    deadline: float,
    clock: Callable[[], float],
) -> dict[str, Choice]:
    """A choice for every trial; the usual settings where nothing better was found in time."""
    best = {trial.name: settings.tuning(trial.kernel, trial.shape, device) for trial in trials}
    # Other numbers of programs need no compiling: first those of all kernels.
    for candidates in (other_programs, other_code):
        for trial in trials:
            if clock() < deadline:
                usual = best[trial.name]
                fitting = [c for c in candidates(usual) if _fits(trial, c, device)]
                best[trial.name] = fastest(trial, usual, fitting, timer, deadline, clock)
    return {name: Choice(t.warps, t.stages, t.programs) for name, t in best.items()}


def _fits(trial: Trial, tuning: Tuning, device: Device) -> bool:
    needed = settings.shared_bytes(trial.kernel, trial.shape, tuning, device.capability)
    return needed <= device.shared_bytes


def other_programs(usual: Tuning) -> Iterator[Tuning]:
    for programs in sorted({usual.programs // 2, usual.programs + 1, 2 * usual.programs}):
        if programs not in (0, usual.programs):
            yield replace(usual, programs=programs)


def other_code(usual: Tuning) -> Iterator[Tuning]:
    """Other stages and warps. Four warps and eight use the same products, fewer may not."""
    if usual.features:
        yield replace(usual, stages=usual.stages + 1)
        if usual.stages > 2:
            yield replace(usual, stages=usual.stages - 1)
    yield replace(usual, warps=4 if usual.warps == 8 else 8)


def fastest(
    trial: Trial,
    usual: Tuning,
    candidates: Sequence[Tuning],
    timer: Timer,
    deadline: float,
    clock: Callable[[], float],
) -> Tuning:
    """The usual one, unless another is clearly faster and gives the same bits."""
    right = trial.results(usual)
    best, least = usual, (1 - GAIN) * timer(lambda: trial.run(usual))
    for candidate in candidates:
        if clock() >= deadline:
            break
        try:
            found = trial.results(candidate)
            same = all(torch.equal(u, v) for u, v in zip(found, right, strict=True))
            taken = timer(lambda candidate=candidate: trial.run(candidate)) if same else None
        except Exception as error:  # Does not compile, does not fit.
            logger.debug("%s under %s: %s", trial.name, candidate, error)
            continue
        if taken is not None and taken < least:
            best, least = candidate, taken
    return best
