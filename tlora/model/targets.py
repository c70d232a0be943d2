"""Which linears of a model an adapter may sit on, and which of them a job asks for."""

import re
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tlora.core.errors import SpecError
from tlora.core.job import JobSpec
from tlora.model.adapters import AdapterWeights
from tlora.model.quantised_linear import QuantisedLinear

OUTPUT_HEAD = "is the output head"


@dataclass(frozen=True, slots=True)
class Target:
    """A linear that can carry adapters."""

    path: str
    in_features: int
    out_features: int
    transposed: bool
    """GPT-2 keeps its weights as [in, out]."""

    @property
    def leaf(self) -> str:
        return self.path.rpartition(".")[2]


def find_targets(model: PreTrainedModel) -> dict[str, Target]:
    """Every linear of the model but its output head, by path, in the order of the modules. A router
    that is made as a linear but gives choices instead of one product is none."""
    head = model.get_output_embeddings()
    targets = {}
    for path, module in model.named_modules():
        if module is head or not isinstance(module, nn.Linear | Conv1D | QuantisedLinear):
            continue
        if isinstance(module, QuantisedLinear):
            targets[path] = Target(path, module.in_features, module.out_features, False)
            continue
        transposed = isinstance(module, Conv1D)
        weight: torch.Tensor = module.weight
        out_features, in_features = weight.shape[::-1] if transposed else weight.shape
        if transposed or _gives_a_product(module, in_features, out_features):
            targets[path] = Target(path, in_features, out_features, transposed)
    return targets


def head_left_out(model: PreTrainedModel) -> dict[str, str]:
    """Its path, and that it is the head."""
    head = model.get_output_embeddings()
    return {path: OUTPUT_HEAD for path, module in model.named_modules() if module is head}


def _gives_a_product(linear: nn.Module, in_features: int, out_features: int) -> bool:
    """A linear with a forward of its own is looked at without its weights."""
    if type(linear).forward is nn.Linear.forward:
        return True
    shapes = {
        name: torch.empty_like(parameter, device="meta")
        for name, parameter in linear.named_parameters()
    }
    x = torch.empty(2, in_features, dtype=shapes["weight"].dtype, device="meta")
    try:
        y = torch.func.functional_call(linear, shapes, (x,))
    except Exception:
        return False
    return isinstance(y, torch.Tensor) and y.shape == (2, out_features)


def choose_targets(job: JobSpec, targets: dict[str, Target]) -> list[Target]:
    """The linears that `lora.target_modules` names: PEFT's rules, but a name that reaches nothing
    is an error, and so is a rank that no layer could use."""
    wanted = job.lora.target_modules
    if wanted == "all-linear":
        chosen = list(targets.values())
    elif isinstance(wanted, str):
        chosen = _matching(job, wanted, targets)
    else:
        chosen = _named(job, wanted, targets)
    for target in chosen:
        limit = min(target.in_features, target.out_features)
        if job.lora.r > limit:
            raise SpecError(
                f"rank {job.lora.r} is larger than {target.path} "
                f"({target.in_features} -> {target.out_features}); use at most {limit}",
                job=job.name,
                field="lora.r",
            )
    return chosen


def check_reach(job: JobSpec, targets: dict[str, Target], left_out: dict[str, str]) -> None:
    """Refuse a job whose `lora.target_modules` reaches linears that are left out for these reasons:
    with PEFT it would train them too. There, too, all-linear is without the head."""
    wanted = job.lora.target_modules
    for path, reason in left_out.items():
        if isinstance(wanted, str):
            everything = wanted == "all-linear" and reason != OUTPUT_HEAD
            reached = everything or re.fullmatch(wanted, path) is not None
            reached = reached or path.endswith(f".{wanted}")
        else:
            reached = any(path == name or path.endswith(f".{name}") for name in wanted)
        if reached:
            ends = {left.rpartition(".")[2] for left in left_out}
            free = dict.fromkeys(t.leaf for t in targets.values() if t.leaf not in ends)
            raise SpecError(
                f"{path} {reason} and cannot carry an adapter; name others, such as "
                f"{', '.join(free) or next(iter(targets))}",
                job=job.name,
                field="lora.target_modules",
            )


def check_fit(job: str, weights: AdapterWeights, targets: dict[str, Target]) -> None:
    """Every matrix must be of a linear that is there, and of its size."""
    for path, pair in weights.items():
        target = targets.get(path)
        if target is None:
            raise ValueError(f"job '{job}': no linear named {path} in the base model")
        rank = pair.a.shape[0] if pair.a.dim() else 0
        shapes = (pair.a.shape, pair.b.shape)
        expected = ((rank, target.in_features), (target.out_features, rank))
        if rank < 1 or shapes != expected:
            found, right = ([list(shape) for shape in both] for both in (shapes, expected))
            raise ValueError(f"job '{job}': A and B of {path} are {found}, not {right}")


def _matching(job: JobSpec, pattern: str, targets: dict[str, Target]) -> list[Target]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise SpecError(
            f"'{pattern}' is not a regular expression: {error}",
            job=job.name,
            field="lora.target_modules",
        ) from None
    chosen = [target for path, target in targets.items() if expression.fullmatch(path)]
    # A single leaf name is a pattern too; people write it without the brackets.
    chosen = chosen or [t for path, t in targets.items() if path.endswith(f".{pattern}")]
    if not chosen:
        raise _unreachable(job, pattern, targets)
    return chosen


def _named(job: JobSpec, names: tuple[str, ...], targets: dict[str, Target]) -> list[Target]:
    def reached_by(name: str) -> set[str]:
        return {path for path in targets if path == name or path.endswith(f".{name}")}

    reached: set[str] = set()
    for name in names:
        paths = reached_by(name)
        if not paths:
            raise _unreachable(job, name, targets)
        reached |= paths
    return [target for path, target in targets.items() if path in reached]


def _unreachable(job: JobSpec, name: str, targets: dict[str, Target]) -> SpecError:
    leaves = list(dict.fromkeys(target.leaf for target in targets.values()))
    return SpecError(
        f"'{name}' reaches no linear of this model; it has {', '.join(leaves)}",
        job=job.name,
        field="lora.target_modules",
    )
