"""Several ranks that share one super-model: who holds what, and what they tell each other.

Everything here is put on a finished model from outside, or is a pure decision; model files read as
one-device code. What a job is, or a step, is known in training/.
"""
