"""One reader per shape: from a row's values, under our names, to an `Example`.

The keys a shape requires are there; whether their values make sense is checked here.
"""

from collections.abc import Mapping
from dataclasses import replace

from tlora.core.sequence import IGNORED
from tlora.data.examples import Chat, Completion, Instruction, Preference, Text, Tokens
from tlora.data.messages import (
    read_chat,
    read_sharegpt,
    read_tools,
    unpacked,
    unpacked_messages,
)
from tlora.data.rows import Origin

Values = Mapping[str, object]

TOKEN_MASKS = ("completion_mask", "assistant_masks")
"""Columns of rows that TRL tokenised: 1 where a token is trained on."""


def read_chat_row(values: Values, origin: Origin) -> Chat:
    return read_chat(values["messages"], key="messages", tools=values.get("tools"), origin=origin)


def read_sharegpt_row(values: Values, origin: Origin) -> Chat:
    return read_sharegpt(
        values["conversations"],
        system=values.get("system"),
        tools=values.get("tools"),
        origin=origin,
    )


def read_alpaca_row(values: Values, origin: Origin) -> Instruction:
    return Instruction(
        instruction=_text(values, "instruction", origin),
        material=_optional_text(values, "input", origin),
        answer=_text(values, "output", origin),
        system=_optional_text(values, "system", origin),
        history=_history(values.get("history"), origin),
    )


def read_prompt_completion_row(values: Values, origin: Origin) -> Chat | Completion:
    key = "completion" if "completion" in values else "response"
    return _answered(values["prompt"], values[key], key, values.get("tools"), origin)


def read_text_row(values: Values, origin: Origin) -> Text:
    text = _text(values, "text", origin)
    if not text:
        raise origin.error("text is empty")
    return Text(text)


def read_tokens_row(values: Values, origin: Origin) -> Tokens:
    input_ids = _integers(values["input_ids"], "input_ids", origin)
    if values.get("labels") is not None:
        return Tokens(input_ids, _for_each_token("labels", values, len(input_ids), origin))
    masks = [
        _for_each_token(key, values, len(input_ids), origin)
        for key in TOKEN_MASKS
        if values.get(key) is not None
    ]
    if not masks:
        return Tokens(input_ids, None)
    kept = zip(input_ids, *masks, strict=True)
    return Tokens(input_ids, tuple(token if all(bits) else IGNORED for token, *bits in kept))


def read_preference_row(values: Values, origin: Origin) -> Preference:
    if "prompt" in values and not _repeat_prompt(values):
        chosen, rejected = (
            _answered(values["prompt"], values[key], key, values.get("tools"), origin)
            for key in ("chosen", "rejected")
        )
        return Preference(chosen, rejected)
    for key in ("chosen", "rejected"):
        if isinstance(unpacked(values[key]), str):
            raise origin.error(
                f"{key} is a text, so the row needs a prompt; without one both answers are lists "
                "of messages"
            )
    chosen, rejected = (
        read_chat(values[key], key=key, tools=values.get("tools"), origin=origin)
        for key in ("chosen", "rejected")
    )
    shared = _shared_messages(chosen, rejected)
    return Preference(_answering(chosen, shared), _answering(rejected, shared))


def _repeat_prompt(values: Values) -> bool:
    """Whether both sides are whole chats beside a prompt that is a text: they hold it too, as in
    datasets where it is there to be looked at."""

    def is_whole(chat: object) -> bool:
        first = chat[0] if isinstance(chat, list) and chat else None
        return isinstance(first, dict) and first.get("role") != "assistant"

    return isinstance(values["prompt"], str) and all(
        is_whole(unpacked(values[key])) for key in ("chosen", "rejected")
    )


def _shared_messages(one: Chat, other: Chat) -> int:
    """How many messages are the prompt of both: those that are alike, but for the last."""
    most = min(len(one.messages), len(other.messages)) - 1
    count = 0
    while count < most and one.messages[count] == other.messages[count]:
        count += 1
    return count


def _answering(chat: Chat, prompt: int) -> Chat:
    """The chat whose first messages are a prompt."""
    return replace(chat, trained=(False,) * prompt + chat.trained[prompt:])


def _answered(
    prompt: object, answer: object, key: str, tools: object, origin: Origin
) -> Chat | Completion:
    """Two strings stay strings; if either side is a message list, both become one chat."""
    prompt, answer = unpacked_messages(prompt), unpacked_messages(answer)
    if isinstance(prompt, str) and isinstance(answer, str):
        return Completion(prompt, answer)
    asked = _as_messages(prompt, "user", "prompt", origin)
    answered = _as_messages(answer, "assistant", key, origin)
    return Chat(
        messages=asked.messages + answered.messages,
        trained=(False,) * len(asked.messages) + answered.trained,
        tools=read_tools(tools, origin),
    )


def _as_messages(value: object, role: str, key: str, origin: Origin) -> Chat:
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise origin.error(f"{key} must be a text or a list of messages, got {value!r:.80}")
    return read_chat(value, key=key, tools=None, origin=origin)


def _text(values: Values, key: str, origin: Origin) -> str:
    value = values[key]
    if not isinstance(value, str):
        raise origin.error(f"{key} must be a text, got {value!r:.80}")
    return value


def _optional_text(values: Values, key: str, origin: Origin) -> str:
    return "" if values.get(key) is None else _text(values, key, origin)


def _history(value: object, origin: Origin) -> tuple[tuple[str, str], ...]:
    value = unpacked(value)
    if value is None or value == "":
        return ()
    if not isinstance(value, list) or not all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(side, str) for side in turn)
        for turn in value
    ):
        raise origin.error(f"history must be a list of [question, answer] pairs, got {value!r:.80}")
    return tuple((question, answer) for question, answer in value)


def _for_each_token(key: str, values: Values, count: int, origin: Origin) -> tuple[int, ...]:
    found = _integers(values[key], key, origin)
    if len(found) != count:
        raise origin.error(f"{key} must be as many as input_ids, got {len(found)} and {count}")
    return found


def _integers(value: object, key: str, origin: Origin) -> tuple[int, ...]:
    value = unpacked(value)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise origin.error(f"{key} must be a list of whole numbers, got {value!r:.80}")
    return tuple(value)
