"""What people get wrong, through the real command line: one message, the right exit code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from support.models import job_spec, random_adapter, save_base, tiny_model
from support.runs import job_file, quiet_single_thread, write_rows

from tlora.cli.main import main
from tlora.config import dump_spec, load_spec
from tlora.model.peft_format import WEIGHTS, export_adapter
from tlora.model.targets import find_targets

ROW = '{"prompt": "q", "completion": "a"}\n'


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    yield from quiet_single_thread()


@pytest.fixture(scope="module", autouse=True)
def no_network_and_own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """transformers reads the variable once, when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TLORA_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "base")


@dataclass(frozen=True)
class Desk:
    """A directory to stand in, with a good job file of two jobs to be spoilt."""

    folder: Path
    document: dict

    def job(self, **settings: object) -> None:
        """Changes the second job, `b`."""
        self.document["jobs"][1].update(settings)

    def write(self, name: str, content: str | bytes) -> str:
        (self.folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    def data(self, content: str | bytes, **settings: object) -> None:
        self.job(data={"path": self.write("b.jsonl", content), **settings})

    def save(self) -> None:
        (self.folder / "jobs.yaml").write_text(yaml.safe_dump(self.document))


@pytest.fixture
def desk(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", 8)
    jobs = [{"name": name, "data": {"path": "rows.jsonl"}} for name in ("a", "b")]
    return Desk(tmp_path, job_file(base, *jobs))


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(args)
    return int(caught.value.code or 0)


def start(desk: Desk) -> None:
    """An adapter of rank 4 as the start of a job of rank 2."""
    model = tiny_model()
    weights, lora = random_adapter(model, rank=4, seed=1), job_spec(r=4).lora
    folder = desk.folder / "start"
    export_adapter(folder, weights, lora, base_model="x", targets=find_targets(model))
    desk.job(init_from="start")


def damaged_start(desk: Desk) -> None:
    start(desk)
    desk.job(lora={"r": 4})
    (desk.folder / "start" / WEIGHTS).write_bytes(b"nonsense")


def empty_base(desk: Desk) -> None:
    (desk.folder / "empty").mkdir()
    desk.document["base"]["model"] = "empty"


def set_base(name: str) -> Callable[[Desk], None]:
    return lambda desk: desk.document["base"].update(model=name)


LONG = json.dumps({"prompt": "q", "completion": "x" * 200}) + "\n"
NOTHING_TRAINED = json.dumps({"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}) + "\n"

CASES: dict[str, tuple[Callable[[Desk], object], list[str]]] = {
    "unknown key": (
        lambda desk: desk.job(lora={"rnk": 4}),
        ["job 'b': lora.rnk: unknown key", "did you mean 'rank'?"],
    ),
    "wrong type": (lambda desk: desk.job(lora={"r": "four"}), ["job 'b': lora.r: ", "'four'"]),
    "a value out of range": (
        lambda desk: desk.job(lora={"lora_dropout": 1.5}),
        ["job 'b': lora.lora_dropout: must be in [0, 1), got 1.5"],
    ),
    "duplicate name": (lambda desk: desk.job(name="a"), ["job 'a': name: two jobs have this"]),
    "missing data file": (
        lambda desk: desk.job(data={"path": "absent.jsonl"}),
        ["job 'b': data.path: ", "absent.jsonl"],
    ),
    "unreachable module": (
        lambda desk: desk.job(lora={"target_modules": ["query"]}),
        ["job 'b': lora.target_modules: 'query' reaches no linear", "q_proj, k_proj"],
    ),
    "rank larger than the layer": (
        lambda desk: desk.job(lora={"r": 17}),
        ["job 'b': lora.r: rank 17 is larger than", "use at most 16"],
    ),
    "base directory absent": (set_base("./absent"), ["base.model: no such model directory"]),
    "base without config": (empty_base, ["base.model: ", "empty holds no config.json"]),
    "base not on the Hub": (
        set_base("org/absent"),
        ["base.model: 'org/absent' is neither a directory here nor a model that can be had"],
    ),
    "malformed row": (lambda desk: desk.data(ROW + "{oops\n"), ["job 'b': ", "b.jsonl:2: "]),
    "row that is not UTF-8": (
        lambda desk: desk.data(ROW.encode() + b'{"prompt": "\xff", "completion": "a"}\n'),
        ["job 'b': ", "b.jsonl:2: "],
    ),
    "row without a trained token": (
        lambda desk: desk.data(NOTHING_TRAINED),
        ["job 'b': ", "b.jsonl:1: "],
    ),
    "row of another shape": (
        lambda desk: desk.data(ROW + '{"question": "q"}\n'),
        ["job 'b': ", "b.jsonl:2: "],
    ),
    "empty dataset": (lambda desk: desk.data(""), ["job 'b': ", "b.jsonl", "no rows"]),
    "over_length raise": (
        lambda desk: (desk.data(ROW + LONG), desk.job(train={"over_length": "raise"})),
        ["job 'b': ", "b.jsonl:2: ", "64"],
    ),
    "over_length drop of all": (
        lambda desk: (desk.data(LONG), desk.job(train={"over_length": "drop"})),
        ["job 'b': ", "no row is left to train on"],
    ),
    "rows beyond the base's context": (
        lambda desk: (desk.data(LONG * 2), desk.job(train={"max_length": 4096})),
        ["job 'b': train.max_length: rows of up to", "the base model takes 128"],
    ),
    "start of another rank": (start, ["job 'b': init_from: ", "has rank 4, the job asks for 2"]),
    "damaged start": (damaged_start, ["job 'b': init_from: ", f"start/{WEIGHTS}: "]),
    "absent start": (
        lambda desk: desk.job(init_from="nowhere"),
        ["job 'b': init_from: no such adapter directory: 'nowhere'"],
    ),
    "unknown device": (
        lambda desk: desk.document["engine"].update(device="tpu9"),
        ["engine.device: must be auto, cpu, cuda or cuda:N, got 'tpu9'"],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("verb", ["train", "check"])
def test_a_mistake_is_one_message_that_names_its_place(
    desk: Desk, verb: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2; job and field, or file and line; no traceback; no run directory half made."""
    spoil, parts = CASES[case]
    spoil(desk)
    desk.save()
    assert run(verb, "jobs.yaml") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for part in parts:
        assert part in error
    assert not (desk.folder / "runs").exists()


def test_a_good_file_passes(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """What the cases above spoil is not wrong from the start."""
    desk.save()
    assert run("check", "jobs.yaml") == 0
    captured = capsys.readouterr()
    assert captured.err == "" and "b: 14 linears" in captured.out


def test_several_mistakes_are_told_together(desk: Desk, capsys) -> None:
    """One run of `check`, all that a file alone can show."""
    desk.job(lora={"rnk": 4}, train={"lerning_rate": 1})
    desk.save()
    assert run("check", "jobs.yaml") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 2 problems\n")
    assert "lora.rnk" in error and "did you mean 'learning_rate'?" in error


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("lora.rnk=4", ["lora.rnk: unknown key; did you mean 'rank'?"]),
        ("jobs.c.lora.r=4", ["jobs.c.lora.r", "no such job"]),
        ("lora.r", ["lora.r"]),
        ("train.batch_size=many", ["train.batch_size", "many"]),
    ],
)
def test_a_wrong_override_is_named(desk: Desk, override: str, parts: list[str], capsys) -> None:
    """Like the same mistake in the file."""
    desk.save()
    assert run("train", "jobs.yaml", "-o", override) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert all(part in error for part in parts)


def test_a_run_with_other_settings_is_not_written_over(desk: Desk, capsys) -> None:
    """Job and field, what to do about it, and the old run is as it was."""
    desk.save()
    run_folder = desk.folder / "runs/jobs"
    run_folder.mkdir(parents=True)
    (run_folder / "run.json").write_text("{}")
    (run_folder / "resolved.yaml").write_text(dump_spec(load_spec("jobs.yaml")))
    before = {path.name: path.read_text() for path in run_folder.iterdir()}
    desk.job(lora={"r": 4})
    desk.save()
    assert run("train", "jobs.yaml") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: job 'b': lora.r: has changed since runs/jobs was started")
    assert "--fresh" in error and error.count("\n") == 1
    assert {path.name: path.read_text() for path in run_folder.iterdir()} == before


def test_a_job_that_fails_in_training_gives_exit_code_one_and_the_others_adapters(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate that overflows: the job's reason is in its result, the neighbour is whole."""
    desk.job(train={"learning_rate": 1e30})
    desk.save()
    assert run("train", "jobs.yaml", "--output", "out") == 1
    captured = capsys.readouterr()
    assert captured.err == "error: failed: b; the reasons are in out\n"
    result = json.loads(Path("out/b/result.json").read_text())
    assert result["status"] == "failed" and "step 2" in result["reason"]
    assert not Path("out/b/adapter").exists()
    assert run("verify", "out/a/adapter") == 0
    assert "logits equal to PEFT" in capsys.readouterr().out


def test_a_damaged_adapter_is_named_by_verify(desk: Desk, capsys) -> None:
    """File and trouble, exit code 2."""
    damaged_start(desk)
    assert run("verify", "start", "--base", desk.document["base"]["model"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: start/{WEIGHTS}: ") and error.count("\n") == 1
    assert run("verify", "nowhere") == 2
    assert capsys.readouterr().err == "error: nowhere: no such adapter directory\n"


def in_a_shell(*args: str) -> subprocess.CompletedProcess[str]:
    """The installed command itself."""
    command = Path(sys.executable).with_name("tlora")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(command), *args], capture_output=True, text=True, env=environment, timeout=600
    )


def test_in_a_shell_a_typo_is_one_line(desk: Desk) -> None:
    """Exit code and streams as a user has them."""
    desk.job(lora={"rnk": 4})
    desk.save()
    done = in_a_shell("train", "jobs.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: job 'b': lora.rnk: unknown key")
    assert done.stderr.count("\n") == 1


def test_in_a_shell_a_base_that_cannot_be_had_is_one_line(desk: Desk) -> None:
    """Nothing of what the libraries underneath would say."""
    desk.document["base"]["model"] = "org/absent"
    desk.save()
    done = in_a_shell("train", "jobs.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("error: base.model: 'org/absent' is neither a directory here")
    assert done.stderr.count("\n") == 1
