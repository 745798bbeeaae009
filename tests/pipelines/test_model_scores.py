"""What the answers of reward models and judges make of a step's scores."""

from typing import Any

import pytest
import torch

from distflow.config import load_config
from distflow.data.batch import Batch
from distflow.graph import NodeOutput
from distflow.pipelines.nodes import add_model_scores
from distflow.pipelines.nodes.scoring_models import ask_model
from distflow.runtime.error_limits import TooManyErrors
from distflow.training.engine import OneRank
from tests.checks.batches import sampled_batch

MODELS = (
    "reward_model.models={critique: {path: builtin:tiny, judge: true, weight: 2}, helpful: {path: "
    "builtin:tiny}}"
)


def add(
    *critique: float | str | None,
    keys: tuple[str, ...] = (),
    before: str | None = None,
    of_turns: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The columns after a step of two groups of two, whose functions gave 1, and whose other model
    gave 10."""
    needed = ("actor_rollout_ref.model.path=builtin:tiny", "data.train_files=builtin:arithmetic-rl")
    config = load_config("grpo", [*needed, MODELS, *keys]).config
    batch: Batch = sampled_batch()
    batch["scores"] = torch.ones(4)
    batch["valid"] = torch.tensor([before is None, True, True, True])
    batch["reward_errors"] = [before, None, None, None]
    batch["reward_parts"] = [{"math": 1.0} for _ in range(4)]
    batch["reward_extra"] = [{"seen": i} for i in range(4)]
    scored = [
        {"error": said} if isinstance(said, str) else {"score": said, "reason": "so"}
        for said in critique
    ]
    answers = [
        {} if said is None else answer for said, answer in zip(critique, scored, strict=True)
    ]
    batch["said_by_critique"] = answers
    batch["said_by_helpful"] = [{"score": 10.0, "cut": 0}] * 4

    if of_turns is not None:
        batch["token_level_scores"] = of_turns
        batch["turn_index"] = (of_turns > 0).long()

    output = add_model_scores(config)(batch, reduce=OneRank())
    assert isinstance(output, NodeOutput) and isinstance(output.batch, dict)
    return {**output.batch, "metrics": output.metrics}


def test_a_score_is_the_weighted_sum_of_all_models() -> None:
    found = add(0.5, 0.25, 1.0, 0.0)
    assert found["scores"].tolist() == [12.0, 11.5, 13.0, 11.0] and found["valid"].all()
    assert found["reward_parts"][1] == {"math": 1.0, "critique": 0.25, "helpful": 10.0}
    assert found["reward_extra"][2] == {"seen": 2, "critique": "so"}
    assert found["metrics"] == dict.fromkeys(
        ("reward/errors/critique", "reward/errors/helpful", "reward/cut/helpful"), 0.0
    )
    assert found["token_level_scores"].sum(-1).tolist() == found["scores"].tolist()


def test_a_model_without_a_word_on_a_sample_adds_nothing_and_is_no_error() -> None:
    models = MODELS.replace("judge: true,", "judge: true, domains: [code],")
    found = add(0.5, 0.25, None, None, keys=(models,))
    assert found["scores"].tolist() == [12.0, 11.5, 11.0, 11.0] and found["valid"].all()
    assert found["reward_parts"][2] == {"math": 1.0, "helpful": 10.0} and found["reward_extra"][
        2
    ] == {"seen": 2}


def test_only_responses_of_its_domains_are_shown_to_a_model() -> None:
    shown = []

    class Scorer:
        def score(self, batch: Batch) -> list[dict[str, object]]:
            shown.append(batch["responses"])
            return [{"score": float(len(text))} for text in batch["responses"]]

    batch = sampled_batch()
    batch["responses"] = ["a", "bb", "ccc", "dddd"]
    batch["domain"] = ["code", "math", "chat", "code"]
    said = ask_model(batch, Scorer(), domains=("code", "chat"))  # type: ignore[arg-type]
    assert said == [{"score": 1.0}, {}, {"score": 3.0}, {"score": 4.0}] and shown == [
        ["a", "ccc", "dddd"]
    ]
    assert ask_model(batch, Scorer(), domains=("none",)) == [{}] * 4 and shown[1] == []  # type: ignore[arg-type]


def test_rewards_of_turns_stay_where_they_are() -> None:
    """What the models add is on the last token of the policy."""
    mask = sampled_batch()["response_mask"]
    earned = torch.zeros_like(mask)
    earned[:, 0] = 0.25
    added = add(0.5, 0.25, 1.0, 0.0, of_turns=earned)["token_level_scores"] - earned

    last = [max(place for place, drawn in enumerate(row) if drawn) for row in mask.tolist()]
    for row, place in enumerate(last):
        wanted = torch.zeros(mask.shape[1], dtype=torch.float64)
        wanted[place] = [11.0, 10.5, 12.0, 10.0][row]
        torch.testing.assert_close(added[row], wanted)


def test_a_score_in_place_of_all_others_leaves_no_reward_of_a_turn() -> None:
    mask = sampled_batch()["response_mask"]
    earned = torch.zeros_like(mask)
    earned[:, 0] = 0.25
    found = add(
        0.5, "silent", 1.0, "silent", keys=("reward.on_error={score: -3}",), of_turns=earned
    )
    sums = found["token_level_scores"].sum(-1).tolist()
    assert sums[1] == sums[3] == -3.0 and found["token_level_scores"][3, 0] == 0.0
    assert found["token_level_scores"][0, 0] == 0.25


def test_a_group_with_too_few_scores_has_none() -> None:
    found = add(0.5, "silent", 1.0, 0.0)
    assert found["valid"].tolist() == [False, False, True, True]
    assert found["reward_errors"] == [
        "a model scored too few samples of its group",
        "critique: silent",
        None,
        None,
    ]
    assert found["metrics"]["reward/errors/critique"] == 1.0


def test_a_sum_beyond_float32_is_the_error_of_its_sample() -> None:
    found = add(
        0.5,
        3e38,
        1.0,
        0.0,
    )
    assert (
        found["valid"].tolist() == [False, False, True, True]
        and "6e+38" in found["reward_errors"][1]
    )


def test_on_error_may_give_a_score_in_place_of_the_whole_sum() -> None:
    found = add(0.5, "silent", 1.0, 0.0, keys=("reward.on_error={score: -3}",))
    assert found["valid"].all() and found["scores"].tolist() == [12.0, -3.0, 13.0, 11.0]
    assert found["reward_errors"] == [None, "critique: silent", None, None]


def test_a_reward_error_stays_whatever_the_models_say() -> None:
    found = add(0.5, 0.5, 1.0, 0.0, before="math: timed out")
    assert found["valid"].tolist() == [False, True, True, True] and found["scores"].tolist()[
        :2
    ] == [1.0, 12.0]
    assert found["reward_errors"][0] == "math: timed out" and found["reward_parts"][0] == {
        "math": 1.0
    }


def test_too_many_errors_end_the_run() -> None:
    with pytest.raises(TooManyErrors, match=r" 3 of 4 samples .* critique: silent"):
        add("silent", "silent", "mute", 1.0)

    assert (
        add("silent", "silent", "mute", 1.0, keys=("reward.max_error_rate=1",))["valid"].tolist()
        == [False] * 4
    )
