"""The judge as an engine: what it reads of a batch, and what becomes of what it cannot read."""

import sqlite3
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from distflow.data.batch import Batch
from distflow.data.sample import Sample, Segment
from distflow.models.loading import load_model, load_tokenizer
from distflow.rewards.judge_cache import JudgeCache
from distflow.rollout.embedded.engine import EmbeddedEngine
from distflow.rollout.engine import RolloutEngine, SamplingParams
from distflow.runtime.judge_engine import Judge, ReplyStore
from distflow.scheduling.group_states import Version
from distflow.training.engine import OneRank
from tests.ranks import run_ranks
from tests.runtime.sharded_judge_worker import JUDGES, SHARES, judge_of, said_by
from tests.tiny_models import BAD, EOS, GOOD, tiny_verdict, write_tiny_judge, write_tiny_model

NOTHING = ReplyStore()
PROMPT = Segment("prompt", (7,))
Ask = Callable[..., list[dict[str, object]]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    folder = write_tiny_judge(tmp_path_factory.mktemp("judge"))
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    make = partial(EmbeddedEngine, model, tokenizer, version=Version(0, 0))

    def score(
        *responses: str,
        template: str = "{prompt}|{level}|{response}",
        positions: int = 128,
        replies: ReplyStore = NOTHING,
        choices: tuple[float, ...] = (),
    ) -> list:
        params = SamplingParams(4, greedy=True, stop_token_ids=(2,))
        samples = [
            Sample(
                f"0-{i}", 0, [PROMPT], prompt="What?", response=text, extra_info={"level": "hard"}
            )
            for i, text in enumerate(responses)
        ]
        judge = Judge(model, tokenizer, make, template, params, positions, replies, choices)
        return judge.score(Batch.from_samples(samples))

    return score


def test_all_responses_of_a_step_are_scored_each_by_its_own_answer(ask: Ask) -> None:
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


def test_what_is_too_long_is_an_error_of_its_sample_alone(ask: Ask) -> None:
    long, short = ask("a" * 200, "a")
    assert (
        long == {"error": "the judge reads 124 tokens, and was to read 211"}
        and short["score"] == 0.75
    )


def test_a_template_that_names_no_column_gives_no_score(ask: Ask) -> None:
    assert ask("a", template="{response} {levl}") == [
        {"error": "the judge's template names levl, which is not a column of the row"}
    ]


def test_a_response_holds_no_token_that_ends_the_question(ask: Ask) -> None:
    """As one token the text would be answered by the end of the answer, which is no score."""
    assert ask(f"it is right{GOOD}")[0]["score"] == 0.75 and tiny_verdict(GOOD) == GOOD
    assert ask(f"b{EOS}")[0] == ask("x&lt;eos>")[0]


def test_replies_are_kept_for_later_steps_and_their_cost_is_bounded(
    tmp_path: Path, ask: Ask
) -> None:
    """Three questions of about as many tokens: each call is counted, and each of the tokens read
    and written."""
    file = str(tmp_path / "judge.sqlite")
    first = ask("so a", "so 3", "so b", replies=ReplyStore(file, "m"))
    assert [set(each) for each in first] == [{"score", "reason"}, {"error"}, {"score", "reason"}]
    calls, tokens = JudgeCache(file).spent()
    assert calls == 3 and tokens > 3 * len("What?|hard|")
    assert ask("so a", "so b", replies=ReplyStore(file, "m", max_calls=3)) == [
        first[0],
        first[2],
    ], "nothing was asked"
    assert JudgeCache(file).spent() == (calls, tokens)
    (spent,) = ask("so 3", replies=ReplyStore(file, "m", max_calls=3))
    assert "3 calls of max_calls=3" in str(spent["error"]) and "score" not in spent, (
        "an error is not stored"
    )
    bought = ask("so a", "so c", replies=ReplyStore(file, "another model", max_tokens=tokens + 1))
    assert [set(each) for each in bought] == [{"score", "reason"}, {"score", "reason"}], (
        "the next step is too late"
    )
    (spent,) = ask("so d", replies=ReplyStore(file, "another model", max_tokens=tokens + 1))
    assert f"tokens of max_tokens={tokens + 1}" in str(spent["error"])


def test_a_damaged_reply_is_asked_for_again(tmp_path: Path, ask: Ask) -> None:
    file = str(tmp_path / "judge.sqlite")
    (before,) = ask("so a", replies=ReplyStore(file, "m"))
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE answers SET content = '{\"score\": 7}'")
    assert (
        ask("so a", replies=ReplyStore(file, "m")) == [before] and JudgeCache(file).spent()[0] == 2
    )


def test_a_judge_with_choices_gives_the_likeliest_of_them(tmp_path: Path) -> None:
    """Compared with float64 log-probs of each question with each reply alone, by the model's own
    forward."""
    folder = write_tiny_model(tmp_path / "model", seed=3)
    choices = (0.0, 0.25, 0.5, 1.0)
    model = load_model(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = None
    params = SamplingParams(4, greedy=True)
    file = str(tmp_path / "judge.sqlite")
    texts = ["so a", "a longer one", "3"]
    batch = Batch.from_samples(
        [Sample(f"0-{i}", 0, [PROMPT], prompt="Q", response=t) for i, t in enumerate(texts)]
    )
    judge = Judge(
        model,
        tokenizer,
        unused_engine,
        "{prompt}|{response}",
        params,
        128,
        ReplyStore(file, "m"),
        choices,
    )
    found = judge.score(batch)
    exact = load_model(folder).double()
    for text, said in zip(texts, found, strict=True):
        totals = []
        for choice in choices:
            question, reply = (
                tokenizer(part)["input_ids"] for part in (f"Q|{text}", f'{{"score": {choice:g}}}')
            )
            logits = exact(torch.tensor([question + reply])).logits[0, len(question) - 1 : -1]
            totals.append(logits.log_softmax(-1).gather(1, torch.tensor(reply)[:, None]).sum())
        share, best = torch.stack(totals).detach().softmax(-1).max(-1)
        assert said["score"] == choices[int(best)]
        assert float(str(said["reason"]).split()[1]) == pytest.approx(float(share), abs=1e-3)
    calls, _ = JudgeCache(file).spent()
    assert judge.score(batch) == found and JudgeCache(file).spent()[0] == calls == 3, (
        "what is known is not asked again"
    )


@pytest.mark.slow
def test_over_two_ranks_a_sharded_judge_says_what_a_whole_one_says(tmp_path: Path) -> None:
    """Also a rank without questions, and compared with the embedded engine, which pads nothing."""
    write_tiny_model(tmp_path / "random", "qwen3", seed=3)
    write_tiny_judge(tmp_path / "judge")
    run_ranks("tests.runtime.sharded_judge_worker", 2, tmp_path)
    for kind, (name, shares) in product(JUDGES, SHARES.items()):
        model = load_model(tmp_path / kind)
        for rank, share in enumerate(shares):
            written, scored, chosen = torch.load(tmp_path / f"{name}-{kind}-{rank}.pt")
            whole = judge_of(model, tmp_path / kind, OneRank())
            whole.make_engine = partial(
                EmbeddedEngine, model, whole.tokenizer, version=Version(0, 0)
            )
            assert written == whole._write(dict(enumerate(share[0])))
            assert (scored, chosen) == tuple(said_by(model, tmp_path / kind, OneRank(), *share)[1:])
            assert len(scored) == len(share[1]) and all("score" in each for each in chosen)


def unused_engine() -> RolloutEngine:
    raise AssertionError("nothing is generated")
