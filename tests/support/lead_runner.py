"""`python lead_runner.py JOBS.yaml OUTPUT STEP`: a run over two devices, to be killed. It hears of
no more than a job's step of this number: whoever kills it may be late."""

import sys
import time

from tlora.config import load_spec
from tlora.runtime.progress import ProgressLines
from tlora.runtime.scheduled import train_on_devices

LONG_S = 600.0


class Steps(ProgressLines):
    """Says every step, so that whoever kills knows when."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def on_step(self, driver, done) -> None:
        self.say(f"step {driver.name} {done.step}")
        if done.step == self.last:
            time.sleep(LONG_S)


if __name__ == "__main__":
    file, output, step = sys.argv[1:]
    train_on_devices(load_spec(file), output=output, devices=2, progress=Steps(int(step)))
