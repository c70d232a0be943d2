"""Decides how an example becomes text: through a chat template where there is one, else in a plain
layout."""

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from tlora.core.errors import DataError
from tlora.data.examples import (
    Chat,
    Completion,
    Example,
    Instruction,
    Preference,
    Text,
    Tokens,
    answers_without_content,
    has_empty_answer,
)
from tlora.data.layouts import lay_out
from tlora.data.rendered import Rendered
from tlora.data.rows import Origin
from tlora.data.templates import ChatRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["completion", "all"]


class Renderer:
    """One tokenizer, one template and one choice of what to train on."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", *, template: str | None, train_on: TrainOn
    ) -> None:
        """`template` stands in for the tokenizer's own; None keeps that."""
        has_template = bool(template or tokenizer.chat_template)
        self._chats = ChatRenderer(tokenizer, template) if has_template else None
        self._train_on_all = train_on == "all"

    def render(self, example: Example, origin: Origin) -> Rendered:
        match example:
            case Completion() | Instruction() if self._chats is not None:
                rendered = self._render_chat(example.as_chat(), origin)
            case Chat():
                rendered = self._render_chat(example, origin)
            case Completion() | Instruction() | Text():
                rendered = lay_out(example)
            case Preference():
                raise AssertionError("a pair is rendered one side at a time")
            case Tokens():
                raise AssertionError("a row of tokens has no text to render")
        _check_characters(rendered.text, origin)
        if self._train_on_all:
            return rendered.wholly_trained()
        empty = has_empty_answer(example) or (
            isinstance(example, Chat) and self._leaves_an_answer_out(example, rendered, origin)
        )
        return replace(rendered, empty_answer=empty)

    def _leaves_an_answer_out(self, chat: Chat, rendered: Rendered, origin: Origin) -> bool:
        """Whether the template writes nothing of an answer without content, a tool call say."""
        assert self._chats is not None
        for place in answers_without_content(chat):
            messages = list(chat.messages)
            messages[place] = {key: messages[place][key] for key in ("role", "content")}
            bare = replace(chat, messages=tuple(messages))
            try:
                if self._chats.render_whole(bare, origin).text == rendered.text:
                    return True
            except DataError:
                # It asks for the call: so it writes it.
                continue
        return False

    def _render_chat(self, chat: Chat, origin: Origin) -> Rendered:
        if self._chats is None:
            raise origin.error(
                "the row is a chat, but the tokenizer has no chat template; "
                "name one in data.chat_template"
            )
        if self._train_on_all:
            return self._chats.render_whole(chat, origin)
        return self._chats.render(chat, origin)

    def describe(self, example: Example) -> str:
        """For people: how rows like this one become text."""
        match example:
            case Tokens():
                return "taken as tokenised"
            case Text():
                return "plain text"
            case Preference():
                return self.describe(example.chosen)
            case Completion() | Instruction() | Chat():
                if self._chats is None:
                    return "plain layout, as the tokenizer has no chat template"
                chat = example if isinstance(example, Chat) else example.as_chat()
                marked = self._chats.has_markers(chat)
                return "chat template with generation markers" if marked else "chat template"


def _check_characters(text: str, origin: Origin) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise origin.error(
            f"the text holds half of a surrogate pair (\\u{ord(text[error.start]):x}), "
            "which is no character; write the whole pair"
        ) from error
