"""A CUDA device shows that the kernels are right there before anything trains on it.

They are compiled for whatever device is found, by whatever compiler is installed, and few pairs of
both have been tried. So each device computes what can be compared (proof.py), once: the file that
says so lies beside the tuner's choices. What shows itself wrong is not used, and training goes the
other way.
"""

import functools
import logging
import os
import time
from collections.abc import Iterable

import torch

from tlora.kernels import cache
from tlora.kernels.multi_lora import choices, settings, settling
from tlora.kernels.multi_lora.pages import Ways
from tlora.kernels.multi_lora.proof import Case, find_fault
from tlora.kernels.multi_lora.routes import kernels_serve, operand_dtype, refuse_kernels
from tlora.kernels.multi_lora.tuner import GroupShape

logger = logging.getLogger(__name__)

TOKENS = 517
DROPOUT = 0.25


def prove_kernels(device: torch.device, dtype: torch.dtype, groups: Iterable[GroupShape]) -> None:
    """Of a model whose linears have this format and, group by group, these (in, out) features.
    Where they are wrong, plain products serve from here on."""
    served = [group for group in groups if kernels_serve(device, len(group[1]))]
    if not served or not _is_asked(device):
        return
    # The widest stands for all: most tiles of everything.
    group = max(served, key=lambda group: (group[0] + sum(group[1]), group))
    operands = operand_dtype(device, dtype, len(group[1]))
    for dropout in (0.0, DROPOUT):
        case = Case(
            device=device, dtype=dtype, operands=operands, group=group, tokens=TOKENS,
            dropout=dropout,
        )  # fmt: skip
        try:
            fault = _fault(case)
        except Exception as error:  # Says nothing about the kernels.
            logger.warning("the multi-LoRA kernels could not be tried out: %s", error)
            continue
        if fault:
            logger.warning(
                "the multi-LoRA kernels are wrong on this device and are not used, which makes "
                "training slower: %s",
                fault,
            )
            refuse_kernels(device)
            return


def proven_ways(device: torch.device, dtype: torch.dtype, group: GroupShape, ways: Ways) -> Ways:
    """All of them, or none."""
    return _proven_ways(device, dtype, group, ways) if ways and _is_asked(device) else ways


@functools.cache
def _proven_ways(device: torch.device, dtype: torch.dtype, group: GroupShape, ways: Ways) -> Ways:
    """Many layers ask, and one of them is enough to hear of it."""
    case = Case(
        device=device, dtype=dtype, operands=dtype, group=group, tokens=settings.INSIDE_TOKENS,
        ways=ways,
    )  # fmt: skip
    try:
        fault = _fault(case)
    except Exception as error:
        fault = f"they could not be tried out: {error}"
    if fault is None:
        return ways
    outs = " + ".join(map(str, group[1]))
    logger.warning(
        "products of %d to %s features do not take the adapters' update inside on this device: %s",
        group[0],
        outs,
        fault,
    )
    return ()


def _is_asked(device: torch.device) -> bool:
    return device.type == "cuda" and os.environ.get("TLORA_PROVE_KERNELS") != "0"


def _fault(case: Case) -> str | None:
    folder, key = cache.directory(), settling.key_of(case.device)
    if case.name in choices.read_proven(folder, key):
        return None
    began = time.monotonic()
    fault = find_fault(case)
    if case.device.type == "cuda":
        torch.cuda.empty_cache()
    if fault is None:
        logger.info("kernels tried out in %.1f s: %s", time.monotonic() - began, case.name)
        choices.write_proven(folder, key, case.name)
    return fault
