"""Plain lines where there is no terminal."""

from tlora.cli.output import aligned, print_table


def test_columns_are_aligned_and_lines_have_no_trailing_space() -> None:
    """However wide a cell is, it is not cut."""
    assert aligned([["a", "b"], ["x" * 90, ""]]) == ["a" + " " * 91 + "b", "x" * 90]


def test_a_table_is_plain_lines_when_it_is_not_on_a_terminal(capsys) -> None:
    """It can be read by other programs, and markup is text."""
    print_table(["job", "data"], [["a", "[bold]x"]])
    assert capsys.readouterr().out == "job  data\na    [bold]x\n"
