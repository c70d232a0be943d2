"""The frozen backbone in parts: each rank holds one, and layers are gathered as they run.

FSDP2 is put on a loaded causal LM before the super-model takes it over. Adapters come later and
stay plain tensors of their rank, so that nothing of them is gathered or reduced; frozen weights
have no gradient, so that nothing of the backbone is reduced either.

FSDP2 swaps a linear's parameter for the gathered one while its layer runs, and keeps that object
from one gathering to the next. Our linears read weights from lists, which are renewed when a layer
begins; what autograd saved is filled again before a layer's backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tlora.core.errors import ModelError, SpecError
from tlora.model.head import PlainHead
from tlora.model.linear import LoraLinear
from tlora.model.super_model import SuperModel
from tlora.parallel.counting import Counts, Purpose, gather_into
from tlora.parallel.lock_step import Pass


class GroupLost(RuntimeError):
    """This rank cannot keep step with the others any more; the group must end."""


def follows_another(error: BaseException) -> bool:
    """Whether it broke because another rank did: collectives have no type of their own for it."""
    if isinstance(error, GroupLost | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        word in str(error) for word in ("gloo", "Connection", "NCCL")
    )


class Sharded:
    """A model whose weights are laid over a mesh; knows which gathering comes when, so that a rank
    whose pass broke off can do the rest of them: the others would wait for it in vain."""

    def __init__(
        self, model: PreTrainedModel, mesh: DeviceMesh, *, counts: Counts, kept_layers: int = 0
    ) -> None:
        """Must be called before the weights are loaded or after, on all ranks. The first
        `kept_layers` stay gathered once they were; the others are freed as soon as they have
        run."""
        self.model = model
        self.counts = counts
        self._pass: list[FSDPModule] = []
        self._issued = 0
        self._kept_are_here = False
        backbone = model.base_model
        layers = layers_to_shard(model)
        check_kept_layers(kept_layers, len(layers))
        model.requires_grad_(False)
        self._tied = _tie_head(model)
        embeddings = model.get_input_embeddings()
        head = embeddings if self._tied else model.get_output_embeddings()
        parts = [embeddings, *layers, *([] if self._tied else [head])]
        for part in (*parts, backbone):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        units = [cast(FSDPModule, part) for part in (backbone, *parts)]
        self.root, self.embeddings, self.layers = units[0], units[1], units[2 : 2 + len(layers)]
        self.head = self.embeddings if self._tied else units[-1]
        self._units = units
        self.kept_layers = 0
        gather = cast(Any, _Gather(self))
        for unit in units:
            unit.set_custom_all_gather(gather)
        self.keep(kept_layers)
        backward = [self.root, *reversed(self.layers)]
        for layer, following in pairwise(self.layers):
            layer.set_modules_to_forward_prefetch([following])
        for unit, following in pairwise(backward):
            unit.set_modules_to_backward_prefetch([following])
        # Itself, which is there: left to itself FSDP2 would gather the embeddings, for nothing.
        backward[-1].set_modules_to_backward_prefetch([backward[-1]])
        # After FSDP2's own hook, so that the embeddings are not gathered again in backward. All
        # ranks must run all layers backward, whatever linears their jobs adapt.
        embeddings.register_forward_hook(_begin_graph)
        for layer in layers:
            linears = _linears_of(model, layer)
            layer.register_forward_pre_hook(
                lambda module, _, linears=linears: _renew(module, linears)
            )

    def keep(self, kept_layers: int) -> None:
        """From the next pass on, on all ranks; none may be gathered that is not kept any more."""
        self.kept_layers = kept_layers
        for place, layer in enumerate(self.layers):
            layer.set_reshard_after_forward(place >= kept_layers)
            layer.set_reshard_after_backward(place >= kept_layers)

    @contextmanager
    def building(self) -> Iterator[None]:
        """While the super-model takes the model over and probes it: the head stays gathered, for
        its weight is looked at outside of its forward."""
        self.head.unshard()
        self.head.set_reshard_after_forward(False)
        yield
        self.head.set_reshard_after_forward(True)
        for unit in self._units:
            unit.reshard()

    def serve(self, model: SuperModel) -> None:
        """Put the head that gathers its weight in."""
        if model.head is None:
            raise ModelError(
                f"base.model: {type(self.model).__name__} makes its logits in a way of its own, "
                "which is not built for a backbone in shards; use a plan with fsdp: 1"
            )
        model.head = ShardedHead(model.head.backbone, model.head.weight, model.head.bias, self)

    def begin(self, kind: Pass) -> None:
        """A pass, on all ranks."""
        self._issued = 0
        passing = self.layers[self.kept_layers :]
        layers = passing if self._kept_are_here else self.layers
        self._pass = [self.root, self.embeddings, *layers, self.head]
        if kind is Pass.TRAIN:
            self._pass += [self.root, *reversed(passing)]

    def end(self) -> None:
        """The pass is through on this rank."""
        if self._issued != len(self._pass):
            raise GroupLost(f"{self._issued} gatherings in a pass of {len(self._pass)}")
        self._kept_are_here = True

    def catch_up(self, cause: Exception) -> None:
        """The pass broke off here: drop what is under way and take part in what others still gather
        for it. Raises GroupLost if that fails too."""
        try:
            missing = self._pass[self._issued :]
            self.reset()
            for unit in missing:
                unit.unshard()
                unit.reshard()
        except Exception as error:
            raise GroupLost(
                f"a pass broke off ({type(cause).__name__}: {cause}) and could not be made up for: "
                f"{error}"
            ) from cause

    def reset(self) -> None:
        """Nothing is gathered from now on; on all ranks, before the next pass, if one broke off."""
        self._kept_are_here = False
        if not hasattr(FSDPModule, "reset_iter_state"):
            raise GroupLost("this version of torch cannot take a pass back that broke off")
        for root in (self.root, self.head):
            if root is not self.embeddings:
                root.reset_iter_state()

    @contextmanager
    def gathered_head(self) -> Iterator[None]:
        self.head.unshard()
        yield
        self.head.reshard()

    def issued(self, num_bytes: int) -> None:
        self._issued += 1
        self.counts.add(Purpose.BACKBONE, num_bytes)


class ShardedHead(PlainHead):
    """Gathers its weight for the time of the losses; their gradient is made along with them."""

    __slots__ = ("sharded",)

    def __init__(
        self,
        backbone: nn.Module,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sharded: Sharded,
    ) -> None:
        super().__init__(backbone, weight, bias)
        object.__setattr__(self, "sharded", sharded)

    def losses(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self.sharded.gathered_head():
            return PlainHead.losses(self, rows, targets)

    def losses_in_tiles(
        self, rows: torch.Tensor, targets: torch.Tensor, tile_rows: int = 0
    ) -> torch.Tensor:
        with self.sharded.gathered_head():
            return PlainHead.losses_in_tiles(self, rows, targets, tile_rows)


class TiedHead(nn.Linear):
    """An output head whose weight is the embeddings', wherever that is now."""

    def __init__(self, embeddings: nn.Module) -> None:
        nn.Module.__init__(self)
        # Not as a submodule: its parameters are the embeddings' business.
        self._owner = (embeddings,)
        self.bias = None

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return cast(torch.Tensor, self._owner[0].weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight)


class _Gather:
    """FSDP2's all-gather, counted."""

    def __init__(self, sharded: Sharded) -> None:
        self._sharded = sharded

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        work = gather_into(output_tensor, input_tensor, group, async_op)
        self._sharded.issued(output_tensor.numel() * output_tensor.element_size())
        return work


def layers_to_shard(model: PreTrainedModel) -> list[nn.Module]:
    layers: list[nn.Module] = [
        each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ModelError(
            f"base.model: {type(model).__name__} has no layers that are known as such, and cannot "
            "be laid over ranks; use a plan with fsdp: 1"
        )
    return layers


def check_kept_layers(kept_layers: int, num_layers: int) -> None:
    if kept_layers > num_layers:
        raise SpecError(
            f"is {kept_layers}, and the base has {num_layers} layers", field="plan.kept_layers"
        )


def _tie_head(model: PreTrainedModel) -> bool:
    """Whether the head shares the embeddings' weight; if so, let it look that up."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.weight is not embeddings.weight:
        return False
    model.set_output_embeddings(TiedHead(embeddings))
    return True


def _begin_graph(module: nn.Module, arguments: object, output: torch.Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _linears_of(model: PreTrainedModel, layer: nn.Module) -> dict[str, nn.Module]:
    """As FSDP2 knows them, by path in the model: ours take their places in the layer, not there."""
    (prefix,) = [path for path, module in model.named_modules() if module is layer]
    return {
        f"{prefix}.{path}": module
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }


def _renew(layer: nn.Module, linears: dict[str, nn.Module]) -> None:
    """The layer's weights have been gathered: tell our linears where they are."""
    for module in layer.modules():
        if isinstance(module, LoraLinear) and module.index == 0:
            own = [linears[target.path] for target in module.group.pool.targets]
            module.group.weights = [cast(torch.Tensor, each.weight) for each in own]
            module.group.biases = [cast(torch.Tensor | None, each.bias) for each in own]
