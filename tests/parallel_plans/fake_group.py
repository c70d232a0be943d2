"""One rank of a fake group, for one mesh after another: a small Llama with frozen weights, sharded
by FSDP2, forward and backward; prints calls and bytes of its collectives, and those of the sum of a
job's gradients. Run by test_fake_group.py."""

import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from tlora.parallel.counting import Counts
from tlora.parallel.reduction import sum_in_order

NAMESPACES = ("c10d", "_c10d_functional")
TOKENS = 16


class Counter(TorchDispatchMode):
    """All-gathers by calls and by the bytes that they leave on a rank; all else by calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found = {"all_gather_calls": 0, "all_gather_bytes": 0, "other_calls": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in NAMESPACES:
            if "allgather_base" in str(func):
                self.found["all_gather_calls"] += 1
                self.found["all_gather_bytes"] += args[0].numel() * args[0].element_size()
            else:
                self.found["other_calls"] += 1
        return func(*args, **(kwargs or {}))


def new_model(asked: dict) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=asked["vocabulary"],
        hidden_size=asked["hidden"],
        intermediate_size=asked["intermediate"],
        num_hidden_layers=asked["layers"],
        num_attention_heads=asked["heads"],
        num_key_value_heads=asked["kv_heads"],
        head_dim=asked["head_dim"],
        tie_word_embeddings=asked["tied"],
    )
    # Fake weights cannot be converted once they are there.
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.requires_grad_(False)


def begin_graph(module, arguments, output) -> None:
    """As adapters do, this asks for a gradient that goes through every layer."""
    output.requires_grad_()


def gradient_of(head, rows: torch.Tensor) -> torch.Tensor:
    """Of a loss, made while the head is there."""
    head.unshard()
    leaf = rows.detach().requires_grad_()
    functional.linear(leaf, head.weight).float().sum().backward()
    head.reshard()
    assert leaf.grad is not None
    return leaf.grad


def counted(asked: dict) -> dict[str, int]:
    replicas, fsdp = asked["replicas"], asked["fsdp"]
    dist.init_process_group("fake", rank=0, world_size=replicas * fsdp, store=FakeStore())
    sizes, names = ((fsdp,), ("shard",))
    if replicas > 1:
        sizes, names = (replicas, fsdp), ("replica", "shard")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    counter = Counter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = new_model(asked)
        embeddings, layers = model.model.embed_tokens, model.model.layers
        # A tied head is the embeddings' weight, gathered once more.
        head = embeddings if asked["tied"] else model.lm_head
        for part in dict.fromkeys((embeddings, *layers, head, model.model)):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        # Left to itself the first layer would gather the embeddings in backward, for nothing.
        layers[0].set_modules_to_backward_prefetch([layers[0]])
        embeddings.register_forward_hook(begin_graph)
        for layer in layers[: asked["kept_layers"]]:
            layer.set_reshard_after_forward(False)
            layer.set_reshard_after_backward(False)
        for _ in range(asked["nano_batches"]):
            with counter:
                rows = model.model(torch.zeros(1, TOKENS, dtype=torch.long)).last_hidden_state
                rows.backward(gradient_of(head, rows))
    summed = Counts()
    sum_in_order([torch.zeros(asked["summed"])], [0.0], counts=summed)
    dist.destroy_process_group()
    return counter.found | {
        f"sum_{name}": value for name, value in summed.as_json()["gradient"].items()
    }


if __name__ == "__main__":
    print(json.dumps([counted(asked) for asked in json.loads(sys.argv[1])]))
