"""The words every other package shares. Plain values, no torch."""
