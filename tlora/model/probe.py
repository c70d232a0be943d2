"""Looking at a model before trusting it: which linears share an input, and whether packing leaks.

Nothing here goes by the model's name. A model is accepted if changing one packed sequence leaves
the logits of the others unchanged to the bit, and if packed logits equal those of the model's own
attention, with sliding windows made so short that they matter in the probe.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from tlora.core.errors import ModelError
from tlora.model.targets import Target

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
PROBE_LENGTHS = (7, 12, 5)
PROBE_WINDOW = 4
# Largest difference of packed and unpacked logits over the largest logit. Measured on random models
# of ten architectures: at most 2e-6 in float32 and 2e-2 in bfloat16; a leak or a wrong mask gives
# more than 0.1.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6, torch.bfloat16: 6e-2, torch.float16: 2e-2}


def check_layer_types(config: PretrainedConfig) -> None:
    """Refuse a configuration with layers that packing cannot honour; needs no weights."""
    unknown = set(getattr(config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if unknown:
        raise ModelError(
            f"base.model: {config.model_type} has layers of type {', '.join(sorted(unknown))}, "
            "which cannot be trained in packed rows"
        )


def find_groups(model: PreTrainedModel, targets: dict[str, Target]) -> list[list[str]]:
    """Paths of linears that are called with one and the same tensor, in the order of the calls;
    only of equal kind (plain or transposed). A linear that is never called, or more than once, or
    that sees only the rows whose logits are kept (part of an output head), is left out."""
    calls: list[tuple[str, torch.Tensor]] = []

    def recorder(path: str):
        def record(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            if arguments:
                calls.append((path, arguments[0]))

        return record

    hooks = [
        model.get_submodule(path).register_forward_pre_hook(recorder(path)) for path in targets
    ]
    ids = _random_ids(model, (4,))
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False, logits_to_keep=ids.new_zeros(1))
    finally:
        for hook in hooks:
            hook.remove()
    times: dict[str, int] = {}
    for path, _ in calls:
        times[path] = times.get(path, 0) + 1
    groups: list[list[str]] = []
    inputs: list[torch.Tensor] = []
    for path, x in calls:
        if times[path] != 1 or x.shape[:-1].numel() != ids.numel():
            continue
        together = groups and inputs[-1] is x
        if together and targets[groups[-1][0]].transposed == targets[path].transposed:
            groups[-1].append(path)
        else:
            groups.append([path])
            inputs.append(x)
    return groups


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[None]:
    """While entered, sliding windows are shorter than the probe's sequences."""
    owners = {id(owner): owner for owner in (model.config.get_text_config(), *model.modules())}
    windows = [
        (owner, window)
        for owner in owners.values()
        if isinstance(window := vars(owner).get("sliding_window"), int) and window > PROBE_WINDOW
    ]
    try:
        for owner, _ in windows:
            vars(owner)["sliding_window"] = PROBE_WINDOW
        yield
    finally:
        for owner, window in windows:
            vars(owner)["sliding_window"] = window


def own_logits(model: PreTrainedModel) -> list[torch.Tensor]:
    """The logits of each probe sequence alone, by the model's own attention code; not of its last
    token, which predicts nothing."""
    with torch.no_grad(), short_windows(model):
        return [
            model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
            for ids in probe_sequences(model)
        ]


def probe_sequences(model: PreTrainedModel) -> list[torch.Tensor]:
    return list(_random_ids(model, PROBE_LENGTHS)[0].split(PROBE_LENGTHS))


def check_packing(
    model: PreTrainedModel,
    logits_of: Callable[[list[torch.Tensor]], torch.Tensor],
    own: list[torch.Tensor],
) -> None:
    """Refuse a model whose sequences see each other, or that computes something else when packed.
    `logits_of` packs sequences and gives a row of logits for every token but the last of each."""
    name = type(model).__name__
    sequences = probe_sequences(model)
    predicting = [length - 1 for length in PROBE_LENGTHS]

    def packed_logits(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        logits = logits_of(sequences)
        if len(logits) != sum(predicting):
            raise ModelError(f"base.model: {name} cannot give the logits of chosen rows only")
        return logits.split(predicting)

    with short_windows(model):
        packed = packed_logits(sequences)
        _check_equal(name, packed, own, TOLERANCE[model.dtype])
        vocabulary = _vocabulary(model)
        for changed in range(len(sequences)):
            others = list(sequences)
            others[changed] = (others[changed] + 1) % vocabulary
            _check_isolated(name, packed, packed_logits(others), changed)


def _check_equal(name: str, packed, own, tolerance: float) -> None:
    for logits, expected in zip(packed, own, strict=True):
        error = (logits - expected).abs().max() / expected.abs().max()
        if not error <= tolerance:
            raise ModelError(
                f"base.model: {name} gives other logits for packed sequences than for the same "
                f"sequences alone (by {float(error):.1%}): it cannot be trained in packed rows"
            )


def _check_isolated(name: str, before, after, changed: int) -> None:
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        if i != changed and not torch.equal(old, new):
            difference = float((old - new).abs().max())
            raise ModelError(
                f"base.model: in {name} a packed sequence changes the logits of its neighbour (by "
                f"{difference:.1g}): it cannot be trained in packed rows"
            )
        if i == changed and torch.equal(old, new):
            raise ModelError(f"base.model: {name} ignores its input in packed rows")


def _random_ids(model: PreTrainedModel, lengths: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, _vocabulary(model), (1, sum(lengths)), generator=generator)
    return ids.to(model.device)


def _vocabulary(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return len(weight)
