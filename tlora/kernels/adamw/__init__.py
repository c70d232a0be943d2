"""AdamW with clipping for many jobs at once, each with settings of its own. README.md has the
maths."""

from tlora.kernels.adamw.orders import Order
from tlora.kernels.adamw.work import Rows, Work, chunks_of, one_dtype

__all__ = ["Order", "Rows", "Work", "chunks_of", "one_dtype"]
