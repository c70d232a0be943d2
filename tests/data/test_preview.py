"""Previews show every character once, with what is trained on."""

from tlora.core.job import DataSpec
from tlora.data.preview import preview_row, preview_rows
from tlora.data.rows import Origin, Row


def test_the_pieces_are_the_text_and_the_trained_ones_are_the_answer(
    tokenizer, beginning_tokenizer
):
    row = Row({"prompt": "Hello 🙂", "completion": "I am 漢字."}, Origin("rows.jsonl", 1))
    for each, begin in ((tokenizer, ""), (beginning_tokenizer, "<|begin|>")):
        pieces = preview_row(row, DataSpec(path="rows.jsonl"), each)
        assert "".join(piece.text for piece in pieces) == begin + "Hello 🙂\nI am 漢字.<|end|>"
        trained = "".join(piece.text for piece in pieces if piece.trained)
        assert trained == "I am 漢字.<|end|>"
        assert len(pieces) > 8


def test_rows_of_tokens_are_decoded(tokenizer):
    ids = tokenizer.encode("Hello you")
    row = Row({"input_ids": ids, "labels": [-100] * (len(ids) - 1) + ids[-1:]}, Origin("a", 1))
    pieces = preview_row(row, DataSpec(path="rows.jsonl"), tokenizer)
    assert "".join(piece.text for piece in pieces) == "Hello you"
    assert [piece.trained for piece in pieces] == [False] * (len(ids) - 1) + [True]


def test_the_first_rows_of_a_dataset_are_shown_with_their_places(write_lines, templates, tokenizer):
    path = write_lines([{"prompt": f"Hello {n}", "completion": "Hi."} for n in range(5)])
    data = DataSpec(path=str(path), chat_template=templates.turns)
    previews = list(preview_rows(data, tokenizer, limit=2))
    assert [str(preview.origin) for preview in previews] == [f"{path}:1", f"{path}:2"]
    shown = "".join(piece.text for piece in previews[1].pieces)
    assert shown == "<|turn|>user\nHello 1<|end|>\n<|turn|>assistant\nHi.<|end|>\n"
    assert previews[0].num_tokens >= len(previews[0].pieces)
