"""One frozen backbone that many adapters share.

Adapters come and go between nano-batches; a nano-batch runs forward and backward inside `routed`.
What a job's step, loss or data is, is not known here.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel

from tlora.core.errors import ModelError
from tlora.core.job import JobSpec
from tlora.core.sequence import TokenSequence
from tlora.kernels.multi_lora.routes import operand_dtype
from tlora.kernels.multi_lora.settling import settle_kernels
from tlora.kernels.streams import threshold
from tlora.model.adapters import AdapterWeights, LoraPair, new_pair
from tlora.model.compiling import (
    compile_layers,
    in_shards,
    is_compile_error,
    run_uncompiled,
    varies,
)
from tlora.model.cuda_link import courier_for
from tlora.model.graphs import Graphs
from tlora.model.head import PlainHead, find_plain_head
from tlora.model.job_rows import Cut, JobRows, adapter_of, cut
from tlora.model.linear import Linear, LoraLinear, SharedInput
from tlora.model.memory import is_out_of_memory
from tlora.model.packing import PackedBatch, Share, pack
from tlora.model.pool import GroupPool
from tlora.model.probe import (
    check_layer_types,
    check_packing,
    find_groups,
    has_experts,
    own_logits,
    probe_sequences,
)
from tlora.model.rank_rows import RowViews, clear, copy_all
from tlora.model.rope import separate_sequences
from tlora.model.routing import Routing, Scaling
from tlora.model.snapshot import Make, Snapshot
from tlora.model.targets import choose_targets, find_targets

_numbers = itertools.count()

T = TypeVar("T")
Held = dict[str, dict[str, torch.Tensor]]
"""What a job's rows hold: by `value`, `exp_avg` or `exp_avg_sq`, then by `PATH.lora_A` and
`PATH.lora_B`, as they lie in the pool."""


class SuperModel:
    """Takes a loaded causal LM over: freezes it, puts its own linears and attention in, and probes
    it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        reserve_rows: int = 64,
        per_sequence: bool = False,
        gradient_checkpointing: bool = False,
        compiled: bool = False,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.device = model.device
        self.routing = Routing(self.device, per_sequence=per_sequence)
        self.targets = find_targets(model)
        self.scalings: dict[str, Scaling] = {}
        self._courier = courier_for(self.device)
        self._vocabulary = cast(torch.Tensor, model.get_input_embeddings().weight).shape[0]
        self.places = 0
        """Another number whenever rows were claimed or freed."""

        self._rows: dict[str, JobRows] = {}
        self._groups: list[SharedInput] = []
        self._head: PlainHead | None = None
        self._graphs: Graphs | None = None
        self._growths = 0
        self._known_growths = 0
        self._pools_moved = True
        self.head_tile_rows = 0
        """Rows of a product of the head where bits count, or 0 for as many as usual."""

        check_layer_types(model.config)
        if per_sequence and has_experts(model):
            raise ModelError(
                f"base.model: {type(model).__name__} has experts, whose sums depend in their last "
                "bits on how many tokens reach them: it cannot be trained with isolation: exact; "
                "leave that out"
            )
        try:
            self._take_over(reserve_rows)
        except ModelError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # Whatever a model does not know how to do on the probe, it cannot do in training.
            raise ModelError(
                f"base.model: {type(model).__name__} does not run on packed rows: {error}"
            ) from error
        # Before anything is compiled or captured: the kernels keep their settings from here on.
        settle_kernels(
            self.device,
            self._groups[0].weights[0].dtype,
            {
                (group[0].in_features, tuple(target.out_features for target in group))
                for group in (pool.targets for pool in self.pools)
            },
        )
        if gradient_checkpointing:
            # A compiled layer must save the same tensors when it is recomputed: S is made again.
            self._checkpoint_layers(keep_s=not compiled)
        if compiled:
            self._compile_layers()
        captured = compiled and self.device.type == "cuda" and not gradient_checkpointing
        if captured and not in_shards(model):
            self._capture_graphs()

    @property
    def vocabulary(self) -> int:
        """Tokens that have an embedding."""
        return self._vocabulary

    @property
    def jobs(self) -> list[str]:
        return list(self.scalings)

    @property
    def groups(self) -> list[SharedInput]:
        """The linears that carry adapters, by shared input."""
        return self._groups

    @property
    def head(self) -> PlainHead | None:
        """The output head, where losses need not all logits."""
        return self._head

    @head.setter
    def head(self, head: PlainHead) -> None:
        self._head = head

    @property
    def pools(self) -> list[GroupPool]:
        return [group.pool for group in self._groups]

    def new_adapter(self, job: JobSpec) -> AdapterWeights:
        """The start of a job's adapter."""
        return {
            target.path: new_pair(
                target.path,
                seed=job.train.seed,
                rank=job.lora.r,
                in_features=target.in_features,
                out_features=target.out_features,
            )
            for target in choose_targets(job, self.targets)
        }

    @torch.no_grad()
    def attach(
        self, job: str, weights: AdapterWeights, *, scale: float, dropout: float = 0.0
    ) -> None:
        """Claim rank rows and fill them. Raises, with nothing claimed, if the job is attached or
        its matrices do not fit the base model."""
        if job in self.scalings:
            raise ValueError(f"job '{job}' is attached already")
        for path, pair in weights.items():
            self._check_fits(job, path, pair)
        # First: places must not be trusted after an attach that breaks off either.
        self._forget_places()
        self._rows.pop(job, None)
        if not all(pool.has_room(weights) for pool in self.pools):
            # One matrix after the other grows, and what it was is free again unless somebody holds
            # on to a part of it.
            self._rows.clear()
            self._forget_graphs()
        try:
            try:
                for pool in self.pools:
                    pool.claim(job, weights)
            finally:
                self._forget_rows_if_moved()
            rows = self.rows(job)
            self._fill(rows.places(weights))
            copy_all(rows.copied)
        except BaseException:
            self._free(job)
            raise
        self.scalings[job] = Scaling(scale, threshold(dropout))

    @torch.no_grad()
    def detach(self, job: str) -> None:
        """Free the job's rows. Who wants what is in them asks before."""
        self._forget_places()
        self._free(job)
        del self.scalings[job]

    def weights(self, job: str) -> AdapterWeights:
        """A copy of the job's matrices in host memory."""
        return self.snapshot(job, of_weights).result()

    def snapshot(
        self, job: str, make: Callable[[Held], T], *, moments: bool = False
    ) -> Snapshot[T]:
        """What the job's rows hold now, in host memory as soon as it is there; on a device training
        goes on meanwhile. `make` is called by whoever asks for it first."""
        rows, kinds = self.rows(job), ("value", "exp_avg", "exp_avg_sq") if moments else ("value",)
        # Not the rows themselves: a snapshot may outlive a pool that has moved.
        cuts = rows.cuts

        def made(copies: list[torch.Tensor]) -> T:
            held: Held = {}
            for number, kind in enumerate(kinds):
                of_kind = copies[number * len(cuts) : (number + 1) * len(cuts)]
                held[kind] = cut(
                    [_in_rows(*each) for each in zip(of_kind, cuts, strict=True)], cuts
                )
            return make(held)

        return self._courier.take([each for kind in kinds for each in rows.flat(kind)], made)

    def figure(self, value: torch.Tensor) -> Snapshot[float]:
        """A number that the device is about to know."""
        return self._courier.take([value.detach().float()], lambda copies: float(copies[0]))

    def bring(self, tensors: list[torch.Tensor], make: Make[T]) -> Snapshot[T]:
        """Host tensors where the model is, in the background: attaching a job with them is short
        then."""
        return self._courier.bring(tensors, make)

    @torch.no_grad()
    def fill_moments(self, job: str, moments: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """The optimiser's moments of a job that goes on, by kind and matrix."""
        rows = self.rows(job)
        self._fill(
            [
                (matrix, tensors[name])
                for kind, tensors in moments.items()
                for name, matrix in rows.matrices(kind).items()
            ]
        )

    def views(self, job: str) -> dict[str, RowViews]:
        """The job's rows with their gradients and moments, by `PATH.lora_A` and `PATH.lora_B`."""
        return self.rows(job).views

    def rows(self, job: str) -> JobRows:
        """All that the job owns; good until it leaves or another one comes."""
        if job not in self._rows:
            self._rows[job] = JobRows([part for pool in self.pools for part in pool.parts(job)])
        return self._rows[job]

    @contextmanager
    def routed(self, batch: PackedBatch, *, train: bool) -> Iterator[None]:
        """The time in which `logits` and their backward may run for this nano-batch."""
        for group in self._groups:
            group.clear()
        if self._pools_moved:
            self._find_pools()
        if self._graphs is not None:
            self._graphs.begin()
        with self.routing.entered(batch, self.pools, self.scalings, train=train):
            yield

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """float32 [N, vocabulary] for the N rows that predict a trained token."""
        # A product over N rows would depend on how many targets the neighbours have: where bits
        # count, the head runs over all rows.
        every_row = self.routing.per_sequence
        logits = self.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            logits_to_keep=0 if every_row else batch.predicting,
            use_cache=False,
        ).logits[0]
        return (logits[batch.predicting] if every_row else logits).float()

    def token_losses(self, batch: PackedBatch) -> torch.Tensor:
        """float32 [N]: the cross-entropy of every trained token."""
        head = self._head
        if head is None:
            return F.cross_entropy(self.logits(batch), batch.targets, reduction="none")
        hidden = self._hidden(head, batch)
        if not self.routing.per_sequence:
            return head.losses(hidden[batch.predicting], batch.targets)
        targets = batch.targets.new_zeros(len(hidden))
        targets[batch.predicting] = batch.targets
        return head.losses_in_tiles(hidden, targets, self.head_tile_rows)[batch.predicting]

    @torch.no_grad()
    def refresh_operands(self) -> None:
        """Weights have changed: so do the copies that kernels read."""
        copied = [rows for pool in self.pools for rows in (pool.a, *pool.b) if rows.has_copy]
        if copied:
            torch._foreach_copy_(
                [rows.operand.detach() for rows in copied], [rows.value for rows in copied]
            )

    def launched(self) -> None:
        """Forward and backward of a nano-batch are under way: the host waits for nothing more."""
        if self._graphs is not None:
            self._graphs.launched()

    @property
    def captures(self) -> int:
        """CUDA graphs captured so far."""
        return self._graphs.captures if self._graphs else 0

    @property
    def settled(self) -> bool:
        """The last nano-batch took the time that its like will take."""
        return self._graphs is None or self._graphs.settled

    def release_graphs(self) -> bool:
        """Give the memory of captured graphs back; whether there was any."""
        return self._graphs is not None and self._graphs.release()

    def _forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.forget()

    def runs_uncompiled(self, error: BaseException) -> bool:
        """If this is the compiler's error, go on without it from now on."""
        if not self.routing.compiled or not is_compile_error(error):
            return False
        run_uncompiled(self.model)
        self.routing.compiled = False
        self.release_graphs()
        self._graphs = None
        return True

    def check_integrity(self) -> None:
        for pool in self.pools:
            pool.check_integrity()
            assert set(pool.slots) <= set(self.scalings)

    def _hidden(self, head: PlainHead, batch: PackedBatch) -> torch.Tensor:
        if self._graphs is None or not self.jobs:
            return head.hidden(batch.input_ids, batch.position_ids)
        shape = self.routing.shape
        if shape is None:
            return head.hidden(batch.input_ids, batch.position_ids)
        key = (torch.is_grad_enabled(), self._growths, *shape)
        hidden = self._graphs.hidden(batch, key)
        if self.routing.depends_on_lengths:
            self._graphs.give_up(key)
        return hidden

    def _check_fits(self, job: str, path: str, pair: LoraPair) -> None:
        target = self.targets.get(path)
        if target is None:
            raise ValueError(f"job '{job}': no linear named {path} in the base model")
        rank = pair.a.shape[0] if pair.a.dim() else 0
        shapes = (pair.a.shape, pair.b.shape)
        expected = ((rank, target.in_features), (target.out_features, rank))
        if rank < 1 or shapes != expected:
            found, right = ([list(shape) for shape in both] for both in (shapes, expected))
            raise ValueError(f"job '{job}': A and B of {path} are {found}, not {right}")

    def _fill(self, places: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """(rows, matrix); matrices in host memory first go to the device together."""
        here = [index for index, (_, matrix) in enumerate(places) if matrix.device != self.device]
        brought = self.bring([places[index][1] for index in here], list).result() if here else []
        for index, matrix in zip(here, brought, strict=True):
            places[index] = (places[index][0], matrix)
        copy_all(places)

    def _free(self, job: str) -> None:
        rows = self.rows(job)
        for pool in self.pools:
            pool.free(job)
        del self._rows[job]
        clear(rows.slices)

    def _forget_places(self) -> None:
        """Rows are claimed or freed: old tables are void. Everybody else's rows stay where they
        are."""
        self.places += 1
        self.routing.forget_routes()

    def _forget_rows_if_moved(self) -> None:
        """A pool that has grown lies elsewhere, with the rows of all."""
        growths = sum(rows.growths for pool in self.pools for rows in pool.matrices)
        if growths != self._known_growths:
            self._known_growths = growths
            self._rows.clear()
            self._pools_moved = True

    def _take_over(self, reserve_rows: int) -> None:
        """Put the pooled linears and the packed attention in; what comes out must stay the same."""
        own = own_logits(self.model)
        self._groups = self._replace_linears(reserve_rows)
        if not self._groups:
            raise ModelError(
                f"base.model: {type(self.model).__name__} has no linear that can carry an adapter"
            )
        self._replace_attention()
        separate_sequences(self.model, self.routing)
        check_packing(self.model, self._probe_logits, own)
        self._head = self._probe_head()
        # The probe also runs in formats that need the lengths.
        self.routing.depends_on_lengths = False

    def _replace_linears(self, reserve_rows: int) -> list[SharedInput]:
        numbers = {path: number for number, path in enumerate(self.targets)}
        grouped = find_groups(self.model, self.targets)
        called = {path for paths in grouped for path in paths}
        self.targets = {path: target for path, target in self.targets.items() if path in called}
        groups = []
        for paths in grouped:
            linears = [cast(Linear, self.model.get_submodule(path)) for path in paths]
            pool = GroupPool(
                [self.targets[path] for path in paths],
                reserve_rows,
                self.device,
                operand_dtype(self.device, linears[0].weight.dtype, len(paths)),
            )
            group = SharedInput(linears, [numbers[path] for path in paths], pool, self.routing)
            groups.append(group)
            for index, (path, linear) in enumerate(zip(paths, linears, strict=True)):
                self.model.set_submodule(path, LoraLinear(linear, index, group))
        return groups

    def _replace_attention(self) -> None:
        # A name of its own per super-model: the function carries this model's routing.
        name = f"tlora_packed_{next(_numbers)}"
        # The register outlives this model, so it must not hold on to it.
        reference = weakref.ref(self.routing)

        def of_this_model(*args: Any, **options: Any) -> tuple[torch.Tensor, None]:
            routing = reference()
            assert routing is not None, "the super-model of this attention is gone"
            return routing.attention(*args, **options)

        AttentionInterface.register(name, of_this_model)
        try:
            self.model.set_attn_implementation(name)
        except (ValueError, NotImplementedError) as error:
            raise _own_attention(self.model) from error
        if self.model.config._attn_implementation != name:
            raise _own_attention(self.model)

    def _checkpoint_layers(self, *, keep_s: bool) -> None:
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        for group in self._groups:
            group.keeps = keep_s
        for module in self.model.modules():
            # Layers recompute only in training mode; their children stay in evaluation mode, so
            # that the backbone's own dropout stays off.
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True

    def _compile_layers(self) -> None:
        self.routing.compiled = compile_layers(self.model) > 0
        # The compiler has not been told of them yet.
        self._pools_moved = True

    def _capture_graphs(self) -> None:
        if self._head is not None and not has_experts(self.model):
            embeddings = self.model.get_input_embeddings()
            self._graphs = Graphs(self._head.hidden, embeddings, self.device)

    def _find_pools(self) -> None:
        """A pool that has grown is another tensor, and lies elsewhere than graphs think."""
        rows = [rows for pool in self.pools for rows in (pool.a, *pool.b)]
        if self.routing.compiled:
            for each in rows:
                varies(each.operand, 0)
                varies(each.grad, 0)
        growths = sum(each.growths for each in rows)
        if growths != self._growths:
            self._growths = growths
            if self._graphs is not None:
                self._graphs.forget()
        self._pools_moved = False

    def _probe_logits(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        batch = pack_all(sequences, self.device)
        with torch.no_grad(), self.routed(batch, train=False):
            return self.logits(batch)

    def _probe_head(self) -> PlainHead | None:
        batch = pack_all(probe_sequences(self.model), self.device)
        with torch.no_grad(), self.routed(batch, train=False):
            logits = self.logits(batch)
            for group in self._groups:
                group.clear()
            return find_plain_head(self.model, batch, logits)


def of_weights(held: Held) -> AdapterWeights:
    """Of a snapshot."""
    return adapter_of(held["value"])


def _in_rows(part: torch.Tensor, names: Cut) -> torch.Tensor:
    return part.view(sum(rank for _, rank in names), -1)


def pack_all(sequences: list[torch.Tensor], device: torch.device) -> PackedBatch:
    """Sequences of no job, every token of which predicts the next."""
    tokens = [ids.cpu().numpy() for ids in sequences]
    count = len(tokens)
    share = Share("", [TokenSequence(ids, ids) for ids in tokens], [0] * count, [1.0] * count)
    return pack([share], sum(map(len, tokens)), device)


def _own_attention(model: PreTrainedModel) -> ModelError:
    return ModelError(
        f"base.model: {type(model).__name__} computes attention with code of its own, which knows "
        "no sequence boundaries: it cannot be trained in packed rows"
    )
