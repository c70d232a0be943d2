"""`python tasks_runner.py SWEEP.yaml OUTPUT EVALUATIONS [FAULT]`: tasks over two devices, to be
killed. It hears of no more evaluations than so: whoever kills it may be late. FAULT: of their
workers, one of task_faults.py."""

import sys
import time

from tlora.config import load_tasks
from tlora.runtime.executors import processes
from tlora.runtime.sweeps.tasks import tune_on_devices
from tlora.runtime.sweeps.view import View

LONG_S = 600.0


class Turns(View):
    """Says every turn, so that whoever kills knows when."""

    def __init__(self, evaluations: int) -> None:
        super().__init__()
        self.left = evaluations

    def on_turn(self, state, event, actions) -> None:
        self.say(f"turn {event.kind}")
        self.left -= event.kind == "evaluated"
        if self.left == 0:
            time.sleep(LONG_S)


if __name__ == "__main__":
    file, output, evaluations, *faults = sys.argv[1:]
    if faults:
        import task_faults

        processes.serve = getattr(task_faults, faults[0])
    tune_on_devices(load_tasks(file), output=output, devices=2, view=Turns(int(evaluations)))
