"""How much of the cores a container lets its processes have."""

from pathlib import Path

import pytest

from tlora.runtime import environment
from tlora.runtime.quota import cpu_quota

UNIFIED = "0::{}\n"
APART = "12:memory:/a\n4:cpuacct,cpu:{}\n1:name=systemd:/b\n0::/\n"
"""As /proc/self/cgroup says it: a tree for each controller."""

OF_CPUSET = "3:cpuset:{}\n"


def quota(tmp_path: Path, memberships: str, files: dict[str, str]) -> float | None:
    own = tmp_path / "own"
    own.write_text(memberships)
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return cpu_quota(tmp_path / "groups", own)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"pod/job/cpu.max": "250000 100000\n"}, 2.5),
        ({"pod/job/cpu.max": "max 100000\n"}, None),
        ({"pod/job/cpu.max": "400000 100000\n", "pod/cpu.max": "300000 100000\n"}, 3.0),
        ({"pod/job/cpu.max": "max 100000\n", "cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu.max": "200000 100000\n"}, 2.0),
        ({"pod/other/cpu.max": "100000 100000\n"}, None),
        ({"pod/job/cpu.max": "none at all\n"}, None),
        ({"pod/job/cpu.max": "100000 0\n"}, None),
        ({"pod/job/cpu.max": "\n"}, None),
        ({}, None),
    ],
)
def test_one_tree_of_groups(tmp_path: Path, files: dict[str, str], cores: float | None) -> None:
    """The least of a group and all that it is in; within a container its own is the root."""
    assert quota(tmp_path, UNIFIED.format("/pod/job"), files) == cores


@pytest.mark.parametrize("tree", ["cpuacct,cpu", "cpu"])
@pytest.mark.parametrize("path", ["/pod", "/../.."])
def test_a_tree_for_each_controller(tmp_path: Path, tree: str, path: str) -> None:
    folder = f"{tree}/pod" if path == "/pod" else tree
    files = {f"{folder}/cpu.cfs_quota_us": "150000\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    assert quota(tmp_path, APART.format(path), files) == 1.5


def test_no_limit_is_said_as_a_negative_one(tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert quota(tmp_path, APART.format("/"), files) is None


def test_what_another_controller_says_is_not_for_cores(tmp_path: Path) -> None:
    files = {"cpuset/pod/cpu.max": "100000 100000\n", "pod/cpu.max": "100000 100000\n"}
    assert quota(tmp_path, OF_CPUSET.format("/pod"), files) is None


def test_where_nothing_says_so_there_is_none(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "not there") is None


@pytest.mark.parametrize(
    ("allowed", "limit", "usable"), [(64, 2.5, 2), (64, 0.5, 1), (2, 8.0, 2), (64, None, 64)]
)
def test_cores_are_usable_as_far_as_the_quota_goes(
    monkeypatch: pytest.MonkeyPatch, allowed: int, limit: float | None, usable: int
) -> None:
    """Whole ones: a thread too many stops them all."""
    monkeypatch.setattr(environment, "allowed_cores", lambda: allowed)
    monkeypatch.setattr(environment, "cpu_quota", lambda: limit)
    assert environment.usable_cores() == usable
