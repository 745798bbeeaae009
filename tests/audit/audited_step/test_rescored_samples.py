"""Plain answers are judged a second time, and a built-in that judges them otherwise is named."""

from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from distflow.audit.audited_step.rescored_samples import counted_score, plain_score
from distflow.errors import TrustError
from distflow.rewards import text_rewards
from distflow.rewards.math.reward import compute_score
from distflow.rewards.pool import domain_pools, process
from distflow.rewards.reward_results import Score
from distflow.rewards.text_rewards import exact_match, has_format
from tests.e2e.runs import Playground

NUMBERS = (
    "7",
    "-7",
    "07",
    "7.0",
    "70",
    "1,000",
    "1e3",
    "0",
    ".5",
    "1/2",
    "0.333333",
    "0.3333333",
    "7 apples",
    "",
)
SHAPES = (
    r"\boxed{%s}",
    "1+2=3 #### %s",
    "#### 3\n#### %s",
    "####\n%s",
    "%s",
    r"\boxed{%s} and \boxed{8}",
    r"\fbox{%s}",
)
SHAPES += (
    r"\boxed{\text{%s}}",
    r"\boxed %s",
    r"\boxed{%s} #### 8",
    "%s ####",
    r"a \boxed{3 \boxed{%s}",
    r"\boxed{%s",
)
FUNCTIONS: dict[str, Any] = {
    "math": compute_score,
    "exact_match": exact_match,
    "format": has_format,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_plain_score_is_the_functions(name: str) -> None:
    texts = [shape % number for shape, number in product(SHAPES, NUMBERS)]
    known = 0
    for text, truth in product(texts, (*filter(None, NUMBERS), 7, 1000, r"so \boxed{7}")):
        if (score := plain_score(name, text, truth, {})) is not None:
            assert score == FUNCTIONS[name]("", text, truth, None), (text, truth)
            known += 1
    assert known > 150


def test_what_is_not_plain_has_no_score() -> None:
    assert plain_score("math", "#### 0.3", "0.33", {}) is None  # one may be the other, rounded
    assert plain_score("math", "#### 7 apples", "7", {}) is None
    assert plain_score("math", "7", "7", {}) is None
    assert plain_score("length", "7", "7", {}) is None
    assert plain_score("format", "so #### 7", None, {"format_regex": ".*####.*"}) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [True, False])
def test_a_built_in_that_judges_wrongly_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    read = process._read_answer

    def planted(*arguments: Any) -> Any:
        result = read(*arguments)
        return Score(1.0) if result == Score(0.0) else result

    options = (
        "reward.functions={default: [exact_match, custom]}",
        "trainer.total_training_steps=1",
    )
    playground = Playground(tmp_path)
    if not wrong:
        playground.run("grpo", *options)
        return
    monkeypatch.setattr(process, "_read_answer", planted)
    with pytest.raises(
        TrustError,
        match=r"found \(reward_results\): reward function 'exact_match' gave 1 to sample",
    ):
        playground.run("grpo", *options)


NEGATIVE = """
from distflow import NodeRole, node
from distflow.graph import Node
from distflow.pipelines.grpo import grpo_pipeline

@node(writes="token_level_rewards", role=NodeRole.REWARD)
def negative(token_level_scores):
    return -token_level_scores

def pipeline():
    graph = grpo_pipeline()
    graph.add_node(Node("negative", negative))
    return graph
"""


@pytest.mark.slow
def test_rewards_of_a_users_node_may_order_samples_otherwise_than_their_scores(
    tmp_path: Path,
) -> None:
    ground = Playground(tmp_path)
    (tmp_path / "negative.py").write_text(NEGATIVE)
    ground.run(
        "grpo", f"dag.pipeline={tmp_path}/negative.py:pipeline", "trainer.total_training_steps=4"
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("length", {}),
        ("length", {"at_least": 3, "at_most": 4, "unit": "words"}),
        ("length", {"at_least": 20, "slope": 15}),
        ("repetition", {}),
        ("repetition", {"n": 2, "unit": "characters"}),
    ],
)
def test_a_counted_score_is_the_functions(name: str, options: dict[str, Any]) -> None:
    for text in ("", "a b", "and so on And so on and so on", "one two three four"):
        assert counted_score(name, text, options) == pytest.approx(
            getattr(text_rewards, name)(text, **options)
        )


@pytest.mark.slow
@pytest.mark.parametrize("is_planted", [True, False])
def test_options_that_do_not_reach_a_reward_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_planted: bool
) -> None:
    if is_planted:
        monkeypatch.setattr(domain_pools, "with_options", lambda target, options: target)
    functions = "reward.functions={default: [{name: length, options: {at_least: 200}}]}"
    wrong = pytest.raises(
        TrustError, match=r"\(reward_results\): reward function 'length' gave 1 to sample"
    )
    with wrong if is_planted else nullcontext():
        Playground(tmp_path).run(
            "grpo", functions, "~custom_reward_function.path", "trainer.total_training_steps=1"
        )
