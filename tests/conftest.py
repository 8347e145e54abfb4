"""The plugin of every suite (`podracer_testing.plugin`), and what the core's tests add to it."""

from collections.abc import Iterator

import pytest
from sockets import listeners

pytest_plugins = ["podracer_testing.plugin", "sharing", "fault_matrix", "pytester"]


@pytest.fixture
def nothing_listens() -> Iterator[None]:
    """Fail a test during which something listened beyond the loopback interface."""
    with listeners() as found:
        yield
    assert found == set()
