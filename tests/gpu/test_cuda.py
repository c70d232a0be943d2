"""The engine on a CUDA device: packed attention, the law of isolation, and what memory it takes."""

import pytest
import torch
from support.curves import Watcher, difference
from support.jobs import BY_NAME, ROWS, base_model

from tlora.kernels.attention.layout import attention_layout
from tlora.kernels.attention.packed import packed_attention
from tlora.kernels.attention.varlen import varlen_attention
from tlora.model.super_model import SuperModel
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
NAMES = ("one", "odd", "dropped", "wide")
# Relative, after 50 steps in float32 on the device against the CPU; products are summed in another
# order there.
ACROSS_DEVICES = 2e-4


def boundaries(lengths: list[int], rows: int) -> torch.Tensor:
    padded = torch.tensor([0, *lengths, rows - sum(lengths)], dtype=torch.int32)
    return padded.cumsum(0, dtype=torch.int32).cuda()


@pytest.mark.parametrize("window", [None, 2, 7, 64])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("value_size", [64, 40])
@pytest.mark.parametrize("repeatable", [False, True])
def test_flash_attention_over_boundaries_equals_sequences_apart(
    window, kv_heads, value_size, repeatable
):
    """Outputs and gradients of the real rows, in bfloat16, against float32 per sequence."""
    torch.manual_seed(0)
    lengths, rows = [3, 130, 1, 64, 57], 320
    shapes = [(rows, 8, 64), (rows, kv_heads, 64), (rows, kv_heads, value_size)]
    fast = [
        torch.randn(*s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes
    ]
    slow = [x.detach().float().requires_grad_() for x in fast]
    out = varlen_attention(
        *fast,
        boundaries(lengths, rows),
        rows,
        scale=0.125,
        window=window,
        repeatable=repeatable,
    )
    layout = attention_layout(lengths, rows, 8 * 64, "cuda")
    expected = packed_attention(*slow, layout, scale=0.125, window=window)
    used = sum(lengths)
    upstream = torch.randn_like(expected[:used])
    (out[:used].float() * upstream).sum().backward()
    (expected[:used] * upstream).sum().backward()
    pairs = [(out, expected), *((p.grad, q.grad) for p, q in zip(fast, slow, strict=True))]
    for got, wanted in pairs:
        error = (got[:used].float() - wanted[:used]).norm() / wanted[:used].norm()
        # bfloat16 keeps 8 bits: 1e-2 holds rounding of inputs and of probabilities.
        assert error < 1e-2


def train_on(device: str, names: tuple[str, ...], dtype: torch.dtype = torch.float32):
    model = SuperModel(base_model().to(device=device, dtype=dtype))
    engine = Engine(model, budget_tokens=192, bucket_step=None)
    drivers = []
    for name in names:
        driver = JobDriver(BY_NAME[name], ROWS[name])
        driver.attach(engine, model.new_adapter(BY_NAME[name]))
        drivers.append(driver)
    watcher = Watcher(engine)
    run_jobs(engine, drivers, watcher)
    return watcher.curves


def test_jobs_train_on_the_device_as_on_the_cpu():
    """Four jobs together in float32, dropout included: the same streams, the same maths."""
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu, on_device = train_on("cpu", NAMES), train_on("cuda", NAMES)
    for name in NAMES:
        assert difference(on_device[name], on_cpu[name]).within(ACROSS_DEVICES), name


def test_jobs_in_bfloat16_stay_within_its_noise_of_training_alone():
    """The noise is measured: the same job alone under another budget."""
    together = train_on("cuda", NAMES, torch.bfloat16)
    for name in ("one", "dropped"):
        alone = train_on("cuda", (name,), torch.bfloat16)
        assert difference(together[name], alone[name]).loss < 2e-2, name
