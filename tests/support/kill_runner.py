"""Trains a job file in forked children and kills them with SIGKILL, again and again, until it is
done.

A process of its own: it only imports before it forks, so that no thread of torch is forked with it.

    python kill_runner.py JOB_FILE OUTPUT KILLS SEED SECONDS
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from tlora.config import load_spec
from tlora.runtime.training import train


def start(job_file: str, output: str, log: str) -> int:
    child = os.fork()
    if child:
        return child
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    status = 1
    try:
        torch.set_num_threads(1)
        status = len(train(load_spec(job_file), output=output).failed)
    finally:
        os._exit(status)


def main() -> None:
    job_file, output, kills, seed, seconds = sys.argv[1:]
    generator = random.Random(int(seed))
    log = f"{output}.log"
    killed = 0
    while killed < int(kills):
        child = start(job_file, output, log)
        time.sleep(generator.uniform(0.02, float(seconds)))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            break
        killed += 1
    child = start(job_file, output, log)
    _, status = os.waitpid(child, 0)
    if status:
        sys.stderr.write(Path(log).read_text()[-3000:])
    print(json.dumps({"killed": killed, "status": status}))


if __name__ == "__main__":
    main()
