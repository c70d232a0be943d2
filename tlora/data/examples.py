"""What rows of any shape become: a few plain values that the tokeniser knows how to lay out."""

from dataclasses import dataclass

Message = dict[str, object]
"""One message as chat templates take it: role, content and perhaps tool_calls, name, ..."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for a chat template."""

    messages: tuple[Message, ...]

    trained: tuple[bool, ...]
    """For each message, whether the model learns to write it; only assistant messages can be."""

    tools: tuple[object, ...] | None = None
    """Tool descriptions, handed to the template as they are."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and the text that should follow it."""

    prompt: str
    completion: str

    def as_chat(self) -> Chat:
        return turns([("user", self.prompt), ("assistant", self.completion)])


@dataclass(frozen=True, slots=True)
class Instruction:
    """A task, perhaps with material to work on, earlier turns and a system message."""

    instruction: str
    material: str
    answer: str
    system: str = ""
    history: tuple[tuple[str, str], ...] = ()

    @property
    def request(self) -> str:
        return f"{self.instruction}\n{self.material}" if self.material else self.instruction

    def as_chat(self) -> Chat:
        spoken = [("system", self.system)] if self.system else []
        for question, answer in self.history:
            spoken += [("user", question), ("assistant", answer)]
        return turns([*spoken, ("user", self.request), ("assistant", self.answer)])


@dataclass(frozen=True, slots=True)
class Text:
    """Running text, every token of which is trained on."""

    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row that was tokenised elsewhere."""

    input_ids: tuple[int, ...]

    labels: tuple[int, ...] | None
    """None: every token is trained on."""


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to the same prompt, of which the first is the better one."""

    chosen: Chat | Completion
    rejected: Chat | Completion


Example = Chat | Completion | Instruction | Text | Tokens | Preference


def has_empty_answer(example: Example) -> bool:
    """Whether the model would learn to end an answer before it has begun: nothing, or white space,
    where it should write."""
    match example:
        case Chat(messages, trained):
            return any(
                learnt and _says_nothing(message)
                for message, learnt in zip(messages, trained, strict=True)
            )
        case Completion(_, completion):
            return _is_blank(completion)
        case Instruction():
            return any(map(_is_blank, [example.answer, *(answer for _, answer in example.history)]))
        case Text() | Tokens():
            return False
        case Preference(chosen, rejected):
            return has_empty_answer(chosen) or has_empty_answer(rejected)


def answers_without_content(chat: Chat) -> list[int]:
    """Which trained messages say what they say by something else, a tool call for instance."""
    return [
        place
        for place, (message, learnt) in enumerate(zip(chat.messages, chat.trained, strict=True))
        if learnt and _is_blank(message["content"]) and not _says_nothing(message)
    ]


def _says_nothing(message: Message) -> bool:
    """Neither content nor a tool call, thoughts or whatever else a template may write out."""
    around = ("role", "name", "content")
    said = any(value for key, value in message.items() if key not in around)
    return not said and _is_blank(message["content"])


def _is_blank(content: object) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, dict) and _is_blank(part.get("text")) for part in content)
    return isinstance(content, str) and not content.strip()


def turns(spoken: list[tuple[str, str]]) -> Chat:
    """A chat of (role, text) turns in which every assistant turn is trained on."""
    return Chat(
        messages=tuple({"role": role, "content": text} for role, text in spoken),
        trained=tuple(role == "assistant" for role, _ in spoken),
    )
