"""A profile of a device whose costs are known."""

import pytest
from support.costs import new_profile

from tlora.costs.profile import Profile


@pytest.fixture(scope="package")
def profile() -> Profile:
    return new_profile()
