"""Writes trl_recorded.json: what Hugging Face TRL makes of the cases of trl_cases.py, on a CPU in
float32. Needs trl and peft; run it from the repository with

    PYTHONPATH=tests:. python tests/support/trl_recorder.py
"""

import json
import os
import tempfile
from importlib.metadata import version
from typing import Any

# Before the libraries that read them are imported.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TQDM_DISABLE="1")

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # pyright: ignore

from support.trl_cases import (
    BASE,
    BROKEN_LINES_CASE,
    CURVES,
    RANK,
    RECORDED,
    ROWS,
    SEED,
    CurveCase,
    RowCase,
    job,
    marks_of,
)
from tlora.config import load_spec
from tlora.core.assets import DEMO
from tlora.data.cursor import order
from tlora.model.super_model import SuperModel

PLAIN = {"report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no"}


def base_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)


def trainer_of(
    rows: list[dict[str, Any]], template: str | None, *, pairs: bool, kind: Any = None, **more: Any
) -> Any:
    settings = {**PLAIN, **more.pop("settings")}
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    if template:
        tokenizer.chat_template = template
    return (kind or (DPOTrainer if pairs else SFTTrainer))(
        model=base_model(),
        args=(DPOConfig if pairs else SFTConfig)(output_dir=tempfile.mkdtemp(), **settings),
        train_dataset=Dataset.from_list(json.loads(json.dumps(rows))),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        **more,
    )


def rows_of(case: RowCase) -> list[list[list[int]]]:
    """Token ids and labels of each row; of a pair, of each side, the chosen one first."""
    settings = {"max_length": case.max_length, **case.trl}
    trainer = trainer_of(case.rows, case.template, pairs=case.pairs, settings=settings)
    if not case.pairs:
        return [[list(row["input_ids"]), list(row["labels"])] for row in trainer.train_dataset]
    sides = []
    for row in trainer.train_dataset:
        batch = trainer.data_collator([row])
        for ids, there, answered in zip(
            batch["input_ids"], batch["attention_mask"], batch["completion_mask"], strict=True
        ):
            ids, answered = ids[there.bool()], answered[there.bool()].bool()
            sides.append([ids.tolist(), torch.where(answered, ids, -100).tolist()])
    return sides


class InOurOrder(torch.utils.data.Sampler):
    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(order(SEED, self.epoch, self.count).tolist())

    def __len__(self) -> int:
        return self.count


class Log(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.held_out: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.steps.append(logs)
        if "eval_loss" in logs:
            self.held_out.append(logs["eval_loss"])


def curve_of(case: CurveCase) -> dict[str, Any]:
    class Ordered(DPOTrainer if case.pairs else SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any, **__: Any) -> InOurOrder:
            return InOurOrder(len(case.rows))

    settings = {**case.settings, "max_length": 128, "logging_steps": 1}
    more: dict[str, Any] = {}
    if case.held_out:
        # All in one batch: TRL takes the mean of the batches' means.
        settings |= {"eval_strategy": "epoch", "eval_on_start": True}
        settings["per_device_eval_batch_size"] = len(case.held_out)
        more["eval_dataset"] = Dataset.from_list(case.held_out)
    trainer = trainer_of(case.rows, None, pairs=case.pairs, kind=Ordered, settings=settings, **more)
    spec = load_spec(
        {"base": str(BASE), "jobs": [job(case, {"path": str(DEMO / "data" / "pirate.jsonl")})]}
    )
    start = SuperModel(base_model()).new_adapter(spec.jobs[0])
    modules = {path: trainer.model.base_model.model.get_submodule(path) for path in start}
    for path, pair in start.items():
        modules[path].lora_A["default"].weight.data.copy_(pair.a)
        modules[path].lora_B["default"].weight.data.copy_(pair.b)
    log = Log()
    trainer.add_callback(log)
    trainer.train()
    figures = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
    if case.pairs:
        figures |= {"chosen_reward": "rewards/chosen", "rejected_reward": "rewards/rejected"}
        figures |= {"margin": "rewards/margins"}
    products = {
        path: module.lora_B["default"].weight.double() @ module.lora_A["default"].weight.double()
        for path, module in modules.items()
    }
    return {
        "steps": [{ours: step[theirs] for ours, theirs in figures.items()} for step in log.steps],
        "held_out": [log.held_out[0], log.held_out[-1]] if case.held_out else [],
        "adapter": {path: marks_of(product.detach()) for path, product in products.items()},
    }


def one_case_to_a_line(recorded: dict[str, Any]) -> str:
    parts = []
    for name, value in recorded.items():
        cases = value.items() if isinstance(value, dict) else [("rows", value)]
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(case)}" for key, case in cases)
        parts.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    packages = ("trl", "transformers", "peft", "torch", "datasets")
    recorded = {
        "versions": {package: version(package) for package in packages},
        "rows": {name: rows_of(case) for name, case in ROWS.items()},
        "rows of broken lines": rows_of(BROKEN_LINES_CASE),
        "curves": {name: curve_of(case) for name, case in CURVES.items()},
    }
    RECORDED.write_text(one_case_to_a_line(recorded), encoding="utf-8")
