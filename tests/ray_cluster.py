"""A real Ray of this machine for the tests: a few CPUs, half a gigabyte of shared memory,
loopback."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def ray_cluster(num_cpus: int = 4) -> Iterator[None]:
    """Started and gone again within the block. Starting takes some seconds: a fixture shares one
    among many tests."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        "local",  # a Ray that runs already is not joined
        num_cpus=num_cpus,
        object_store_memory=500_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
    )

    try:
        yield
    finally:
        ray.shutdown()
