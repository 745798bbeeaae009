"""The engines of a worker: those of its plan, each part built once."""

from typing import Any

import torch
from torch import nn

from distflow.planning.plan import RankPlan
from distflow.runtime.resources import Resources, build_resources
from distflow.training.engine import OneRank


def built(
    *engines: str, services: tuple[str, ...] = (), weight: float = 0.0
) -> tuple[Resources, list[str]]:
    """Resources of a worker with these engines, and the parts in the order in which they were
    built."""
    order: list[str] = []

    def part(name: str, *needs: str, value: Any = None) -> Any:
        def factory(get: Any, device: torch.device) -> object:
            assert device.type == "cpu"
            needed = [get(need) for need in needs]
            order.append(name)
            return (name, *needed) if value is None else value

        return factory

    policy = nn.Linear(2, 3)
    nn.init.constant_(policy.weight, weight)
    nn.init.zeros_(policy.bias)
    factories = {
        "policy": part("policy", value=policy),
        "tokenizer": part("tokenizer"),
        "stop_token_ids": part("stop_token_ids", "tokenizer", value=(7,)),
        "actor": part("actor", "policy"),
        "ref": part("ref", "policy"),
        "critic": part("critic"),
        "reward_fn": part("reward_fn"),
    }

    return build_resources(factories, RankPlan(0, "cpu", (), (), engines, services)), order


def test_a_worker_builds_what_its_plan_names_and_each_part_once():
    resources, order = built("actor", "ref", services=("reward_fn",))
    assert sorted(order) == ["actor", "policy", "ref", "reward_fn", "stop_token_ids", "tokenizer"]
    assert (
        set(resources.by_name()) == {"tokenizer", "actor", "ref", "reward_fn"}
        and resources.critic is None
    )
    assert resources.trained() == {"actor": resources.actor} and resources.sizes.policy == 9
    assert resources.stop_token_ids == (7,)


def test_a_service_that_every_worker_has_may_be_named():
    assert built(services=("tokenizer",))[0].by_name() == {"tokenizer": ("tokenizer",)}


def test_the_fingerprint_is_that_of_the_weights_as_they_were_loaded():
    prints = [
        built("actor", weight=weight)[0].facts["model_fingerprint"] for weight in (0.0, 0.0, 1.0)
    ]
    assert prints[0] == prints[1] != prints[2]


def test_parts_are_given_the_collective_of_their_ranks():
    given: list[object] = []
    factories: dict[str, Any] = {
        "policy": lambda get, device: nn.Linear(1, 1),
        "tokenizer": lambda get, device: None,
        "stop_token_ids": lambda get, device: (),
        "actor": lambda get, device: given.append(get("collective")),
    }
    ranks = OneRank()
    build_resources(factories, RankPlan(0, "cpu", (), (), ("actor",), ()), ranks)
    assert given == [ranks]
