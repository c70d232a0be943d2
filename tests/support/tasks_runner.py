"""`python tasks_runner.py SWEEP.yaml OUTPUT`: tasks over two devices, to be killed."""

import sys

from tlora.config import load_tasks
from tlora.runtime.sweeps.tasks import tune_on_devices
from tlora.runtime.sweeps.view import View


class Turns(View):
    """Says every turn, so that whoever kills knows when."""

    def on_turn(self, state, event, actions) -> None:
        self.say(f"turn {event.kind}")


if __name__ == "__main__":
    tune_on_devices(load_tasks(sys.argv[1]), output=sys.argv[2], devices=2, view=Turns())
