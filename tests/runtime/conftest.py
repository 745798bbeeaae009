"""What several files of this folder share."""

from collections.abc import Iterator

import pytest

from tests.ray_cluster import ray_cluster


@pytest.fixture(scope="session")
def on_ray() -> Iterator[None]:
    """Ray runs, the same one for all tests of this process."""
    with ray_cluster():
        yield


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts a Ray has the machine for itself."""
    for item in items:
        if item.path.name.startswith("test_ray_"):
            item.add_marker(pytest.mark.alone)
