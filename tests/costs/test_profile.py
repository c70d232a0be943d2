"""Profiles on disk: the same back, and a clear word on what is wrong in one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.costs import new_profile

from tlora.core.errors import SpecError
from tlora.costs.profile import (
    GroupCheck,
    Profile,
    Skipped,
    as_json,
    of_json,
    read_profile,
    shipped_profiles,
    write_profile,
)

# The keys that programs outside rely on.
FIXED = {
    "v", "kind", "device", "dtype", "shape", "versions", "points", "fit", "heldout_error_pct",
    "attach_s", "detach_s", "warmup_s",
}  # fmt: skip


def test_a_profile_comes_back_as_it_was_written(profile: Profile, tmp_path: Path) -> None:
    """In one line with all fixed keys, and nothing else in the folder."""
    full = replace(
        profile,
        skipped=(Skipped(rows=16_384, length=512, ranks=(8, 64), reason="out of memory"),),
        notes=("a note",),
        load_s=1.5,
        group_check=GroupCheck(jobs=8, tokens=10_000, predicted_s=1.1, measured_s=1.0),
    )
    assert full.group_check is not None and full.group_check.error_pct == pytest.approx(10.0)
    write_profile(full, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == full
    (line,) = (tmp_path / "p.json").read_text().splitlines()
    assert set(json.loads(line)) >= FIXED
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def broken(profile: Profile, *path: str | int, value: object) -> object:
    data = json.loads(json.dumps(as_json(profile)))
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("kind",), "bench", "is not a profile"),
        (("v",), 2, "is not a profile of version 1"),
        (("device",), None, "device: is missing"),
        (("attach_s",), "fast", 'attach_s: must be a number of at least 0, got "fast"'),
        (("fit",), [], r"fit: must be an object, got \[\]"),
        (("fit", "time", "row_s"), None, "fit.time.row_s: is missing"),
        (("fit", "time", "row_s"), -1e-6, "fit.time.row_s: must be a number of at least 0"),
        (("fit", "time", "sharpness"), 0, "fit.time.sharpness: must be at least 1"),
        (("fit", "memory", "weights_bytes"), True, "fit.memory.weights_bytes: must be a number"),
        (("points",), {}, "points: must be a list"),
        (("points",), [], "points: none was held out"),
        (("points", 3, "seconds"), 0, r"points\[3\].seconds: must be above 0"),
        (("points", 3, "segments"), [[1, 2]], r"points\[3\].segments: must be \[tokens, rank"),
        (("points", 3, "segments"), [[1, 2, "x"]], r"points\[3\].segments\[0\].* must be a number"),
        (("points", 3, "peak_bytes"), "much", r"points\[3\].peak_bytes: must be a number"),
        (("skipped",), [{"rows": 64}], r"skipped\[0\].length: is missing"),
        (("buckets",), ["x"], "buckets: must be a number"),
        (("buckets",), [], "buckets: must name at least one size"),
        (("bucket_step",), 0.5, "bucket_step: must be a whole number"),
        (("budget_tokens",), 0.5, "budget_tokens: must be a whole number"),
    ],
)
def test_a_damaged_profile_is_refused_by_field(path, value, message, profile) -> None:
    """As is one without it."""
    of_json(json.loads(json.dumps(as_json(profile))))
    with pytest.raises(SpecError, match=message):
        of_json(broken(profile, *path, value=value))


def test_a_fit_that_is_not_that_of_its_points_is_refused() -> None:
    """One parameter 1 % off, or an error that flatters."""
    profile = replace(new_profile(noise_pct=1.0), bucket_step=64)
    assert of_json(as_json(profile)) == profile
    slower = profile.time.row_s * 1.01
    for path, value in (
        (("fit", "time", "row_s"), slower),
        (("heldout_error_pct",), profile.heldout_error_pct / 2),
    ):
        with pytest.raises(SpecError, match=r"heldout_error_pct: says .*, but its points give"):
            of_json(broken(profile, *path, value=value))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "p.json cannot be read: No such file"),
        (b"{\n oops", "p.json:2: not JSON"),
        (b"\xff\xfe", "p.json cannot be read: not a text file"),
        (b"[]", "p.json: must be an object"),
    ],
)
def test_a_file_that_is_no_profile_is_named(content, message, tmp_path) -> None:
    """With the line, where there is one."""
    file = tmp_path / "p.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SpecError, match=message):
        read_profile(file)


def test_every_shipped_profile_can_be_read_and_is_a_good_fit() -> None:
    """By the name of its file; on the points it was not fitted to it is within 15 %."""
    for name, profile in shipped_profiles().items():
        assert profile.heldout_error_pct < 15, name
        assert profile.shape in name
