"""Products with frozen weights, by whichever of torch's libraries is the faster one on this CPU.

torch gives products in float32 to MKL, which leaves AVX-512 to Intel's own processors. oneDNN,
which comes with torch as well, takes it wherever it is: on one core of an AMD EPYC (family 26) 225
to 260 GFLOP/s for 110, from some 200 rows and 64 features on. The choice depends on the processor
alone, so that a job meets the same products before and after a restart.
"""

import functools
from pathlib import Path

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + bias for x of [rows, in]."""
    if _takes_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def input_gradient(dy: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    """The sum of dY_l W_l over linears of one input."""
    if _takes_onednn(dy[0], *weights):
        dx = linear(dy[0], weights[0].t(), None)
        for dy_l, weight in zip(dy[1:], weights[1:], strict=True):
            dx += linear(dy_l, weight.t(), None)
        return dx
    dx = dy[0] @ weights[0]
    for dy_l, weight in zip(dy[1:], weights[1:], strict=True):
        dx.addmm_(dy_l, weight)
    return dx


def serving(*values: torch.Tensor) -> bool:
    """Whether products of such values are oneDNN's where no gradient is recorded."""
    single = all(each.dtype == torch.float32 for each in values)
    return single and values[0].device.type == "cpu" and _prefers_onednn()


def _takes_onednn(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    # Compiled code chooses for itself, and takes the operator for constant weights alone.
    if torch.compiler.is_compiling() or not serving(x, *weights):
        return False
    # The operator has no gradient.
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in (x, *weights)))


@functools.cache
def _prefers_onednn() -> bool:
    capable = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return capable and torch.backends.mkldnn.is_available() and _vendor() == "AuthenticAMD"


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
