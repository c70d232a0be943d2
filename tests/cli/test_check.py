"""`tlora check`: what was resolved, then what the data says."""


def test_the_resolved_jobs_and_then_the_checks_are_printed(
    job_file, runtime, tlora_command, capsys
) -> None:
    """One line per job, nothing cut off, texts as they are."""
    assert tlora_command("check", "jobs.yaml", "-o", "jobs.a.lora.r=32") == 0
    title, header, first, second, *checks = capsys.readouterr().out.splitlines()
    assert title == "jobs.yaml: base org/model, dtype auto, jobs 2"
    assert header.split()[:3] == ["job", "data", "r"]
    assert first.split()[:3] == ["a", "org/rows", "32"] and first.endswith("7 steps")
    assert "q_proj,v_proj" in second and second.endswith("3 epochs")
    assert checks == ["job 'a': 10 rows [chat]", "all well"]


def test_a_bad_file_ends_before_anything_heavy(job_file, runtime, tlora_command, capsys) -> None:
    """The runtime is not asked, and nothing but the error is printed."""
    assert tlora_command("check", "jobs.yaml", "-o", "lora.rnk=3") == 2
    captured = capsys.readouterr()
    assert runtime.calls == [] and captured.out == ""
    assert captured.err.startswith("error: lora.rnk: unknown key; did you mean 'rank'?")


def test_a_missing_file_is_named(tlora_command, tmp_path, monkeypatch, capsys) -> None:
    """In one line."""
    monkeypatch.chdir(tmp_path)
    assert tlora_command("check", "nowhere.yaml") == 2
    assert capsys.readouterr().err == "error: nowhere.yaml: no such file\n"
