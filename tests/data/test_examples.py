"""What rows become, whatever their shape."""

import pytest

from tlora.data.examples import (
    Chat,
    Completion,
    Example,
    Instruction,
    Preference,
    Text,
    Tokens,
    has_empty_answer,
    turns,
)

CALL = {"type": "function", "function": {"name": "now", "arguments": {}}}


def answered(**message: object) -> Chat:
    return Chat(({"role": "user", "content": ""}, {"role": "assistant", **message}), (False, True))


EMPTY: dict[str, Example] = {
    "completion": Completion("Hi", ""),
    "white space": Completion("Hi", " \n"),
    "instruction": Instruction("Say", "", ""),
    "history": Instruction("Say", "", "it", history=(("a", "b"), ("c", ""))),
    "chat": answered(content=""),
    "named": answered(content="", name="helper"),
    "parts": answered(content=[{"type": "text", "text": " "}]),
    "no parts": answered(content=[]),
    "an earlier turn": turns([("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "c")]),
    "chosen": Preference(Completion("Hi", ""), Completion("Hi", "no")),
    "rejected": Preference(Completion("Hi", "yes"), answered(content="")),
}
FULL: dict[str, Example] = {
    "completion": Completion("", "Hi"),
    "instruction": Instruction("", "", "it", history=(("", "b"),)),
    "chat": answered(content="Hi"),
    "tool call": answered(content="", tool_calls=[CALL]),
    "thoughts": answered(content="", reasoning_content="Hm."),
    "parts": answered(content=[{"type": "text", "text": ""}, {"type": "text", "text": "Hi"}]),
    "other parts": answered(content=[{"type": "image"}]),
    "not trained": Chat(({"role": "assistant", "content": ""},), (False,)),
    "text": Text(" "),
    "tokens": Tokens((2,), None),
    "preference": Preference(Completion("", "yes"), Completion("", "no")),
}


@pytest.mark.parametrize("example", EMPTY.values(), ids=EMPTY)
def test_an_answer_that_says_nothing_is_found(example: Example) -> None:
    """In any shape, and also if it is one of several."""
    assert has_empty_answer(example)


@pytest.mark.parametrize("example", FULL.values(), ids=FULL)
def test_whatever_a_template_may_write_out_is_an_answer(example: Example) -> None:
    """Empty prompts are nobody's business here, nor are answers that are not learnt."""
    assert not has_empty_answer(example)
