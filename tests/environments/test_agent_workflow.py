"""Whole runs of the workflow `agent`: agents with the official clients train; bad ones are errors
of their episode."""

import asyncio
import json
import sys
import time
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from distflow.config.derived_settings import code_of_workflow
from distflow.environments.agent_workflow import AgentWorkflow
from distflow.environments.chat import Prompt
from distflow.environments.workflows import Row
from distflow.errors import UserError
from distflow.launch.user_code import pipeline_code
from tests.e2e.runs import Run
from tests.environments.test_chat import FAMILIES, Engine, chat_of
from tests.environments.test_training import WORKFLOW, Games, saved
from tests.patience import is_running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not find_spec("anthropic"), reason="agents are tested with the official clients (extra dev)"
    ),
]

AGENTS = '''
import asyncio, json, os, random, subprocess, sys, time
import httpx
import numpy
from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI


async def several(prompt, base_url, api_key, ground_truth):
    """Each of the formats in one conversation, a branch with a summary, and two of calls at once."""
    said = [{"role": "user", "content": prompt}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        chat = client.chat.completions
        reply = (await chat.create(model="gpt-4o", messages=said, max_tokens=3)).choices[0].message
        said += [reply.model_dump(), {"role": "user", "content": "b"}]
        chunks = await chat.create(model="gpt-4o", messages=said, max_tokens=3, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        said = [{"role": each["role"], "content": each["content"]} for each in said]
        said += [{"role": "assistant", "content": text}, {"role": "user", "content": "c"}]
        summary = [{"role": "user", "content": "all: " + text}]
        other = await client.responses.create(model="o", input=summary, max_output_tokens=3)
        asked = [[{"role": "user", "content": word + text}] for word in ("or ", "and ")]
        pair = await asyncio.gather(*(chat.create(model="o", messages=each, max_tokens=3) for each in asked))
        text = min((made.choices[0].message.content for made in pair), key=len)
    last = Anthropic().messages.create(model="claude", messages=said, max_tokens=3)
    assert ground_truth == "7"
    return {"length": len(text) / 4, "letters": sum(map(ord, other.output_text + last.content[0].text)) % 7 / 6}


async def at_once(prompt):
    """Four calls at once, then two that extend the same reply."""
    async with AsyncOpenAI() as client:
        async def ask(*said):
            messages = [{"role": role, "content": text} for role, text in said]
            made = await client.chat.completions.create(model="x", messages=messages, max_tokens=3)
            return made.choices[0].message.content

        first = ("user", prompt)
        texts = await asyncio.gather(*(ask(first) for _ in range(4)))
        more = await asyncio.gather(*(ask(first, ("assistant", texts[0]), ("user", "b")) for _ in range(2)))
    return len("".join(texts + more)) / 18


def noisy(prompt):
    """Takes a time that is drawn anew."""
    said, client = [{"role": "user", "content": prompt}], OpenAI()
    for turn in range(random.choice((1, 2, 3))):
        time.sleep(os.urandom(1)[0] / 2_000)
        text = client.chat.completions.create(model="x", messages=said, max_tokens=5).choices[0].message.content
        said += [{"role": "assistant", "content": text}, {"role": "user", "content": str(turn)}]
    return sum(map(ord, text)) % 7 / 6


def faulty(prompt, row, base_url):
    kinds = ("silent", "other key", "image", "caught", "large", "hangs", "text", "exits")
    kind = random.choice((*kinds, *["good"] * len(kinds)))
    said = [{"role": "user", "content": prompt}]
    ask = OpenAI(max_retries=0).chat.completions.create
    if kind == "silent":
        return 1.0
    if kind == "other key":
        ask = OpenAI(max_retries=0, api_key="other").chat.completions.create
    if kind in ("image", "caught"):
        said = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    if kind == "large":
        said = [{"role": "user", "content": "a" * 10_000_000}]
    try:
        text = ask(model="x", messages=said, max_tokens=3).choices[0].message.content
    except Exception:
        if kind == "caught":
            return 1.0
        raise
    if kind == "hangs":
        script = "import os, time; os.setsid(); open(%r, 'w').write(str(os.getpid())); time.sleep(600)"
        subprocess.run([sys.executable, "-c", script % row["file"]])
    if kind == "text":
        return text
    if kind == "exits":
        os._exit(3)
    return {"part": numpy.float32(len(text) / 4), "extra": {"length": numpy.int64(len(text))}}


def chats(prompt, messages, row):
    """Sends the prompt as a message; of odd rows with the template, and ignores that it is refused."""
    assert messages == [{"role": "system", "content": "Add."}, {"role": "user", "content": prompt}], messages
    assert row["prompt"] == prompt and "<eos>" not in prompt, row
    said = f"<eos>{prompt}" if row["odd"] else prompt
    try:
        text = OpenAI().chat.completions.create(
            model="x", messages=[{"role": "user", "content": said}], max_tokens=3
        ).choices[0].message.content
    except Exception:
        return 0.0
    return len(text) / 4


def careless(prompt, base_url, api_key):
    reply = httpx.post(f"{base_url}/completions", json={"prompt": prompt}, headers={"x-api-key": api_key}, timeout=None)
    assert reply.status_code == 500
    return 1.0


def judged(conversations, messages, result, prompt):
    assert messages == conversations[-1] and messages[0] == {"role": "user", "content": prompt}
    assert messages[1]["content"] == json.loads(result)["text"]
    return json.loads(result)["length"] / 5
'''  # noqa: E501
COMMAND = """
import json, sys
from openai import OpenAI
row = json.load(sys.stdin)
said = [{"role": "user", "content": row["prompt"]}]
text = OpenAI().chat.completions.create(model="x", messages=said, max_tokens=5).choices[0].message.content
print(json.dumps({"text": text, "length": len(text)}))
"""  # noqa: E501
KEYS = (
    f"{WORKFLOW}=agent",
    "data.max_prompt_length=60",
    "data.max_response_length=80",
    "reward.timeout_s=60",
)


@pytest.fixture
def games(tmp_path):
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "command.py").write_text(COMMAND)
    return Games(tmp_path)


def options(games: Games, **values: str) -> str:
    return (
        f"{WORKFLOW}_kwargs={{{', '.join(f'{name}: {value}' for name, value in values.items())}}}"
    )


def checked(games: Games, function: str, max_staleness: int) -> Run:
    """Two steps of an agent of `AGENTS`, every check of which passes."""
    run = games.run(
        "grpo",
        *KEYS,
        options(games, function=f"{games.folder}/agents.py:{function}"),
        "trainer.total_training_steps=2",
        "trainer.save_groups=all",
        "trust.check_freq=1",
        f"async.max_staleness={max_staleness}",
    )
    assert not run.notes("warning")
    for step in run.checks():
        assert {"turns", "masks", "versions", "draws", "loss", "advantages"} <= {*step["passed"]}
    return run


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_calls_at_once_are_branches_that_train_and_pass_every_check(games, max_staleness):
    run = checked(games, "at_once", max_staleness)
    named = ("episodes/branches", "reward/error_rate")
    branches, errors = ([row[name] for row in run.metrics() if name in row] for name in named)
    assert len(branches) == 2
    assert all(3 < each <= 4 for each in branches), branches  # equal replies share one
    assert errors
    assert not any(errors)


@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.by_hand)])
def test_an_agent_with_all_clients_trains_and_every_check_passes(games, max_staleness):
    run = checked(games, "several", max_staleness)
    batch = saved(run)
    assert all(len(forks) == 3 for forks in batch["forks"])

    for mask in batch["response_mask"]:
        edges = torch.nn.functional.pad(mask.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
        assert len(edges) == 12, "three turns of one conversation, and one of each of its branches"
        assert all(
            1 <= end - begin <= 3 for begin, end in zip(edges[::2], edges[1::2], strict=True)
        )

    parts = batch["reward_parts"]
    assert {*parts[0]} == {"length", "letters"}


SAID = (
    "every call of the agent was refused; the last: content of type 'image_url' is not supported",
    "the agent ended without calling its endpoint",
    "the API key is not that of this base URL",
    "content of type 'image_url' is not supported",
    "a request may have at most 4,194,304 bytes",
    "an episode did not end within 30 s",
    "it returned",
    "its process exited with status 3",
)


def test_bad_agents_are_errors_of_their_episode_by_name_and_the_run_goes_on(games):
    games.write_rows(
        [{"prompt": f"{i}=", "answer": "7", "file": f"{games.folder}/pid"} for i in range(4)]
    )
    run = games.run(
        "grpo",
        *KEYS,
        options(games, function=f"{games.folder}/agents.py:faulty"),
        "trainer.total_training_steps=1",
        "trainer.save_groups=all",
        "actor_rollout_ref.rollout.n=16",
        "reward.max_error_rate=1",
        "reward.timeout_s=30",
    )
    batch = saved(run)
    assert len(batch) == 64
    errors = [error for error in batch["reward_errors"] if error is not None]
    for said in SAID:
        assert any(said in error for error in errors), said
    assert all(
        "workflow AgentWorkflow" in error and any(said in error for said in SAID)
        for error in errors
    )
    assert batch["valid"].sum() == 64 - len(errors) > 16
    (row,) = run.metrics()
    assert row["agent/refused_calls"] == sum(
        "content of type" in error or "bytes" in error for error in errors
    )
    pid = int((games.folder / "pid").read_text())
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(pid), "a process in a session of its own ends with its episode"


def test_an_agent_gets_the_text_without_the_template_and_cannot_apply_it_twice(games):
    games.write_rows([{"prompt": f"{i}=", "answer": "7", "odd": i % 2} for i in range(4)])
    run = games.run(
        "grpo",
        *KEYS,
        options(games, function=f"{games.folder}/agents.py:chats"),
        *("data.prompt_format=chat", "data.system_prompt=Add."),
        *("trainer.total_training_steps=1", "trainer.save_groups=all", "reward.max_error_rate=1"),
    )

    batch = saved(run)
    for extra, error in zip(batch["extra_info"], batch["reward_errors"], strict=True):
        assert (error is not None) == bool(extra["odd"]), error
        assert error is None or "template would be applied twice" in error, error

    assert "template would be applied twice" in (run.folder / "report.html").read_text()


def test_a_fault_of_ours_is_an_error_of_the_episode_although_the_agent_goes_on(games):
    async def breaks(*_: object) -> Any:
        raise KeyError("broken")

    async def run() -> None:
        chat = chat_of(FAMILIES["qwen2.5"](), Engine([]))
        chat.generate = breaks
        await AgentWorkflow(function=f"{games.folder}/agents.py:careless")(
            chat, Row(Prompt("1=", [1]))
        )

    with pytest.raises(KeyError, match="broken"):
        asyncio.run(run())


@pytest.mark.parametrize(
    "reward", [pytest.param("agents.py:judged", marks=pytest.mark.by_hand), "reward_fn"]
)
def test_a_command_is_run_with_its_row_and_scored_by_its_trace_or_the_runs_functions(games, reward):
    keys = options(
        games,
        command=f"[{sys.executable}, {games.folder}/command.py]",
        reward=reward.replace("agents.py", f"{games.folder}/agents.py"),
    )
    own = [
        f"custom_reward_function.path={games.folder}/reward.py",
        "reward.functions={default: [custom]}",
    ]
    run = games.run(
        *("grpo", *KEYS, keys, "trainer.total_training_steps=1", "trainer.save_groups=all"),
        *(own if reward == "reward_fn" else []),
    )

    batch = saved(run)
    for text, score in zip(batch["responses"], batch["scores"].tolist(), strict=True):
        expected = len(text) / 5
        if reward == "reward_fn":
            printed = json.dumps({"text": text, "length": len(text)})
            expected = sum(map(ord, printed)) % 7 / 6
        assert score == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "needs either function or command"),
        ({"function": "{}/agents.py:nobody"}, "has no 'nobody'"),
        (
            {"function": "{}/agents.py:several", "command": "ls", "reward": "reward_fn"},
            "either function or command",
        ),
        ({"command": "ls"}, "a command returns no score"),
        (
            {"command": "no-such-program --x", "reward": "reward_fn"},
            "executable 'no-such-program'",
        ),
        (
            {"command": "[no-such-program]", "reward": "reward_fn"},
            "executable 'no-such-program'",
        ),
        ({"function": "{}/agents.py:judged"}, "argument: 'conversations'"),
        (
            {"function": "{}/agents.py:several", "rewards": "x"},
            "'rewards'.* function, command, kwargs, reward",
        ),
        (
            {"function": "{}/agents.py:several", "format": "xlm"},
            "xlm.*'xml'",
        ),
        (
            {"function": "{}/agents.py:several", "max_calls": "0"},
            "max_calls=0: ",
        ),
    ],
)
def test_options_that_cannot_work_are_refused_at_the_start(games, values, said):
    told = {name: value.replace("{}", str(games.folder)) for name, value in values.items()}
    with pytest.raises(UserError, match=said):
        games.spec("grpo", *KEYS, options(games, **told))


def test_the_code_of_an_agent_is_named(games):
    agents = f"{games.folder}/agents.py"
    config, _ = games.spec(
        "grpo", *KEYS, options(games, function=f"{agents}:several", reward=f"{agents}:judged")
    )
    assert [target for _, target in code_of_workflow(config)] == [
        f"{agents}:several",
        f"{agents}:judged",
    ]
    config, _ = games.spec("grpo", *KEYS, options(games, command="ls /", reward=f"{agents}:judged"))
    assert any(line.endswith("workflow_kwargs.command: ls /") for line in pipeline_code(config))
