"""The reward `model`, against `transformers`' own classifier in float64 that is asked one text at a
time."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from distflow.builtin_names import PROMPT_MESSAGES, REWARDS
from distflow.data.sample import Sample, Segment
from distflow.errors import UserError
from distflow.rewards import model_reward
from distflow.rewards.function_loading import load_reward, with_options
from distflow.rewards.pool.domain_pools import Patience
from distflow.rewards.pool.worker import score_all
from distflow.rewards.reward_results import Score
from tests.rewards.routers import make_router, pids_of
from tests.tiny_models import EOS, tiny_tokenizer, write_tiny_reward_model

PROMPT = "What is 2+3?"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
RESPONSES = ["5", "", "It is 5, as 2 and 3 are 5 together.", "<pad><pad>", EOS, "\ud800 and more"]
OWN_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% "
    "endfor %}"
)


def own_tokenizer(**changes: Any) -> PreTrainedTokenizerFast:
    """Of another family than the policy's: another template, and what `changes` say."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = OWN_TEMPLATE
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def reference(folder: Path, texts: list[str]) -> list[float]:
    """What the model says of each of these alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    model.config.pad_token_id = None
    ids = [tiny_tokenizer()(text, add_special_tokens=False)["input_ids"] for text in texts]
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([each])).logits[0, 0]) for each in ids]


def score(
    folder: Path, responses: list[str], messages: object = None, **options: object
) -> list[dict[str, object]]:
    extra: dict[str, object] = {PROMPT_MESSAGES: messages} if messages else {}
    given: dict[str, Any] = {"path": str(folder), "dtype": "float32", "device": "cpu", **options}
    return model_reward.compute_score(
        responses, [extra] * len(responses), [PROMPT] * len(responses), **given
    )


def values(scored: list[dict[str, object]]) -> list[object]:
    return [each["score"] for each in scored]


def in_template(response: str, messages: list[dict[str, str]]) -> str:
    whole = response.replace("\ud800", "?")
    turns = [*messages, {"role": "assistant", "content": whole}]
    return "".join(f"<{turn['role']}>{turn['content']}{EOS}" for turn in turns)


@pytest.mark.parametrize(
    "pad", [{"pad_token": EOS}, {"pad_token": None}, {}, {"padding_side": "left"}], ids=str
)
def test_messages_go_through_the_models_own_template(tmp_path, pad):
    folder = write_tiny_reward_model(tmp_path, tokenizer=own_tokenizer(**pad))
    wanted = reference(folder, [in_template(response, MESSAGES) for response in RESPONSES])
    assert len({round(each, 3) for each in wanted}) == len(RESPONSES)

    for max_tokens in (1, 150, 10_000):
        assert values(score(folder, RESPONSES, MESSAGES, max_tokens=max_tokens)) == pytest.approx(
            wanted, abs=2e-5
        )


def test_a_plain_prompt_is_one_message_of_the_user(tmp_path):
    folder = write_tiny_reward_model(tmp_path, tokenizer=own_tokenizer())
    wanted = reference(folder, [in_template(response, MESSAGES[1:]) for response in RESPONSES])
    assert values(score(folder, RESPONSES)) == pytest.approx(wanted, abs=2e-5)


def test_without_a_template_texts_stand_behind_each_other_and_end(tmp_path):
    folder = write_tiny_reward_model(tmp_path, tokenizer=own_tokenizer(chat_template=None))
    wanted = reference(
        folder, [f"Be brief.\n\n{PROMPT}{response}{EOS}" for response in RESPONSES[:3]]
    )
    assert values(score(folder, RESPONSES[:3], MESSAGES)) == pytest.approx(wanted, abs=2e-5)


def test_an_encoder_is_shown_a_pair(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = own_tokenizer(chat_template=None)
    pair = TemplateProcessing(
        "<bos> $A <eos>", "<bos> $A <eos> $B <eos>", [("<bos>", 1), ("<eos>", 2)]
    )
    tokenizer.backend_tokenizer.post_processor = pair
    folder = write_tiny_reward_model(
        tmp_path, "bert", tokenizer=tokenizer, max_position_embeddings=40
    )
    texts = [f"<bos>{PROMPT}{EOS}{response}{EOS}" for response in ("5", "6 or so")]
    assert values(score(folder, ["5", "6 or so"])) == pytest.approx(
        reference(folder, texts), abs=2e-5
    )
    (cut,) = score(folder, ["x" * 50])
    assert cut["cut_tokens"] == 3 + len(PROMPT) + 50 - 40


def test_what_is_too_long_loses_its_beginning_and_that_is_told(tmp_path):
    tokenizer = own_tokenizer(chat_template="{{ bos_token }}" + OWN_TEMPLATE)
    folder = write_tiny_reward_model(tmp_path, tokenizer=tokenizer, max_position_embeddings=40)
    text = f"<bos>{in_template('5', MESSAGES)}"
    number = len(tiny_tokenizer()(text)["input_ids"])
    (whole,), (cut,) = (
        score(folder, ["5"], MESSAGES, max_length=0),
        score(folder, ["5"], MESSAGES, max_length=20),
    )
    assert number > 40 and whole["cut_tokens"] == number - 40 and cut["cut_tokens"] == number - 20
    ids = tiny_tokenizer()(text)["input_ids"]
    kept = tiny_tokenizer().decode(ids[:1] + ids[-19:])
    assert cut["score"] == pytest.approx(reference(folder, [kept])[0], abs=2e-5)
    assert "cut_tokens" not in score(folder, ["5"], [{"role": "user", "content": "a"}])[0]
    with pytest.raises(UserError, match="40.*41"):
        score(folder, ["5"], max_length=41)


def target(folder: Path) -> str:
    return with_options(
        REWARDS["model"].target, {"path": str(folder), "dtype": "float32", "device": "cpu"}
    )


def asked(response: str) -> dict[str, object]:
    return {"solution_str": response, "extra_info": {}, "prompt": PROMPT}


def test_no_number_is_no_score(tmp_path):
    folder = write_tiny_reward_model(tmp_path)
    function = load_reward(target(folder))
    model_reward._loaded(str(folder), "", "float32", "cpu", 0).model.score.weight.data[:] = math.nan
    answers = score_all("model", function, [asked("5"), asked("6")], 5.0)
    assert ["not finite" in str(answer["error"]) for answer in answers] == [True] * 2


def sample(domain: str, response: str) -> Sample:
    segments = [Segment("prompt", (1,)), Segment("environment", (1,))]
    return Sample(
        "0-0", 0, segments, prompt=PROMPT, response=response, ground_truth="5", domain=domain
    )


def part(folder: Path, weight: float, **options: object) -> tuple[str, float, dict[str, object]]:
    return "model", weight, {"path": str(folder), "dtype": "float32", "device": "cpu", **options}


@pytest.mark.slow
def test_one_process_judges_for_all_domains_as_one_part_of_the_score(tmp_path):
    folder, other = (
        write_tiny_reward_model(tmp_path / name, seed=i) for i, name in enumerate("ab")
    )
    functions: dict[str, Any] = {
        "sums": [("exact_match", 1.0), part(folder, 0.5)],
        "chat": [part(folder, 2.0)],
        "plain": [("exact_match", 1.0)],
        "other": [part(other, 1.0, max_length=9)],
    }

    domains = {"chat": Patience(20.0, 1)}
    with make_router(
        functions, timeout_s=30.0, num_workers=2, max_response_length=9, domains=domains
    ) as router:
        pools = router.pools
        assert (
            pools.of("sums", "model") is pools.of("chat", "model") is not pools.of("other", "model")
        )
        assert pools.of("sums", "exact_match") is not pools.of("plain", "exact_match")
        assert len(pids_of(pools)) == 2 + 2, (
            "a process for each model, and for each domain that has other functions"
        )
        samples = [
            sample(domain, text) for domain in ("sums", "chat", "other") for text in ("5", "no")
        ]
        found = asyncio.run(router(samples))
        counts = router.call_counts.take().counts
        again = asyncio.run(router(samples))
        alone = asyncio.run(
            pools.call("model", {"data_source": "sums", "solution_str": "5", "extra_info": {}})
        )

    said = reference(folder, [f"<bos>user: {PROMPT}assistant: {text}{EOS}" for text in ("5", "no")])
    reward_results = [judgement.reward_result for judgement in found]
    assert all(isinstance(reward_result, Score) for reward_result in reward_results), reward_results
    total = [reward_result.value for reward_result in reward_results]
    assert total[:4] == pytest.approx(
        [1 + said[0] / 2, said[1] / 2, 2 * said[0], 2 * said[1]], abs=2e-5
    )
    assert [found[i].accuracy for i in (0, 1)] == [1.0, 0.0], (
        "what compares with the answer says what is right"
    )
    assert [sorted(reward_result.extra) for reward_result in reward_results] == [[]] * 4 + [
        ["model/cut_tokens"]
    ] * 2
    assert counts["reward/cut/model"] == 2 and counts["reward/calls"] == 6
    assert [each.reward_result for each in again] == reward_results, "to the bit"
    assert isinstance(alone, Score)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"path": ""}, "the reward 'model' has no path"),
        ({"path": "{folder}/nowhere"}, "there is no such file or folder"),
        ({"path": "{folder}", "dtype": "float8"}, "has dtype 'float8': write bfloat16 or float32"),
        ({"path": "{folder}", "device": "cuda:77"}, "has no device 'cuda:77'"),
        ({"path": "{folder}", "max_tokens": 0}, "max_tokens 1 or more"),
        ({"path": "{folder}/other"}, "its tokenizer is another model's"),
        (
            {"path": "{folder}", "max_lenght": 9},
            "no option 'max_lenght'; did you mean 'max_length'",
        ),
    ],
)
def test_what_cannot_judge_is_told_before_the_start(tmp_path, options, said):
    write_tiny_reward_model(tmp_path)
    write_tiny_reward_model(tmp_path / "other", vocab_size=50)
    given = {
        name: str(value).format(folder=tmp_path) if name == "path" else value
        for name, value in options.items()
    }
    with pytest.raises(UserError) as caught:
        load_reward(with_options(REWARDS["model"].target, given))
    assert said in str(caught.value)


def test_a_failure_is_an_error_of_those_that_were_asked_together(tmp_path):
    template = (
        "{% if messages[-1]['content'] == 'bad' %}{{ raise_exception('not this') }}{% endif %}"
        + OWN_TEMPLATE
    )
    folder = write_tiny_reward_model(tmp_path, tokenizer=own_tokenizer(chat_template=template))
    function = load_reward(target(folder))
    bad = score_all("model", function, [asked("good"), asked("bad")], 5.0)
    assert ["not this" in str(answer["error"]) for answer in bad] == [True] * 2
    assert "score" in score_all("model", function, [asked("good")], 5.0)[0]
