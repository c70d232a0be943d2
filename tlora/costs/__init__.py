"""What a group of jobs costs: seconds and bytes, predicted from a profile of the device.

`tlora profile` measures a device and writes a profile; `predict` answers from one what a
scheduler asks. Nothing here measures, and nothing knows torch.
"""

from tlora.core.load import JobLoad
from tlora.costs.predict import (
    Prediction,
    finish_times,
    knee_tokens,
    predict,
    solo,
)
from tlora.costs.profile import Profile, read_profile, shipped_profiles, write_profile

__all__ = [
    "JobLoad",
    "Prediction",
    "Profile",
    "finish_times",
    "knee_tokens",
    "predict",
    "read_profile",
    "shipped_profiles",
    "solo",
    "write_profile",
]
