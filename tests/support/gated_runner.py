"""`python gated_runner.py SWEEP.yaml OUTPUT DEVICES [GATE]`: a sweep in this process (DEVICES is 0)
or over worker processes. With GATE it makes that file when it has read the run, and does all else
once the file is gone."""

import sys
import time
from pathlib import Path

from tlora.config import load_sweep
from tlora.runtime.sweeps import tasks, tune


def gated(gate: Path, look_ahead):
    def look(*arguments):
        gate.touch()
        while gate.exists():
            time.sleep(0.01)
        return look_ahead(*arguments)

    return look


if __name__ == "__main__":
    file, output, devices, *gates = sys.argv[1:]
    for gate in gates:
        tune.look_ahead = gated(Path(gate), tune.look_ahead)
        tasks.look_ahead = gated(Path(gate), tasks.look_ahead)
    if int(devices):
        tasks.tune_on_devices([load_sweep(file)], output=output, devices=int(devices))
    else:
        tune.tune(load_sweep(file), output=output)
