"""What several files of this folder share."""

from collections.abc import Iterator

import pytest

from tests.ray_cluster import ray_cluster


@pytest.fixture(scope="session")
def on_ray() -> Iterator[None]:
    """Ray runs, the same one for all tests of this process."""
    with ray_cluster():
        yield
