"""`tlora simulate`: alone, with a trace, and wrong turns."""

import json

import pytest

OWN = "name,arrival_s,steps,gpus,rank,batch,length\n"


def test_it_works_alone(tlora_command, tmp_path, capsys) -> None:
    """The shipped trace, two policies; figures, a file and a page come out."""
    figures, page = tmp_path / "s.json", tmp_path / "s.html"
    args = ("simulate", "--policy", "tlora,solo", "--jobs", "80", "--gpus", "8")
    assert tlora_command(*args, "--json", str(figures), "--html", str(page)) == 0
    captured = capsys.readouterr()
    assert "small: 80 jobs on 8 GPUs, load 0.80" in captured.out
    assert "tlora against solo" in captured.out and "solo: 80 jobs" in captured.err
    assert all(len(row) <= 100 for row in captured.out.splitlines() if str(tmp_path) not in row)
    found = json.loads(figures.read_text())
    assert found["kind"] == "simulate" and set(found["policies"]) == {"tlora", "solo"}
    assert page.read_text().startswith("<!doctype html>")


def test_a_trace_of_ones_own_runs_as_it_stands(tlora_command, tmp_path, capsys) -> None:
    """Bases are those that it names, arrivals as they are with a load of 0, bad rows skipped."""
    trace = tmp_path / "mine.csv"
    header = OWN.replace("\n", ",base\n")
    trace.write_text(header + "a,0,50,1,8,1,512,x\nb,50,50,1,8,1,512,y\nc,60,-1,1,8,1,512,y\n")
    figures = tmp_path / "s.json"
    policies = ("--policy", "solo", "--policy", "srtf")
    args = ("simulate", str(trace), *policies, "--load", "0", "--gpus", "2")
    assert tlora_command(*args, "--bad-rows", "skip", "--json", str(figures)) == 0
    assert "1 bad row was skipped" in capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert found["jobs"] == 2 and found["skipped_rows"] == 1
    assert set(found["policies"]) == {"solo", "srtf"}, "both that were named, not the last"
    figures = found["policies"]["solo"]
    assert figures["queue_s"]["mean"] == 0 and figures["jobs_done"] == 2
    assert figures["makespan_s"] == pytest.approx(50 + figures["jct_s"]["mean"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.csv"], "none.csv: cannot be read: No such file"),
        (["bad.csv"], "bad.csv:2: steps: must be a number, got 'many'"),
        (["--policy", "best"], "--policy: 'best' is none of tlora"),
        (["--policy", ""], "--policy: '' is none of"),
        (["--policy", "solo", "--policy", "best"], "--policy: 'best' is none of tlora"),
        (["--policy", "solo", "--policy", "tlora,solo"], "--policy: names one twice"),
        (["--gpus", "0"], "--gpus: must be at least 1, got 0"),
        (["--load", "-1"], "--load: must be a number of at least 0, got -1.0"),
        (["--load", "inf"], "--load: must be a number of at least 0, got inf"),
        (["--days", "nan"], "--days: must be a number above 0, got nan"),
        (["--seeds", "0"], "--seeds: must be at least 1, got 0"),
        (["--predictor-error", "-0.1"], "--predictor-error: must be between 0 and 2, got -0.1"),
        (["--days", "0"], "--days: must be a number above 0, got 0.0"),
        (["--skip-days", "99"], "--skip-days, --days: leaves no job of the trace"),
        (["--jobs", "-3"], "--jobs: must be a number above 0, got -3"),
        (["--per-node", "0"], "--per-node: must be at least 1, got 0"),
        (["--profile", "h300"], "--profile: 'h300' is neither a file nor one of"),
        (["--profile", "bad.csv"], "bad.csv:1: not JSON"),
        (["--lengths", "0"], "--lengths: must be at least 1, got 0"),
        (["--lengths", "bad.csv"], "bad.csv: cannot be read: not an .npz"),
        (["--mtbf", "0"], "--mtbf: must be a number above 0"),
        (["--bad-rows", "keep"], "--bad-rows: must be refuse or skip, got 'keep'"),
        (["--json", "."], "--json: . is a directory; name a file"),
        (["--html", "no/r.html"], "--html: there is no directory no"),
    ],
)
def test_a_wrong_turn_is_one_message_and_exit_code_two(
    args, message, tlora_command, tmp_path, monkeypatch, capsys
) -> None:
    """It names the option or the row, and nothing is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text(OWN + "a,0,many,1,8,1,512\n")
    assert tlora_command("simulate", *args) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err.replace("\n", " ")
    assert captured.out == "" and "Traceback" not in captured.err
