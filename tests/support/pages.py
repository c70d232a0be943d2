"""The fenced blocks of a Markdown page, and what its hidden comments ask of a test.

A comment directly before a block may say one of

    <!-- not run by tests: WHY -->
    <!-- test: exits with 2 -->
    <!-- test: Ctrl-C after "WORDS OF THE OUTPUT" -->
"""

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)\s*$")
COMMENT = re.compile(r"^ *<!-- (?P<text>.*) -->\s*$")
NOT_RUN = re.compile(r"not run by tests: (\S.*)")
EXIT_CODE = re.compile(r"test: exits with (\d+)")
INTERRUPT = re.compile(r'test: Ctrl-C after "(.+)"')
COMMAND = re.compile(r"^(\$ |tlora |make |pip |python |vllm |export )", re.MULTILINE)

LANGUAGES = ("bash", "python", "yaml", "text", "json", "")
"""`text` is the output of the block before it; a fence without a language is a picture."""


class PageError(AssertionError):
    """The page promises what is not so."""


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    not_run: str | None = None
    """Why the tests leave it out."""

    exit_code: int = 0
    interrupt_after: str | None = None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """The file that the block says it is, in a comment on its first line."""
        named = re.match(r"# (\S+\.(?:ya?ml|py|sh))\s*\n", self.text)
        return named[1] if named else None


def read_page(path: Path, name: str) -> list[Block]:
    blocks = parse(path.read_text(encoding="utf-8"), name)
    for before, block in zip([None, *blocks], blocks, strict=False):
        check_block(before, block)
    return blocks


def parse(text: str, page: str) -> list[Block]:
    blocks: list[Block] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opened = FENCE.match(lines[at])
        if opened is None:
            if lines[at].lstrip().startswith("```"):
                raise PageError(f"{page}:{at + 1}: a fence that is not understood: {lines[at]}")
            at += 1
            continue
        indent = len(opened["indent"])
        end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == "```"), None)
        if end is None:
            raise PageError(f"{page}:{at + 1}: the fence is never closed")
        body = "\n".join(line[indent:] for line in lines[at + 1 : end]) + "\n"
        comment = comment_before(lines, at)
        blocks.append(with_comment(Block(page, at + 1, opened["language"], body), comment))
        at = end + 1
    return blocks


def comment_before(lines: list[str], fence: int) -> str | None:
    above = next((line for line in reversed(lines[:fence]) if line.strip()), "")
    found = COMMENT.match(above)
    return found["text"] if found else None


def with_comment(block: Block, comment: str | None) -> Block:
    given = (block.page, block.line, block.language, block.text)
    if comment is None:
        return block
    if found := NOT_RUN.fullmatch(comment):
        return Block(*given, not_run=found[1])
    if found := EXIT_CODE.fullmatch(comment):
        return Block(*given, exit_code=int(found[1]))
    if found := INTERRUPT.fullmatch(comment):
        return Block(*given, exit_code=130, interrupt_after=found[1])
    raise PageError(f"{block.place}: a comment that is not understood: {comment}")


def check_block(before: Block | None, block: Block) -> None:
    """Refuses what would slip through unseen."""
    if block.language not in LANGUAGES:
        raise PageError(f"{block.place}: '{block.language}' blocks are not tested; use {LANGUAGES}")
    if block.language == "" and COMMAND.search(block.text):
        raise PageError(f"{block.place}: commands in a fence without a language; write ```bash")
    if block.language == "text" and (before is None or before.language not in ("bash", "python")):
        raise PageError(f"{block.place}: output that follows no command")


def check_output(shown: Block, output: str) -> None:
    """The shown text stands in the output.

    `...` stands for anything on a line, or for any lines where it stands alone. Speeds and times
    may be any; numbers with a decimal point may differ by a quarter, as they do between machines.
    Progress that is told every few seconds may come anywhere, if the page shows none.
    """
    pattern, numbers = output_pattern(shown.text)
    lines = plain(output)
    if not PROGRESS.search(shown.text):
        lines = PROGRESS.sub("", lines)
    found = re.search(f"^{pattern}", lines, re.MULTILINE)
    if found is None:
        raise PageError(f"{shown.place}: shown is\n{shown.text}\nbut the output is\n{output}")
    for number, group in zip(numbers, found.groups(), strict=True):
        if abs(float(group) - number) > max(0.25 * abs(number), 0.02):
            raise PageError(f"{shown.place}: shown is {number}, but the output has {group}")


def plain(output: str) -> str:
    return "\n".join(line.rstrip() for line in output.splitlines()) + "\n"


PROGRESS = re.compile(r"^\[ *\d+ s\] .*\n", re.MULTILINE)

PIECE = re.compile(
    r"(?P<speed>[\d,]+ tokens/s)|(?P<time>\b\d+:\d\d\b)|(?P<clock>\[ *\d+ s\])"
    r"|(?P<decimal>(?<![\w.])\d+\.\d+(?![\w.]))|(?P<any>\.\.\.)"
)
PATTERNS = {
    "speed": r"[\d,]+ tokens/s",
    "time": r"\d+:\d\d",
    "clock": r"\[ *\d+ s\]",
    "decimal": r"(\d+\.\d+)",
    "any": r"[^\n]*",
}


def output_pattern(text: str) -> tuple[str, list[float]]:
    """A regular expression for the shown text, and the numbers that its groups should be near."""
    pattern, numbers = "", []
    for line in plain(text).splitlines():
        if line == "...":
            pattern += r"(?:[^\n]*\n)*?"
            continue
        at = 0
        for piece in PIECE.finditer(line):
            pattern += re.escape(line[at : piece.start()]) + PATTERNS[str(piece.lastgroup)]
            numbers += [float(piece[0])] if piece.lastgroup == "decimal" else []
            at = piece.end()
        pattern += re.escape(line[at:]) + r"\n"
    return pattern, numbers
