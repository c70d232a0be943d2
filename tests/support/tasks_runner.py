"""`python tasks_runner.py SWEEP.yaml OUTPUT [FAULT]`: tasks over two devices, to be killed. FAULT:
of their workers, one of task_faults.py."""

import sys

from tlora.config import load_tasks
from tlora.runtime.executors import processes
from tlora.runtime.sweeps.tasks import tune_on_devices
from tlora.runtime.sweeps.view import View


class Turns(View):
    """Says every turn, so that whoever kills knows when."""

    def on_turn(self, state, event, actions) -> None:
        self.say(f"turn {event.kind}")


if __name__ == "__main__":
    if len(sys.argv) > 3:
        import task_faults

        processes.serve = getattr(task_faults, sys.argv[3])
    tune_on_devices(load_tasks(sys.argv[1]), output=sys.argv[2], devices=2, view=Turns())
