"""The tests of the pages can fail: each way in which a page may be wrong is refused."""

from pathlib import Path

import pytest
from support.page_runner import Shell, run_page
from support.pages import Block, PageError, check_output, read_page


def page(tmp_path: Path, text: str) -> list[Block]:
    file = tmp_path / "page.md"
    # The fences would end this file's own block in some editors.
    file.write_text(text.replace("'''", "```"))
    return read_page(file, "page.md")


GOOD = {
    "commands and output": (
        "'''bash\ncat > rows.txt <<'END'\na\nb\nEND\nwc -l < rows.txt\n'''\n\n'''text\n2\n'''\n"
    ),
    "tlora": "'''bash\ntlora --version\n'''\n\n'''text\ntlora 0.1.0\n'''\n",
    "python": "'''python\nimport tlora\nprint(tlora.__version__)\n'''\n\n'''text\n0.1.0\n'''\n",
    "python from the shell": "'''bash\npython - <<'END'\nprint(1 + 1)\nEND\n'''\n'''text\n2\n'''\n",
    "a pipe": "'''bash\ntlora schema | grep -c schema\n'''\n",
    "an expected failure": (
        "<!-- test: exits with 2 -->\n'''bash\ntlora check gone.yaml\n'''\n"
        "'''text\nerror: gone.yaml: ...\n'''\n"
    ),
    "Ctrl-C": (
        '<!-- test: Ctrl-C after "now" -->\n'
        "'''bash\npython -c 'import time; print(\"now\", flush=True); time.sleep(60)'\n'''\n"
    ),
    "a job file": "'''yaml\nbase: demo\njobs: [{name: a, data: org/rows}]\n'''\n",
    "part of a job file": "'''yaml\ndata: {path: org/rows}\nlora: {r: 4}\n'''\n",
    "a block left out": "<!-- not run by tests: needs a GPU -->\n'''bash\nno-such-command\n'''\n",
}

BAD = {
    "no such verb": "'''bash\ntlora trian jobs.yaml\n'''\n",
    "no such option": "'''bash\ntlora schema --quiet\n'''\n",
    "no such command": "'''bash\nno-such-command\n'''\n",
    "a failure in the middle": "'''bash\nfalse\ntrue\n'''\n",
    "a failure in a pipe": "'''bash\ntlora trian | cat\n'''\n",
    "a failure that does not come": "<!-- test: exits with 2 -->\n'''bash\ntrue\n'''\n",
    "Python that raises": "'''python\nimport no_such_module\n'''\n",
    "other output": "'''bash\necho one\n'''\n\n'''text\ntwo\n'''\n",
    "words that never come": '<!-- test: Ctrl-C after "now" -->\n' + "'''bash\nexit 130\n'''\n",
    "an unknown key": "'''yaml\nbase: demo\njobs: [{name: a, data: org/rows, rnk: 4}]\n'''\n",
    "an unknown key in a part": "'''yaml\nlora: {rnk: 4}\n'''\n",
    "a missing file": "'''yaml\ndata: rows.jsonl\n'''\n",
    "a comment with a slip": "<!-- not run by test: no reason -->\n'''bash\ntrue\n'''\n",
    "a block left out without a reason": "<!-- not run by tests: -->\n'''bash\ntrue\n'''\n",
    "a language that nobody runs": "'''zsh\ntlora --version\n'''\n",
    "commands without a language": "'''\ntlora train jobs.yaml\n'''\n",
    "output of nothing": "'''text\nhello\n'''\n",
    "a fence that stays open": "'''bash\ntrue\n",
}


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_a_right_page_passes(text: str, shell: Shell, tmp_path: Path) -> None:
    """So that the refusals below mean something."""
    run_page(page(tmp_path, text), tmp_path, shell)


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_wrong_page_is_refused(text: str, shell: Shell, tmp_path: Path) -> None:
    """With the page and the line."""
    with pytest.raises(PageError, match=r"page\.md:\d+: "):
        run_page(page(tmp_path, text), tmp_path, shell)


def shown(text: str) -> Block:
    return Block("page.md", 1, "text", text)


OUTPUT = """reading
a: loss 1.2345, 1,234 tokens/s, 0:12 left
b: 40 steps
done in /tmp/x/runs
"""


@pytest.mark.parametrize(
    "text",
    [
        OUTPUT,
        "a: loss 1.2355, 999 tokens/s, 1:01 left\n",
        "reading\n...\ndone in .../runs\n",
        "b: 40 steps\n",
    ],
)
def test_output_may_differ_as_it_does_between_machines(text: str) -> None:
    """Speeds, times, rounding, folders."""
    check_output(shown(text), OUTPUT)


@pytest.mark.parametrize(
    "text",
    [
        "a: loss 2.2345, 1,234 tokens/s, 0:12 left\n",
        "b: 41 steps\n",
        "b: 4\n",
        "40 steps\n",
        "reading\nb: 40 steps\n",
        "done in .../run\n",
        "reading ...\ndone\n",
    ],
)
def test_output_may_not_differ_otherwise(text: str) -> None:
    """Another number, a line left out without a word, half a line."""
    with pytest.raises(PageError):
        check_output(shown(text), OUTPUT)


def test_progress_by_the_clock_may_come_anywhere() -> None:
    """A slow machine tells it between any two lines; a page that shows some must have it."""
    late = OUTPUT.replace("b: 40", "[    5 s] 3,824 tokens/s | a 14/60\nb: 40")
    check_output(shown(OUTPUT), late)
    check_output(shown("[    9 s] 1 tokens/s | a 14/60\nb: 40 steps\n"), late)
    with pytest.raises(PageError):
        check_output(shown("[    9 s] 1 tokens/s | a 14/60\nb: 40 steps\n"), OUTPUT)
