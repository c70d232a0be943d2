"""One server of commands for all pages."""

from collections.abc import Iterator

import pytest
from support.page_runner import Shell, command_server


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    # The path of a socket may not be long.
    with command_server(tmp_path_factory.mktemp("s")) as shell:
        yield shell
