"""Token masks: the rule at the edges, plain layouts, begin and end tokens, rows of tokens."""

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from tlora.core.errors import DataError
from tlora.core.sequence import IGNORED
from tlora.data.examples import Chat, Completion, Instruction, Preference, Text, Tokens, turns
from tlora.data.render import Renderer
from tlora.data.rows import Origin
from tlora.data.tokenise import Encoder


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, and tokens that hold what often stands between question and answer."""
    letters = [*"abcdefghijklmnopqrstuvwxyz: \n", "</s>", ":y", "\ny", "\n\n"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    merges = [(":", "y"), ("\n", "y"), ("\n", "\n")]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


class CharacterTokenizer(PreTrainedTokenizer):
    """Written in Python, so it has no offsets; one token per character code."""

    vocab_size = 200

    def get_vocab(self):
        return {chr(code): code for code in range(200)} | self.added_tokens_encoder

    def _tokenize(self, text, **kwargs):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


@pytest.mark.parametrize(
    ("separator", "answer", "tokens", "num_trained"),
    [
        (":", "yes", ["q", ":y", "e", "s", "</s>"], 3),  # ":" is the prompt's, so its token is
        ("\n", "yes", ["q", "\ny", "e", "s", "</s>"], 4),  # only white space of it is the prompt's
        (
            "\n",
            "\nno",
            ["q", "\n\n", "n", "o", "</s>"],
            3,
        ),  # nothing visible: its first place counts
        (" ", "no", ["q", " ", "n", "o", "</s>"], 3),
    ],
)
def test_a_token_belongs_where_its_first_visible_character_is(
    separator, answer, tokens, num_trained, encode
):
    merging = merging_tokenizer()
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content + '"
        + separator.replace("\n", "\\n")
        + "' }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    row = encode(Completion("q", answer), merging, template)
    assert merging.convert_ids_to_tokens(row.input_ids) == tokens
    untrained = len(tokens) - num_trained
    assert (row.labels != IGNORED).tolist() == [False] * untrained + [True] * num_trained


def test_white_space_after_an_answer_does_not_draw_in_the_next_word(encode, assert_trained):
    """The answer ends with a line break that the tokenizer puts into the next question's token."""
    merging = merging_tokenizer()
    chat = turns([("user", "q"), ("assistant", "a\n"), ("user", "yes"), ("assistant", "b")])
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    row = encode(chat, merging, template)
    assert_trained(row.input_ids, row.labels, ["a", "b"], merging)


def test_a_space_at_the_end_of_the_prompt_does_not_cost_the_answer_its_first_word(
    tokenizer, encode, assert_trained
):
    """Whether the tokenizer counts that space into its offsets or leaves it out."""
    trimming = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()),
        eos_token="<|end|>",
    )
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert trimming("are you", return_offsets_mapping=True)["offset_mapping"][-1] == (4, 7)
    for each in (tokenizer, trimming):
        row = encode(Completion("how are ", "you today"), each)
        assert_trained(row.input_ids, row.labels, [" you today<|end|>"], each)


def test_characters_of_several_tokens_are_trained_whole(tokenizer, encode, assert_trained):
    row = encode(Completion("smile 🙂\n", "🙂 é 漢字"), tokenizer)
    assert_trained(row.input_ids, row.labels, ["🙂 é 漢字<|end|>"], tokenizer)


@pytest.mark.parametrize(
    ("prompt", "whole"),
    [("Hello", "Hello\nyou"), ("Hello\n", "Hello\nyou"), ("Hello ", "Hello you"), ("", "you")],
)
def test_a_completion_follows_on_a_new_line_unless_the_prompt_ends_in_space(
    prompt, whole, tokenizer, encode
):
    row = encode(Completion(prompt, "you"), tokenizer)
    assert tokenizer.decode(row.input_ids) == whole + "<|end|>"


def test_only_a_tokenizer_that_begins_texts_itself_gets_a_begin_token(
    tokenizer, beginning_tokenizer, encode, assert_trained
):
    for each, begin in ((tokenizer, ""), (beginning_tokenizer, "<|begin|>")):
        row = encode(Completion("Hello", "I am fine."), each)
        assert each.decode(row.input_ids) == begin + "Hello\nI am fine.<|end|>"
        assert_trained(row.input_ids, row.labels, ["I am fine.<|end|>"], each)


def test_begin_and_end_tokens_in_the_text_are_not_doubled(beginning_tokenizer, encode):
    row = encode(Text("<|begin|>Hello<|end|>"), beginning_tokenizer)
    assert beginning_tokenizer.decode(row.input_ids) == "<|begin|>Hello<|end|>"


def test_running_text_is_trained_from_its_first_token_to_the_end_token(
    beginning_tokenizer, encode, assert_trained
):
    row = encode(Text("The lazy dog."), beginning_tokenizer)
    assert_trained(row.input_ids, row.labels, ["The lazy dog.<|end|>"], beginning_tokenizer)


def test_instructions_without_a_template_get_headings(tokenizer, encode, assert_trained):
    example = Instruction(
        instruction="Add.", material="1 2", answer="3", system="Count.", history=(("Hi", "Hello"),)
    )
    row = encode(example, tokenizer)
    assert tokenizer.decode(row.input_ids) == (
        "Count.\n\n### Instruction:\nHi\n\n### Response:\nHello\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3<|end|>"
    )
    assert_trained(row.input_ids, row.labels, ["Hello", "3<|end|>"], tokenizer)


def test_instructions_and_completions_become_chats_where_there_is_a_template(
    templates, tokenizer, encode, assert_trained
):
    example = Instruction(instruction="Add.", material="1 2", answer="3", system="Count.")
    for each in (example, example.as_chat()):
        row = encode(each, tokenizer, templates.turns)
        assert tokenizer.decode(row.input_ids) == (
            "<|turn|>system\nCount.<|end|>\n<|turn|>user\nAdd.\n1 2<|end|>\n"
            "<|turn|>assistant\n3<|end|>\n"
        )
        assert_trained(row.input_ids, row.labels, ["3<|end|>"], tokenizer)
    row = encode(Completion("Hello", "Hi."), tokenizer, templates.turns)
    assert_trained(row.input_ids, row.labels, ["Hi.<|end|>"], tokenizer)


def test_a_tokenizer_without_offsets_tokenises_the_pieces(templates, encode, assert_trained):
    slow = CharacterTokenizer(eos_token="<|end|>")
    assert not slow.is_fast
    chat = turns([("user", "hello"), ("assistant", "hi"), ("user", "so?"), ("assistant", "yes")])
    row = encode(chat, slow, templates.turns)
    assert_trained(row.input_ids, row.labels, ["hi<|end|>", "yes<|end|>"], slow)
    row = encode(Completion("hello", "hi"), slow)
    assert slow.decode(row.input_ids) == "hello\nhi<|end|>"
    assert_trained(row.input_ids, row.labels, ["hi<|end|>"], slow)


def test_rows_of_tokens_are_taken_as_they_are(tokenizer, encode):
    row = encode(Tokens((5, 6, 7), (IGNORED, 9, IGNORED)), tokenizer)
    assert row.input_ids.tolist() == [5, 6, 7]
    assert row.labels.tolist() == [IGNORED, 9, IGNORED]
    assert encode(Tokens((5, 6, 7), None), tokenizer).labels.tolist() == [5, 6, 7]


@pytest.mark.parametrize("ids", [(1, 10**6), (-1, 2), (1, 2**70)])
def test_tokens_outside_the_vocabulary_are_refused(ids, tokenizer, encode):
    with pytest.raises(DataError, match=r"rows.jsonl:7: input_ids holds .* vocabulary"):
        encode(Tokens(ids, None), tokenizer)


@pytest.mark.parametrize(
    "example",
    [
        Tokens((5,), None),
        Tokens((5, 6), (5, IGNORED)),
        Chat(({"role": "user", "content": "Hello"},), (False,)),
    ],
)
def test_a_row_without_a_token_to_train_on_is_refused(example, templates, tokenizer, encode):
    """The first token never carries loss, so a row that trains only that one trains nothing."""
    with pytest.raises(DataError, match=r"rows.jsonl:7: the row has no token to train on"):
        encode(example, tokenizer, templates.turns)


def test_a_pair_becomes_two_rows_as_each_answer_alone_would(tokenizer, encode):
    """The chosen one first, each with the prompt; what is trained on are the answers."""
    chosen, rejected = Completion("Hello", "how are you"), Completion("Hello", "fine")
    encoder = Encoder(tokenizer, Renderer(tokenizer, template=None, train_on="completion"))
    pair = encoder.encode([(Preference(chosen, rejected), Origin("rows.jsonl", 7))])
    for found, example in zip(pair, (chosen, rejected), strict=True):
        alone = encode(example, tokenizer)
        assert found.input_ids.tolist() == alone.input_ids.tolist()
        assert found.labels.tolist() == alone.labels.tolist()


def test_half_a_surrogate_pair_is_refused(tokenizer, encode):
    with pytest.raises(DataError, match=r"rows.jsonl:7: .*surrogate pair \(\\ud83d\)"):
        encode(Completion("Hello", "\ud83d"), tokenizer)
