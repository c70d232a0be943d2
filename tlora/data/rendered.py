"""A row as text with the spans that are trained on: what rendering hands to tokenising."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rendered:
    """The whole text of one row."""

    text: str

    spans: tuple[tuple[int, int], ...]
    """Character ranges [start, end) that are trained on, in order, apart from each other."""

    framed: bool = False
    """Whether the begin and end tokens are still to be put around the text."""

    empty_answer: bool = False
    """Whether one of the spans is that of an answer that says nothing: its end, if anything."""

    def __post_init__(self) -> None:
        edges = [edge for span in self.spans for edge in span]
        assert edges == sorted(edges), f"spans out of order: {self.spans}"
        assert not edges or (edges[0] >= 0 and edges[-1] <= len(self.text)), "span outside the text"

    def wholly_trained(self) -> "Rendered":
        return Rendered(self.text, ((0, len(self.text)),), self.framed)
