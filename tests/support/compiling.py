"""What Triton's compiler makes of a kernel for a device that need not be there."""

import subprocess
from pathlib import Path
from typing import Any

import torch

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def source_of(launch: tuple[Any, tuple, dict]) -> Any:
    """Of a launch that was recorded: kernel, arguments, options. Tensors begin where they may."""
    from triton.compiler import ASTSource

    kernel, arguments, _ = launch
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32"
    return ASTSource(kernel, signature, constants, attributes)


def resources(kernel: Any, folder: Path) -> str:
    """What the assembler says of a compiled kernel: registers, stack, local memory."""
    import triton

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
