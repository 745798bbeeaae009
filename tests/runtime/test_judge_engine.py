"""The judge as an engine: what it reads of a batch, and what becomes of what it cannot read."""

from collections.abc import Callable
from functools import partial

import pytest

from distflow.data.batch import Batch
from distflow.data.sample import Sample, Segment
from distflow.models.loading import load_model, load_tokenizer
from distflow.rollout.embedded.engine import EmbeddedEngine
from distflow.rollout.engine import SamplingParams
from distflow.runtime.judge_engine import Judge
from distflow.scheduling.group_states import Version
from tests.tiny_models import BAD, EOS, GOOD, tiny_verdict, write_tiny_judge

PROMPT = Segment("prompt", (7,))
Ask = Callable[..., list[dict[str, object]]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    folder = write_tiny_judge(tmp_path_factory.mktemp("judge"))
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    make = partial(EmbeddedEngine, model, tokenizer, version=Version(0, 0))

    def score(
        *responses: str,
        template: str = "{prompt}|{level}|{response}",
        positions: int = 128,
    ) -> list:
        params = SamplingParams(4, greedy=True, stop_token_ids=(2,))
        samples = [
            Sample(
                f"0-{i}", 0, [PROMPT], prompt="What?", response=text, extra_info={"level": "hard"}
            )
            for i, text in enumerate(responses)
        ]
        judge = Judge(model, tokenizer, make, template, params, positions)

        return judge.score(Batch.from_samples(samples))

    return score


def test_all_responses_of_a_step_are_scored_each_by_its_own_answer(ask):
    found = ask("so a", "so b", "so 3", "so <")
    assert [tiny_verdict(text) for text in ("a", "b", ";")] == [GOOD, BAD, GOOD]
    assert found == [
        {"score": 0.75, "reason": "odd"},
        {"score": 0.0, "reason": "even"},
        {"error": "the judge's reply is not JSON: 'no idea'"},
        {"score": 0.75, "reason": "odd"},
    ]
    assert ask() == [], "a rank without samples asks nothing"
    assert ask("so a") == found[:1], "every step has an engine of its own"


def test_what_is_too_long_is_an_error_of_its_sample_alone(ask):
    long, short = ask("a" * 200, "a")
    assert (
        long == {"error": "the judge reads 124 tokens, and was to read 211"}
        and short["score"] == 0.75
    )


def test_a_template_that_names_no_column_gives_no_score(ask):
    assert ask("a", template="{response} {levl}") == [
        {"error": "the judge's template names levl, which is not a column of the row"}
    ]


def test_a_response_holds_no_token_that_ends_the_question(ask):
    """As one token the text would be answered by the end of the answer, which is no score."""
    assert ask(f"it is right{GOOD}")[0]["score"] == 0.75 and tiny_verdict(GOOD) == GOOD
    assert ask(f"b{EOS}")[0] == ask("x&lt;eos>")[0]
