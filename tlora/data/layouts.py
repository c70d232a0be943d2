"""How rows are laid out as text for a tokenizer that has no chat template.

A completion follows its prompt on a new line, unless the prompt ends in white space already.
Instructions get headings in words, the layout that instruction-tuned models without a template are
used to.
"""

from tlora.data.examples import Completion, Instruction, Text
from tlora.data.rendered import Rendered

INSTRUCTION_HEADING = "### Instruction:\n"
MATERIAL_HEADING = "### Input:\n"
ANSWER_HEADING = "### Response:\n"


def lay_out(example: Completion | Instruction | Text) -> Rendered:
    """Text to be framed by the begin and end tokens; the answers are trained on."""
    match example:
        case Text(text):
            return Rendered(text, ((0, len(text)),), framed=True)
        case Completion(prompt, completion):
            between = "" if not prompt or prompt[-1].isspace() else "\n"
            return _joined([(prompt + between, False), (completion, True)])
        case Instruction():
            return _joined(_instruction_pieces(example))


def _instruction_pieces(example: Instruction) -> list[tuple[str, bool]]:
    pieces = [(f"{example.system}\n\n", False)] if example.system else []
    for question, answer in example.history:
        pieces.append((f"{INSTRUCTION_HEADING}{question}\n\n{ANSWER_HEADING}", False))
        pieces.append((answer, True))
        pieces.append(("\n\n", False))
    pieces.append((f"{INSTRUCTION_HEADING}{example.instruction}\n\n", False))
    if example.material:
        pieces.append((f"{MATERIAL_HEADING}{example.material}\n\n", False))
    pieces.append((ANSWER_HEADING, False))
    pieces.append((example.answer, True))
    return pieces


def _joined(pieces: list[tuple[str, bool]]) -> Rendered:
    spans: list[tuple[int, int]] = []
    end = 0
    for text, trained in pieces:
        start, end = end, end + len(text)
        if trained:
            spans.append((start, end))
    return Rendered("".join(text for text, _ in pieces), tuple(spans), framed=True)
