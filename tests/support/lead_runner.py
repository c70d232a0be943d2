"""`python lead_runner.py JOBS.yaml OUTPUT`: a run over two devices, to be killed."""

import sys

from tlora.config import load_spec
from tlora.runtime.progress import ProgressLines
from tlora.runtime.scheduled import train_on_devices


class Steps(ProgressLines):
    """Says every step, so that whoever kills knows when."""

    def on_step(self, driver, done) -> None:
        self.say(f"step {driver.name} {done.step}")


if __name__ == "__main__":
    train_on_devices(load_spec(sys.argv[1]), output=sys.argv[2], devices=2, progress=Steps())
