"""Runs code of users in the tests' own process, and forgets what it registered."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from distflow import builtin_names as names
from distflow.algorithms.registry import (
    ADV_ESTIMATORS,
    POLICY_LOSSES,
    find_adv_est,
    find_policy_loss,
)
from distflow.config.keys import schema


@contextmanager
def forgotten(*modules: str) -> Iterator[None]:
    """Inside, user code may register estimators, losses and groups; afterwards these and `modules`
    were never there."""
    for find, table in ((find_adv_est, names.ESTIMATORS), (find_policy_loss, names.POLICY_LOSSES)):
        # a built-in that is first asked for inside must not be forgotten: it is imported once
        for name in table:
            find(name)

    before = [
        (registry, dict(registry))
        for registry in (ADV_ESTIMATORS, POLICY_LOSSES, schema._user_groups)
    ]
    paths = list(sys.path)

    registered = set(names.REGISTERED)
    try:
        yield
    finally:
        for registry, entries in before:
            registry.clear()
            registry.update(entries)

        names.REGISTERED &= registered
        schema.schema_keys.cache_clear()

        for name in [
            name for name in sys.modules if name.split(".")[0] in modules or name in modules
        ]:
            del sys.modules[name]

        sys.path[:] = paths
