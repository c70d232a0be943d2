"""The tuner chooses the fastest setting that changes no bit and keeps it on disk. Times are given
here, so no device is needed."""

import json
import logging
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tlora.kernels import cache
from tlora.kernels.multi_lora import choices, devices, settings, settling, tuner
from tlora.kernels.multi_lora.devices import Choice
from tlora.kernels.multi_lora.settings import MEASURED, Device, Shape, Tuning
from tlora.kernels.multi_lora.tuner import Trial

SHAPE = Shape(num_tokens=2048, max_rank=64, width=192)
USUAL = settings.tuning("reduce_b", SHAPE)
NAME = devices.choice_name("reduce_b", SHAPE)
KEY = {"device": "a card", "capability": "8.9", "source": "1", "torch": "2", "triton": "3"}


class Bench:
    """A trial, and a timer that reads off what each setting takes; the usual one takes 100."""

    def __init__(self, times=None, *, fails=(), differs=(), kernel="reduce_b", shape=SHAPE):
        self.times, self.fails, self.differs = times or {}, fails, differs
        self.tried: list[Tuning] = []
        self.now = 0.0
        self._last = 0.0
        self.trial = Trial(kernel, shape, self._run, self._results)

    def _run(self, tuning: Tuning) -> None:
        self.tried.append(tuning)
        self._last = self.times.get((tuning.warps, tuning.stages, tuning.programs), 100.0)

    def _results(self, tuning: Tuning) -> list[torch.Tensor]:
        place = (tuning.warps, tuning.stages, tuning.programs)
        if place in self.fails:
            raise RuntimeError("out of resource: shared memory")
        return [torch.tensor([1.0 + (place in self.differs)])]

    def timer(self, run) -> float:
        run()
        self.now += 1
        return self._last

    def tune(self, *, device=MEASURED, deadline=1e9) -> Choice:
        (choice,) = tuner.tune(
            [self.trial], self.timer, device, deadline=deadline, clock=lambda: self.now
        ).values()
        return choice


def changed(**values) -> Choice:
    tuning = replace(USUAL, **values)
    return Choice(tuning.warps, tuning.stages, tuning.programs)


def place(**values):
    return tuple(asdict(changed(**values)).values())


def test_the_fastest_setting_is_chosen():
    assert Bench({place(programs=2): 90.0, place(warps=4): 95.0}).tune() == changed(programs=2)
    both = {place(programs=2): 90.0, place(programs=2, warps=4): 80.0}
    assert Bench(both).tune() == changed(programs=2, warps=4)


@pytest.mark.parametrize(("taken", "is_chosen"), [(98.5, False), (97.5, True)])
def test_a_gain_below_two_percent_is_chance(taken, is_chosen):
    expected = changed(warps=4) if is_chosen else changed()
    assert Bench({place(warps=4): taken}).tune() == expected


def test_a_setting_that_does_not_compile_is_skipped():
    times = {place(programs=2): 80.0, place(programs=2, warps=4): 50.0}
    assert Bench(times).tune() == changed(programs=2, warps=4)
    fails = [place(programs=2, warps=4)]
    assert Bench(times, fails=fails).tune() == changed(programs=2)


def test_a_setting_that_changes_bits_is_not_taken():
    times = {place(warps=4): 50.0}
    assert Bench(times).tune() == changed(warps=4)
    assert Bench(times, differs=[place(warps=4)]).tune() == changed()


def test_nothing_is_begun_after_the_deadline():
    bench = Bench({place(programs=2): 50.0, place(warps=4): 40.0})
    assert bench.tune(deadline=2) == changed(programs=2)
    assert len(bench.tried) == 2
    late = Bench({place(programs=2): 50.0})
    assert late.tune(deadline=0) == changed()
    assert not late.tried


def test_tiles_and_order_of_sums_stay():
    """Only warps, stages and programs differ, and warps are those with the same products."""
    bench = Bench()
    bench.tune()
    assert len(set(bench.tried)) > 3
    for tuning in bench.tried:
        same = replace(USUAL, warps=tuning.warps, stages=tuning.stages, programs=tuning.programs)
        assert tuning == same
        assert tuning.warps in (4, 8)
        assert tuning.programs > 0


def test_settings_that_do_not_fit_are_not_tried():
    small = Device(shared_bytes=101_376, capability=86)
    bench = Bench()
    bench.tune(device=small)
    assert {t.stages for t in bench.tried} == {2}
    assert all(
        settings.shared_bytes("reduce_b", SHAPE, t, 86) <= small.shared_bytes for t in bench.tried
    )


def known_or_tuned(folder: Path, bench: Bench, key=KEY):
    return tuner.known_or_tuned(
        folder, key, {NAME}, lambda: [bench.trial], bench.timer, MEASURED, clock=lambda: bench.now
    )


def test_what_was_found_is_not_timed_again(tmp_path):
    first = Bench({place(warps=4): 50.0})
    assert known_or_tuned(tmp_path / "kernels", first) == {NAME: changed(warps=4)}
    second = Bench({place(programs=2): 10.0})
    assert known_or_tuned(tmp_path / "kernels", second) == {NAME: changed(warps=4)}
    assert first.tried
    assert not second.tried
    assert len(list((tmp_path / "kernels").iterdir())) == 1, "no temporary file is left"


@pytest.mark.parametrize("field", KEY)
def test_another_device_or_version_is_timed_anew(tmp_path, field):
    known_or_tuned(tmp_path, Bench({place(warps=4): 50.0}))
    other = Bench({place(programs=2): 10.0})
    found = known_or_tuned(tmp_path, other, {**KEY, field: "other"})
    assert found == {NAME: changed(programs=2)}


WRONG = {
    "no json": "{",
    "a list": "[]",
    "another key": json.dumps({"key": {**KEY, "torch": "9"}, "choices": {}}),
    "a string": json.dumps({"key": KEY, "choices": {NAME: "fast"}}),
    "unknown field": json.dumps({"key": KEY, "choices": {NAME: {"tokens": 8}}}),
    "no number": json.dumps(
        {"key": KEY, "choices": {NAME: {"warps": 8, "stages": "3", "programs": 1}}}
    ),
    "one warp": json.dumps(
        {"key": KEY, "choices": {NAME: {"warps": 1, "stages": 3, "programs": 1}}}
    ),
    "no programs": json.dumps(
        {"key": KEY, "choices": {NAME: {"warps": 8, "stages": 3, "programs": 0}}}
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_not_ours_is_ignored_and_said_so(tmp_path, name, caplog):
    path = choices.path_of(tmp_path, KEY)
    path.write_text(WRONG[name])
    bench = Bench({place(warps=4): 50.0})
    assert known_or_tuned(tmp_path, bench) == {NAME: changed(warps=4)}
    assert bench.tried
    assert str(path) in caplog.text
    assert choices.read(tmp_path, KEY) == {NAME: changed(warps=4)}


def test_where_nothing_can_be_kept_nothing_is_timed(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    bench = Bench({place(warps=4): 50.0})
    assert known_or_tuned(tmp_path / "file" / "kernels", bench) == {}
    assert not bench.tried
    assert "cannot be kept" in caplog.text


def test_a_tuner_that_fails_leaves_the_usual_settings(tmp_path, caplog):
    bench = Bench(fails=[place()])
    assert known_or_tuned(tmp_path, bench) == {}
    assert "usual settings" in caplog.text


def test_two_writers_leave_a_whole_file(tmp_path):
    names = [f"kernel {i}" for i in range(8)]

    def write(name):
        for _ in range(20):
            choices.write(tmp_path, KEY, {name: changed()})
            assert choices.read(tmp_path, KEY), "somebody's file, whole"

    threads = [threading.Thread(target=write, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = choices.read(tmp_path, KEY)
    assert found
    assert set(found) <= set(names)
    assert set(found.values()) == {changed()}
    assert len(list(tmp_path.iterdir())) == 1


def test_writing_keeps_what_is_there(tmp_path):
    choices.write(tmp_path, KEY, {"a": changed(), "b": changed()})
    choices.write(tmp_path, KEY, {"b": changed(warps=4), "c": changed(warps=4)})
    found = choices.read(tmp_path, KEY)
    assert found == {"a": changed(), "b": changed(), "c": changed(warps=4)}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TLORA_CACHE": "/x"}, "/x/kernels"),
        ({"XDG_CACHE_HOME": "/y"}, "/y/tlora/kernels"),
        ({"XDG_CACHE_HOME": "/y", "TLORA_CACHE": "/x"}, "/x/kernels"),
        ({"HOME": "/z"}, "/z/.cache/tlora/kernels"),
    ],
)
def test_the_file_lies_in_the_cache_directory(monkeypatch, variables, expected):
    for name in ("TLORA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache.directory() == Path(expected)


@pytest.fixture
def nothing_settled(monkeypatch):
    monkeypatch.setattr(devices, "_settled", {})
    devices.tuning_of.cache_clear()
    yield
    devices.tuning_of.cache_clear()


def test_what_is_settled_stays(nothing_settled):
    device = torch.device("cpu")
    assert devices.tuning_of("reduce_b", SHAPE, device) == USUAL
    devices.settle(device, {NAME: changed(warps=4), "other": None})
    assert devices.tuning_of("reduce_b", SHAPE, device) == replace(USUAL, warps=4)
    devices.settle(device, {NAME: changed(programs=2), "other": changed(programs=2)})
    assert devices.tuning_of("reduce_b", SHAPE, device) == replace(USUAL, warps=4)
    assert devices.settled(device) == {NAME, "other"}
    assert devices.settled(torch.device("meta")) == frozenset()


def test_a_choice_that_does_not_fit_another_rank_is_left_out():
    """It was made for rank 64; the tiles of other ranks may be larger."""
    small = Device(shared_bytes=101_376, capability=86)
    shape = replace(SHAPE, max_rank=256, width=768, pool_itemsize=4)
    usual = settings.tuning("expand_y", shape, small)
    fits, not_fits = Choice(8, usual.stages, 4), Choice(8, usual.stages + 1, 4)
    assert devices.apply(fits, "expand_y", shape, usual, small).warps == 8
    assert devices.apply(not_fits, "expand_y", shape, usual, small) == usual


def test_without_a_cuda_device_nothing_happens(nothing_settled, caplog):
    with caplog.at_level(logging.DEBUG):
        settling.settle_kernels(torch.device("cpu"), torch.float32, [(64, (64,))])
    assert not devices.settled(torch.device("cpu"))
    assert not caplog.records


def test_it_runs_when_it_is_asked_for(monkeypatch, nothing_settled):
    """Otherwise not even the device is asked for its name."""
    monkeypatch.setattr(settling, "kernels_serve", lambda *_: pytest.fail("asked"))
    device = torch.device("cuda", 0)
    monkeypatch.delenv("TLORA_TUNE_KERNELS", raising=False)
    settling.settle_kernels(device, torch.float16, [(64, (64,))])
    monkeypatch.setenv("TLORA_TUNE_KERNELS", "1")
    with pytest.raises(pytest.fail.Exception):
        settling.settle_kernels(device, torch.float16, [(64, (64,))])
