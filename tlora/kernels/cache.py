"""Where what was compiled, tried and chosen for this machine is kept."""

import os
from pathlib import Path


def directory() -> Path:
    """TLORA_CACHE, or tlora in the user's cache directory: where tokenised data is too. Raises
    RuntimeError for a user who has no home."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TLORA_CACHE") or f"{base}/tlora").expanduser() / "kernels"
