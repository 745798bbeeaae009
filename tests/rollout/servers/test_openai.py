"""The client of OpenAI's completions, against a server of ours behind that route."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distflow.cli import main
from distflow.errors import TrustError, UserError
from distflow.models.loading import load_tokenizer
from distflow.models.model_paths import BUILTIN_FOLDER
from distflow.observe.run_reader import read_metrics
from distflow.rollout.servers.openai_engine import OpenAIEngine
from distflow.scheduling.group_states import Version
from tests.e2e.cli_runs import CliRun
from tests.rollout.drive import FIRST, forward_log_probs, make_model, prompt_of, request_of
from tests.rollout.servers.sglang_server import Running, SGLang
from tests.tiny_models import tiny_tokenizer

Story = Callable[[OpenAIEngine, SGLang], Awaitable[Any]]
NAME = "actor_rollout_ref.rollout.name=openai"
URL = "actor_rollout_ref.rollout.url"
MODEL = "builtin:tiny-arithmetic"


def with_server(story: Story, **args: Any) -> None:
    async def run(server: Running) -> None:
        url = f"{server.url}/v1"
        async with OpenAIEngine(
            make_model(), tiny_tokenizer(), version=FIRST, url=url, longest=32
        ) as engine:
            await asyncio.wait_for(story(engine, server.state), 100)

    with Running(make_model(), tiny_tokenizer(), **{"names": ["policy"], **args}) as server:
        asyncio.run(run(server))


@pytest.mark.parametrize("returns", ["token_ids", "tokens"])
def test_token_ids_go_in_and_come_out_with_their_log_probs(returns: str) -> None:
    async def story(engine: OpenAIEngine, server: SGLang) -> None:
        request = request_of(prompt_of(5), (0, 1, 2))
        (free, *others) = await engine.generate(request)
        assert server.prompts[1:] == [prompt_of(5)] * 3 and len({*map(str, [free, *others])}) == 3
        for each in (free, *others):
            truth = forward_log_probs(make_model(), request.prompt_ids, each)
            assert each.rollout_log_probs == pytest.approx(truth, abs=1e-4)
            assert (len(each.token_ids), each.finish_reason, each.versions) == (
                12,
                "length",
                (0,) * 12,
            )
        stop = request_of(prompt_of(5), stop_token_ids=(free.token_ids[4],))
        (stopped,) = await engine.generate(stop)
        assert stopped.finish_reason == "stop" and stopped.token_ids[-1] == free.token_ids[4]
        greedy = request_of(prompt_of(7), greedy=True)
        assert await engine.generate(greedy) == await engine.generate(greedy)

    with_server(story, returns=returns)


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        ("other prompt", "a prompt other than the requested one"),
        ("other tokens", "a token 1000000, which the model does not have"),
        ("one log-prob", "12 tokens with 1 and 1 log-probs"),
        ("NaN", "in a form that its interface"),
        ("garbage", "no JSON"),
    ],
)
def test_an_answer_that_cannot_be_true_is_named(lie: str, text: str) -> None:
    async def story(engine: OpenAIEngine, server: SGLang) -> None:
        server.lie = lie
        with pytest.raises(TrustError, match=text):
            await engine.generate(request_of(prompt_of(5)))

    with_server(story)


def test_weights_are_refused_and_a_version_is_not() -> None:
    async def story(engine: OpenAIEngine, server: SGLang) -> None:
        await engine.load_weights(Version(0, 3), [])
        (response,) = await engine.generate(request_of(prompt_of(5)))
        assert list(response.versions) == [3] * 12
        with pytest.raises(UserError, match="takes no weights"):
            await engine.load_weights(Version(0, 4), list(make_model().named_parameters()))

    with_server(story)


def test_a_pause_holds_requests_back() -> None:
    async def story(engine: OpenAIEngine, server: SGLang) -> None:
        await engine.pause()
        task = asyncio.create_task(engine.generate(request_of(prompt_of(5))))
        await engine.hashes()
        assert not task.done() and prompt_of(5) not in server.prompts
        await engine.resume()
        await task

    with_server(story)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"returns": "texts"}, "returns no token ids or no log-probs"),
        ({"names": ["one", "another"]}, "serves the models one, another"),
        ({"context_length": 31}, "a context of 31 tokens"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_at_the_start(
    args: dict[str, Any], text: str
) -> None:
    async def story(engine: OpenAIEngine, server: SGLang) -> None:
        raise AssertionError("entered")

    with pytest.raises(UserError, match=text):
        with_server(story, **args)


def test_training_with_it_and_one_without_an_address_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = [NAME, f"trainer.default_local_dir={tmp_path}/run", "trainer.total_training_steps=1"]
    assert main(["train", "examples/tiny.yaml", *keys, f"{URL}=http://127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert (
        "rollout.name=openai is for `distflow eval`" in said
        and "one of embedded, hf, vllm, sglang" in said
    )
    assert main(["train", "examples/tiny.yaml", *keys]) == 2
    assert "needs the address of one server" in capsys.readouterr().err


def write_evaluation(folder: Path) -> tuple[Any, Any, list[str]]:
    """A model that is written there, its tokenizer, and the keys of an evaluation with it."""
    torch.manual_seed(3)
    tokenizer = load_tokenizer(MODEL)
    config = AutoConfig.from_pretrained(BUILTIN_FOLDER / "tiny-arithmetic")
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    data = folder / "problems.jsonl"
    data.write_text(
        "".join(f'{{"prompt": "{n}+{n + 1}=", "answer": "{n + n + 1}"}}\n' for n in range(10, 30))
    )
    path = f"actor_rollout_ref.model.path={folder}/model"
    keys = [
        path,
        "actor_rollout_ref.model.init=pretrained",
        "data.val_max_samples=20",
        f"data.val_files={data}",
    ]
    return model.eval(), tokenizer, keys


@pytest.mark.slow
def test_an_evaluation_whose_server_answers_no_request_ends_with_its_address(
    tmp_path: Path,
) -> None:
    model, tokenizer, keys = write_evaluation(tmp_path)
    with Running(model, tokenizer, names=["policy"]) as server:
        server.state.lie = "never answers"
        url = f"{URL}={server.url}"
        keys += [NAME, url, "actor_rollout_ref.rollout.timeout_s=2", f"--to={tmp_path}/openai"]
        run = CliRun(tmp_path / "log", ["eval", "examples/tiny.yaml", *keys])
        while run.running:
            time.sleep(0.05)
        said = run.said()
        assert run.status() == 1, said
        hangs = (
            f"OpenAIEngine (the OpenAI-compatible server at {server.url}) hangs: it was asked for "
        )
        assert hangs in said and said.count("distflow: ") == 1, said


@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
def test_it_evaluates_the_model_of_the_server_and_no_other(
    right: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With what the embedded engine finds; a server with another model does not pass for this
    one."""
    model, tokenizer, keys = write_evaluation(tmp_path)
    if not right:
        for weight in model.parameters():
            weight.data *= 1.5
    with Running(model, tokenizer, names=["policy"]) as server:
        status = main(
            [
                "eval",
                "examples/tiny.yaml",
                *keys,
                NAME,
                f"{URL}={server.url}",
                f"--to={tmp_path}/openai",
            ]
        )
        said = capsys.readouterr()
        assert status == (0 if right else 1), said.err
    if right:
        assert main(["eval", "examples/tiny.yaml", *keys, f"--to={tmp_path}/embedded"]) == 0
        values = [
            next(each.values for each in read_metrics(tmp_path / name) if each.kind == "val")
            for name in ("openai", "embedded")
        ]
        assert values[0] == values[1]
    else:
        assert "canary: on fixed prompts" in said.err
