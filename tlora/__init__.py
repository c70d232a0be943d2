"""Many LoRA jobs, one frozen backbone, each trained exactly as it would train alone."""

__version__ = "0.1.0"
