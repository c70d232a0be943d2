"""Linears that share an input: one computation, each its own output, in eager and compiled code."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.comparing import agrees, same_bits
from support.tiny import tiny_llama
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from tlora.core.errors import ModelError
from tlora.core.sequence import TokenSequence
from tlora.kernels.streams import threshold
from tlora.model import linear
from tlora.model.adapters import AdapterWeights, LoraPair
from tlora.model.job_rows import adapter_of
from tlora.model.linear import LoraLinear, SharedInput, replace_linears
from tlora.model.packing import Share, pack
from tlora.model.pool import GroupPool
from tlora.model.routing import Routing, Scaling
from tlora.model.super_model import SuperModel
from tlora.model.targets import Target, find_targets

CPU = torch.device("cpu")
IN, OUT = 8, {"q": 6, "k": 10}
SCALINGS = {
    "one": Scaling(0.5, 0),
    "two": Scaling(2.0, threshold(0.25)),
    "three": Scaling(-1.0, threshold(0.1)),
}


class Scene(nn.Module):
    """Two linears over one input, in the place that a model's layer would give them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        frozen = [nn.Linear(IN, out).requires_grad_(False) for out in OUT.values()]
        targets = [Target(path, IN, out, False) for path, out in OUT.items()]
        self.pool = GroupPool(targets, 16, CPU)
        self.routing = Routing(CPU)
        self.shared = SharedInput(frozen, [0, 1], self.pool, self.routing)
        self.q, self.k = (LoraLinear(linear, i, self.shared) for i, linear in enumerate(frozen))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q(x), self.k(x).tanh()], dim=-1)

    def attach(self, job: str, ranks: dict[str, int]) -> None:
        generator = torch.Generator().manual_seed(len(job))
        weights: AdapterWeights = {
            path: LoraPair(
                torch.randn(rank, IN, generator=generator),
                torch.randn(OUT[path], rank, generator=generator),
            )
            for path, rank in ranks.items()
        }
        self.pool.attach(job, weights)
        self.routing.forget_routes()

    def detach(self, job: str) -> None:
        self.pool.detach(job)
        self.routing.forget_routes()


def train_once(
    scene: Scene, jobs: list[str], call: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """The output, dx and the pooled gradients of four tokens of each job and padding."""
    tokens = np.arange(4, dtype=np.int32)
    shares = [Share(job, [TokenSequence(tokens, tokens)], [0], [1.0], key=7) for job in jobs]
    matrices = [scene.pool.a, *scene.pool.b]
    for rows in matrices:
        rows.grad.zero_()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 16, IN, generator=generator).requires_grad_(True)
    with scene.routing.entered(pack(shares, 16), [scene.pool], SCALINGS, train=True):
        y = call(x)
        y.backward(torch.randn(y.shape, generator=generator))
    return [y.detach(), x.grad, *(rows.grad.clone() for rows in matrices)]


def scene_of_two() -> Scene:
    scene = Scene()
    scene.attach("one", {"q": 3})
    scene.attach("two", {"q": 2, "k": 5})
    return scene


def test_each_linear_gives_its_own_output() -> None:
    """Base plus the adapters of the jobs that are there: checked without dropout, by products."""
    scene = scene_of_two()
    found = train_once(scene, ["one"], scene)[0]
    x = torch.randn(1, 16, IN, generator=torch.Generator().manual_seed(1))
    pair = adapter_of({name: rows.value for name, rows in scene.pool.views("one")})["q"]
    q = x @ scene.q.weight.T + scene.q.bias
    q[:, :4] += 0.5 * x[:, :4] @ pair.a.T @ pair.b.T
    k = x @ scene.k.weight.T + scene.k.bias
    assert agrees(found, torch.cat([q, k.tanh()], dim=-1))


def test_linears_called_with_different_inputs_are_refused() -> None:
    """The second would get the output of the first one's input."""
    scene = scene_of_two()
    with pytest.raises(AssertionError, match="different inputs"):
        train_once(scene, ["one"], lambda x: torch.cat([scene.q(x), scene.k(x + 1)], dim=-1))


def test_what_a_failed_forward_left_can_be_cleared() -> None:
    """The next nano-batch starts afresh, and no output is kept alive."""
    scene = scene_of_two()
    wanted = train_once(scene, ["one", "two"], scene)
    with pytest.raises(ZeroDivisionError):
        train_once(scene, ["one", "two"], lambda x: scene.q(x) / (1 // 0))
    scene.shared.clear()
    assert scene.shared._ready == {} and scene.shared._input is None
    assert all(map(same_bits, train_once(scene, ["one", "two"], scene), wanted))


def test_a_finished_forward_keeps_no_output_alive() -> None:
    """The last linear to be called takes the last one away."""
    scene = scene_of_two()
    train_once(scene, ["one"], scene)
    assert scene.shared._ready == {} and scene.shared._input is None


def test_checkpointing_adds_every_gradient_once() -> None:
    """Forward runs twice, backward once: the same bits."""
    scene = scene_of_two()
    wanted = train_once(scene, ["one", "two"], scene)
    found = train_once(scene, ["one", "two"], lambda x: checkpoint(scene, x, use_reentrant=False))
    assert all(map(same_bits, found, wanted))


def test_jobs_that_come_and_go_recompile_nothing() -> None:
    """One graph for other nano-batches, other jobs, other ranks, at fixed capacity; its bits are
    those without compiling."""
    torch._dynamo.reset()
    counters.clear()
    scene = scene_of_two()
    compiled = torch.compile(scene, fullgraph=True, backend="aot_eager")

    def check(*jobs: str) -> None:
        wanted, found = (train_once(scene, list(jobs), call) for call in (scene, compiled))
        assert all(map(same_bits, found, wanted))

    check("one", "two")
    check("two")
    check()
    scene.attach("three", {"k": 4})
    check("three", "two", "one")
    scene.detach("one")
    check("two", "three")
    assert counters["stats"]["unique_graphs"] == 1
    for number in range(4):
        scene.attach(f"more {number}", {"q": 9, "k": 9})
    check("two")
    assert counters["stats"]["unique_graphs"] == 2, "a pool that grew is another shape"
    torch._dynamo.reset()


def test_products_have_the_update_inside_where_it_may_be(monkeypatch: pytest.MonkeyPatch):
    """Nothing adds a bias in a product of Y, and dX has none. Not where bits count, nor in shards,
    whose weights begin anywhere. Weights are those that the model came with."""
    ways = {
        (32, (32, 16, 16)): ("forward", "backward"),
        (32, (48, 48)): ("forward",),
        (48, (32,)): ("backward",),
    }
    monkeypatch.setattr(linear, "inside_ways", lambda device, operands, *shape: ways.get(shape, ()))

    def found(exact: bool = False, **settings: object) -> dict[str, tuple[str, ...]]:
        own = tiny_llama(**settings)
        addresses = {name: weight.data_ptr() for name, weight in own.named_parameters()}
        groups = SuperModel(own, per_sequence=exact).groups[:4]
        for group in groups:
            for target, weight in zip(group.pool.targets, group.weights, strict=True):
                assert weight.data_ptr() == addresses[f"{target.path}.weight"]
                assert weight.is_contiguous()
        return {group.pool.targets[0].path.split(".")[-1]: group.pool.inside for group in groups}

    usual = {
        "q_proj": ("forward", "backward"),
        "o_proj": (),
        "gate_proj": ("forward",),
        "down_proj": ("backward",),
    }
    assert found() == usual
    assert found(attention_bias=True) == {**usual, "q_proj": ("backward",)}
    assert found(mlp_bias=True) == {**usual, "gate_proj": ()}
    assert found(exact=True) == dict.fromkeys(usual, ())
    monkeypatch.setattr(linear, "in_shards", lambda model: True)
    assert found() == dict.fromkeys(usual, ())


def test_a_model_in_two_half_precisions_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Where there are copies: before any job could fail for it."""
    model = tiny_llama().bfloat16()
    model.model.layers[1].mlp.half()
    monkeypatch.setattr(linear, "operand_dtype", lambda device, weights, count: weights)
    groups = [["model.layers.0.mlp.down_proj"], ["model.layers.1.mlp.down_proj"]]
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has linears in bfloat16 and float16;"):
        replace_linears(model, groups, find_targets(model), Routing(CPU), reserve_rows=4)
