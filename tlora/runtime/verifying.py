"""`tlora verify`: an adapter directory against its base model."""

from pathlib import Path

import torch

from tlora.core.errors import AdapterError
from tlora.core.job import BaseSpec
from tlora.core.sequence import TokenSequence
from tlora.model.loading import load_base, resolve_device
from tlora.model.peft_format import read_adapter, read_config
from tlora.model.precision import in_float32
from tlora.model.probe import probe_sequences
from tlora.model.super_model import SuperModel
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.exporting import (
    LOGITS_TOLERANCE,
    adapter_logits,
    base_logits,
    logits_error,
    plain_logits,
)


def verify_adapter(directory: Path, base: str | None = None) -> list[str]:
    """Lines that say what was found; AdapterError if the adapter does not do what it says."""
    quieten_libraries()
    model_name = base or base_of(directory)
    device = resolve_device("auto")
    model = SuperModel(load_base(BaseSpec(model=model_name), device))
    adapter = read_adapter(directory, model.targets)
    ids = torch.cat(probe_sequences(model.model)).cpu().numpy()
    probe = TokenSequence(ids, ids)
    plain = plain_logits(model, adapter.weights, adapter.scale, probe)
    if not bool(torch.isfinite(plain).all()):
        raise AdapterError(f"{directory}: gives logits that are not finite")
    lines = [
        f"{directory}: rank {adapter.r}, scale {adapter.scale:g}, {len(adapter.weights)} linears "
        f"of {model_name}"
    ]
    fused = logits_error(adapter_logits(model, adapter.weights, adapter.scale, probe), plain)
    lines.append(_compared(directory, "tlora's own path", fused))
    peft = peft_logits(directory, model_name, ids)
    if peft is None:
        lines.append("PEFT is not installed: not compared with it")
    else:
        lines.append(_compared(directory, "PEFT", logits_error(peft, plain)))
    change = logits_error(plain, base_logits(model, probe))
    lines.append(
        f"changes the base model's logits by {change:.2%} of the largest"
        if change
        else "leaves the base model's logits as they are: an adapter that was never trained?"
    )
    return lines


def base_of(directory: Path) -> str:
    name = str(read_config(directory).get("base_model_name_or_path") or "")
    if not name:
        raise AdapterError(f"{directory}: does not name its base model; give it with --base")
    return name


def peft_logits(directory: Path, model_name: str, ids) -> torch.Tensor | None:
    """Through PEFT's own loader, or None where PEFT is not installed."""
    try:
        from peft import PeftModel
    except ImportError:
        return None
    device = resolve_device("auto")
    plain = load_base(BaseSpec(model=model_name), device)
    try:
        model = PeftModel.from_pretrained(plain, str(directory)).eval()
    except (ValueError, TypeError, RuntimeError) as error:
        raise AdapterError(f"{directory}: PEFT cannot load it: {error}") from error
    with torch.no_grad(), in_float32(model):
        logits = model(input_ids=torch.from_numpy(ids)[None].to(device)).logits[0]
    # The last row predicts nothing that is compared.
    return logits[:-1].float()


def _compared(directory: Path, other: str, error: float) -> str:
    if not error <= LOGITS_TOLERANCE:
        raise AdapterError(
            f"{directory}: {other} gives other logits (by {error:.1e} of the largest; "
            f"{LOGITS_TOLERANCE:.0e} may be rounding)"
        )
    return f"logits equal to {other} within {error:.1e}"
