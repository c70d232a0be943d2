"""Tests side by side have the same random inputs: they are drawn before processes are started."""

from support.interpreter import SEED

assert SEED >= 0
