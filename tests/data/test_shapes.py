"""Rows of every shape, what they become, and what is said of rows that do not fit."""

import json

import pytest

from tlora.core.errors import DataError
from tlora.core.job import DataSpec
from tlora.data.examples import Chat, Completion, Instruction, Preference, Text, Tokens, turns
from tlora.data.rows import Origin, Row
from tlora.data.shapes import detect, read_examples

QUESTION = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hi."}
CHAT = Chat((QUESTION, ANSWER), (False, True))
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
WITH_TOOLS = Chat((QUESTION, ANSWER), (False, True), tuple(TOOLS))
TWO_TURNS = turns([("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")])


def read(*values: dict[str, object], **settings: object):
    """The examples of a dataset with these rows."""
    data = DataSpec(path="rows.jsonl", **settings)  # type: ignore[arg-type]
    rows = [Row(value, Origin("rows.jsonl", line)) for line, value in enumerate(values, start=1)]
    return [example for example, _ in read_examples(rows, data, detect(rows[0], data))]


def complaint(*values: dict[str, object], **settings: object) -> str:
    with pytest.raises(DataError) as caught:
        read(*values, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("shape", "values", "expected"),
    [
        ("chat", {"messages": [QUESTION, ANSWER]}, CHAT),
        ("chat", {"messages": json.dumps([QUESTION, ANSWER])}, CHAT),
        (
            "chat",
            {"messages": [QUESTION | {"name": "Ann", "weight": None}, ANSWER | {"weight": 0}]},
            Chat((QUESTION | {"name": "Ann"}, ANSWER), (False, False)),
        ),
        (
            "sharegpt",
            {
                "system": "Be brief.",
                "conversations": [
                    {"from": "human", "value": "Hello"},
                    {"from": "gpt", "value": "Hi.", "weight": 0},
                    {"from": "observation", "value": "sun"},
                    {"from": "bing", "value": "Sunny."},
                ],
            },
            Chat(
                (
                    {"role": "system", "content": "Be brief."},
                    QUESTION,
                    ANSWER,
                    {"role": "tool", "content": "sun"},
                    {"role": "assistant", "content": "Sunny."},
                ),
                (False, False, False, False, True),
            ),
        ),
        ("alpaca", {"instruction": "a", "output": "b"}, Instruction("a", "", "b")),
        (
            "alpaca",
            {
                "instruction": "a",
                "input": "m",
                "output": "b",
                "system": "s",
                "history": [["q", "r"]],
            },
            Instruction("a", "m", "b", "s", (("q", "r"),)),
        ),
        ("prompt_completion", {"prompt": "a", "completion": "b"}, Completion("a", "b")),
        ("prompt_completion", {"prompt": "a", "response": "[]", "id": 3}, Completion("a", "[]")),
        ("prompt_completion", {"prompt": [QUESTION], "completion": [ANSWER]}, CHAT),
        (
            "prompt_completion",
            {"prompt": [QUESTION, ANSWER, QUESTION], "completion": "Hi."},
            Chat((QUESTION, ANSWER, QUESTION, ANSWER), (False, False, False, True)),
        ),
        (
            "prompt_completion",
            {"prompt": json.dumps([QUESTION]), "completion": json.dumps([ANSWER])},
            CHAT,
        ),
        (
            "prompt_completion",
            {"prompt": "a", "completion": '[{"role": "chair", "content": "b"}]'},
            Completion("a", '[{"role": "chair", "content": "b"}]'),
        ),
        ("text", {"text": "a"}, Text("a")),
        ("tokens", {"input_ids": [1, 2]}, Tokens((1, 2), None)),
        ("tokens", {"input_ids": [1, 2], "labels": [-100, 2]}, Tokens((1, 2), (-100, 2))),
        (
            "tokens",
            {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]},
            Tokens((1, 2, 3), (-100, 2, -100)),
        ),
        (
            "tokens",
            {"input_ids": [1, 2], "labels": [1, 2], "completion_mask": [0, 1]},
            Tokens((1, 2), (1, 2)),
        ),
        (
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            Preference(Completion("a", "b"), Completion("a", "c")),
        ),
        (
            "preference",
            {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER]},
            Preference(CHAT, CHAT),
        ),
        (
            "preference",
            {
                "prompt": json.dumps([QUESTION]),
                "chosen": json.dumps([ANSWER]),
                "rejected": json.dumps([ANSWER]),
            },
            Preference(CHAT, CHAT),
        ),
        (
            "preference",
            {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [ANSWER], "tools": TOOLS},
            Preference(WITH_TOOLS, WITH_TOOLS),
        ),
        (
            "preference",
            {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER], "tools": TOOLS},
            Preference(WITH_TOOLS, WITH_TOOLS),
        ),
    ],
)
def test_rows_are_recognised_by_their_keys(shape, values, expected):
    data = DataSpec(path="rows.jsonl")
    detection = detect(Row(values, Origin("rows.jsonl", 1)), data)
    assert detection.shape == shape
    assert detection.text.startswith(f"{shape} (keys ")
    assert read(values) == [expected]
    assert read(values, shape=shape) == [expected]


def test_columns_rename_keys_before_the_shape_is_looked_for():
    """The old names are gone, or a renamed Alpaca row would still be one."""
    row = {"instruction": "a", "output": "b"}
    columns = {"prompt": "instruction", "completion": "output"}
    assert read(row, columns=columns) == [Completion("a", "b")]


def test_an_optional_column_may_be_missing_in_some_rows():
    columns = {"input": "context"}
    rows = [
        {"instruction": "a", "output": "b"},
        {"instruction": "a", "output": "b", "context": "c"},
    ]
    assert read(*rows, columns=columns) == [Instruction("a", "", "b"), Instruction("a", "c", "b")]
    assert "'context', which no row" in complaint(rows[0], columns=columns)


def test_tool_calls_are_passed_on_with_their_arguments_as_objects():
    call = {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    asking = {"role": "assistant", "content": None, "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "weather"}}]
    (chat,) = read({"messages": [QUESTION, asking], "tools": json.dumps(tools)})
    assert chat.tools == tuple(tools)
    assert chat.trained == (False, True)
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert call["function"]["arguments"] == '{"city": "Oslo"}', "the user's row was changed"


def test_a_row_of_another_shape_is_named_with_what_was_expected():
    message = complaint({"prompt": "a", "completion": "b"}, {"text": "c"})
    assert message.startswith("rows.jsonl:2: expected a row of shape prompt_completion")
    assert "prompt, completion or response" in message
    assert "got the keys 'text'" in message


def test_unknown_rows_are_answered_with_what_is_known():
    message = complaint({"question": "a", "answer": "b"})
    assert message.startswith("rows.jsonl:1: cannot tell")
    for part in ("'question', 'answer'", "chat: messages", "data.columns", "{prompt: question"):
        assert part in message


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"promt": "question"}, "'promt' is not one of our keys"),
        (
            {"prompt": "querstion"},
            "maps prompt to 'querstion', but the row has the keys 'question'",
        ),
    ],
)
def test_a_wrong_column_map_says_what_is_wrong(columns, expected):
    assert expected in complaint({"question": "a", "answer": "b"}, columns=columns)


def calling(arguments: str) -> dict[str, object]:
    call = {"function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": "Hello"}, "must be a list"),
        ({"messages": "[" * 10**6}, "must be a list"),
        ({"messages": [QUESTION, calling("7" * 5000)]}, "tool arguments that are not JSON"),
        ({"messages": ["Hello"]}, "message 1 of messages must be an object"),
        ({"messages": [{"role": "assitant", "content": "a"}]}, "the role 'assitant'; known roles"),
        ({"messages": [{"role": "user", "content": None}]}, "neither content nor tool_calls"),
        ({"messages": [{"role": "user", "content": 3}]}, "needs a text as its content"),
        ({"messages": [QUESTION, ANSWER | {"weight": 0.5}]}, "the weight 0.5"),
        ({"messages": [QUESTION], "tools": "weather"}, "tools must be a list"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "is from 'alien'; known speakers"),
        ({"conversations": [{"from": "human", "value": 1}]}, "needs a text as its value"),
        ({"instruction": "a", "output": None}, "output must be a text"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "history must be"),
        ({"prompt": 3, "completion": "b"}, "prompt must be a text or a list of messages"),
        ({"text": ""}, "text is empty"),
        ({"text": None}, "text must be a text"),
        ({"input_ids": [1, "a"]}, "input_ids must be a list of whole numbers"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels must be as many as input_ids"),
        ({"input_ids": [1, 2], "completion_mask": [1]}, "completion_mask must be as many as"),
    ],
)
def test_values_that_make_no_sense_are_named_by_their_row(values, expected):
    message = complaint(values)
    assert message.startswith("rows.jsonl:1: ")
    assert expected in message
