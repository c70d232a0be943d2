"""Renders chats with a chat template and finds the characters that the assistant wrote.

Templates with `{% generation %}` markers say it themselves. The stock templates of most model
families have none, so the spans are found from outside, message by message:

1. By prefixes. Render the chat up to the message, with the generation prompt, and up to and
   including the message. If both are prefixes of the whole rendering, the difference is what the
   model has to write: thinking, text, tool calls and the end-of-turn token.
2. By substitution, where the template renders a message differently once others follow (it drops
   earlier thinking, moves the system message). Render the whole chat with the message replaced by
   one foreign character. If nothing else changed, what stands in the character's place is the
   message, and what follows the character both there and when the message is the last one is its
   ending. A template that writes the results of tools into the message that asked for them is
   found out by replacing the results.

A template that allows neither is refused: a wrong mask would train on the wrong tokens in silence.
"""

import json
import re
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from tlora.core.errors import DataError
from tlora.data.examples import Chat, Message
from tlora.data.rendered import Rendered
from tlora.data.rows import Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
FOREIGN_CHARACTERS = [chr(code) for code in range(0x2460, 0x2474)]
"""Circled numbers: no template trims them or gives them a meaning, and few texts hold all of
them."""

RESULT_ROLES = ("tool", "function", "ipython")

Span = tuple[int, int]


class ChatRenderer:
    """One tokenizer with one template."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: str | None) -> None:
        """`template` stands in for the tokenizer's own."""
        self._tokenizer = tokenizer
        self._template = template
        self._end_tokens = tuple(
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        )

    def render_whole(self, chat: Chat, origin: Origin) -> Rendered:
        """Every character trained on, so no spans need to be found."""
        chat = self._with_fitting_arguments(chat, origin)
        return Rendered(self._text(list(chat.messages), chat, origin), ()).wholly_trained()

    def render(self, chat: Chat, origin: Origin) -> Rendered:
        """The assistant's characters trained on."""
        chat = self._with_fitting_arguments(chat, origin)
        if self.has_markers(chat):
            return self._by_markers(chat, origin)
        text = self._text(list(chat.messages), chat, origin)
        spans = [
            self._by_prefixes(text, place, chat, origin)
            or self._by_substitution(text, place, chat, origin)
            for place, trained in enumerate(chat.trained)
            if trained
        ]
        return Rendered(text, tuple(self._without_trailing_space(text, span) for span in spans))

    def has_markers(self, chat: Chat) -> bool:
        return GENERATION_MARKER.search(self._template_for(chat)) is not None

    def _template_for(self, chat: Chat) -> str:
        tools = list(chat.tools) if chat.tools else None
        return self._tokenizer.get_chat_template(self._template, tools)  # pyright: ignore[reportArgumentType]

    def _with_fitting_arguments(self, chat: Chat, origin: Origin) -> Chat:
        """Most templates want the arguments of tool calls as objects, DeepSeek's as text."""
        as_text = _with_arguments_as_text(chat)
        if as_text is None or self._takes(chat, origin) or not self._takes(as_text, origin):
            return chat
        return as_text

    def _takes(self, chat: Chat, origin: Origin) -> bool:
        try:
            self._text(list(chat.messages), chat, origin)
        except DataError:
            return False
        return True

    def _by_markers(self, chat: Chat, origin: Origin) -> Rendered:
        # apply_chat_template gives a token mask only; the function under it gives spans of text, to
        # which the rule of `tokenise` then applies as to all other rows.
        from transformers.utils.chat_template_utils import render_jinja_template  # heavy

        variables: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        try:
            rendered: Any = render_jinja_template(  # its annotation says str
                conversations=[list(chat.messages)],
                tools=list(chat.tools) if chat.tools else None,  # pyright: ignore[reportArgumentType]
                chat_template=self._template_for(chat),
                return_assistant_tokens_mask=True,
                **variables,
            )
        except Exception as error:  # a template is a program of its own: it may raise anything
            raise origin.error(f"the chat template refuses this row: {error}") from error
        (text,), (spans,) = rendered
        spans = [(start, end) for start, end in spans]
        spoken = [
            trained
            for message, trained in zip(chat.messages, chat.trained, strict=True)
            if message["role"] == "assistant"
        ]
        if not all(spoken):
            if len(spans) != len(spoken):
                raise origin.error(
                    "some assistant messages are not to be trained, but the template marks "
                    f"{len(spans)} generations for {len(spoken)} assistant messages, so it is "
                    "unclear which to leave out"
                )
            spans = [span for span, trained in zip(spans, spoken, strict=True) if trained]
        return Rendered(text, tuple(spans))

    def _by_prefixes(self, text: str, place: int, chat: Chat, origin: Origin) -> Span | None:
        if place == 0:
            return None
        before = self._text(list(chat.messages[:place]), chat, origin, generation_prompt=True)
        through = self._text(list(chat.messages[: place + 1]), chat, origin)
        stable = text.startswith(before) and text.startswith(through)
        return (len(before), len(through)) if stable and before != through else None

    def _by_substitution(self, text: str, place: int, chat: Chat, origin: Origin) -> Span:
        foreign = next((mark for mark in FOREIGN_CHARACTERS if mark not in text), None)
        if foreign is None:
            raise _unstable(place, origin)
        replaced: list[Message] = list(chat.messages)
        replaced[place] = {"role": "assistant", "content": _like(chat.messages[place], foreign)}
        try:
            whole = self._text(replaced, chat, origin)
            last = self._text(replaced[: place + 1], chat, origin)
        except DataError as error:  # it takes the row itself, but not in another form
            raise _unstable(place, origin) from error
        if whole.count(foreign) != 1 or last.count(foreign) != 1:
            raise _unstable(place, origin)
        before, after = whole.split(foreign)
        end = len(text) - len(after)
        if not (text.startswith(before) and text.endswith(after) and len(before) <= end):
            raise _unstable(place, origin)
        opening, ending = last.split(foreign)
        opening = self._written_before(opening, place, chat, origin)
        start = len(before) - (len(opening) if before.endswith(opening) else 0)
        if self._depends_on_results(text[:end], place, chat, foreign, origin):
            raise _unstable(place, origin)
        return start, end + len(self._shared_ending(ending, after))

    def _depends_on_results(
        self, written: str, place: int, chat: Chat, foreign: str, origin: Origin
    ) -> bool:
        """Whether the text up to the end of a message holds results of tools that came after it,
        which the model does not write."""
        messages: list[Message] = list(chat.messages)
        for later in range(place + 1, len(messages)):
            if messages[later]["role"] in RESULT_ROLES:
                content = _like(messages[later], foreign)
                messages[later] = {**messages[later], "content": content}
        if messages == list(chat.messages):
            return False
        try:
            return not self._text(messages, chat, origin).startswith(written)
        except DataError as error:  # as in _by_substitution
            raise _unstable(place, origin) from error

    def _shared_ending(self, ending: str, after: str) -> str:
        """What ends a message wherever it stands: after the end of the last turn the template may
        write an end of the whole chat."""
        if after.startswith(ending):
            return ending
        if after.startswith(ending.rstrip()):
            return ending.rstrip()
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(ending, after, strict=False))
        shared = "".join(character for character, _ in alike)
        ends = (shared.rfind(token) + len(token) for token in self._end_tokens if token in shared)
        return shared[: max(ends, default=0)]

    def _written_before(self, opening: str, place: int, chat: Chat, origin: Origin) -> str:
        """What the model writes between the generation prompt and the message, often one space."""
        if place == 0:
            return ""
        prompt = self._text(list(chat.messages[:place]), chat, origin, generation_prompt=True)
        return opening.removeprefix(prompt) if opening.startswith(prompt) else ""

    def _without_trailing_space(self, text: str, span: Span) -> Span:
        """White space that the template puts after the end-of-turn token is never the model's to
        write."""
        start, end = span
        written = text[start:end].rstrip()
        return (start, start + len(written)) if written.endswith(self._end_tokens) else span

    def _text(
        self,
        messages: list[Message],
        chat: Chat,
        origin: Origin,
        *,
        generation_prompt: bool = False,
    ) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages,  # pyright: ignore[reportArgumentType]
                tools=list(chat.tools) if chat.tools else None,  # pyright: ignore[reportArgumentType]
                chat_template=self._template,
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # as above
            raise origin.error(f"the chat template refuses this row: {error}") from error
        assert isinstance(rendered, str)
        return rendered


def _like(message: Message, text: str) -> object:
    """Content of the same form as the message's, a text or a list of parts."""
    return [{"type": "text", "text": text}] if isinstance(message["content"], list) else text


def _with_arguments_as_text(chat: Chat) -> Chat | None:
    """The chat with the arguments of its tool calls as JSON; None where none is an object."""
    messages = tuple(_message_with_text(message) for message in chat.messages)
    return None if messages == chat.messages else replace(chat, messages=messages)


def _message_with_text(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call_with_text(call) for call in calls]}


def _call_with_text(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, dict | list):
        return call
    assert isinstance(call, dict) and isinstance(function, dict)
    text = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _unstable(place: int, origin: Origin) -> DataError:
    return origin.error(
        f"cannot tell which part of the rendered chat is message {place + 1}, because the chat "
        "template changes the text around it; give data.chat_template a template with "
        "{% generation %} markers"
    )
