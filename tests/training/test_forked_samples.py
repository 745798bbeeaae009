"""An episode of several conversations as one sample: each is computed alone, and the episode counts
once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distflow.algorithms.methods.grpo import compute_grpo_advantage
from distflow.algorithms.methods.rloo import compute_rloo_advantage
from distflow.algorithms.objectives import PolicyObjective
from distflow.config import Config
from distflow.data.batch import Batch
from distflow.data.decisions import by_decision
from distflow.data.sample import Sample, Segment
from distflow.models.loading import load_model
from distflow.pipelines.nodes.updates import update
from distflow.runtime.node_context import NodeContext
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import TorchScorer, TorchTrainEngine
from tests.tiny_models import write_tiny_model

PROMPT = (3, 4, 5)
SCORES = (2.0, 1.0, 1.5)
NUM_DRAWN = (2, 6, 3)
APART = (2, 3, 2, 1, 3)
"""Drawn tokens of each conversation."""


def drew(*ids: int) -> Segment:
    numbers = tuple(-0.5 for _ in ids)
    return Segment("policy", ids, numbers, numbers, (0,) * len(ids))


def forked_batch(split: bool = False) -> Batch:
    """Three episodes of a group; the second has a fork, and a summary with a prompt of its own.
    split: each conversation is a sample, its prompt being all that came before its own first drawn
    token."""
    asked = Segment("prompt", PROMPT)
    going_on = [*PROMPT, 6, 7]
    episodes: list[tuple[list[Segment], tuple[tuple[str, int], ...]]] = [
        ([asked, drew(8, 9)], ()),
        (
            [
                *(asked, drew(6, 7), Segment("environment", (10,)), drew(11)),
                *(Segment("prompt", tuple(going_on)), Segment("environment", (12,)), drew(13, 14)),
                *(Segment("prompt", (20, 21)), drew(22)),
            ],
            (("1", 4), ("2", 12)),
        ),
        ([asked, drew(15, 16, 17)], ()),
    ]
    conversations = [[own] for own in (episodes[0], episodes[2])]
    conversations.insert(1, [(episodes[1][0][a:b], ()) for a, b in ((0, 4), (4, 7), (7, 9))])
    chosen = [each for own in conversations for each in own] if split else episodes
    samples = [
        Sample(f"0-{i}", 0, segments, episode=i, forks=forks, domain="default")
        for i, (segments, forks) in enumerate(chosen)
    ]
    batch = Batch.from_samples(samples)
    if not split:
        batch["scores"] = torch.tensor(SCORES)
    return batch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "m", "qwen3")


def plain_log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """Of the drawn tokens of each sample, by the model's own forward, one sample at a time."""
    found = []
    for row in range(len(batch)):
        prompt = int(batch.lengths("prompt")[row])
        response = int(batch.lengths("response")[row])
        ids = torch.cat([batch["prompt_ids"][row, :prompt], batch["response_ids"][row, :response]])
        logits = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        own = logits[prompt - 1 : -1].gather(-1, ids[prompt:, None])[:, 0]
        found.append(own[batch["response_mask"][row, :response] > 0])

    return torch.cat(found)


def test_the_rows_hold_the_conversations_end_to_end() -> None:
    batch = forked_batch()
    assert batch.lengths("response").tolist() == [2, 15, 3]
    assert batch.conversation_lengths().tolist() == [5, 7, 8, 3, 6]
    assert batch.select([2, 1]).conversation_lengths().tolist() == [6, 7, 8, 3]
    assert int(batch["response_mask"].sum()) == sum(NUM_DRAWN)
    assert float(batch["token_level_scores"][1].nonzero()[:, 0]) == 14, "on the last drawn token"


@pytest.mark.parametrize("max_tokens", [1, 10_000])
def test_each_conversation_is_computed_alone(folder: Path, max_tokens: int) -> None:
    batch = forked_batch()
    model = load_model(folder, dtype=torch.float64)
    scored = TorchScorer(model, max_tokens_per_micro_batch=max_tokens).forward(
        batch, ("log_probs",)
    )

    with torch.no_grad():
        expected = plain_log_probs(
            load_model(folder, dtype=torch.float64), forked_batch(split=True)
        )

    drawn = scored.flat("log_probs")[batch.flat("response_mask") > 0]
    torch.testing.assert_close(drawn.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("max_tokens", [1, 10_000])
def test_each_agent_is_computed_at_its_own_temperature(folder: Path, max_tokens: int) -> None:
    """The conversations 1 and 2 are those of two more agents; the first one has the temperature of
    the run."""
    batch = forked_batch()
    model = load_model(folder)
    own = {"first": None, "1": 0.5, "2": 2.0}
    scorer = TorchScorer(
        model, max_tokens_per_micro_batch=max_tokens, temperature=1.5, agent_temperatures=own
    )
    found = scorer.forward(batch, ("log_probs", "entropy"))

    for name in ("log_probs", "entropy"):
        at = {
            heat: TorchScorer(model, temperature=heat).forward(batch, (name,))[name]
            for heat in (1.5, 0.5, 2.0)
        }
        wanted = at[1.5].clone()
        wanted[1, 4:12] = at[0.5][1, 4:12]
        wanted[1, 12:15] = at[2.0][1, 12:15]
        drawn = batch["response_mask"] > 0
        torch.testing.assert_close(found[name][drawn], wanted[drawn], rtol=0, atol=1e-5)
        assert float((wanted - at[1.5])[drawn].abs().max()) > 0.01


def test_the_group_counts_the_episode_once_and_its_tokens_share_the_advantage() -> None:
    batch = forked_batch()
    for estimate, expected in (
        (compute_grpo_advantage, (1.0, -1.0, 0.0)),  # (score − 1.5) / 0.5
        (compute_rloo_advantage, (0.75, -0.75, 0.0)),  # score − mean of the two others
    ):
        advantages, _ = estimate(
            batch["token_level_rewards"], batch["response_mask"], batch["group_index"]
        )

        for row, value in enumerate(expected):
            own = advantages[row]
            mask = batch["response_mask"][row] > 0
            torch.testing.assert_close(
                own[mask], torch.full((NUM_DRAWN[row],), value).double(), rtol=0, atol=1e-5
            )
            assert not own[~mask].any()


TURNS = torch.tensor([0, 0, 0, 0, -1, 1, *[-1] * 6, 2, 2, -1, -1, 3, 0, 0, 0])


def test_each_decision_is_a_sample_with_what_the_episode_has() -> None:
    batch = forked_batch()
    wanted = forked_batch(split=True)
    batch["turn_index"] = TURNS
    batch["images"] = [[], [["a"], [], ["b", "c"]], []]
    found, places = by_decision(batch)
    assert found["uid"] == ["0-0", "0-1", "0-1", "0-1", "0-2"] and found["decision"].tolist() == [
        0,
        0,
        1,
        2,
        0,
    ]
    assert found.row_names == ["0-0/0", "0-1/0", "0-1/1", "0-1/2", "0-2/0"]
    assert found["scores"].tolist() == [2.0, 1.0, 1.0, 1.0, 1.5]
    assert found["images"] == [[], [["a"]], [[]], [["b", "c"]], []] and not any(found["forks"])
    assert found.lengths("prompt").tolist() == [3, 3, 6, 2, 3] and found.lengths(
        "response"
    ).tolist() == [2, 4, 2, 1, 3]
    assert torch.equal(found.flat("input_ids"), wanted.flat("input_ids"))
    drawn = {
        name: found.flat(name)[found.flat("response_mask") > 0]
        for name in ("response_ids", "turn_index")
    }
    assert drawn["response_ids"].tolist() == [8, 9, 6, 7, 11, 13, 14, 22, 15, 16, 17]
    assert drawn["turn_index"].tolist() == [0, 0, 0, 0, 1, 2, 2, 3, 0, 0, 0]
    assert torch.equal(batch.flat("response_ids")[places], found.flat("response_ids"))
    assert by_decision(batch.select([]))[0].row_names == []


@pytest.mark.parametrize(
    ("level", "mode", "weights"),
    [
        ("episode", "token-mean", [1 / 11] * 5),
        ("episode", "seq-mean-token-sum", [1 / 3] * 5),
        ("episode", "seq-mean-token-mean", [1 / 6, 1 / 18, 1 / 18, 1 / 18, 1 / 9]),
        ("decision", "token-mean", [1 / 11] * 5),
        ("decision", "seq-mean-token-sum", [1 / 5] * 5),
        ("decision", "seq-mean-token-mean", [1 / 5 / number for number in APART]),
    ],
)
def test_the_loss_and_its_step_are_those_of_the_conversations_apart(
    folder: Path, level: str, mode: str, weights: list[float]
) -> None:
    """weights: of each drawn token of a conversation. Old log-probs are other ones, so that ratios
    are."""
    batch = forked_batch()
    plain = load_model(folder, dtype=torch.float64)
    advantages = [0.9, -0.7, 0.4]
    spread = torch.tensor(advantages).repeat_interleave(batch.lengths("response")) * batch.flat(
        "response_mask"
    )
    batch["advantages"] = spread
    batch["old_log_probs"] = torch.full_like(spread, -4.6)
    batch["turn_index"] = TURNS
    log_probs = plain_log_probs(plain, forked_batch(split=True))
    conversation = torch.arange(5).repeat_interleave(torch.tensor(APART))
    advantage = torch.tensor(advantages, dtype=torch.float64)[
        torch.tensor([0, 1, 1, 1, 2])[conversation]
    ]
    ratio = (log_probs + 4.6).exp()
    per_token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    loss = (per_token * torch.tensor(weights, dtype=torch.float64)[conversation]).sum()
    loss.backward()
    make_optimizer("sgd", plain.parameters(), lr=0.1).step()

    model = load_model(folder, dtype=torch.float64)
    engine = TorchTrainEngine(
        model,
        optimizer=make_optimizer("sgd", model.parameters(), lr=0.1),
        schedule=make_schedule("constant", total_steps=2),
        max_grad_norm=None,
    )

    # it encodes nothing
    ctx: Any = NodeContext(Config(), 0, None, group_ids=(0,))  # type: ignore[arg-type]
    objective = PolicyObjective("vanilla", loss_agg_mode=mode)
    options: Any = {
        "name": "actor",
        "num_prompts": 1,
        "records": "trainer_log_probs",
        "sample_level": level,
    }
    found = update(batch, engine, ctx, objective=objective, **options)
    assert found.metrics["actor/loss"] == pytest.approx(float(loss.detach()), abs=1e-7)
    recorded = found.batch.flat("trainer_log_probs")[batch.flat("response_mask") > 0]  # type: ignore[union-attr]
    torch.testing.assert_close(recorded.double(), log_probs.detach(), rtol=0, atol=1e-6)
    trained = dict(engine.weights())
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(trained[name], weight.detach(), rtol=0, atol=1e-7, msg=name)
