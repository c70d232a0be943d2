"""What this package has in C, where it serves: compiled for this machine where it is first needed,
and kept once it was seen to be right. TLORA_NATIVE=0 leaves all of it out, `adapters` and
`attention` the other part.
"""

import ctypes
import logging
import os
from pathlib import Path

from tlora.kernels import c_library, cache

logger = logging.getLogger(__name__)


PARTS = ("adapters", "attention")


def find(
    part: str, source: Path, find_fault: c_library.Fault, *, without: str
) -> ctypes.CDLL | None:
    """A log says why there is none, and `without` what happens then."""
    wanted = os.environ.get("TLORA_NATIVE")
    if wanted == "0" or (wanted in PARTS and wanted != part):
        return None
    name = "/".join(source.parts[-2:])
    try:
        return _load(source, find_fault, name)
    except c_library.WrongLibrary as fault:
        logger.warning("%s is wrong on this machine and is not used: %s", name, fault)
    except c_library.NoLibrary as reason:
        logger.info("%s, which is slower: %s", without, reason)
    return None


def _load(source: Path, find_fault: c_library.Fault, name: str) -> ctypes.CDLL:
    try:
        return c_library.load(source, cache.directory(), find_fault)
    except (RuntimeError, c_library.NoPlace) as error:
        # Users of a container may have no home, or one that they cannot write to or run code from.
        library = c_library.load(source, None, find_fault)
        logger.info(
            "%s is compiled by every process anew, for it cannot be kept: %s; TLORA_CACHE names "
            "another directory",
            name,
            error,
        )
        return library
