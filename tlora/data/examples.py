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


def turns(spoken: list[tuple[str, str]]) -> Chat:
    """A chat of (role, text) turns in which every assistant turn is trained on."""
    return Chat(
        messages=tuple({"role": role, "content": text} for role, text in spoken),
        trained=tuple(role == "assistant" for role, _ in spoken),
    )
