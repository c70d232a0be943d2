"""Looking at a model before trusting it: which linears share an input, and whether packing leaks.

Nothing here goes by the model's name. A model is accepted if changing one packed sequence leaves
the logits of the others unchanged to the bit, and if packed logits equal those of the model's own
attention.
"""

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from tlora.core.errors import ModelError
from tlora.model.targets import Target

PROBE_LENGTHS = (7, 12, 5)
# Largest difference of packed and unpacked logits over the largest logit. Measured on random models
# of ten architectures: at most 2e-6 in float32 and 2e-2 in bfloat16; a leak or a wrong mask gives
# more than 0.1.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 6e-2, torch.float16: 2e-2}


def find_groups(model: PreTrainedModel, targets: dict[str, Target]) -> list[list[str]]:
    """Paths of linears that are called with one and the same tensor, in the order of the calls;
    only of equal kind (plain or transposed). A linear that is never called, or more than once, is
    left out."""
    calls: list[tuple[str, torch.Tensor]] = []

    def recorder(path: str):
        return lambda module, arguments: calls.append((path, arguments[0]))

    hooks = [
        model.get_submodule(path).register_forward_pre_hook(recorder(path)) for path in targets
    ]
    try:
        with torch.no_grad():
            model(input_ids=_random_ids(model, (4,)), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    times: dict[str, int] = {}
    for path, _ in calls:
        times[path] = times.get(path, 0) + 1
    groups: list[list[str]] = []
    inputs: list[torch.Tensor] = []
    for path, x in calls:
        if times[path] != 1:
            continue
        together = groups and inputs[-1] is x
        if together and targets[groups[-1][0]].transposed == targets[path].transposed:
            groups[-1].append(path)
        else:
            groups.append([path])
            inputs.append(x)
    return groups


def own_logits(model: PreTrainedModel) -> list[torch.Tensor]:
    """The logits of each probe sequence alone, by the model's own attention code."""
    with torch.no_grad():
        return [
            model(input_ids=ids[None], use_cache=False).logits[0] for ids in probe_sequences(model)
        ]


def probe_sequences(model: PreTrainedModel) -> list[torch.Tensor]:
    return list(_random_ids(model, PROBE_LENGTHS)[0].split(PROBE_LENGTHS))


def check_packing(model: PreTrainedModel, packed_logits, own: list[torch.Tensor]) -> None:
    """Refuse a model whose sequences see each other. `packed_logits` maps sequences to their
    logits, one row per token."""
    name = type(model).__name__
    sequences = probe_sequences(model)
    packed = packed_logits(sequences).split(PROBE_LENGTHS)
    for logits, expected in zip(packed, own, strict=True):
        error = (logits - expected).abs().max() / expected.abs().max()
        if not error <= TOLERANCE[model.dtype]:
            raise ModelError(
                f"base.model: {name} gives other logits for packed sequences than for the same "
                f"sequences alone (by {float(error):.1%}): it cannot be trained in packed rows"
            )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for changed in range(len(sequences)):
        others = list(sequences)
        others[changed] = (others[changed] + 1) % vocabulary
        again = packed_logits(others).split(PROBE_LENGTHS)
        for i, (before, after) in enumerate(zip(packed, again, strict=True)):
            if i != changed and not torch.equal(before, after):
                raise ModelError(
                    f"base.model: in {name} a packed sequence changes the logits of its neighbour: "
                    "it cannot be trained in packed rows"
                )
            if i == changed and torch.equal(before, after):
                raise ModelError(f"base.model: {name} ignores its input in packed rows")


def _random_ids(model: nn.Module, lengths: tuple[int, ...]) -> torch.Tensor:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, vocabulary, (1, sum(lengths)), generator=generator)
    return ids.to(model.device)
