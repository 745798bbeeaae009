"""Faults between a run's config and files and what it trains on, planted one at a time: in the data
plan, in the tokens of prompts and responses, in stops, reward functions and turns. The run names
each; healthy runs raise no alarm."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from distflow.data import encode_rows
from distflow.data.encoded_prompts import PromptRow
from distflow.errors import TrustError
from distflow.launch import make_spec
from distflow.rewards.pool import domain_pools
from tests.e2e.runs import Playground
from tests.e2e.test_conversations import SFT, talk
from tests.sparse_params import one_fast_in
from tests.tiny_models import tiny_tokenizer

Patch = pytest.MonkeyPatch
ONE = "trainer.total_training_steps=1"


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    """Its tokenizer begins each text with a token."""
    ground = Playground(tmp_path_factory.mktemp("data"))
    begins = tiny_tokenizer()
    added = [("<bos>", 1)]
    begins.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=added
    )
    begins.save_pretrained(ground.folder / "model")
    roles = ("user", "assistant", "user")
    chats = [
        [{"role": role, "content": f"{role[0]}{i}+{turn}"} for turn, role in enumerate(roles)]
        for i in range(8)
    ]
    rows: dict[str, list[dict[str, Any]]] = {
        **{
            name: [{"prompt": f"{name[0]}{i}=", "answer": str(i)} for i in range(9)]
            for name in ("one", "other")
        },
        "long": [{"prompt": f"{'ab' * 9}{i}=", "answer": str(i)} for i in range(9)],
        "chat": [{"prompt": chat, "answer": "1"} for chat in chats],
        "talks": [talk(i, i % 3 + 1) for i in range(8)],
    }
    for name, own in rows.items():
        (ground.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    (ground.folder / "words.py").write_text(
        "def score(solution_str, ground_truth, **_):\n    return len(set(solution_str)) / 10\n"
    )

    return ground


def setup(ground: Playground, name: str) -> tuple[str, ...]:
    """Preset and overrides of a set-up; those that begin with ~ take a key out."""
    file = f"data.train_files={ground.folder}"
    words = f"{ground.folder}/words.py:score"
    each = {
        "one": f"{{train_files: '{ground.folder}/one.jsonl', weight: 3, reward: custom}}",
        "other": (
            f"{{train_files: '{ground.folder}/other.jsonl', reward: ['{words}', {{name: custom, "
            f"weight: 0.5}}]}}"
        ),
    }
    domains = f"data.domains={{{', '.join(f'{name}: {own}' for name, own in each.items())}}}"

    return {
        "epochs": ("grpo", f"{file}/one.jsonl", "trainer.total_epochs=2"),
        "domains": ("grpo", "data.train_files=[]", domains, "~reward.functions", ONE),
        "stops": ("grpo", f"{file}/one.jsonl", "actor_rollout_ref.rollout.stop=[q, '8']", ONE),
        "chat": (
            "grpo",
            f"{file}/chat.jsonl",
            "data.prompt_format=chat",
            "data.system_prompt=be kind",
            "data.max_prompt_length=90",
            ONE,
        ),
        "cut": (
            "grpo",
            f"{file}/long.jsonl",
            "data.filter_overlong_prompts=false",
            "data.truncation=middle",
            ONE,
        ),
        "talks": ("sft", *SFT, f"{file}/talks.jsonl"),
        "lazy": ("grpo", f"{file}/one.jsonl", "data.lazy=true", ONE),
    }[name]


def wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, wrap(getattr(owner, name)))


def chats(change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    def wrap(original: Any) -> Any:
        return lambda row, options: replace(
            found := original(row, options), messages=change(found.messages)
        )

    return wrapped(encode_rows, "_prompt", wrap)


def of_the_first(original: Any) -> Any:
    return lambda config: dict.fromkeys(found := original(config), next(iter(found.values())))


def last_turn(answer: Any) -> Any:
    return lambda row, *rest: answer(replace(row, turns=row.turns[-1:]), *rest)


PLANTED: dict[str, tuple[str, Callable[[Patch], None], str]] = {
    "one domain's reward functions for all": (
        "domains",
        wrapped(domain_pools, "reward_functions", of_the_first),
        r"\(reward_results\): reward function '.*words.py:score' was never called",
    ),
    "earlier messages lost": (
        "chat",
        chats(lambda messages: [messages[0], messages[-1]]),
        r"\(data\): the prompt of ",
    ),
    "no stops": (
        "stops",
        wrapped(
            make_spec, "sampling_params", lambda make: lambda *given: replace(make(*given), stop=())
        ),
        r"\(draws\): tokens were drawn with stop=\(\)",
    ),
    "the last turn alone": (
        "talks",
        wrapped(PromptRow, "answer", last_turn),
        r"\(responses\): response_mask of ",
    ),
}


def run(ground: Playground, patch: Patch, setting: str, name: str) -> Any:
    preset, *given = setup(ground, setting)
    gone = [each[1:] for each in given if each.startswith("~")]
    plain = Playground.overrides

    def without(self: Playground, *names: str) -> list[str]:
        given = plain(self, *names, *(["~reward.functions"] if "reward.functions" in gone else []))
        return [each for each in given if each.split("=")[0] not in {*gone, "~reward.functions"}]

    patch.setattr(Playground, "overrides", without)
    return ground.run(preset, *[each for each in given if not each.startswith("~")], name=name)


@pytest.mark.parametrize("name", one_fast_in(len(PLANTED), PLANTED))
def test_what_is_not_the_configs_is_named(ground, monkeypatch, name):
    setting, plant, seen = PLANTED[name]
    plant(monkeypatch)
    with pytest.raises(TrustError, match=seen):
        run(ground, monkeypatch, setting, f"fault-{[*PLANTED].index(name)}")
