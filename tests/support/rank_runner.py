"""`torchrun rank_runner.py ...`: as `torchrun -m tlora ...`, but the first group takes its time:
whoever is to stop one of its ranks may be late."""

import os
import time

from tlora.cli.main import main
from tlora.training.group_engine import GroupEngine

FREE_TURNS = 12
TURN_S = 0.25

if __name__ == "__main__":
    if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        agree, turns = GroupEngine._agree, [0]

        def slowly(self):
            turns[0] += 1
            if turns[0] > FREE_TURNS:
                time.sleep(TURN_S)
            return agree(self)

        GroupEngine._agree = slowly
    main()
