"""`tlora merge`: an adapter folded into its base, as a plain checkpoint."""

from pathlib import Path

import torch

from tlora.core.errors import AdapterError, SpecError
from tlora.core.job import BaseSpec
from tlora.model.loading import load_base, load_tokenizer, resolve_device
from tlora.model.peft_format import read_adapter
from tlora.model.plain import plain_adapter
from tlora.model.probe import TOLERANCE, probe_sequences
from tlora.model.targets import find_targets
from tlora.runtime.directory import replace_directory
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.exporting import logits_error
from tlora.runtime.verifying import base_of


def merge_adapter(directory: Path, output: Path, base: str | None = None) -> list[str]:
    """Write base + adapter to `output`. The merged logits are compared with the unmerged ones
    before anything is put there."""
    quieten_libraries()
    if output.exists():
        raise SpecError(f"{output} exists already; name another directory", field="--output")
    spec = BaseSpec(model=base or base_of(directory))
    model = load_base(spec, resolve_device("auto")).eval()
    targets = find_targets(model)
    adapter = read_adapter(directory, targets)
    ids = torch.cat(probe_sequences(model))[None]
    with torch.no_grad():
        with plain_adapter(model, adapter.weights, adapter.scale):
            expected = model(input_ids=ids).logits[0].float()
        for path, pair in adapter.weights.items():
            weight = model.get_parameter(f"{path}.weight")
            delta = adapter.scale * pair.b.to(weight.device) @ pair.a.to(weight.device)
            delta = delta.T if targets[path].transposed else delta
            weight.copy_((weight.float() + delta).to(weight.dtype))
        error = logits_error(model(input_ids=ids).logits[0].float(), expected)
    if not error <= TOLERANCE[model.dtype]:
        raise AdapterError(f"{directory}: merged, it gives other logits (by {error:.1%})")

    def fill(staged: Path) -> None:
        model.save_pretrained(staged)
        load_tokenizer(spec).save_pretrained(staged)

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        replace_directory(output, fill)
    except OSError as error:
        raise SpecError(
            f"{output} cannot be written: {error.strerror or error}; name a directory that can",
            field="--output",
        ) from error
    return [
        f"{output}: {spec.model} with {directory}, rank {adapter.r}, merged into "
        f"{len(adapter.weights)} linears",
        f"logits equal to base and adapter apart within {error:.1e}",
    ]
