"""Traces: three layouts, and rows that are no jobs."""

import gzip
import os
from pathlib import Path

import pytest

from tlora.core.errors import DataError
from tlora.simulation.synthetic import SMALL_TRACE, synthetic_jobs, write_trace
from tlora.simulation.traces import Given, TraceJob, read_trace

CLUSTER = "job_id,submit_time_s,submit_time,duration_s,gpus,vc,status"
ACME = (
    "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,"
    "queue,gpu_time,mem_per_pod_GB,shared_mem_per_pod,fail_time,stop_time"
)
OWN = "name,arrival_s,steps,gpus,rank,batch,length"


def written(folder: Path, *lines: str, name: str = "t.csv") -> Path:
    path = folder / name
    text = "\n".join(lines) + "\n"
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_a_cluster_trace_is_read_with_parts_of_gpus_as_whole_ones(name, tmp_path) -> None:
    """Rows without GPUs or time are left out; further columns are left alone."""
    path = written(
        tmp_path,
        CLUSTER + ",qos",
        "a,0,,100,8,vc1,Pass,x",
        "b,5,2017-09-04 10:30:41,7.5,0.46,,,x",
        "c,5,,9,0,vc1,,x",
        "d,6,,0,1,vc1,,x",
        name=name,
    )
    trace = read_trace(path)
    assert trace.name == "t" and trace.left_out == 2 and trace.skipped == ()
    assert trace.jobs == (
        TraceJob("a", 0.0, 100.0, 8, "vc1", "Pass"),
        TraceJob("b", 5.0, 7.5, 1, "default", ""),
    )


def test_rows_as_acmetrace_publishes_them_are_read(tmp_path) -> None:
    """Hand-made in the layout of trace_seren; times carry a zone, CPU jobs are left out."""
    tail = "0,3600,8,0,,"
    path = written(
        tmp_path,
        ACME,
        f"dlc1,u1,2,16,64,Other,COMPLETED,2023-03-01 00:00:10+08:00,"
        f"2023-03-01 00:00:20+08:00,2023-03-01 01:00:20+08:00,3600,{tail}",
        f"dlc2,u2,1,0,8,Other,FAILED,2023-03-01 00:00:30+08:00,,,12,{tail}",
        f"dlc3,u2,1,1,8,Other,CANCELLED,2023-02-28 16:01:10+00:00,,,45.5,{tail}",
    )
    trace = read_trace(path)
    assert [job.name for job in trace.jobs] == ["dlc1", "dlc3"] and trace.left_out == 1
    first, second = trace.jobs
    assert first.gpus == 16 and first.duration_s == 3600 and first.tenant == "u1"
    assert second.arrival_s - first.arrival_s == 60 and second.status == "CANCELLED"


def test_our_own_csv_gives_steps_and_all_that_is_drawn_otherwise(tmp_path) -> None:
    """With and without the columns that may be left out."""
    path = written(tmp_path, OWN, "a,0,100,2,8,4,512")
    (job,) = read_trace(path).jobs
    given = Given(steps=100, rank=8, batch=4, length=512)
    assert job == TraceJob("a", 0.0, None, 2, "default", "", given)
    path = written(tmp_path, OWN + ",base,tenant,priority", "a,0,100,2,8,4,512,qwen,blue,2")
    (job,) = read_trace(path).jobs
    assert job.tenant == "blue" and job.given is not None
    assert (job.given.base, job.given.priority) == ("qwen", 2.0)


BAD_ROWS = {
    "b,1,,-5,1,,": "duration_s: must be at least 0, got -5",
    "b,-1,,5,1,,": "submit_time_s: must be at least 0, got -1",
    "b,1,,five,1,,": "duration_s: must be a number, got 'five'",
    "b,1,,nan,1,,": "duration_s: must be at least 0, got nan",
    "b,1,,,1,,": "duration_s: is empty",
    "b,1,,1e30,1,,": "a duration is in seconds and at most ten years, got 1e+30",
    "b,1,,5,1": "has 5 cells, the header has 7",
    ",1,,5,1,,": "job_id: is empty",
    "b,,yesterday,5,1,,": "submit_time: must be a date and time, got 'yesterday'",
    "a,1,,5,1,,": "job 'a' is there already",
    "b,0.5,,5,1,,": "arrives before the row above it (--sort puts rows in order)",
    "": "is empty",
    " , ,,,,,": "is empty",
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.items())
def test_a_bad_row_is_named_with_file_and_line(row, message, tmp_path) -> None:
    """Refused, or skipped and counted, with the same words."""
    path = written(tmp_path, CLUSTER, "a,1,,5,1,,", row, "z,2,,5,1,,", "")
    with pytest.raises(DataError) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}:3: {message}"
    trace = read_trace(path, on_bad="skip")
    assert [job.name for job in trace.jobs] == ["a", "z"]
    assert trace.skipped == (f"{path}:3: {message}",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,0,0,1,8,1,512", "steps: must be a whole number of at least 1, got 0"),
        ("a,0,9,1.5,8,1,512", "gpus: must be a whole number of at least 1, got 1.5"),
        ("a,0,9,1,8,1,", "length: is empty"),
    ],
)
def test_a_bad_row_of_our_own_csv_is_named_too(row, message, tmp_path) -> None:
    """Counts are whole and above 0."""
    with pytest.raises(DataError, match=rf"t\.csv:2: {message}"):
        read_trace(written(tmp_path, OWN, row))


@pytest.mark.parametrize("priority", ["0", "1e17"])
def test_a_priority_beyond_reckoning_is_a_bad_row(priority, tmp_path) -> None:
    """Named with its line, as any other."""
    path = written(tmp_path, OWN + ",priority", f"a,0,9,1,8,1,512,{priority}", "b,0,9,1,8,1,512,2")
    with pytest.raises(DataError, match=r"t\.csv:2: priority: must be between 1e-09 and 1e\+09"):
        read_trace(path)
    assert len(read_trace(path, on_bad="skip").jobs) == 1


def test_rows_out_of_order_can_be_sorted(tmp_path) -> None:
    """They are then no bad rows."""
    path = written(tmp_path, CLUSTER, "b,9,,5,1,,", "a,1,,5,1,,")
    trace = read_trace(path, sort=True)
    assert [job.name for job in trace.jobs] == ["a", "b"] and trace.skipped == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; a trace begins with a header"),
        (b"TIMESTAMP,ContextTokens\n1,2\n", "is no trace that is known; headers that are read: "),
        (b"job_id,submit_time_s,duration_s,gpus\n", "lacks the columns submit_time, vc, status"),
        (b"name,name\n", "names a column twice"),
        (CLUSTER.encode(), "holds no job that could be run"),
        (b"\xff\xfe\x00\x01", "is not a CSV text file"),
    ],
)
def test_a_file_that_is_no_trace_is_told(content, message, tmp_path) -> None:
    """By its name, with what would be one."""
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_trace(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path) -> None:
    """Not there, a directory, cut in the middle."""
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(CLUSTER.encode() * 99)[:40])
    with pytest.raises(DataError, match="is not a whole gzip file"):
        read_trace(cut)


def test_the_first_days_and_jobs_are_counted_from_the_first_arrival(tmp_path) -> None:
    """Whichever is less."""
    rows = [f"j{day},{day * 86400},,5,1,," for day in range(3, 9)]
    trace = read_trace(written(tmp_path, CLUSTER, *rows))
    assert [job.name for job in trace.first(days=2).jobs] == ["j3", "j4"]
    assert [job.name for job in trace.first(skip_days=1.5, days=1).jobs] == ["j5"]
    assert len(trace.first(days=4, jobs=3).jobs) == 3 and len(trace.first().jobs) == 6


def test_the_shipped_trace_is_what_its_generator_makes(tmp_path) -> None:
    """So that it can be made again; another seed makes another."""
    write_trace(synthetic_jobs(400, days=4, seed=0), tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == SMALL_TRACE.read_text()
    assert synthetic_jobs(400, days=4, seed=1) != synthetic_jobs(400, days=4, seed=0)
    assert len(read_trace(SMALL_TRACE).jobs) == 400


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "jobs", "left_out"),
    [
        ("philly_2017", 82_247, 0),
        ("elasticflow_itp_2021", 32_068, 0),
        ("alibaba_gpu_v2023", 7_063, 1_089),
    ],
)
def test_real_traces_are_read_whole(name, jobs, left_out) -> None:
    """No row is bad; all others are jobs or CPU pods."""
    folder = os.environ.get("TLORA_TEST_DATA")
    if not folder:
        pytest.skip("TLORA_TEST_DATA is not set")
    trace = read_trace(Path(folder) / "traces" / f"{name}.csv.gz")
    assert (len(trace.jobs), trace.left_out, trace.skipped) == (jobs, left_out, ())
