"""`tlora bench`: the same jobs fused, one at a time, with PEFT and as the frozen backbone alone.

Runs wherever torch and transformers do: nothing here needs pydantic, typer or rich, and PEFT is
only asked for by its own arm. docs/benchmarks.md says how to read the results.
"""
