"""A whole run: from a job file to adapters that PEFT loads, and everything left beside them."""

import json
import warnings
from io import StringIO
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from support.models import largest_error, packed, super_logits, tiny_model
from support.runs import job_file, write_rows
from transformers import AutoModelForCausalLM

from tlora.config import load_spec
from tlora.core.job import EngineSpec, RunSpec
from tlora.core.sequence import TokenSequence
from tlora.data.prepare import prepare
from tlora.model.loading import load_base, load_tokenizer
from tlora.model.peft_format import read_adapter
from tlora.model.super_model import SuperModel
from tlora.model.targets import find_targets
from tlora.runtime import exporting
from tlora.runtime.environment import cache_directory
from tlora.runtime.progress import ProgressLines
from tlora.runtime.training import RunResult, compiling_lines, train

# As in tests/model/test_super_model.py: measured noise up to 1e-6 of the largest logit.
TOLERANCE = 1e-5
METRICS = [
    *("v", "kind", "job", "step", "total_steps", "epoch", "loss", "lr", "grad_norm"),
    *("target_tokens", "tokens_seen", "sequences_seen", "nano_batches", "tokens_per_s", "time"),
]


def run(spec: RunSpec, output: Path) -> tuple[RunResult, str]:
    """The result and what a person would have seen."""
    seen = StringIO()
    result = train(spec, output=output, progress=ProgressLines(seen))
    return result, seen.getvalue()


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def spec(base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """Three jobs that differ in everything that is cheap to differ in."""
    data = tmp_path_factory.mktemp("data")
    first, second = (str(write_rows(data / f"{n}.jsonl", 16, seed=n)) for n in (0, 50))
    return load_spec(
        job_file(
            base,
            {"name": "wide", "data": {"path": first}, "eval": {"split": 4, "steps": 2}},
            {
                "name": "narrow",
                "data": {"path": first},
                "lora": {"r": 1, "lora_alpha": 0.5, "target_modules": ["q_proj", "v_proj"]},
                "train": {"batch_size": 5, "num_train_epochs": 1, "max_steps": None, "seed": 4},
            },
            {
                "name": "top",
                "data": {"path": second},
                "lora": {"r": 3, "target_modules": r".*\.1\..*", "use_rslora": True},
                "train": {"max_steps": 4, "batch_size": 1, "lr_scheduler_type": "linear"},
            },
        )
    )


@pytest.fixture(scope="module")
def finished(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, str]:
    return run(spec, tmp_path_factory.mktemp("runs") / "run")


def test_every_job_completes_and_leaves_its_files(finished) -> None:
    """Those of the run directory's description, and no rubbish."""
    result, _ = finished
    assert result.failed == [] and set(result.jobs) == {"wide", "narrow", "top"}
    root = result.output
    assert {path.name for path in root.iterdir()} == {
        "run.json",
        "resolved.yaml",
        "events.jsonl",
        "report.html",
        "data.txt",
        "state.sqlite",
        "wide",
        "narrow",
        "top",
    }
    for job in result.jobs:
        best = {"best"} if job == "wide" else set()
        files = {path.name for path in (root / job).iterdir()}
        assert files == {"adapter", "metrics.jsonl", "result.json"} | best
        assert {path.name for path in (root / job / "adapter").iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
            "README.md",
        }


def test_the_run_says_what_it_ran_with(finished, spec: RunSpec) -> None:
    """`run.json` names base, jobs and versions; `resolved.yaml` is a job file for the same run."""
    root = finished[0].output
    about = json.loads((root / "run.json").read_text())
    assert about["v"] == 1 and about["base"] == spec.base.model
    assert about["jobs"] == ["wide", "narrow", "top"] and about["device"] == "cpu"
    assert set(about["versions"]) == {"tlora", "torch", "transformers", "python"}
    assert load_spec(yaml.safe_load((root / "resolved.yaml").read_text())) == spec


def test_metrics_have_a_line_per_step_with_every_field(finished) -> None:
    """And one per evaluation: before the first step, every two, and at the end."""
    root = finished[0].output
    steps = {"wide": 3, "narrow": 4, "top": 4}
    for job, total in steps.items():
        records = lines_of(root / job / "metrics.jsonl")
        assert all(list(record) == METRICS for record in records)
        assert {(record["v"], record["job"]) for record in records} == {(1, job)}
        trained = [record for record in records if record["kind"] == "train"]
        assert [record["step"] for record in trained] == list(range(1, total + 1))
        assert {record["total_steps"] for record in trained} == {total}
        for record in trained:
            assert record["loss"] > 0 and record["grad_norm"] > 0 and record["tokens_per_s"] > 0
            assert record["target_tokens"] > 0 and record["nano_batches"] >= 1
        seen = [record["tokens_seen"] for record in trained]
        assert seen == sorted(set(seen))
    evaluated = [r for r in lines_of(root / "wide" / "metrics.jsonl") if r["kind"] == "eval"]
    assert [record["step"] for record in evaluated] == [0, 2, 3]
    narrow = lines_of(root / "narrow" / "metrics.jsonl")
    assert [record["sequences_seen"] for record in narrow] == [5, 10, 15, 16]
    assert narrow[-1]["epoch"] == 1.0


def test_results_agree_with_the_metrics(finished) -> None:
    """Status, steps, losses and where the adapters are."""
    result, _ = finished
    for job, summary in result.jobs.items():
        written = json.loads((result.output / job / "result.json").read_text())
        records = lines_of(result.output / job / "metrics.jsonl")
        trained = [record for record in records if record["kind"] == "train"]
        assert written["status"] == summary.status == "completed" and written["reason"] is None
        assert written["steps"] == written["total_steps"] == len(trained)
        for field in ("loss", "tokens_seen", "sequences_seen"):
            assert written[field] == trained[-1][field]
        assert written["adapter"] == f"{job}/adapter"
    wide = result.jobs["wide"]
    losses = {
        record["step"]: record["loss"]
        for record in lines_of(result.output / "wide" / "metrics.jsonl")
        if record["kind"] == "eval"
    }
    assert (wide.first_eval_loss, wide.eval_loss) == (losses[0], losses[3])
    assert wide.best_eval_loss == min(losses[2], losses[3]) == losses[wide.best_step]
    assert wide.best_adapter == "wide/best" and (result.output / "wide/best").is_dir()
    assert result.jobs["top"].best_adapter is None


def test_events_tell_of_every_nano_batch_and_every_end(finished) -> None:
    """In order, with the tokens that each job had in it."""
    result, _ = finished
    events = lines_of(result.output / "events.jsonl")
    kinds = [event["kind"] for event in events]
    assert kinds[:3] == ["attached"] * 3 and kinds.count("ended") == 3
    batches = [event for event in events if event["kind"] == "nano_batch"]
    assert any(len(event["tokens"]) > 1 for event in batches), "jobs share nano-batches"
    for job, summary in result.jobs.items():
        trained = [e["tokens"].get(job, 0) for e in batches if e["purpose"] == "train"]
        assert sum(trained) == summary.tokens_seen


def test_a_person_is_told_what_happens_and_how_to_serve_it(finished) -> None:
    """Each job's data, its end and its adapter; the commands of one, and where the others' are."""
    result, seen = finished
    for job, summary in result.jobs.items():
        assert f"{job}: completed" in seen and str(result.output / job / "adapter") in seen
        assert f"--lora-modules {job}=" in summary.serving[0]
        written = json.loads((result.output / job / "result.json").read_text())
        assert written["serving"] == summary.serving
    assert seen.count("vllm serve") == 1 and "result.json" in seen
    assert str(result.output / "report.html") in seen
    assert "training 3 jobs together" in seen


@pytest.mark.parametrize("job", ["wide", "narrow", "top"])
def test_peft_gives_the_logits_of_the_trained_adapter(finished, spec: RunSpec, job: str) -> None:
    """And they are not the base's: something was learnt."""
    directory = finished[0].output / job / "adapter"
    model = SuperModel(load_base(spec.base, torch.device("cpu")))
    adapter = read_adapter(directory, model.targets)
    model.attach(job, adapter.weights, scale=adapter.scale)
    ids = torch.arange(40) * 5 % 250 + 3
    batch = packed({job: [TokenSequence(ids.numpy(), ids.numpy())]})
    fused = super_logits(model, batch)[job]
    plain = AutoModelForCausalLM.from_pretrained(spec.base.model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = plain(input_ids=ids[None]).logits[0, :-1]
        peft = PeftModel.from_pretrained(plain, str(directory)).eval()
        found = peft(input_ids=ids[None]).logits[0, :-1]
    assert largest_error(found, fused) < TOLERANCE
    assert largest_error(found, base) > 100 * TOLERANCE


def test_continuing_from_an_adapter_starts_where_it_ended(
    base: Path, rows: Path, tmp_path: Path
) -> None:
    """The first loss of the second run, before any step, is the last of the first run to the bit:
    the weights came through the files whole. Another start gives another loss."""
    job = {"name": "a", "data": {"path": str(rows)}, "eval": {"split": 4}}
    first, _ = run(load_spec(job_file(base, job)), tmp_path / "first")
    start = {"init_from": str(tmp_path / "first" / "a" / "adapter")}
    second, _ = run(load_spec(job_file(base, {**job, **start})), tmp_path / "second")
    assert second.jobs["a"].first_eval_loss == first.jobs["a"].eval_loss
    assert first.jobs["a"].first_eval_loss != first.jobs["a"].eval_loss


def test_the_first_step_from_an_adapter_has_the_loss_that_adapter_gives(
    base: Path, rows: Path, tmp_path: Path
) -> None:
    """Computed here from the exported files, on the rows of the first batch."""
    job = {"name": "a", "data": {"path": str(rows)}, "train": {"batch_size": 20, "max_steps": 1}}
    run(load_spec(job_file(base, job)), tmp_path / "first")
    spec = load_spec(
        job_file(base, {**job, "init_from": str(tmp_path / "first" / "a" / "adapter")})
    )
    second, _ = run(spec, tmp_path / "second")
    model = SuperModel(load_base(spec.base, torch.device("cpu")))
    adapter = read_adapter(tmp_path / "first" / "a" / "adapter", model.targets)
    model.attach("a", adapter.weights, scale=adapter.scale)
    data = prepare(spec.jobs[0], load_tokenizer(spec.base), cache_dir=cache_directory()).train
    batch = packed({"a": [data[i] for i in range(len(data))]})
    logits = super_logits(model, batch)["a"]
    expected = torch.nn.functional.cross_entropy(logits, batch.targets)
    # One mean over some hundred tokens in two orders: rounding of float32.
    assert second.jobs["a"].loss == pytest.approx(float(expected), rel=1e-6)


def test_a_job_that_fails_leaves_the_others_as_if_it_had_never_been(
    base: Path, rows: Path, tmp_path: Path
) -> None:
    """A learning rate of 1e30 overflows after a step; the neighbour's adapter is what it is alone,
    to rounding, and the failed job leaves its reason and no adapter."""
    good = {"name": "good", "data": {"path": str(rows)}}
    bad = {"name": "bad", "data": {"path": str(rows)}, "train": {"learning_rate": 1e30}}
    alone, _ = run(load_spec(job_file(base, good)), tmp_path / "alone")
    together, seen = run(load_spec(job_file(base, bad, good)), tmp_path / "together")
    assert together.failed == ["bad"] and "bad: failed" in seen
    failed = json.loads((tmp_path / "together/bad/result.json").read_text())
    assert failed["status"] == "failed" and failed["adapter"] is None
    assert "step 2" in failed["reason"]
    assert not (tmp_path / "together/bad/adapter").exists()
    targets = find_targets(tiny_model())
    found, expected = (
        read_adapter(tmp_path / name / "good" / "adapter", targets).weights
        for name in ("together", "alone")
    )
    # Measured: not one bit. Other shapes of a nano-batch may round otherwise, by some 1e-7.
    for path, pair in found.items():
        assert torch.allclose(pair.a, expected[path].a, rtol=0, atol=1e-6)
        assert torch.allclose(pair.b, expected[path].b, rtol=0, atol=1e-6)
    assert alone.jobs["good"].loss == pytest.approx(together.jobs["good"].loss, rel=1e-5)


def test_an_adapter_that_cannot_be_written_fails_its_job_only(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk under one job: the other has its adapter."""
    honest = exporting.export_adapter

    def full(directory: Path, *others, **settings) -> None:
        if "/a/" in str(directory):
            raise OSError("No space left on device")
        honest(directory, *others, **settings)

    monkeypatch.setattr(exporting, "export_adapter", full)
    jobs = [{"name": name, "data": {"path": str(rows)}} for name in ("a", "b")]
    result, _ = run(load_spec(job_file(base, *jobs)), tmp_path / "run")
    assert result.failed == ["a"] and "No space left" in result.jobs["a"].reason
    assert [path.name for path in (tmp_path / "run/b/adapter").glob("*.safetensors")]
    assert not list((tmp_path / "run/a").glob(".*")) and not (tmp_path / "run/a/adapter").exists()


def test_whoever_waits_for_compiled_layers_is_told() -> None:
    """On a GPU unless it is turned off, elsewhere only if it is asked for."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    said = [
        bool(compiling_lines(EngineSpec(compile=asked), device))
        for asked in ("auto", True, False)
        for device in (cpu, gpu)
    ]
    assert said == [False, True, True, True, False, False]
