"""Rows out of every format, and every kind of damage named by its place."""

import csv
import gzip
import io
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tlora.core.errors import DataError
from tlora.data import json_array
from tlora.data.reading import read_rows
from tlora.data.sources import find_sources

ROWS = [
    {"prompt": "Hello, you", "completion": 'He said "hi"\nand left'},
    {"prompt": "漢字 🙂", "completion": "é"},
    {"prompt": "", "completion": "{[,]}"},
]


def as_json_lines() -> bytes:
    return "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()


def as_csv() -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(ROWS[0]))
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def as_parquet() -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


CONTENT = {
    "rows.jsonl": as_json_lines(),
    "rows.ndjson": as_json_lines(),
    "lines.json": as_json_lines(),
    "pretty.json": json.dumps(ROWS, indent=2).encode(),
    "dense.json": json.dumps(ROWS, separators=(",", ":")).encode(),
    "array.jsonl": json.dumps(ROWS).encode(),
    "rows.csv": as_csv(),
    "rows.parquet": as_parquet(),
}
PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def read(*paths: Path | str) -> list[dict[str, object]]:
    return [row.values for row in read_rows(find_sources(tuple(map(str, paths))))]


def refused(path: Path | str) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    return str(caught.value)


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("name", CONTENT)
def test_every_format_gives_the_same_rows(name, packing, tmp_path):
    path = tmp_path / (name + packing)
    path.write_bytes(PACKERS[packing](CONTENT[name]))
    assert read(path) == ROWS


@pytest.mark.parametrize("name", ["rows.jsonl", "pretty.json", "rows.csv"])
def test_a_byte_order_mark_is_not_part_of_the_data(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + CONTENT[name])
    assert read(path) == ROWS


def test_origins_name_lines_where_there_are_lines_and_rows_elsewhere(tmp_path):
    expected = {"rows.jsonl": [1, 3, 5], "pretty.json": [1, 2, 3], "rows.csv": [2, 4, 5]}
    for name, lines in (expected | {"rows.parquet": [1, 2, 3]}).items():
        path = tmp_path / name
        path.write_bytes(CONTENT[name])
        origins = [row.origin for row in read_rows(find_sources((str(path),)))]
        assert [origin.line for origin in origins] == lines
        assert str(origins[-1]) == f"{path}:{lines[-1]}"


def test_directories_globs_and_lists_are_read_in_order(tmp_path):
    (tmp_path / "nested").mkdir()
    for name in ("b.jsonl", "a.jsonl", "nested/c.csv", ".hidden.jsonl", "notes.md"):
        (tmp_path / name).write_text(
            f"text\n{name}" if "csv" in name else json.dumps({"text": name})
        )
    names = [{"text": name} for name in ("a.jsonl", "b.jsonl", "nested/c.csv")]
    assert read(tmp_path) == names
    assert read(tmp_path / "*.jsonl") == names[:2]
    assert read(tmp_path / "b.jsonl", tmp_path / "a.jsonl") == [names[1], names[0]]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_an_array_may_be_cut_anywhere_by_the_buffer(block, monkeypatch, tmp_path):
    monkeypatch.setattr(json_array, "BLOCK_CHARACTERS", block)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS, indent=1, ensure_ascii=False))
    assert read(path) == ROWS
    path.write_text(" [ ] \n")
    assert read(path) == []


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"text": "a"}\n{"text": \n', r":2: not valid JSON.*one object on each line"),
        (b'{"text": "a"}\n\n[1]\n', r":3: expected a JSON object .*got list"),
        (b'{"text": "a"}\n{"text": "\xe9"}\n', r":2: not UTF-8 \(byte 0xe9 at place 11"),
        (b'[{"text": "a"}, 3]', r":2: expected a JSON object"),
        (b'[{"text": "a"}, {"text": nonsense}]', r":2: this element .*not valid JSON"),
        (b'[{"text": "a"}', r":1: the file ends inside the JSON array"),
        (b'[{"text": "a"}, {"te', r":2: this element .*not valid JSON"),
        (b'[{"text": "a"} {"text": "b"}]', r":1: expected a comma"),
        (b'[{"text": "a"}] more', r":1: there is text after"),
        (b'[{"text": "a"}, {"text": "\xe9"}]', r"not UTF-8"),
        (b'{"a": ' + b"[" * 10**6, r":1: not valid JSON"),
        (b'{"text": "a"}\n{"n": ' + b"7" * 5000 + b"}", r":2: not valid JSON.*4300 digits"),
        (b'[{"text": "a"}, {"n": ' + b"7" * 5000 + b"}]", r":2: this element .*4300 digits"),
    ],
)
def test_damaged_json_is_named_by_its_place(content, complaint, tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    assert re.search("^" + re.escape(str(path)) + ".*" + complaint, refused(path))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"a,b\n1,2\n1,2,3\n", r":3: expected 2 cells \(a, b\), got 3"),
        (b"a,b\n1,2\n1\n", r":3: expected 2 cells"),
        (b"a,a\n1,2\n", r":1: the first line must name each column once"),
        (b'a,b\n1,"2\n', r":2: not valid CSV"),
        (b"a,b\n1,\xff\n", r":2: not UTF-8"),
    ],
)
def test_damaged_csv_is_named_by_its_line(content, complaint, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    assert re.search(complaint, refused(path))


def test_csv_cells_may_be_long(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text\n" + "a" * 1_000_000)
    assert read(path) == [{"text": "a" * 1_000_000}]


def test_damaged_containers_are_named(tmp_path):
    whole = gzip.compress(CONTENT["rows.jsonl"] * 1000)
    for name, content in {
        "cut.jsonl.gz": whole[: len(whole) // 2],
        "not.jsonl.gz": b"plain text",
        "not.jsonl.zst": b"plain text",
        "not.parquet": b"plain text",
    }.items():
        (tmp_path / name).write_bytes(content)
        assert str(tmp_path / name) in refused(tmp_path / name)


def test_paths_that_name_nothing_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.xml").write_text("<rows/>")
    assert "no such file" in refused(tmp_path / "missing.jsonl")
    assert "holds no file ending in" in refused(tmp_path / "empty")
    assert "no file matches" in refused(tmp_path / "*.jsonl")
    assert "cannot tell the format" in refused(tmp_path / "rows.xml")


def test_a_hub_dataset_without_the_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert re.search(r"someone/rows: .*pip install", refused("someone/rows"))


def test_a_hub_dataset_is_streamed_and_an_unreachable_one_is_named(monkeypatch):
    """A stand-in for the library: the tests have no network."""

    def load_dataset(name: str, *, split: str, streaming: bool):
        assert streaming
        if name != "someone/rows":
            raise ConnectionError("no route to the Hub")
        return iter([{"text": split}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert read("someone/rows", "someone/rows:test") == [{"text": "train"}, {"text": "test"}]
    assert re.search(r"someone/else: .*no route to the Hub", refused("someone/else"))


MEASURE = """
import re, sys
from pathlib import Path
from tlora.data.reading import read_rows
from tlora.data.sources import find_sources

def peak_kilobytes():
    # Not ru_maxrss: that starts with the peak of the process that started this one.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

before = peak_kilobytes()
rows = read_rows(find_sources((sys.argv[1],)))
num_rows = len(list(rows)) if sys.argv[2] == "hold" else sum(1 for _ in rows)
print(num_rows, (peak_kilobytes() - before) // 1024)
"""
LARGE_ROWS = 6_000
LARGE_TEXT = "word " * 2_000
ALLOWED_MEGABYTES = 25


def growth_megabytes(path: Path, way: str) -> int:
    """By how much reading the file raises the peak of a process that does nothing else."""
    command = [sys.executable, "-c", MEASURE, str(path), way]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    num_rows, grown = map(int, printed.split())
    assert num_rows == LARGE_ROWS
    return grown


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.jsonl.gz"])
def test_a_large_file_is_not_held_in_memory(name, tmp_path):
    """Of 60 MB of text, only a part is in memory at any time."""
    path = tmp_path / name
    row = json.dumps({"text": LARGE_TEXT})
    opener = gzip.open if name.endswith("gz") else open
    with opener(path, "wt") as file:
        match name:
            case "rows.json":
                file.write("[" + ",\n".join([row] * LARGE_ROWS) + "]")
            case "rows.csv":
                file.writelines(["text\n", *[LARGE_TEXT + "\n"] * LARGE_ROWS])
            case _:
                file.writelines([row + "\n"] * LARGE_ROWS)
    assert growth_megabytes(path, "stream") < ALLOWED_MEGABYTES
    if name == "rows.jsonl":
        assert growth_megabytes(path, "hold") > ALLOWED_MEGABYTES


def test_what_may_not_be_looked_at_is_named(tmp_path, monkeypatch):
    """Below a directory, or a name that no file can have."""
    (tmp_path / "rows.jsonl").write_text("{}\n")

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    with pytest.raises(DataError, match="cannot be looked at: File name too long"):
        find_sources(("x" * 5000 + ".jsonl",))
    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(DataError, match=r"rows.jsonl: cannot be looked at: Permission denied"):
        find_sources((str(tmp_path),))
