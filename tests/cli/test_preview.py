"""`tlora preview` shows what is trained."""

from tlora.cli.preview import marked


def test_without_colour_trained_text_stands_between_brackets():
    """Also when it ends the row, and when it comes in several runs."""
    pieces = [("Q: ", False), ("hi", False), ("there", True), ("</s>", True), (" Q2", False)]
    assert marked(pieces, plain=True).plain == "Q: hi[[there</s>]] Q2"
    assert marked([("a", True)], plain=True).plain == "[[a]]"


def test_with_colour_the_text_is_unchanged_and_the_trained_part_styled():
    """Colour and underline: not by colour alone."""
    text = marked([("prompt ", False), ("answer", True)], plain=False)
    assert text.plain == "prompt answer"
    assert [(span.start, span.end, str(span.style)) for span in text.spans] == [
        (7, 13, "green underline")
    ]
