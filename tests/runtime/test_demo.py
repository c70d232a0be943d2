"""`tlora demo`: what it ships, that its scripts made it, and that it runs."""

import json
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tlora.cli.main import main
from tlora.config import load_spec
from tlora.core.assets import DEMO
from tlora.core.job import RunSpec
from tlora.data.prepare import prepare
from tlora.runtime import demo
from tlora.runtime.checking import prepare_jobs
from tlora.runtime.progress import ProgressLines
from tlora.runtime.training import train

RECIPE = Path(__file__).parents[2] / "recipes" / "demo"
FRESH_SEED = 7_654_321
"""Neither that of the training texts nor that of the recorded figures."""


@pytest.fixture(scope="module")
def recipe() -> Iterator[dict[str, ModuleType]]:
    """The scripts as modules; they import each other by bare names, as scripts do."""
    names = ("words", "corpus", "pretrain", "rows")
    sys.path.insert(0, str(RECIPE))
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(RECIPE))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return load_spec(DEMO / "jobs.yaml")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO / "base")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO / "base").eval()


def within_the_bar(perplexity: float, unigram: float) -> bool:
    return perplexity <= unigram / 2


def test_the_base_has_at_most_half_the_perplexity_of_a_unigram_model(
    recipe, model, tokenizer
) -> None:
    """On texts of a seed it never saw; the same model with random weights is refused."""
    pretrain = recipe["pretrain"]
    ids = pretrain.held_out(tokenizer, FRESH_SEED, 40)
    unigram = pretrain.unigram_perplexity(ids)
    untrained = pretrain.new_model(tokenizer, seed=0)
    assert within_the_bar(pretrain.perplexity(model, ids), unigram)
    assert not within_the_bar(pretrain.perplexity(untrained, ids), unigram)


def test_the_recorded_perplexities_are_those_of_the_shipped_model(recipe, model, tokenizer) -> None:
    """To the rounding of another machine."""
    record = json.loads((DEMO / "base" / "pretraining.json").read_text())
    pretrain, held_out = recipe["pretrain"], record["held_out"]
    ids = pretrain.held_out(tokenizer, held_out["seed"], pretrain.HELD_OUT_ROWS)
    assert pretrain.unigram_perplexity(ids) == pytest.approx(held_out["unigram_perplexity"], 1e-3)
    assert pretrain.perplexity(model, ids) == pytest.approx(held_out["perplexity"], 1e-3)
    assert record["parameters"] == model.num_parameters()


def test_the_script_gives_the_shipped_tokenizer(recipe, tokenizer) -> None:
    """The whole of it: words, merges and special tokens."""
    made = recipe["pretrain"].train_tokenizer(recipe["pretrain"].SEED)
    assert made.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert made.chat_template == tokenizer.chat_template


def test_pretraining_with_the_same_seed_gives_the_same_weights(recipe, tokenizer) -> None:
    """Bit for bit, and another seed gives others."""
    pretrain = recipe["pretrain"]

    def weights(seed: int) -> torch.Tensor:
        model = pretrain.new_model(tokenizer, seed)
        pretrain.pretrain(model, tokenizer, seed=seed, steps=1, echo_steps=1)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    first, second, other = weights(5), weights(5), weights(6)
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_the_script_gives_the_shipped_datasets(recipe) -> None:
    """To the byte, and there are no others."""
    rows = recipe["rows"]
    made = {
        f"{task}.jsonl": "".join(json.dumps(row) + "\n" for row in rows.rows(task))
        for task in rows.TASKS
    }
    assert made == {path.name: path.read_text("utf-8") for path in (DEMO / "data").iterdir()}


def test_no_row_stands_twice_in_a_dataset() -> None:
    """So that what is held out is new to the adapter."""
    for path in (DEMO / "data").iterdir():
        lines = path.read_text("utf-8").splitlines()
        assert len(set(lines)) == len(lines) >= 100, path.name


def test_what_is_shipped_stays_small() -> None:
    """Everybody who installs the package carries it."""
    sizes = {path: path.stat().st_size for path in DEMO.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 4 * 2**20
    assert sum(size for path, size in sizes.items() if path.parent.name == "data") < 400 * 2**10


def test_the_jobs_differ_in_everything(spec) -> None:
    """At least six, and no setting is the same in all of them."""
    jobs = spec.jobs
    assert len(jobs) >= 6
    settings = [
        {job.data.path for job in jobs},
        {job.lora.r for job in jobs},
        {job.train.learning_rate for job in jobs},
        {job.train.seed for job in jobs},
    ]
    assert [len(values) >= 6 for values in settings] == [True] * len(settings)
    for values in (
        {job.lora.lora_alpha for job in jobs},
        {job.lora.lora_dropout for job in jobs},
        {job.lora.target_modules for job in jobs},
        {job.train.lr_scheduler_type for job in jobs},
        {job.train.batch_size for job in jobs},
        {job.train.max_length for job in jobs},
        {job.train.max_steps for job in jobs},
    ):
        assert len(values) >= 3, values


def test_every_dataset_is_valid_and_whole(spec, tokenizer, tmp_path) -> None:
    """No row is cut or left out, some are held out, and four shapes are detected."""
    shapes = set()
    for job in spec.jobs:
        report = prepare(job, tokenizer, cache_dir=tmp_path).report
        shapes.add(report.detected.split()[0])
        assert (report.rows_dropped, report.rows_truncated) == (0, 0), job.name
        assert report.eval_rows > 0, job.name
    assert shapes == {"chat", "sharegpt", "alpaca", "prompt_completion"}


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    text: str


def run_short_demo(*arguments: str, steps: int) -> Ran:
    out = StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as caught:
        main(["demo", *arguments, "-o", f"train.max_steps={steps}"])
    return Ran(int(caught.value.code or 0), out.getvalue())


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("demo") / "runs" / "demo"


@pytest.fixture(scope="module")
def short_demo(output) -> Iterator[Ran]:
    """In a folder of its own, without a word more; but two steps a job and one round of the
    comparison."""
    with pytest.MonkeyPatch.context() as patch, chdir(output.parents[1]):
        patch.setattr(demo, "COMPARED_SECONDS", 0.0)
        ran = run_short_demo(steps=2)
    yield ran


def test_the_demo_trains_every_job_to_an_adapter(short_demo, output, spec) -> None:
    """In the format that everything else loads."""
    assert short_demo.code == 0, short_demo.text
    for job in spec.jobs:
        assert (output / job.name / "adapter" / "adapter_model.safetensors").is_file()


def test_the_demo_says_what_fusing_gained_and_what_was_compared(short_demo) -> None:
    """Measured there and then."""
    assert "What fusing gained here:" in short_demo.text
    assert "times as fast as one job at a time" in short_demo.text
    assert "Compared: the first 16 steps of all jobs, once each way" in short_demo.text


def test_the_demo_shows_answers_before_and_after(short_demo, spec) -> None:
    """Of the base model and of the adapter, and a line for every job."""
    assert short_demo.text.count("was asked:") == demo.EXAMPLES
    assert short_demo.text.count("with adapter") == demo.EXAMPLES
    table = short_demo.text.split("What they learnt")[1]
    assert all(f"\n{job.name} " in table for job in spec.jobs)


def test_the_job_file_that_the_demo_recommends_can_be_read(short_demo, output, spec) -> None:
    """It asks for the same jobs."""
    assert "cp runs/demo/resolved.yaml my-jobs.yaml" in short_demo.text
    again = load_spec(output / "resolved.yaml")
    assert [job.lora for job in again.jobs] == [job.lora for job in spec.jobs]


def test_the_demo_starts_over_when_it_is_run_again(short_demo, output, monkeypatch) -> None:
    """Nothing of the first run is left in the second."""
    monkeypatch.setattr(demo, "compare", lambda *_, **__: fake_comparison())
    assert run_short_demo("--output", str(output), steps=1).code == 0
    results = [json.loads(path.read_text()) for path in output.glob("*/result.json")]
    assert {result["steps"] for result in results} == {1}


def fake_comparison() -> demo.Comparison:
    return demo.Comparison(rounds=1, steps=1, tokens=1, together_seconds=1.0, alone_seconds=1.0)


@pytest.mark.slow
def test_every_job_of_the_demo_learns_something_to_be_seen(spec, tmp_path) -> None:
    """The whole training: more right answers than before in every job, and half of all rows."""
    run = train(spec, output=tmp_path / "run", progress=ProgressLines(StringIO()))
    learnt, _ = demo.look_at_answers(spec, prepare_jobs(spec, limit=None), run)
    assert len(learnt) == len(spec.jobs)
    gains = {each.result.job: each.right_after - each.right_before for each in learnt}
    assert min(gains.values()) >= 3, gains
    assert sum(gains.values()) >= sum(each.rows for each in learnt) / 2, gains
