"""Out and in again, and what changed between two jobs."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tlora.config import changed_fields, dump_spec, load_spec, resolved
from tlora.core.job import (
    JOB_NAME,
    BaseSpec,
    DataSpec,
    DType,
    EngineSpec,
    EvalSpec,
    Isolation,
    JobSpec,
    LoraSpec,
    OverLength,
    RunSpec,
    SaveSpec,
    Schedule,
    Shape,
    Tracker,
    TrainSpec,
)

# Names that load_spec leaves as they are: no file of the machine has them.
hub_ids = st.from_regex(r"[a-z]{9}/[a-z]{9}-[0-9]", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
counts = st.integers(1, 10**9)
fractions = st.floats(0, 1, exclude_max=True)
optional_counts = st.none() | counts
modules = st.from_regex(r"[a-z]{1,5}_proj", fullmatch=True)


def choice(literal: object) -> st.SearchStrategy[str]:
    return st.sampled_from(get_args(literal))


loras = st.builds(
    LoraSpec,
    r=counts,
    lora_alpha=st.floats(1e-6, 1e6),
    lora_dropout=fractions,
    target_modules=st.just("all-linear")
    | modules.map(lambda name: rf".*\.{name}")
    | st.lists(modules, min_size=1, max_size=3).map(tuple),
    use_rslora=st.booleans(),
)
trains = st.builds(
    TrainSpec,
    learning_rate=st.floats(1e-3, 1),
    min_lr=st.floats(0, 1e-3),
    lr_scheduler_type=choice(Schedule),
    decay_steps=counts | fractions,
    warmup_steps=counts | fractions,
    num_train_epochs=st.floats(1e-3, 1e3),
    max_steps=optional_counts,
    batch_size=counts,
    max_length=st.integers(2, 10**6),
    over_length=choice(OverLength),
    max_grad_norm=st.none() | st.floats(1e-6, 10),
    adam_epsilon=st.floats(1e-12, 1e-3),
    seed=st.integers(0, 2**64 - 1),
    weight=st.floats(1e-3, 1e3),
)
datas = st.builds(
    DataSpec,
    path=hub_ids | st.lists(hub_ids, min_size=1, max_size=3).map(tuple),
    eval_path=st.none() | hub_ids,
    shape=choice(Shape),
    columns=st.dictionaries(texts, texts, max_size=3),
    chat_template=st.none() | texts.map(lambda text: f"{{{{ {text} }}}}"),
)
jobs = st.builds(
    JobSpec,
    name=st.from_regex(JOB_NAME, fullmatch=True)
    | st.sampled_from(["on", "123", "1.10", "null", "1e5", "2024-01-01", "true"]),
    data=datas,
    lora=loras,
    train=trains,
    eval=st.builds(EvalSpec, split=counts | fractions, steps=optional_counts),
    save=st.builds(SaveSpec, steps=optional_counts, total_limit=optional_counts),
    init_from=st.none(),
)
runs = st.builds(
    RunSpec,
    base=st.builds(
        BaseSpec,
        model=hub_ids,
        revision=st.none() | texts,
        dtype=choice(DType),
        # Not in FP8, which exact isolation refuses.
        quantization=st.sampled_from(["none", "nf4"]),
    ),
    jobs=st.lists(jobs, min_size=1, max_size=3, unique_by=lambda job: job.name).map(tuple),
    engine=st.builds(
        EngineSpec,
        nano_batch_tokens=st.just("auto") | counts,
        isolation=choice(Isolation),
        gradient_checkpointing=st.booleans(),
        compile=st.just("auto") | st.booleans(),
        max_parallel=optional_counts,
    ),
    report_to=st.lists(choice(Tracker), unique=True, max_size=3).map(tuple),
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(spec=runs)
def test_a_run_written_and_read_again_is_the_same_run(tmp_path: Path, spec: RunSpec) -> None:
    """As YAML in a file and as plain values."""
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_spec(spec), encoding="utf-8")
    assert load_spec(file) == spec
    assert load_spec(resolved(spec)) == spec


def test_a_resolved_run_speaks_canonical_names_only() -> None:
    """Aliases, short forms and defaults are gone."""
    tree = {"base": "org/m", "defaults": {"lr": 1e-3}, "jobs": [{"name": "a", "data": "org/rows"}]}
    out = resolved(load_spec(tree))
    assert list(out) == ["base", "jobs", "engine", "report_to"]
    text = dump_spec(load_spec(tree))
    assert "learning_rate: 0.001" in text and "\n- name: a\n  data:\n    path: org/rows" in text


def test_equal_jobs_have_no_changed_fields() -> None:
    """The usual case of a resumed run."""
    job = JobSpec(name="a", data=DataSpec(path="x"))
    assert changed_fields(job, JobSpec(name="a", data=DataSpec(path="x"))) == []


def test_changed_fields_are_named_by_their_path() -> None:
    """In the order of the declaration, as deep as they go."""
    old = JobSpec(name="a", data=DataSpec(path="x"))
    new = replace(
        old, data=DataSpec(path="x", columns={"a": "b"}), lora=LoraSpec(r=8), init_from="y"
    )
    assert changed_fields(old, new) == ["data.columns", "lora.r", "init_from"]
