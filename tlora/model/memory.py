"""What running out of memory looks like, on a device and on the host."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a type for a device that is full, but none for the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        "DefaultCPUAllocator" in str(error)
    )
