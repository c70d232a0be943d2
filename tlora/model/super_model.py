"""One frozen backbone that many adapters share.

Adapters come and go between nano-batches; a nano-batch runs forward and backward inside `routed`.
What a job's step, loss or data is, is not known here.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from transformers.modeling_utils import PreTrainedModel

from tlora.core.errors import ModelError
from tlora.core.job import JobSpec
from tlora.kernels.multi_lora.settling import settle_kernels
from tlora.kernels.streams import threshold
from tlora.model.adapter_rows import AdapterRows
from tlora.model.adapters import AdapterWeights, new_pair
from tlora.model.attention import replace_attention
from tlora.model.berth import Berth
from tlora.model.compiling import (
    compile_layers,
    in_shards,
    is_compile_error,
    run_uncompiled,
    varies,
)
from tlora.model.graphs import Graphs
from tlora.model.head import PlainHead, find_plain_head
from tlora.model.job_rows import Held, JobRows, Moments, of_weights
from tlora.model.linear import SharedInput, replace_linears
from tlora.model.memory import is_out_of_memory
from tlora.model.packing import PackedBatch, pack_all
from tlora.model.pool import GroupPool
from tlora.model.probe import (
    check_layer_types,
    check_packing,
    find_groups,
    has_experts,
    own_logits,
    probe_sequences,
)
from tlora.model.quantising import restore_linears
from tlora.model.rank_rows import RowViews
from tlora.model.recomputing import RecomputedLayer, recompute_layers
from tlora.model.rope import separate_sequences
from tlora.model.routing import NOT_COMPILED, Routing, Scaling
from tlora.model.snapshot import Make, Snapshot
from tlora.model.targets import check_fit, check_reach, choose_targets, find_targets, head_left_out

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        self._vocabulary = cast(torch.Tensor, model.get_input_embeddings().weight).shape[0]
        self.places = 0
        """Another number whenever rows were claimed or freed."""

        self._head: PlainHead | None = None
        self._graphs: Graphs | None = None
        self._known_growths = 0
        """Of the pools, as compiled layers and graphs know them."""

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
            self._groups[0].dtype,
            {
                (group[0].in_features, tuple(target.out_features for target in group))
                for group in (pool.targets for pool in self.pools)
            },
        )
        if compiled and self.routing.counts_in_attention:
            logger.warning("layers are not compiled: %s", NOT_COMPILED)
            compiled = False
        self._recomputes = gradient_checkpointing
        if compiled:
            self._compile_layers()
        if gradient_checkpointing and not self.routing.compiled:
            recompute_layers(model, self.routing)
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
        return self.adapter_rows.pools

    def check_reach(self, job: JobSpec) -> None:
        """Raises SpecError for a job that asks for linears which cannot carry an adapter."""
        check_reach(job, self.targets, self._left_out)

    def new_adapter(self, job: JobSpec) -> AdapterWeights:
        """The start of a job's adapter. Raises as `check_reach`."""
        self.check_reach(job)
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
        self,
        job: str,
        weights: AdapterWeights,
        *,
        scale: float,
        dropout: float = 0.0,
        moments: Moments | None = None,
    ) -> None:
        """Claim rank rows and fill them, also with the optimiser's moments of a job that goes on.
        Raises, with nothing claimed, if the job is attached or its matrices do not fit the base
        model or hold what is no finite number."""
        if job in self.scalings:
            raise ValueError(f"job '{job}' is attached already")
        check_fit(job, weights, self.targets)
        # First: places must not be trusted after an attach that breaks off either.
        self._forget_places()
        self.adapter_rows.claim(job, weights, moments, let_go=self._forget_graphs)
        self.scalings[job] = Scaling(scale, threshold(dropout))

    @torch.no_grad()
    def detach(self, job: str) -> None:
        """Free the job's rows. Who wants what is in them asks before."""
        self._forget_places()
        self.adapter_rows.free(job)
        del self.scalings[job]

    def weights(self, job: str) -> AdapterWeights:
        """A copy of the job's matrices in host memory."""
        return self.snapshot(job, of_weights).result()

    def snapshot(
        self, job: str, make: Callable[[Held], T], *, moments: bool = False
    ) -> Snapshot[T]:
        """What the job's rows hold now, in host memory as soon as it is there; on a device training
        goes on meanwhile. `make` is called by whoever asks for it first."""
        return self.adapter_rows.snapshot(job, make, moments=moments)

    def figure(self, value: torch.Tensor) -> Snapshot[float]:
        """A number that the device is about to know."""
        courier = self.adapter_rows.courier
        return courier.take([value.detach().float()], lambda copies: float(copies[0]))

    def bring(self, tensors: list[torch.Tensor], make: Make[T]) -> Snapshot[T]:
        """Host tensors where the model is, in the background: attaching a job with them is short
        then."""
        return self.adapter_rows.courier.bring(tensors, make)

    @torch.no_grad()
    def keep_rows(
        self, job: str, weights: AdapterWeights, moments: Moments | None = None
    ) -> Berth | None:
        """Rows for a job on its way, by any thread: as long as somebody holds on to the berth,
        attaching a job with these very tensors has only to fill them, unless others had no room
        meanwhile. None where there is no room now, or tensors lie elsewhere than the model. Raises
        what attaching would."""
        check_fit(job, weights, self.targets)
        return self.adapter_rows.keep(job, weights, moments or {})

    def views(self, job: str) -> dict[str, RowViews]:
        """The job's rows with their gradients and moments, by `PATH.lora_A` and `PATH.lora_B`."""
        return self.rows(job).views

    def rows(self, job: str) -> JobRows:
        """All that the job owns; good until it leaves or another one comes."""
        return self.adapter_rows.of(job)

    @contextmanager
    def routed(self, batch: PackedBatch, *, train: bool) -> Iterator[None]:
        """The time in which `logits` and their backward may run for this nano-batch."""
        for group in self._groups:
            group.clear()
        if self._known_growths != self.adapter_rows.growths:
            self._find_moved_pools()
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
        if self._recomputes:
            recompute_layers(self.model, self.routing)
        self.release_graphs()
        self._graphs = None
        return True

    def check_integrity(self) -> None:
        self.adapter_rows.check_integrity()
        for pool in self.pools:
            assert set(pool.slots) <= set(self.scalings)

    def _hidden(self, head: PlainHead, batch: PackedBatch) -> torch.Tensor:
        if self._graphs is None or not self.jobs:
            return head.hidden(batch.input_ids, batch.position_ids)
        shape = self.routing.shape
        if shape is None:
            return head.hidden(batch.input_ids, batch.position_ids)
        key = (torch.is_grad_enabled(), self._known_growths, *shape)
        # A look in another format may have needed the lengths; does this?
        self.routing.depends_on_lengths = False
        hidden = self._graphs.hidden(batch, key)
        if self.routing.depends_on_lengths:
            self._graphs.give_up(key)
        return hidden

    def _forget_places(self) -> None:
        """Rows are claimed or freed: old tables are void. Everybody else's rows stay where they
        are."""
        self.places += 1
        self.routing.forget_routes()

    def _take_over(self, reserve_rows: int) -> None:
        """Put the pooled linears and the packed attention in; what comes out must stay the same."""
        grouped, left_out = find_groups(self.model, self.targets)
        restore_linears(self.model, left_out)
        own = own_logits(self.model)
        self._left_out = left_out | head_left_out(self.model)
        self._groups = replace_linears(
            self.model, grouped, self.targets, self.routing, reserve_rows=reserve_rows
        )
        if not self._groups:
            raise ModelError(
                f"base.model: {type(self.model).__name__} has no linear that can carry an adapter"
            )
        self.adapter_rows = AdapterRows([group.pool for group in self._groups], self.device)
        called = {path for paths in grouped for path in paths}
        self.targets = {path: target for path, target in self.targets.items() if path in called}
        replace_attention(self.model, self.routing)
        separate_sequences(self.model, self.routing)
        check_packing(self.model, self._probe_logits, own)
        # The checks run in float32 too; this one runs as training will.
        self.routing.counts_in_attention = False
        self._head = self._probe_head()

    def _compile_layers(self) -> None:
        in_parts = partial(RecomputedLayer, self.routing) if self._recomputes else None
        self.routing.compiled = compile_layers(self.model, in_parts=in_parts) > 0
        self._mark_pools()

    def _capture_graphs(self) -> None:
        if self._head is not None and not has_experts(self.model):
            embeddings = self.model.get_input_embeddings()
            self._graphs = Graphs(self._head.hidden, embeddings, self.device)

    def _find_moved_pools(self) -> None:
        """A pool that has grown is another tensor, and lies elsewhere than graphs think."""
        self._mark_pools()
        self._forget_graphs()
        self._known_growths = self.adapter_rows.growths

    def _mark_pools(self) -> None:
        """Compiled layers should not rely on their sizes."""
        if self.routing.compiled:
            for rows in (rows for pool in self.pools for rows in pool.matrices):
                varies(rows.operand, 0)
                varies(rows.grad, 0)

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
