"""Compiling ahead for `gpu_lora_kernels.py`, in processes without a device; what was compiled."""

import torch
from kernel_candidates import Candidate
from kernel_cases import Layer, Place, launch, part_of
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tlora.kernels.multi_lora.blocks import Blocks

_last_compiled: list = []


def remember_compiled() -> None:
    """Keep what was compiled last, for its registers; the interpreter has none."""
    original = JITFunction.run

    def run(self, *args, **kwargs):
        compiled = original(self, *args, **kwargs)
        _last_compiled[:] = [compiled]
        return compiled

    JITFunction.run = run


def resources() -> dict:
    compiled = _last_compiled[0] if _last_compiled else None
    if compiled is None:
        return {}
    return {
        "registers": getattr(compiled, "n_regs", None),
        "spills": getattr(compiled, "n_spills", None),
        "shared": getattr(compiled.metadata, "shared", None),
    }


class _Compiler:
    """Stands in for the device in processes that only fill Triton's cache on disk."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


def start_compiler(target) -> None:
    torch.set_num_threads(1)
    driver.set_active(_Compiler(target))
    original = JITFunction.run

    def run(self, *args, **kwargs):
        return original(self, *args, **{**kwargs, "warmup": True})

    JITFunction.run = run


def compile_only(kernel: str, place: Place, candidate: Candidate, tile: int) -> str:
    """Compile what `launch` would; the message if that fails."""
    try:
        layout = place.layout(candidate)
        layer = Layer(place, layout.s_width, "cpu", real=False)
        part = part_of(layer, tile) if tile else None
        launch(kernel, layer, Blocks.new(layout, "cpu"), candidate, part)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    return ""
