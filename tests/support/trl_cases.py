"""What was given to Hugging Face TRL and what it made of it: its tokens and masks of rows, and its
training of a job from start to end. `trl_recorder.py` writes trl_recorded.json from these cases, so
the tests that compare with it need no TRL."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tlora.core.assets import DEMO

RECORDED = Path(__file__).with_name("trl_recorded.json")
BASE = DEMO / "base"

Message = dict[str, Any]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, **more: object) -> Message:
    return {"role": "assistant", "content": content, **more}


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city."}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
SYSTEM = {"role": "system", "content": "Be brief."}
CHATS: list[dict[str, Any]] = [
    {"messages": [user("What is two and two?"), assistant("It is 4.")]},
    {"messages": [SYSTEM, user("Hi"), assistant("Hello."), user("Bye"), assistant("Farewell.")]},
    {"messages": [user("Say nothing."), assistant("")]},
    {"messages": [user("Hi"), assistant("Hello."), user("Are you there?")]},
]
CALLING: list[dict[str, Any]] = [
    {
        "messages": [
            user("How is it in Oslo?"),
            assistant("Let me see.", tool_calls=[CALL]),
            {"role": "tool", "content": "sunny"},
            assistant("It is sunny."),
        ],
        "tools": TOOLS,
    }
]

# As the demo base's own template, with tools. TRL wants markers; tlora finds the answers itself.
MARKED = """\
{%- if tools %}{{ '<|system|> ' + (tools | tojson) + '<|end|>' }}{% endif -%}
{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{{- ' ' + message.content -}}
{%- for call in message.tool_calls or [] -%}{{- ' ' + (call.function | tojson) -}}{%- endfor -%}
{{- '<|end|>' -}}
{%- endgeneration -%}
{%- else -%}{{- ' ' + message.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}"""
UNMARKED = MARKED.replace("{%- generation -%}\n", "").replace("{%- endgeneration -%}\n", "")

# A line break after every turn, as ChatML has it.
BROKEN_LINES = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif -%}"""

# Of docs/migrating.md: prompts and completions as TRL puts them together where both are texts.
JOINED = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- generation %}{{ message.content + eos_token }}{% endgeneration -%}
{%- else %}{{ message.content }}{% endif -%}
{%- endfor -%}"""

ANSWERED: list[dict[str, Any]] = [
    {"prompt": [user("What is two and two?")], "completion": [assistant("It is 4.")]},
    {
        "prompt": [SYSTEM, user("Hi"), assistant("Hello."), user("Bye")],
        "completion": [assistant("Farewell.")],
    },
]
TEXTS: list[dict[str, Any]] = [
    {"text": "A crow lives in a tall tower."},
    {"text": "A pirate ends by himself.<|end|>"},
]


@dataclass(frozen=True)
class RowCase:
    """Rows, and the settings under which both are to make the same of them."""

    rows: list[dict[str, Any]]
    trl: dict[str, Any] = field(default_factory=dict)
    """Of SFTConfig or DPOConfig."""

    tlora: dict[str, Any] = field(default_factory=dict)
    """Of a job's data."""

    template: str | None = None
    """For TRL, in place of the tokenizer's own; tlora is told in `tlora`."""

    max_length: int = 200
    pairs: bool = False


ROWS = {
    "answers of chats": RowCase(
        CHATS, {"assistant_only_loss": True}, {"chat_template": UNMARKED}, MARKED
    ),
    "answers of chats, by markers": RowCase(
        CHATS, {"assistant_only_loss": True}, {"chat_template": MARKED}, MARKED
    ),
    "calls of tools": RowCase(
        CALLING, {"assistant_only_loss": True}, {"chat_template": UNMARKED}, MARKED
    ),
    "whole chats": RowCase(CHATS, {}, {"train_on": "all"}),
    "prompts and completions of messages": RowCase(ANSWERED),
    "prompts and completions of text": RowCase(
        [{"prompt": "A question:\n", "completion": "An answer."}], {}, {"chat_template": JOINED}
    ),
    "texts": RowCase(TEXTS),
    "texts cut short": RowCase(TEXTS, max_length=6),
    "rows of tokens with a mask": RowCase(
        [{"input_ids": [9, 8, 7, 6], "completion_mask": [0, 0, 1, 1]}],
        {"completion_only_loss": True},
    ),
    "pairs": RowCase(
        [
            {
                "prompt": row["prompt"],
                "chosen": row["completion"],
                "rejected": [assistant("Go away, you.")],
                "tools": TOOLS,
            }
            for row in ANSWERED
        ],
        tlora={"chat_template": UNMARKED},
        template=UNMARKED,
        pairs=True,
    ),
    "pairs without a prompt": RowCase(
        [
            {
                "chosen": [*row["prompt"], *row["completion"]],
                "rejected": [*row["prompt"], assistant("No.")],
            }
            for row in ANSWERED
        ],
        pairs=True,
    ),
}
BROKEN_LINES_CASE = RowCase(ANSWERED, tlora={"chat_template": BROKEN_LINES}, template=BROKEN_LINES)
"""Where they are not the same: TRL trains on the line break after the end token, too."""


@dataclass(frozen=True)
class CurveCase:
    """A job of both, in the names that both understand, on the demo's pirate."""

    rows: list[dict[str, Any]]
    settings: dict[str, Any]
    held_out: list[dict[str, Any]] = field(default_factory=list)
    pairs: bool = False


EPSILON = 1e-5
"""Beyond the rounding of gradients: where one is nothing but rounding, Adam with a smaller epsilon
makes a whole step of it."""

RANK = 8
SEED = 5


def pirate() -> list[list[Message]]:
    lines = (DEMO / "data" / "pirate.jsonl").read_text().splitlines()
    return [json.loads(line)["messages"] for line in lines]


def plain(answer: Message) -> Message:
    return assistant(answer["content"].removeprefix("Arr! ").removesuffix(", matey!") + ".")


# 45 rows in batches of 8: the last batch of an epoch has 5, in parts of 4 and 1.
PROMPTED = [{"prompt": [asked], "completion": [answer]} for asked, answer in pirate()[:57]]
CURVES = {
    "supervised": CurveCase(
        PROMPTED[:45],
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2,
            "learning_rate": 2e-3,
            "adam_epsilon": EPSILON,
            "lr_scheduler_type": "linear",
            "warmup_steps": 3,
            "weight_decay": 1.0,
            "max_grad_norm": 6.0,
        },
        held_out=PROMPTED[45:],
    ),
    "preference": CurveCase(
        [
            {"prompt": [asked], "chosen": [answer], "rejected": [plain(answer)]}
            for asked, answer in pirate()[:45]
        ],
        {
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "num_train_epochs": 2,
            "learning_rate": 5e-4,
            "adam_epsilon": EPSILON,
            "lr_scheduler_type": "cosine",
            "beta": 0.3,
        },
        pairs=True,
    ),
}


def job(case: CurveCase, data: dict[str, Any], **changes: object) -> dict[str, Any]:
    """As a job file has it."""
    loss = {"loss": "dpo"} if case.pairs else {}
    return {
        "name": "job",
        "data": data,
        "lora": {"r": RANK, "lora_alpha": 2 * RANK},
        "train": {"seed": SEED, "max_length": 128, **case.settings, **loss, **changes},
        "eval": {},
    }


def marks_of(product: Any) -> tuple[float, float]:
    """Two numbers that another product of B and A would hardly have."""
    import torch

    waves = torch.cos(torch.arange(product.numel(), dtype=torch.float64))
    return float(product.norm()), float(product.flatten() @ waves)
