"""A config with the groups that roles name, as plain attributes: the graph knows no config
class."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def config():
    return SimpleNamespace(
        algorithm=SimpleNamespace(
            adv_estimator="grpo",
            gamma=0.9,
            lam=0.95,
            use_kl_in_reward=False,
            kl_ctrl=SimpleNamespace(type="fixed", kl_coef=0.001),
            filter_groups=SimpleNamespace(enable=False, metric="score"),
        ),
        actor_rollout_ref=SimpleNamespace(
            actor=SimpleNamespace(clip_ratio=0.2, optim=SimpleNamespace(lr=1e-6)),
            rollout=SimpleNamespace(n=8, temperature=1.0),
            ref=SimpleNamespace(),
        ),
        critic=SimpleNamespace(cliprange_value=0.5),
        reward=SimpleNamespace(timeout_s=10.0),
        async_=SimpleNamespace(max_staleness=0),
    )
