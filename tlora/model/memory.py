"""What running out of memory looks like, on a device and on the host, and what a token takes."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a type for a device that is full, but none for the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        "DefaultCPUAllocator" in str(error)
    )


ACTIVATION_COPIES = 1.5
"""Inputs and outputs of linears that a step keeps, with what norms and activations add. A guess:
it only has to tell what fits from what does not."""

BYTES_PER_LOGIT = 10
"""In half precision, in float32, and as a gradient."""


def activation_bytes(widths: int, vocabulary: int, itemsize: int) -> float:
    """Of one token, for linears whose inputs and outputs are together so wide."""
    return ACTIVATION_COPIES * widths * itemsize + BYTES_PER_LOGIT * vocabulary
