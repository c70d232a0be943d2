"""Reads message lists: the chat shape's, ShareGPT's and those inside prompts and completions.

Messages go to the template as the user wrote them, but for three things every template trips over:
keys that a table format filled with null, arguments of tool calls that are JSON inside a string,
and `weight`.
"""

import json

from tlora.data.examples import Chat, Message
from tlora.data.rows import Origin

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


def read_chat(value: object, *, key: str, tools: object, origin: Origin) -> Chat:
    """A list of {role, content}, found under `key`."""
    messages: list[Message] = []
    trained: list[bool] = []
    for place, entry in _entries(value, key=key, origin=origin):
        message = {name: item for name, item in entry.items() if item is not None}
        weight = message.pop("weight", 1)
        role = message.get("role")
        if role not in ROLES:
            raise origin.error(f"{place} has the role {role!r}; known roles: {', '.join(ROLES)}")
        if "tool_calls" in message:
            message["tool_calls"] = _with_parsed_arguments(message["tool_calls"], place, origin)
        elif "content" not in message:
            raise origin.error(f"{place} has neither content nor tool_calls")
        if not isinstance(message.setdefault("content", ""), str | list):
            raise origin.error(
                f"{place} needs a text as its content, got {message['content']!r:.80}"
            )
        messages.append(message)
        trained.append(role == "assistant" and _is_trained(weight, place, origin))
    return Chat(tuple(messages), tuple(trained), read_tools(tools, origin))


def read_sharegpt(value: object, *, system: object, tools: object, origin: Origin) -> Chat:
    """A list of {from, value}; {role, content} is taken for the same."""
    messages: list[Message] = []
    trained: list[bool] = []
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
        trained.append(False)
    for place, entry in _entries(value, key="conversations", origin=origin):
        speaker = entry.get("from", entry.get("role"))
        content = entry.get("value", entry.get("content"))
        role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            known = ", ".join(SHAREGPT_ROLES)
            raise origin.error(f"{place} is from {speaker!r}; known speakers: {known}")
        if not isinstance(content, str):
            raise origin.error(f"{place} needs a text as its value, got {content!r}")
        messages.append({"role": role, "content": content})
        weight = entry.get("weight")
        keep = _is_trained(1 if weight is None else weight, place, origin)
        trained.append(role == "assistant" and keep)
    return Chat(tuple(messages), tuple(trained), read_tools(tools, origin))


def read_tools(value: object, origin: Origin) -> tuple[object, ...] | None:
    value = unpacked(value)
    if value is None or value == "":
        return None
    if not isinstance(value, list):
        raise origin.error(f"tools must be a list of tool descriptions, got {value!r}")
    return tuple(value) or None


def unpacked(value: object) -> object:
    """CSV cells and some Parquet columns hold lists as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def unpacked_messages(value: object) -> object:
    """The same where a text may stand as well: one that is no list of messages is meant as it
    is."""
    found = unpacked(value)
    packed = isinstance(found, list) and found and all(map(_is_message, found))
    return found if packed else value


def _is_message(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and entry.get("role") in ROLES
        and ("content" in entry or "tool_calls" in entry)
    )


def _entries(value: object, *, key: str, origin: Origin) -> list[tuple[str, dict[str, object]]]:
    """The messages, each with the words that name its place."""
    value = unpacked(value)
    if not isinstance(value, list) or not value:
        raise origin.error(f"{key} must be a list of at least one message, got {value!r:.80}")
    entries: list[tuple[str, dict[str, object]]] = []
    for number, entry in enumerate(value, start=1):
        place = f"message {number} of {key}"
        if not isinstance(entry, dict):
            raise origin.error(f"{place} must be an object, got {entry!r:.80}")
        entries.append((place, entry))
    return entries


def _is_trained(weight: object, place: str, origin: Origin) -> bool:
    if weight not in (0, 1):
        raise origin.error(f"{place} has the weight {weight!r}; it must be 0 (not trained) or 1")
    return weight == 1


def _with_parsed_arguments(calls: object, place: str, origin: Origin) -> list[object]:
    """OpenAI writes a call's arguments as a JSON string; templates expect the object itself."""
    if not isinstance(calls, list):
        raise origin.error(f"{place} needs a list as its tool_calls, got {calls!r:.80}")
    parsed: list[object] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except (ValueError, RecursionError) as error:
                raise origin.error(
                    f"{place} has tool arguments that are not JSON: {error}"
                ) from error
            call = {**call, "function": {**function, "arguments": arguments}}
        parsed.append(call)
    return parsed
