"""Masks of chats: exactly what the assistant wrote and its end token, whatever the template."""

import numpy as np
import pytest

from tlora.core.errors import DataError
from tlora.core.sequence import IGNORED
from tlora.data.examples import Chat, Message, turns

TWO_TURNS = turns(
    [
        ("system", "Be brief."),
        ("user", "Hello, how are you?"),
        ("assistant", "I am fine, thank you."),
        ("user", "How many singers are there?"),
        ("assistant", "There are twelve."),
    ]
)
ASKING_A_TOOL: tuple[Message, ...] = (
    {"role": "user", "content": "How is it in Oslo?"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
        ],
    },
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny."},
)
ANSWERS = ["I am fine, thank you.<|end|>", "There are twelve.<|end|>"]


@pytest.mark.parametrize("name", ["turns", "headers", "merged_system"])
def test_exactly_the_answers_and_their_end_tokens_are_trained(
    name, templates, tokenizer, encode, assert_trained
):
    row = encode(TWO_TURNS, tokenizer, getattr(templates, name))
    assert_trained(row.input_ids, row.labels, ANSWERS, tokenizer)


def test_answers_are_found_where_the_text_before_them_moves(
    templates, tokenizer, encode, assert_trained
):
    """The space that the template puts before an answer goes with the answer's first word."""
    row = encode(TWO_TURNS, tokenizer, templates.moving_system)
    assert_trained(row.input_ids, row.labels, [" " + answer for answer in ANSWERS], tokenizer)


def test_every_answer_ends_with_its_end_token_where_the_whole_chat_has_an_end_of_its_own(
    templates, tokenizer, encode, assert_trained
):
    row = encode(TWO_TURNS, tokenizer, templates.closed)
    expected = [ANSWERS[0], ANSWERS[1] + "\n<|header|>"]
    assert_trained(row.input_ids, row.labels, expected, tokenizer)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_that_is_off_by_one_is_noticed(shift, templates, tokenizer, encode, assert_trained):
    row = encode(TWO_TURNS, tokenizer, templates.turns)
    trained = np.roll(row.labels != IGNORED, shift)
    broken = np.where(trained, row.input_ids, IGNORED)
    with pytest.raises(AssertionError):
        assert_trained(row.input_ids, broken, ANSWERS, tokenizer)


def test_thinking_is_trained_where_the_template_keeps_it(
    templates, tokenizer, encode, assert_trained
):
    """Earlier answers are rendered without it, so rendering prefixes alone would not find them."""
    chat = turns(
        [
            ("user", "Hello"),
            ("assistant", "<think>\nA greeting.\n</think>\n\nHi."),
            ("user", "How many?"),
            ("assistant", "<think>\nCount.\n</think>\n\nTwelve."),
        ]
    )
    row = encode(chat, tokenizer, templates.thinking)
    last = "<think>\nCount.\n</think>\n\nTwelve.<|end|>"
    assert_trained(row.input_ids, row.labels, ["Hi.<|end|>", last], tokenizer)


def test_an_empty_thought_that_the_template_adds_is_trained_in_the_last_answer_only(
    templates, tokenizer, encode, assert_trained
):
    row = encode(TWO_TURNS, tokenizer, templates.thinking)
    expected = [ANSWERS[0], "<think>\n\n</think>\n\n" + ANSWERS[1]]
    assert_trained(row.input_ids, row.labels, expected, tokenizer)


@pytest.mark.parametrize("name", ["turns", "thinking"])
def test_tool_calls_are_trained_and_tool_results_are_not(
    name, templates, tokenizer, encode, assert_trained
):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    chat = Chat(
        messages=(
            {"role": "user", "content": "How is it in Oslo?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "sunny"},
            {"role": "assistant", "content": "It is sunny."},
        ),
        trained=(False, True, False, True),
        tools=({"name": "weather"},),
    )
    row = encode(chat, tokenizer, getattr(templates, name))
    called = "[call weather Oslo]" if name == "turns" else "[call weather]"
    answer = "It is sunny.<|end|>"
    if name == "thinking":
        answer = "<think>\n\n</think>\n\n" + answer
    assert_trained(row.input_ids, row.labels, [called + "<|end|>", answer], tokenizer)
    assert ("Tools:" in tokenizer.decode(row.input_ids)) == (name == "turns")


def test_a_template_that_writes_results_of_tools_into_an_answer_is_refused(
    templates, tokenizer, encode
):
    """They would be trained on with it."""
    chat = Chat(ASKING_A_TOOL, trained=(False, True, False, True))
    whole = encode(chat, tokenizer, templates.results_inside, "all")
    assert "[call weather][result sunny]Let me see.<|end|>" in tokenizer.decode(whole.input_ids)
    with pytest.raises(DataError, match="which part of the rendered chat is message 2"):
        encode(chat, tokenizer, templates.results_inside)


def test_a_template_that_takes_the_row_is_not_said_to_refuse_it(templates, tokenizer, encode):
    """It refuses the row with another result in it, by which it would be found out."""
    strict = (
        "{%- for message in messages if message.role == 'tool' and message.content != 'sunny' -%}"
        "{{- raise_exception('no weather') -}}{%- endfor -%}"
    )
    messages = (*ASKING_A_TOOL, {"role": "user", "content": "Thanks."})
    chat = Chat(messages, trained=(False, True, False, True, False))
    encode(chat, tokenizer, templates.thinking)
    encode(chat, tokenizer, strict + templates.thinking, "all")
    with pytest.raises(DataError, match="which part of the rendered chat is message 2"):
        encode(chat, tokenizer, strict + templates.thinking)


def test_a_template_that_takes_arguments_for_text_gets_text(
    templates, tokenizer, encode, assert_trained
):
    chat = Chat(ASKING_A_TOOL, trained=(False, True, False, True))
    row = encode(chat, tokenizer, templates.text_arguments)
    expected = ['Let me see.[call {"city": "Oslo"}]<|end|>', "It is sunny.<|end|>"]
    assert_trained(row.input_ids, row.labels, expected, tokenizer)


@pytest.mark.parametrize(("name", "empty"), [("turns", False), ("headers", True)])
def test_a_tool_call_that_the_template_leaves_out_is_an_empty_answer(
    name, empty, templates, tokenizer, encode
):
    """Only its end would be trained, which is said of such rows."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    template = getattr(templates, name)
    messages = (
        {"role": "user", "content": "How is it in Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    )
    chat = Chat(messages, trained=(False, True, False, True))
    assert encode(chat, tokenizer, template).empty_answer == empty
    untrained = Chat(messages, trained=(False, False, False, True))
    assert not encode(untrained, tokenizer, template).empty_answer


def test_an_answer_of_weight_zero_is_not_trained(templates, tokenizer, encode, assert_trained):
    chat = Chat(TWO_TURNS.messages, trained=(False, False, False, False, True))
    row = encode(chat, tokenizer, templates.turns)
    assert_trained(row.input_ids, row.labels, ANSWERS[1:], tokenizer)


def test_generation_markers_decide_where_there_are_any(
    templates, tokenizer, encode, assert_trained
):
    row = encode(TWO_TURNS, tokenizer, templates.marked)
    expected = ["I am fine, thank you.", "There are twelve."]
    assert_trained(row.input_ids, row.labels, expected, tokenizer)
    chat = Chat(TWO_TURNS.messages, trained=(False, False, True, False, False))
    row = encode(chat, tokenizer, templates.marked)
    assert_trained(row.input_ids, row.labels, expected[:1], tokenizer)


def test_a_chat_may_open_with_the_assistant(templates, tokenizer, encode, assert_trained):
    chat = turns([("assistant", "Welcome!"), ("user", "Hello"), ("assistant", "Hi.")])
    row = encode(chat, tokenizer, templates.turns)
    assert_trained(row.input_ids, row.labels, ["Welcome!<|end|>", "Hi.<|end|>"], tokenizer)


def test_content_in_parts_goes_to_the_template_as_parts(tokenizer, encode, assert_trained):
    template = (
        "{% for m in messages %}<|turn|>{{ m.role }} "
        "{% for part in m.content %}{{ part.text }}{% endfor %}<|end|>{% endfor %}"
    )
    part = [{"type": "text", "text": "Hello there"}]
    chat = Chat(
        ({"role": "user", "content": part}, {"role": "assistant", "content": part}), (False, True)
    )
    row = encode(chat, tokenizer, template)
    # This template has no generation prompt, so the header is the model's to write, too.
    expected = ["<|turn|>assistant Hello there<|end|>"]
    assert_trained(row.input_ids, row.labels, expected, tokenizer)


def test_a_template_that_changes_its_surroundings_is_refused(templates, tokenizer, encode):
    with pytest.raises(DataError, match=r"rows.jsonl:7: .*message 3, .*generation"):
        encode(TWO_TURNS, tokenizer, templates.echo)


def test_a_row_that_the_template_refuses_is_named(templates, tokenizer, encode):
    chat = turns([("user", "Hello"), ("user", "Hello?"), ("assistant", "Hi.")])
    with pytest.raises(DataError, match=r"rows.jsonl:7: .*must take turns"):
        encode(chat, tokenizer, templates.merged_system)


def test_train_on_all_trains_every_token(templates, tokenizer, encode):
    row = encode(TWO_TURNS, tokenizer, templates.turns, train_on="all")
    assert (row.labels == row.input_ids).all()


def test_the_begin_token_of_a_template_is_not_doubled(templates, beginning_tokenizer, encode):
    row = encode(TWO_TURNS, beginning_tokenizer, templates.headers)
    assert row.input_ids.tolist().count(beginning_tokenizer.bos_token_id) == 1


def test_a_chat_without_any_template_is_refused(tokenizer, encode):
    with pytest.raises(DataError, match=r"rows.jsonl:7: .*no chat template"):
        encode(TWO_TURNS, tokenizer)
