"""Two policies in one run: each trains on its own agents' conversations, as an independent loop
does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distflow.algorithms.objectives import PolicyObjective
from distflow.data.batch import Batch
from distflow.data.sample import Sample, Segment
from distflow.models.loading import load_model
from distflow.training.engine import TrainState
from distflow.training.multi_policy_engine import MultiPolicyTrainer, PolicyTrainer
from distflow.training.optimizer import make_optimizer, make_schedule
from tests.tiny_models import write_tiny_model

OWNERS = {"solver": "actor", "checker": "second", "rival": "actor"}
EPISODES: list[dict[str, list[tuple[list[int], list[int]]]]] = [
    {"solver": [([3, 4], [8, 9, 6])], "checker": [([5, 6, 7], [10])], "rival": [([4, 4], [7, 7])]},
    {"solver": [([3, 4], [8]), ([12, 13], [14, 15])], "checker": [([5, 6], [11, 4]), ([9], [5])]},
    {"checker": [([9, 9], [3, 3])]},
]
"""Of each agent what it was shown and what it said, turn by turn."""


def drew(ids: list[int]) -> Segment:
    numbers = tuple(-4.6 for _ in ids)
    return Segment("policy", tuple(ids), numbers, numbers, (0,) * len(ids))


def batch_of_episodes() -> Batch:
    samples = []
    for number, episode in enumerate(EPISODES):
        segments = [Segment("prompt", (3, 4))]
        forks = list[tuple[str, int]]()
        for agent, turns in episode.items():
            if agent != "solver":
                forks.append((agent, sum(len(each.token_ids) for each in segments[1:])))
            for turn, (seen, said) in enumerate(turns):
                if agent != "solver" or turn:
                    segments.append(Segment("environment" if turn else "prompt", tuple(seen)))
                segments.append(drew(said))

        samples.append(Sample(f"0-{number}", 0, segments, episode=number, forks=tuple(forks)))

    batch = Batch.from_samples(samples)
    batch["advantages"] = torch.arange(int(batch.lengths("response").sum())).float().cos()
    batch["old_log_probs"] = batch.flat("rollout_log_probs")
    return batch


def trainer(folder: Path, policy: str, **options: Any) -> PolicyTrainer:
    model = load_model(str(folder), init="random", seed=sum(map(ord, policy)))
    return PolicyTrainer(
        model,
        policy=policy,
        policies=OWNERS,
        optimizer=make_optimizer("adamw", model.parameters(), lr=1e-3, weight_decay=0.1),
        schedule=make_schedule("constant", total_steps=10),
        max_grad_norm=0.05,
        **options,
    )


@pytest.fixture
def policies(tmp_path):
    folder = write_tiny_model(tmp_path / "m")
    return MultiPolicyTrainer(
        {name: trainer(folder, name) for name in ("actor", "second")}, {"actor": "solver"}
    )


def conversations(policy: str) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Of the policy's agents: the ids, and where in them a reply is, with its place in the batch's
    responses."""
    found = []
    place = 0
    for episode in EPISODES:
        for agent, turns in episode.items():
            ids = list[int]()
            replies = list[tuple[int, int]]()
            for number, (seen, said) in enumerate(turns):
                is_prompt = agent == "solver" and not number  # which is not in the response
                place += 0 if is_prompt else len(seen)
                replies += [(len(ids) + len(seen) + i, place + i) for i in range(len(said))]
                ids = [*ids, *seen, *said]
                place = place + len(said)

            if OWNERS[agent] == policy:
                found.append((ids, replies))

    return found


def plain_log_probs(model: nn.Module, policy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all tokens that the policy said, and their places."""
    found = []
    places = []
    for ids, replies in conversations(policy):
        scores = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        found += [scores[at - 1, ids[at]] for at, _ in replies]
        places += [place for _, place in replies]

    return torch.stack(found), torch.tensor(places)


def test_each_token_is_scored_by_the_policy_of_its_conversation(policies):
    batch = batch_of_episodes()
    scored = policies.forward(batch, ("log_probs", "entropy"))

    seen = torch.zeros(len(scored.flat("log_probs")))
    for policy, engine in policies.engines.items():
        with torch.no_grad():
            expected, places = plain_log_probs(engine.model, policy)
        assert torch.allclose(scored.flat("log_probs")[places], expected, atol=1e-5)
        assert torch.equal(
            engine.own(batch).flat("loss_mask").nonzero()[:, 0], places.sort().values
        )
        seen[places] += 1

    assert torch.equal(seen, batch.flat("response_mask").float()), (
        "each sampled token belongs to one policy"
    )


def test_an_update_is_that_of_an_independent_loop_over_the_policys_own_tokens(policies):
    """Mean over its own tokens, gradients clipped by its own norm, moments of its own; two
    steps."""
    batch = batch_of_episodes()
    objective = PolicyObjective("vanilla")

    for policy, engine in policies.engines.items():
        other = next(each for each in policies.engines.values() if each is not engine)
        before = [weight.detach().clone() for weight in other.model.parameters()]
        plain = load_model(
            str(engine.model.config._name_or_path), init="random", seed=sum(map(ord, policy))
        )
        optimizer = make_optimizer("adamw", plain.parameters(), lr=1e-3, weight_decay=0.1)

        for _ in range(2):
            log_probs, places = plain_log_probs(plain, policy)
            advantages = batch.flat("advantages")[places]
            ratio = (log_probs - batch.flat("old_log_probs")[places]).exp()
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            found = engine.train_step(engine.own(batch), objective)
            assert found["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
            assert (
                found["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
                and found["grad_norm"] > 0.05
            )

        for ours, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=2e-5)
        assert all(map(torch.equal, before, other.model.parameters())), (
            "the other policy has not moved by a bit"
        )


def test_the_state_of_all_policies_is_restored_bit_for_bit(policies, tmp_path):
    batch = batch_of_episodes()
    objective = PolicyObjective("vanilla")
    policies.train_step(batch, objective)
    state = policies.state()
    saved = TrainState({name: tensor.clone() for name, tensor in state.tensors.items()}, state.meta)
    folder = tmp_path / "m"
    again = MultiPolicyTrainer({name: trainer(folder, name) for name in ("actor", "second")}, {})
    again.load_state(saved)

    for both in (policies, again):
        both.train_step(batch, objective)
        assert both.num_steps == 4

    assert {name for name, _ in again.weights()} == {name for name, _ in policies.weights()}
    for (name, ours), (_, theirs) in zip(policies.weights(), again.weights(), strict=True):
        assert name.partition(".")[0] in ("actor", "second") and torch.equal(ours, theirs), name
    with pytest.raises(ValueError, match="actor.*second"):
        again.load_state(TrainState({}, {"actor": {}}))
