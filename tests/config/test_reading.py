"""Files: syntax, encodings, and the traps of YAML."""

from pathlib import Path
from typing import cast

import numpy as np
import pytest

from tlora.config import load_spec
from tlora.config.reading import parse_yaml
from tlora.core.errors import SpecError

HEAD = "base: org/model\ndefaults: {data: org/rows}\n"


def load_text(folder: Path, text: str, name: str = "jobs.yaml"):
    file = folder / name
    file.write_text(text)
    return load_spec(file)


def message_of(folder: Path, text: str, name: str = "jobs.yaml") -> str:
    with pytest.raises(SpecError) as caught:
        load_text(folder, text, name)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{folder}/", "")


@pytest.mark.parametrize(
    "name", ["123", "on", "no", "yes", "true", "1.10", "007", "1e5", "2024-01-31", "0x1f"]
)
def test_a_job_name_is_the_text_that_was_written(tmp_path: Path, name: str) -> None:
    """YAML would read each of these as something else."""
    assert load_text(tmp_path, f"{HEAD}jobs: [{{name: {name}}}]").jobs[0].name == name


def test_numbers_and_truths_are_read_where_they_are_wanted(tmp_path: Path) -> None:
    """`1e-4` and `yes` included."""
    text = f"{HEAD}jobs: [{{name: a, lr: 1e-4, use_rslora: yes, r: 010, max_grad_norm: ~}}]"
    job = load_text(tmp_path, text).jobs[0]
    assert (job.train.learning_rate, job.lora.use_rslora, job.lora.r) == (1e-4, True, 10)
    assert job.train.max_grad_norm is None


def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    """PyYAML would keep the last in silence."""
    text = f"{HEAD}jobs:\n  - name: a\n    lora:\n      r: 4\n      r: 8\n"
    assert message_of(tmp_path, text) == ("jobs.yaml:7:7: the key 'r' stands twice in one mapping")


def test_a_key_that_stands_twice_in_json_is_refused(tmp_path: Path) -> None:
    """As in YAML."""
    message = message_of(tmp_path, '{"base": "a", "base": "b"}', "jobs.json")
    assert message == "jobs.json: the key 'base' stands twice in one mapping"


def test_merge_keys_and_anchors_are_understood(tmp_path: Path) -> None:
    """What the mapping itself says wins over what it merges."""
    text = (
        f"{HEAD}jobs:\n  - &first {{name: a, lora: &small {{r: 4, alpha: 8}}}}\n"
        "  - {<<: *first, name: b}\n  - {name: c, lora: {<<: *small, r: 5}}\n"
    )
    jobs = load_text(tmp_path, text).jobs
    assert [(job.name, job.lora.r, job.lora.lora_alpha) for job in jobs] == [
        ("a", 4, 8),
        ("b", 4, 8),
        ("c", 5, 8),
    ]


def test_anchors_that_unfold_without_bound_are_refused(tmp_path: Path) -> None:
    """A few lines can stand for billions of values."""
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 12)]
    message = message_of(tmp_path, "\n".join(["l0: &l0 [x, x]", *levels]))
    assert message.startswith("jobs.yaml:") and "anchors unfold" in message


def test_an_anchor_that_holds_itself_is_refused(tmp_path: Path) -> None:
    """Reading it would never end."""
    assert "an anchor that holds itself" in message_of(tmp_path, "jobs: &x [*x]")


@pytest.mark.parametrize(
    ("text", "place", "part"),
    [
        ("base: x\n\tjobs: []", "jobs.yaml:2:1: ", "spaces, not tabs"),
        ("base: [x\njobs: []", "jobs.yaml:2:5: ", "expected ',' or ']'"),
        ("base: *nowhere", "jobs.yaml:1:7: ", "undefined alias"),
        ("base: !!python/object:os.system x", "jobs.yaml:1:7: ", "could not determine"),
        ("a: 1\n---\nb: 2", "jobs.yaml:2:1: ", "another document"),
        ("base: x\njobs: \x00", "jobs.yaml:2: ", "does not allow"),
        ("[" * 2000, "jobs.yaml: ", "nested too deeply"),
        ("", "jobs.yaml: ", "must be a mapping"),
        ("just text", "jobs.yaml: ", "must be a mapping"),
    ],
)
def test_a_file_that_is_not_yaml_is_refused_in_one_line_with_its_place(
    tmp_path: Path, text: str, place: str, part: str
) -> None:
    """File, line and column first, as editors understand."""
    message = message_of(tmp_path, text)
    assert message.startswith(place) and part in message


def test_a_file_that_is_not_json_is_refused_with_its_place(tmp_path: Path) -> None:
    """Tabs are fine there, missing commas are not."""
    assert message_of(tmp_path, '{\n\t"a": 1\n\t"b"}', "x.json").startswith("x.json:3:2: ")
    assert "nested too deeply" in message_of(tmp_path, "[" * 100_000, "x.json")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, a directory, or not UTF-8."""
    (tmp_path / "latin.yaml").write_bytes(b"base: caf\xe9")
    for name, part in [
        ("x.yaml", "no such file"),
        ("latin.yaml", "UTF-8"),
        (".", "is a directory"),
    ]:
        with pytest.raises(SpecError, match=part):
            load_spec(tmp_path / name)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    """Some editors write one."""
    (tmp_path / "jobs.yaml").write_text(f"{HEAD}jobs: [{{name: a}}]", encoding="utf-8-sig")
    assert len(load_spec(tmp_path / "jobs.yaml").jobs) == 1


def test_python_values_of_other_types_are_taken_for_what_they_are() -> None:
    """Tuples, paths and numpy numbers come from callers, not from files."""
    job = {"name": "a", "data": Path("org/rows"), "r": np.int64(4), "lr": np.float32(0.5)}
    loaded = load_spec({"base": "org/model", "jobs": (job,)}).jobs[0]
    assert (loaded.data.path, loaded.lora.r, loaded.train.learning_rate) == ("org/rows", 4, 0.5)


def test_only_null_is_resolved_in_yaml() -> None:
    """Every other plain scalar stays text until its field is known."""
    tree = cast(dict[str, object], parse_yaml("{a: null, b: ~, c: , d: true, e: 1.5}", "x"))
    assert tree == {"a": None, "b": None, "c": None, "d": "true", "e": "1.5"}
