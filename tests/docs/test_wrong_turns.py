"""A newcomer's wrong turns in an empty folder: each is answered by what to do instead."""

import shutil
from pathlib import Path

import pytest
from support.page_runner import Shell

ROWS = '{"prompt": "How many?", "completion": "two"}\n' * 4
JOBS = """base: demo
defaults: {max_steps: 2, r: 4}
jobs:
  - {name: count, data: rows.jsonl}
  - {name: tally, data: rows.jsonl}
"""


def change(old: str, new: str, verb: str = "check") -> str:
    return f"sed -i 's|{old}|{new}|' jobs.yaml; tlora {verb} jobs.yaml"


TURNS = {
    "no job file": ("tlora train nowhere.yaml", "nowhere.yaml: no such file; this folder has jobs"),
    "a misspelt job file": ("tlora check job.yaml", "did you mean 'jobs.yaml'?"),
    "a folder for a job file": ("tlora check .", "is a directory; name a job file, such as 'jobs."),
    "data for a job file": ("tlora train rows.jsonl", "this is data, not a job file; name it in"),
    "no data file": (change("rows.jsonl", "gone/x.jsonl"), "no such file: 'gone/x.jsonl' (looked"),
    "a misspelt data file": (change("rows.jsonl", "row.jsonl"), "did you mean 'rows.jsonl'?"),
    "an empty data file": (": > rows.jsonl; tlora check jobs.yaml", "rows.jsonl: the dataset hold"),
    "columns of other names": (
        "printf 'question,answer\\na,b\\n' > q.csv; " + change("rows.jsonl", "q.csv"),
        "map them in data.columns, for example {prompt: question, completion: answer}",
    ),
    "columns the wrong way round": (
        change("data: rows.jsonl", "data: {path: rows.jsonl, columns: {question: prompt}}"),
        "data.columns maps our key to yours; 'question' is not one of our keys",
    ),
    "an unknown key": (change("max_steps", "max_step"), "max_step: unknown key; did you mean 'max"),
    "a key at the wrong place": (
        change("^base", "lora: {r: 4}\\nbase"),
        "belongs in 'defaults' or",
    ),
    "a misspelt job": ("tlora preview jobs.yaml --job cuont", "no job 'cuont'", "mean 'count'?"),
    "a job name with a space": (change("count", "My Job"), "how about 'my-job'?"),
    "no base": (change("base: demo", "report_to: none"), "base.model: is required: a model's name"),
    "no such base directory": (change("demo", "./qwen"), "no such model directory: './qwen'"),
    "no such path to a base": (change("demo", "my/models/qwen"), "no such model directory: 'my/mo"),
    "a file as a base": (change("demo", "rows.jsonl"), "is a file; name the directory of a model"),
    "no such model": (change("demo", "dmeo"), "'dmeo' is neither a directory here nor a model"),
    "a folder that cannot be written": (
        "tlora train jobs.yaml --output /proc/nowhere",
        "--output: /proc/nowhere cannot be used: ",
        "name a directory that can be written",
    ),
    "starting over with nobody to ask": (
        "tlora train jobs.yaml --fresh",
        "nothing was removed from runs/jobs; answer y, or add --yes",
    ),
    "a job directory for an adapter": (
        "tlora verify runs/jobs/count",
        "did you mean runs/jobs/count/adapter?",
    ),
    "a run directory for an adapter": (
        "tlora merge runs/jobs --output merged",
        "did you mean runs/jobs/count/adapter?",
    ),
    "no adapter at all": (
        "mkdir empty; tlora verify empty",
        "empty: adapter_config.json is missin",
    ),
    "a file for an adapter": ("tlora verify rows.jsonl", "is a file; name the directory of an ada"),
    "another base for an adapter": (
        "tlora verify runs/jobs/count/adapter --base ./gone",
        "--base: no such model directory: './gone'",
    ),
    "a merged model that cannot be written": (
        "tlora merge runs/jobs/count/adapter --output /proc/nowhere/m",
        "--output: /proc/nowhere/m cannot be written: ",
    ),
}


@pytest.fixture(scope="module")
def finished(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the right way has been gone."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "jobs.yaml").write_text(JOBS)
    ran = shell.run("tlora check jobs.yaml && tlora train jobs.yaml", folder)
    assert ran.code == 0 and "error" not in ran.output, ran.output
    assert "no rows are held out" not in ran.output
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "folder"))


@pytest.mark.parametrize(
    ("script", "parts"), [(script, parts) for script, *parts in TURNS.values()], ids=TURNS
)
def test_a_wrong_turn_is_answered(
    script: str, parts: list[str], shell: Shell, folder: Path
) -> None:
    """Exit code 2, one message, no traceback."""
    ran = shell.run(script, folder)
    assert ran.code == 2, ran.output
    assert ran.output.count("error: ") == 1 and "Traceback" not in ran.output
    for part in parts:
        assert part in ran.output


def test_rows_without_an_answer_are_told_and_trained(shell: Shell, folder: Path) -> None:
    """By every verb that reads them: an export with a column missing looks like that."""
    more = 'printf \'{"prompt": "How many?", "completion": ""}\\n\' >> rows.jsonl; '
    sweep = "base: demo\ntask: {name: t, data: rows.jsonl, max_steps: 1, eval: {split: 1}}\n"
    (folder / "sweep.yaml").write_text(sweep + "search: {space: {lora.r: [2, 4]}}\n")
    ran = shell.run(
        more + "tlora check jobs.yaml; tlora train jobs.yaml --output again; tlora tune sweep.yaml",
        folder,
    )
    assert ran.code == 0, ran.output
    told = [line for line in ran.output.splitlines() if "empty answers, of which only" in line]
    # Two jobs, by check and by train, and a task.
    assert len(told) == 5 and all("1 rows (" in line for line in told)
    assert all(line.endswith("rows.jsonl:5)") for line in told)


def test_asking_to_evaluate_without_held_out_rows_is_told(shell: Shell, folder: Path) -> None:
    """Not refused: other jobs of the file may have some."""
    ran = shell.run("tlora check jobs.yaml -o eval.steps=2", folder)
    assert ran.code == 0
    assert "eval.steps does nothing; set eval.split or data.eval_path" in ran.output


def test_the_base_of_the_demo_can_be_named_to_verify_and_merge(shell: Shell, folder: Path) -> None:
    """As in a job file."""
    adapter = "runs/jobs/count/adapter --base demo"
    ran = shell.run(f"tlora verify {adapter}; tlora merge {adapter} --output merged", folder)
    assert ran.code == 0, ran.output
    assert (folder / "merged" / "config.json").is_file()


UNGUARDED = """
import tlora

spec = {"base": "demo", "defaults": {"r": 4, "max_steps": 2, "eval": {"split": 2}},
        "task": {"name": "count", "data": "rows.jsonl"}, "search": {"space": {"r": [2, 4]}}}
tlora.tune_on_devices(tlora.load_tasks(spec), output="runs/devices", devices=2)
"""


def test_a_script_that_starts_workers_wherever_it_is_imported(shell: Shell, folder: Path) -> None:
    """The last message, of the script alone, names the file and the two lines that are missing;
    with these it runs."""
    (folder / "script.py").write_text(UNGUARDED)
    ran = shell.run("python script.py", folder)
    assert ran.code == 1 and ran.output.count("Traceback") == 1, ran.output
    assert f"{folder / 'script.py'}: every worker process imports this script" in ran.output
    assert 'if __name__ == "__main__":\n    main()' in ran.output
    *head, call = UNGUARDED.strip().splitlines()
    guarded = ["def main():", f"    {call}", "", 'if __name__ == "__main__":', "    main()"]
    (folder / "script.py").write_text("\n".join([*head, *guarded]) + "\n")
    ran = shell.run("python script.py", folder)
    assert ran.code == 0 and (folder / "runs/devices/winner/adapter").is_dir(), ran.output
