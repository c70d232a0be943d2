"""Plan files."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.config import dump_plan, load_plan
from tlora.core.errors import SpecError, SpecErrors
from tlora.core.plan import Plan


def test_a_plan_file_is_read_in_yaml_and_json(tmp_path: Path) -> None:
    """What is not given has its default."""
    (tmp_path / "p.yaml").write_text("replicas: 2\nfsdp: 4\nbucket: 8192\nadapters: rank_local\n")
    fields = {"replicas": 2, "fsdp": 4, "bucket": 8192, "adapters": "rank_local"}
    (tmp_path / "p.json").write_text(json.dumps(fields))
    expected = Plan(replicas=2, fsdp=4, bucket=8192, adapters="rank_local")
    assert load_plan(tmp_path / "p.yaml") == expected
    assert load_plan(tmp_path / "p.json") == expected
    assert load_plan(fields) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp: 4", "plan.bucket: is missing"),
        ("bucket: 512\nreplica: 2", "plan.replica: no such field; did you mean 'replicas'?"),
        ("bucket: many", "plan.bucket: must be a whole number, got 'many'"),
        ("bucket: 0", "plan.bucket: must be at least 1, got 0"),
        ("bucket: 512\nadapters: ranklocal", "plan.adapters: must be one of .*did you mean"),
        ("bucket: 512\nspread: [a]", "plan.spread: .* needs plan.adapters: mixed"),
        ("bucket: 512\nadapters: mixed\nspread: [a, b, a]", "plan.spread: names a job twice"),
        ("bucket: 512\nkept_layers: 3", "plan.kept_layers: must be 0 where nothing is sharded"),
        ("- 1", "plan: must be a mapping"),
        ("", "plan: must be a mapping"),
        ("bucket: [", "p.yaml:"),
    ],
)
def test_what_is_wrong_in_a_plan_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    """With the field and the fix."""
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(SpecError, match=message):
        load_plan(tmp_path / "p.yaml")


def test_a_file_that_does_not_say_where_adapters_are_has_jobs_on_one_rank() -> None:
    """What a file written for another plan would say is in it."""
    assert load_plan({"replicas": 2, "bucket": 512}).adapters == "rank_local"
    assert "adapters: data_parallel" in dump_plan(Plan(replicas=2, bucket=512))


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    """Three things; and a file that is not there is one."""
    with pytest.raises(SpecErrors, match="3 problems"):
        load_plan({"fsdp": "x", "shards": 2})
    with pytest.raises(SpecError, match=r"no\.yaml: cannot be read: No such file"):
        load_plan(tmp_path / "no.yaml")


@given(
    st.integers(1, 1000),
    st.integers(2, 8),
    st.integers(0, 9),
    st.sampled_from(["rank_local", "data_parallel", "mixed"]),
    st.lists(st.sampled_from(["a", "1e-4", "on", "x y"]), max_size=3, unique=True),
)
def test_a_written_plan_reads_back_equal(
    bucket: int, fsdp: int, kept: int, adapters: str, names: list[str]
) -> None:
    """Names that YAML would take for numbers too."""
    plan = Plan(
        bucket=bucket,
        fsdp=fsdp,
        kept_layers=kept,
        adapters=adapters,  # type: ignore[arg-type]
        spread=tuple(names) if adapters == "mixed" else (),
    )
    text = dump_plan(plan)
    from tlora.config.plans import plan_of
    from tlora.config.reading import parse_yaml

    assert plan_of(parse_yaml(text, "plan")) == plan
