"""Looking at a model before trusting it: which linears share an input, and whether packing leaks.

Nothing here goes by the model's name. A model is accepted if changing one packed sequence leaves
the logits of the others unchanged to the bit, and if packed logits equal those of the model's own
attention, with sliding windows and the limits of rotary embeddings made so short that they matter
in the probe.

A model with experts is held to rounding, in float32, instead of bits: a token goes to its experts
by itself, but the sums of an expert's product may be taken in another order when another number of
tokens reaches it. In bfloat16 such rounding can send a token to another expert, so that nothing
useful can be compared there. Where products round what they are given to FP8, the last bit of
bfloat16 becomes one of FP8, which is no less: packed logits are held to the model's own in float32
alone.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from tlora.core.errors import ModelError
from tlora.model.linear import LoraLinear
from tlora.model.precision import in_float32
from tlora.model.rope import short_limits
from tlora.model.targets import Target

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
PROBE_LENGTHS = (7, 12, 5)
PROBE_WINDOW = 4
PROBE_ROPE_LIMIT = 8
"""Between the probe's lengths."""

# Largest difference of packed and unpacked logits over the largest logit. Measured on random models
# of ten architectures: at most 2e-6 in float32 and 2e-2 in bfloat16; a leak or a wrong mask gives
# more than 0.1.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6, torch.bfloat16: 6e-2, torch.float16: 2e-2}

# What a neighbour may change in float32 through the order of an expert's sums, over the largest
# logit. Measured on random models of eight kinds: at most 2e-7 with two layers and 1e-6 with six;
# deep models have more of them.
EXPERT_NOISE = 1e-4


def check_layer_types(config: PretrainedConfig) -> None:
    """Refuse a configuration with layers that packing cannot honour; needs no weights."""
    text = config.get_text_config(decoder=True)
    unknown = set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if unknown:
        raise ModelError(
            f"base.model: {config.model_type} has layers of type {', '.join(sorted(unknown))}, "
            "which cannot be trained in packed rows"
        )


class CalledLinears(NamedTuple):
    """The linears that a forward calls, by path."""

    groups: list[list[str]]
    """Called with one and the same tensor, in the order of the calls; only of equal kind (plain or
    transposed)."""

    left_out: dict[str, str]
    """Those that can carry no adapter here, though they would in PEFT, and why."""


def find_groups(model: PreTrainedModel, targets: dict[str, Target]) -> CalledLinears:
    """A linear that is called more than once, or that sees only the rows whose logits are kept
    (part of an output head), is left out; one that is never called does nothing anywhere."""
    calls: list[tuple[str, torch.Tensor]] = []

    def recorder(path: str):
        def record(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            if arguments:
                calls.append((path, arguments[0]))

        return record

    hooks = [
        model.get_submodule(path).register_forward_pre_hook(recorder(path)) for path in targets
    ]
    # So many that they do not all reach one expert: its linears see some of the tokens only.
    ids = _random_ids(model, PROBE_LENGTHS)
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
    left_out: dict[str, str] = {}
    for path, x in calls:
        if times[path] != 1:
            left_out[path] = f"runs {times[path]} times in one pass"
            continue
        if x.shape[:-1].numel() != ids.numel():
            left_out[path] = "does not see every token"
            continue
        together = groups and inputs[-1] is x
        if together and targets[groups[-1][0]].transposed == targets[path].transposed:
            groups[-1].append(path)
        else:
            groups.append([path])
            inputs.append(x)
    return CalledLinears(groups, left_out)


def has_experts(model: PreTrainedModel) -> bool:
    """Whether tokens are sent to experts, whose matrices are stacked in one parameter."""
    return any(
        parameter.dim() == 3
        for module in model.modules()
        if not isinstance(module, nn.Conv1d)
        for parameter in module.parameters(recurse=False)
    )


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[None]:
    """While entered, sliding windows are shorter than the probe's sequences."""
    text = model.config.get_text_config(decoder=True)
    owners = {id(owner): owner for owner in (text, *model.modules())}
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


def own_logits(model: PreTrainedModel) -> dict[torch.dtype, list[torch.Tensor]]:
    """The logits of each probe sequence alone, by the model's own code, in each format that the
    probe is computed in; not of its last token, which predicts nothing."""
    found = {}
    for dtype in _formats(model):
        with torch.no_grad(), _probing(model, dtype):
            found[dtype] = [
                model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
                for ids in probe_sequences(model)
            ]
    return found


def probe_sequences(model: PreTrainedModel) -> list[torch.Tensor]:
    return list(_random_ids(model, PROBE_LENGTHS)[0].split(PROBE_LENGTHS))


def check_packing(
    model: PreTrainedModel,
    logits_of: Callable[[list[torch.Tensor]], torch.Tensor],
    own: dict[torch.dtype, list[torch.Tensor]],
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

    vocabulary = _vocabulary(model)
    noise = EXPERT_NOISE if has_experts(model) else 0.0
    for dtype, expected in own.items():
        with _probing(model, dtype):
            packed = packed_logits(sequences)
            if dtype != model.dtype or not _rounds_to_fp8(model):
                _check_equal(name, packed, expected, TOLERANCE[dtype])
            for changed in range(len(sequences)):
                others = list(sequences)
                others[changed] = (others[changed] + 1) % vocabulary
                _check_isolated(name, packed, packed_logits(others), changed, noise)


def _rounds_to_fp8(model: PreTrainedModel) -> bool:
    return any(module.group.in_fp8 for module in model.modules() if isinstance(module, LoraLinear))


def _formats(model: PreTrainedModel) -> list[torch.dtype]:
    """What the model is trained in, and float32 where that is sharper."""
    wide = torch.promote_types(model.dtype, torch.float32)
    return [wide] if has_experts(model) else list(dict.fromkeys([model.dtype, wide]))


@contextmanager
def _probing(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Windows and limits so short that they matter, and numbers of this format."""
    widened: AbstractContextManager = nullcontext() if dtype == model.dtype else in_float32(model)
    with ExitStack() as stack:
        stack.enter_context(short_windows(model))
        stack.enter_context(short_limits(model, PROBE_ROPE_LIMIT))
        stack.enter_context(widened)
        yield


def _check_equal(name: str, packed, own, tolerance: float) -> None:
    for logits, expected in zip(packed, own, strict=True):
        error = (logits - expected).abs().max() / expected.abs().max()
        if not error <= tolerance:
            raise ModelError(
                f"base.model: {name} gives other logits for packed sequences than for the same "
                f"sequences alone (by {float(error):.1%}): it cannot be trained in packed rows"
            )


def _check_isolated(name: str, before, after, changed: int, noise: float) -> None:
    """Logits of the unchanged sequences must be the same: to the bit, or to this share of the
    largest."""
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        difference = float((old - new).abs().max())
        if i != changed and not difference <= noise * float(old.abs().max()):
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
