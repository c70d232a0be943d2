"""Real runs: loads models and data, drives the engine, and writes what is left behind."""
