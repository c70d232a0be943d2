"""Sweeps: which settings are tried, when one is given up, who takes its room. Pure decisions, no
torch, no clock, no files."""
