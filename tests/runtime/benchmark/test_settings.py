"""Options as people write them."""

from pathlib import Path

import pytest

from tlora.core.errors import SpecError
from tlora.runtime.benchmark.settings import ARMS, HELP, Settings, read_lengths, settings_of


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shape": "llama-9b"}, "--shape: 'llama-9b' is neither one of llama-8b, llama-1b, demo"),
        ({"ranks": ["4,0"]}, "--ranks: must be at least 1, got 0"),
        ({"ranks": ["4;8"]}, "--ranks: must be whole numbers with commas between, got '4;8'"),
        ({"batch": ["-1"]}, "--batch: must be at least 1"),
        ({"jobs": 0}, "--jobs: must be at least 1"),
        ({"repeats": 0}, "--repeats: must be at least 1"),
        ({"seconds": 0}, "--seconds: must be at least 1"),
        ({"arms": ["fused,frozen"]}, "--arms: 'frozen' is none of fused, own, compiled"),
        ({"dropout": 1.0}, "--dropout: must be in [0, 1)"),
        ({"dtype": "int4"}, "--dtype: must be one of auto"),
        ({"quantization": "int4"}, "--quantization: must be one of none, fp8, nf4, got int4"),
        ({"lengths": "nowhere.txt"}, "--lengths: 'nowhere.txt' is neither a length nor a file"),
        ({"lengths": "1"}, "--lengths: must be a length of 2 tokens or more"),
        ({"json": Path("/nowhere/x.jsonl")}, "--json: there is no directory /nowhere"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_wrong(given, message) -> None:
    """Before torch is loaded or anything measured."""
    with pytest.raises(SpecError) as caught:
        settings_of(given)
    assert str(caught.value).startswith(message)


def test_a_bad_line_of_a_length_file_is_named_by_its_number(tmp_path) -> None:
    """Empty lines are nothing; a word and a length of one token are errors."""
    file = tmp_path / "lengths.txt"
    file.write_text("12\n\n7\n")
    assert read_lengths(str(file)) == (12, 7)
    for bad in ("twelve", "1", "3.5"):
        file.write_text(f"12\n\n{bad}\n")
        with pytest.raises(SpecError, match=rf"lengths.txt:3: .* got '{bad}'"):
            read_lengths(str(file))
    file.write_text("\n")
    with pytest.raises(SpecError, match="holds no lengths"):
        read_lengths(str(file))


def test_the_named_lengths_come_with_the_package() -> None:
    """So that the default works from an installed wheel."""
    lengths = read_lengths("short_mixed")
    assert len(lengths) > 100 and min(lengths) >= 2 and max(lengths) < 256


def test_every_option_has_a_help_text() -> None:
    """The verb and the module show the same."""
    assert set(HELP) == set(Settings.__slots__)


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ({}, [*ARMS]),
        ({"arms": ["peft, own"]}, ["fused", "own", "peft"]),
        ({"arms": ["own,peft,compiled"], "skip_peft": True}, ["fused", "own", "compiled"]),
        (
            {"skip_peft": True, "skip_compile": True},
            ["fused", "own", "one-at-a-time", "plain", "processes"],
        ),
    ],
)
def test_arms_are_those_asked_for_and_not_skipped_in_the_order_of_a_round(given, kinds) -> None:
    """The fused one is always among them."""
    assert settings_of(given).kinds == kinds


def test_a_list_may_be_said_in_parts() -> None:
    """In their order; a part that is wrong is named with the others."""
    given = {"ranks": ["4,8", "2"], "batch": ["1", "3"], "arms": ["own", "peft, plain"]}
    found = settings_of(given)
    assert (found.ranks, found.batch) == ((4, 8, 2), (1, 3))
    assert found.kinds == ["fused", "own", "plain", "peft"]
    assert settings_of({"ranks": None}) == settings_of({}) == Settings()
    with pytest.raises(SpecError, match=r"--ranks: must be whole numbers .*, got '4,x'"):
        settings_of({"ranks": ["4", "x"]})
