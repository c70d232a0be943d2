"""Who trains with whom, and where: policies. Pure: state and events in, decisions out; no clock, no
device, no randomness, no torch."""

from tlora.schedule.policy import Policy
from tlora.schedule.settings import Settings
from tlora.schedule.table import POLICIES, make_policy

__all__ = ["POLICIES", "Policy", "Settings", "make_policy"]
