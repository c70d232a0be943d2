"""Executors that train: groups in this process, or in worker processes on this machine.

One *device* is one GPU of the scheduler's cluster: a worker with an engine of its own.
"""
