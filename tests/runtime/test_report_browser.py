"""The report in a real browser: its scripts run without an error and draw what they should."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.run_dirs import synthetic_run

from tlora.runtime.benchmark.landscapes import recorded
from tlora.runtime.report import write_report

pytestmark = pytest.mark.browser

QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1200,900"),
)
WATCH = """<script>
addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });
</script>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium")
    if found is None and not os.environ.get("CI"):
        pytest.skip("chromium is not installed: make system-deps")
    assert found is not None, "chromium is not installed: make system-deps"
    return found


def opened(chromium: str, page: Path, profile: Path, *, after: str) -> str:
    """The page as it is after its scripts, and this one, have run."""
    text = page.read_text().replace("<head>", f"<head>{WATCH}", 1)
    page.write_text(text.replace("</body>", f"<script>{after}</script></body>"))
    command = [chromium, *QUIET, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return done.stdout


def figure(dom: str, name: str) -> str:
    found = re.search(rf'<figure id="{name}">(.*?)</figure>', dom, re.S)
    assert found is not None
    return found[1]


def test_the_report_is_drawn_in_a_browser(chromium: str, tmp_path: Path) -> None:
    """Two curves per chosen job, bars with padding, a small curve per row; a click hides a job."""
    root = synthetic_run(tmp_path / "run", jobs=10, nano_batches=600, failing=["job-001"])
    page = write_report(root)
    click = 'document.querySelector("#legend button").click();'
    dom = opened(chromium, page, tmp_path / "profile", after=click)
    assert 'data-drawn="yes"' in dom and "data-error" not in dom
    assert figure(dom, "loss").count('class="curve"') == 2 * 7, "eight were chosen, one was hidden"
    assert "<path" in figure(dom, "throughput") and 'class="padding"' in figure(dom, "composition")
    assert len(re.findall(r'<td class="spark"[^>]*><svg', dom)) == 10


def test_the_tuned_size_is_drawn(chromium: str, tmp_path: Path) -> None:
    """Two lines, a sign for every decision that has room, and what the signs mean."""
    landscape = recorded("1B with adapters, eager")
    page = write_report(synthetic_run(tmp_path / "run", tuned=landscape, nano_batches=120))
    dom = opened(chromium, page, tmp_path / "profile", after="")
    assert 'data-drawn="yes"' in dom and "data-error" not in dom
    drawn = figure(dom, "tuning")
    assert 'class="budget"' in drawn and 'class="useful"' in drawn and "▲" in drawn
    assert "▲ double" in dom


def test_speeds_that_are_not_known_are_said_to_be(chromium: str, tmp_path: Path) -> None:
    """Of nano-batches that were never full, as where jobs are few and small."""
    landscape = recorded("1B with adapters, eager")
    root = synthetic_run(tmp_path / "run", tuned=landscape, nano_batches=40)
    events = [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["kind"] == "nano_batch":
            event["measure"]["full"] = False
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    dom = opened(chromium, write_report(root), tmp_path / "profile", after="")
    assert 'data-drawn="yes"' in dom and "data-error" not in dom
    drawn = figure(dom, "tuning")
    assert 'class="budget"' in drawn and 'class="useful"' not in drawn
    assert "no nano-batch was full" in drawn


def test_an_error_in_a_script_would_be_seen(chromium: str, tmp_path: Path) -> None:
    """The check above can fail."""
    page = write_report(synthetic_run(tmp_path / "run"))
    dom = opened(chromium, page, tmp_path / "profile", after="nothing.here();")
    assert "data-error" in dom
