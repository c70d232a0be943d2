"""`tlora profile`: measures nano-batches on this device, and fits the cost model to them.

Runs wherever torch and transformers do, like the benchmark whose shapes and clocks it uses.
docs/profiles.md says what is measured and how to read it.
"""
