"""The workflow `tools`: what the engine is asked, over the templates of four families and a
scripted policy; and a real run, whose tokens are those that the engine saw."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from distflow.data.batch import Batch
from distflow.data.sample import Sample, Segment
from distflow.environments.chat import Chat, Limits, Prompt
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.environments.tool_workflow import ToolWorkflow
from distflow.environments.workflows import Row
from distflow.errors import UserError
from distflow.observe.run_reader import read_samples
from tests.data.chat_templates import (
    CHATML_TOKENS,
    LLAMA3,
    LLAMA3_TOKENS,
    MISTRAL,
    MISTRAL_TOKENS,
    QWEN2,
    QWEN3,
    byte_level,
    metaspace,
)
from tests.e2e.runs import Playground

CODER = QWEN2.replace('{"name": "', "<function=")  # a template that shows the format xml
FAMILIES = {
    "qwen2": (byte_level(QWEN2, CHATML_TOKENS, "<|im_end|>"), "hermes"),
    "qwen3": (byte_level(QWEN3, CHATML_TOKENS, "<|im_end|>"), "hermes"),
    "coder": (byte_level(CODER, CHATML_TOKENS, "<|im_end|>"), "xml"),
    "llama3": (byte_level(LLAMA3, LLAMA3_TOKENS, "<|eot_id|>", "<|begin_of_text|>"), "llama3"),
    "mistral": (metaspace(MISTRAL, MISTRAL_TOKENS, "</s>", "<s>"), "mistral"),
}
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
    ),
    "xml": (
        "<tool_call>\n<function=calculator>\n<parameter=expression>\n6*7\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "llama3": '{"name": "calculator", "parameters": {"expression": "6*7"}}',
    "mistral": '[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "6*7"}}]',
}


class Policy:
    """Says what it is told to, and keeps what it was asked."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, replies: Sequence[str], cut: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.replies = [*replies]
        self.cut = cut
        self.asked: list[tuple[int, ...]] = []
        self.drawn: list[tuple[int, ...]] = []

    async def __call__(
        self, ids: tuple[int, ...], most: int, stop: tuple[str | int, ...], drawn: int
    ) -> Segment:
        assert drawn == sum(map(len, self.drawn))
        text = self.replies[min(len(self.drawn), len(self.replies) - 1)]
        made = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        made = made if self.cut else (*made, self.tokenizer.eos_token_id)
        self.asked.append(ids)
        self.drawn.append(made)
        numbers = (-0.5,) * len(made)
        reason = "length" if self.cut else "stop"

        return Segment.drawn(0, made, numbers, numbers, (0,) * len(made), reason)


async def scored(reply: object) -> Any:
    return "the score"


def talk(policy: Policy, messages: Sequence[dict[str, str]], **options: Any) -> Chat:
    return run_workflow(ToolWorkflow(**{"tools": ["calculator"], **options}), policy, messages)


def run_workflow(
    workflow: ToolWorkflow, policy: Policy, messages: Sequence[dict[str, str]]
) -> Chat:
    tokenizer = policy.tokenizer
    chat = Chat(
        TurnTokens(tokenizer, [tokenizer.eos_token_id], {}),
        policy,
        Limits(3000, 4000),
        templated=True,
    )
    ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)["input_ids"]
    row = Row(Prompt("ask", ids, messages), ground_truth="42")
    assert asyncio.run(workflow(chat, row, scored)) == "the score"

    return chat


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_are_the_ids_that_the_policy_saw_and_drew(family):
    tokenizer, form = FAMILIES[family]
    policy = Policy(tokenizer, [CALLS[form], CALLS[form].replace("6*7", "6*"), "42"])
    chat = talk(
        policy,
        [{"role": "user", "content": "what is 6 * 7?"}],
    )
    assert [s.owner for s in chat.segments] == [
        "prompt",
        "policy",
        "tool",
        "policy",
        "tool",
        "policy",
    ]

    ids: tuple[int, ...] = ()
    for number, segment in enumerate(chat.segments):
        if segment.owner == "policy":
            assert (
                policy.asked[number // 2] == ids and segment.token_ids == policy.drawn[number // 2]
            )
        ids += segment.token_ids

    first, second, third = (tokenizer.decode(chat.segments[place].token_ids) for place in (0, 2, 4))
    assert '"calculator"' in first and "Computes an arithmetic expression" in first, (
        "the template tells the tools"
    )
    assert "42" in second and "error: calculator raised SyntaxError" in third
    assert chat.counts.pop("tool/calculator/ms") >= 0
    assert chat.counts == {"tool/calculator/calls": 2, "tool/calculator/errors": 1}
    batch = Batch.from_samples([Sample("0-0", 0, chat.segments)])
    owners = [s.owner == "policy" for s in chat.segments[1:] for _ in s.token_ids]
    assert batch["response_mask"][0].tolist() == owners


def test_several_calls_in_a_reply_have_an_answer_each():
    tokenizer, form = FAMILIES["qwen2"]
    broken = "<tool_call>{</tool_call>"
    policy = Policy(
        tokenizer, [f"{CALLS[form]}\n{broken}\n{CALLS[form].replace('6*7', '2-5')}", "done"]
    )
    text = tokenizer.decode(talk(policy, [{"role": "user", "content": "x"}]).segments[2].token_ids)
    answers = [
        part.partition("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]
    ]
    assert answers[0] == "42" and "cannot be read" in answers[1] and answers[2] == "-3"


def test_calls_end_with_max_turns_and_with_a_reply_that_is_cut_off():
    tokenizer, form = FAMILIES["qwen2"]
    endless = talk(
        Policy(tokenizer, [CALLS[form]]), [{"role": "user", "content": "x"}], max_turns=2
    )
    assert (
        endless.turns == 2
        and endless.finish_reason == "max_turns"
        and endless.counts["tool/calculator/calls"] == 1
    )
    cut = talk(Policy(tokenizer, [CALLS[form]], cut=True), [{"role": "user", "content": "x"}])
    assert cut.turns == 1 and cut.finish_reason == "length" and not cut.counts


def test_calls_of_an_episode_that_raises_are_counted():
    class Ends(Policy):
        async def __call__(self, *asked: Any) -> Segment:
            if self.drawn:
                raise RuntimeError("no second reply")
            return await super().__call__(*asked)

    tokenizer, form = FAMILIES["qwen2"]
    chat = Chat(
        TurnTokens(tokenizer, [tokenizer.eos_token_id], {}),
        Ends(tokenizer, [CALLS[form]]),
        Limits(3000, 4000),
        templated=True,
    )
    row = Row(Prompt("ask", (5,), [{"role": "user", "content": "x"}]))
    with pytest.raises(RuntimeError, match="no second reply"):
        asyncio.run(ToolWorkflow(tools=["calculator"])(chat, row, scored))
    assert chat.counts["tool/calculator/calls"] == 1


def test_a_template_without_tools_is_refused():
    tokenizer = byte_level("{{ messages[0].content }}", CHATML_TOKENS, "<|im_end|>")
    with pytest.raises(UserError, match="template .* tools"):
        talk(Policy(tokenizer, ["x"]), [{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tools": []}, "name at least one tool"),
        ({"tools": "calculator"}, "in a list"),
        ({"tools": {"json:dumps": {}}}, "in a list"),
        (
            {"tools": ["json.dumps"]},
            "'json.dumps';.*file.py:function",
        ),
        ({"tools": [{"name": "/tmp/own.py.tool"}]}, "no built-in tool"),
        ({"tools": ["calculator"], "format": "hermess"}, "hermess.*'hermes'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        ToolWorkflow(**options)


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
BROKEN = "<tool_call>{</tool_call>"
MARKS = ("<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>")
TEMPLATE = (
    "{{ '#' if tools }}{% for message in messages %}<|{{ message.role }}|>{{ message.content "
    "}}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Callers(Playground):
    """A random model that often calls, since a whole call is one token of twenty."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        vocabulary = {
            token: number for number, token in enumerate([*MARKS, CALL, BROKEN, *"0123456789#x:"])
        }
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="x"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_tokens(
            [
                AddedToken(own, special=own in MARKS, normalized=False)
                for own in (*MARKS, CALL, BROKEN)
            ]
        )
        special = {"eos_token": "<|end|>", "pad_token": "<pad>", "chat_template": TEMPLATE}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
            folder / "caller"
        )
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        numbers = {
            "vocab_size": len(vocabulary),
            "eos_token_id": 1,
            "pad_token_id": 0,
            "max_position_embeddings": 256,
        }
        LlamaConfig(**sizes, **numbers).save_pretrained(folder / "caller")
        chats = [[{"role": "user", "content": str(number)}] for number in range(12)]
        (folder / "rows.jsonl").write_text(
            "".join(json.dumps({"prompt": chat, "answer": "7"}) + "\n" for chat in chats)
        )


def test_a_template_that_shows_no_format_is_refused_at_the_start(tmp_path):
    keys = ("data.prompt_format=chat", "actor_rollout_ref.rollout.workflow=tools")
    tools = "actor_rollout_ref.rollout.workflow_kwargs={tools: [calculator]}"
    paths = (
        f"actor_rollout_ref.model.path={tmp_path}/caller",
        "actor_rollout_ref.model.init=random",
    )
    with pytest.raises(UserError, match="workflow_kwargs.format"):
        Callers(tmp_path).spec("grpo", *keys, tools, *paths)


@pytest.mark.slow
def test_a_run_with_tools_trains_on_what_was_drawn_alone_and_passes_every_check(tmp_path):
    run = Callers(tmp_path).run(
        "grpo",
        f"actor_rollout_ref.model.path={tmp_path}/caller",
        "actor_rollout_ref.model.init=random",
        "data.prompt_format=chat",
        f"data.val_files={tmp_path}/rows.jsonl",
        "data.allow_overlap=true",
        "data.max_response_length=160",
        "actor_rollout_ref.rollout.workflow=tools",
        (
            "actor_rollout_ref.rollout.workflow_kwargs={tools: [calculator], max_turns: 3, format: "
            "hermes}"
        ),
        "trainer.total_training_steps=3",
        "trainer.val_before_train=true",
        "trainer.save_groups=all",
        "trust.check_freq=1",
    )
    found = run.checks()
    assert len(found) >= 3 and not run.notes("warning")
    assert all({"turns", "masks", "draws", "loss"} <= {*step["passed"]} for step in found[-3:])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "caller")

    calls = 0
    for path in sorted((run.folder / "tokens").glob("*.safetensors")):
        batch = Batch.load(path)
        for ids, mask, trained in zip(
            batch["response_ids"], batch["response_mask"], batch["loss_mask"], strict=True
        ):
            given = tokenizer.decode(ids[: len(mask)][~mask.bool()].tolist()).replace("<pad>", "")
            answers = given.replace("<|assistant|>", "").split("<|tool|>")[1:]
            assert all(each == "42<|end|>" or each.startswith("xxxxx:") for each in answers), (
                "no letters but x"
            )
            assert not (trained.bool() & ~mask.bool()).any()
            calls += given.count("<|tool|>")

    counted = sum(
        metrics.get(f"tool/{name}/calls", 0)
        for metrics in run.metrics()
        for name in ("calculator", "unknown")
    )
    assert 10 < calls <= counted, (
        "the answers to the last calls of a response may have no room in it"
    )
    assert sum(len(read_samples(run.folder, step)) for step in (1, 2, 3)) == 48
