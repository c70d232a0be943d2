"""The cache on disk: complete or absent, whoever writes and whenever they stop."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tlora.core.sequence import IGNORED
from tlora.data.cache import CacheWriter, open_cache, remove_abandoned_drafts
from tlora.data.rows import Origin
from tlora.data.tokenise import Encoded

NAMES = ("a.jsonl", "b.jsonl")


def encoded(ids: list[int], labels: list[int], origin: Origin) -> Encoded:
    return Encoded(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32), origin)


ROWS = [
    encoded([5, 6, 7], [IGNORED, 6, 7], Origin("a.jsonl", 1)),
    encoded([8, 9], [IGNORED, 9], Origin("b.jsonl", 2_000_000_000_000)),
]


def write(target: Path, rows: list[Encoded] = ROWS, *, own_labels: bool = False) -> None:
    with CacheWriter(target, own_labels=own_labels, source_names=NAMES) as writer:
        for row in rows:
            writer.add(row)
        writer.publish(detected="chat", rendering="as is")


@pytest.mark.parametrize("own_labels", [False, True])
def test_rows_come_back_as_they_were_written(own_labels, tmp_path):
    write(tmp_path / "key", own_labels=own_labels)
    cache = open_cache(tmp_path / "key", NAMES)
    assert cache is not None
    assert len(cache) == 2
    for index, row in enumerate(ROWS):
        stored = cache.row(index)
        assert stored.input_ids.tolist() == row.input_ids.tolist()
        assert stored.labels.tolist() == row.labels.tolist()
        assert (stored.input_ids.dtype, stored.labels.dtype) == (np.int32, np.int32)
        assert stored.origin == str(row.origin)
    assert cache.lengths.tolist() == [3, 2]
    assert cache.targets.tolist() == [2, 1]


def test_labels_of_their_own_are_kept(tmp_path):
    write(tmp_path / "key", [encoded([5, 6], [1, 2], Origin("a.jsonl", 1))], own_labels=True)
    cache = open_cache(tmp_path / "key", NAMES)
    assert cache is not None
    assert cache.row(0).labels.tolist() == [1, 2]


def test_origins_bear_the_names_of_the_job_that_reads(tmp_path):
    """Two jobs with copies of one file share a cache, and each is told of its own file."""
    write(tmp_path / "key")
    cache = open_cache(tmp_path / "key", ("copy.jsonl", "other.jsonl"))
    assert cache is not None
    assert cache.origin(0) == "copy.jsonl:1"


def test_an_unfinished_cache_is_not_there(tmp_path):
    with CacheWriter(tmp_path / "key", own_labels=False, source_names=NAMES) as writer:
        writer.add(ROWS[0])
        assert open_cache(tmp_path / "key", NAMES) is None
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_cache_is_not_used_and_is_replaced(tmp_path):
    target = tmp_path / "key"
    for damage in ("tokens.bin", "trained.bin", "meta.json"):
        write(target)
        (target / damage).write_bytes(b"12")
        assert open_cache(target, NAMES) is None
        write(target)
        assert open_cache(target, NAMES) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_the_second_writer_uses_what_the_first_wrote(tmp_path):
    target = tmp_path / "key"
    with CacheWriter(target, own_labels=False, source_names=NAMES) as late:
        late.add(ROWS[0])
        write(target)
        late.publish(detected="late", rendering="as is")
    cache = open_cache(target, NAMES)
    assert cache is not None
    assert (cache.meta.detected, len(cache)) == ("chat", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_old_drafts_are_cleared_and_young_ones_left(tmp_path):
    for name in ("old", "young"):
        (tmp_path / f"key.draft-{name}").mkdir()
        (tmp_path / f"key.draft-{name}" / "tokens.bin").write_bytes(b"1234")
    for path in (tmp_path / "key.draft-old" / "tokens.bin", tmp_path / "key.draft-old"):
        os.utime(path, (0, 0))
    remove_abandoned_drafts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["key.draft-young"]


WRITE_TOGETHER = """
import sys, time
from pathlib import Path
import numpy as np
from tlora.data.cache import CacheWriter, open_cache
from tlora.data.rows import Origin
from tlora.data.tokenise import Encoded

folder, own, other = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
for round in range(30):
    (folder / f"{own}-{round}").touch()
    while not (folder / f"{other}-{round}").exists():
        time.sleep(0)
    target = folder / "tokens" / f"key{round}"
    ids = np.arange(round + 2, dtype=np.int32)
    with CacheWriter(target, own_labels=False, source_names=("a",)) as writer:
        for line in range(20):
            writer.add(Encoded(ids, ids, Origin("a", line + 1)))
        writer.publish(detected=own, rendering="as is")
    cache = open_cache(target, ("a",))
    assert len(cache) == 20 and cache.row(19).input_ids.tolist() == ids.tolist()
"""


@pytest.mark.multi_process
def test_two_processes_may_write_the_same_key_at_once(tmp_path):
    """They meet before each of thirty keys; both end with a whole cache, and no draft is left."""
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITE_TOGETHER, str(tmp_path), own, other])
        for own, other in (("left", "right"), ("right", "left"))
    ]
    assert [process.wait(timeout=600) for process in processes] == [0, 0]
    written = sorted(path.name for path in (tmp_path / "tokens").iterdir())
    assert written == sorted(f"key{round}" for round in range(30))
    winners = {
        json.loads((tmp_path / "tokens" / name / "meta.json").read_text())["detected"]
        for name in written
    }
    assert winners <= {"left", "right"}


def test_a_cache_that_does_not_say_which_answers_are_empty_is_made_again(tmp_path):
    """It was written before that was asked; its rows are the same."""
    target = tmp_path / "key"
    write(target, [replace(ROWS[0], empty_answer=True), ROWS[1]])
    cache = open_cache(target, NAMES)
    assert cache is not None and cache.empty_units().tolist() == [0]
    meta = json.loads((target / "meta.json").read_text())
    del meta["num_empty"]
    (target / "meta.json").write_text(json.dumps(meta))
    (target / "empty.npy").unlink()
    assert open_cache(target, NAMES) is None
    write(target)
    cache = open_cache(target, NAMES)
    assert cache is not None and cache.empty_units().tolist() == []
