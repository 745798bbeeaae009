"""The client of SGLang against a server of ours behind the same routes: one that lies, dies, is not
there; and one that the client starts. What every engine must do is in
tests/rollout/test_engines_alike.py."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distflow.cli import main
from distflow.errors import TrustError, UserError
from distflow.models.loading import load_tokenizer
from distflow.observe.run_reader import read_metrics
from distflow.rollout.conformance import FIRST as FIRST_WEIGHTS
from distflow.rollout.conformance import Finding, check_engine
from distflow.rollout.engine_bench import Bench
from distflow.rollout.servers import http_engine, sglang_engine
from distflow.rollout.servers.http_engine import ServerFailed
from distflow.rollout.servers.sglang_engine import SGLangEngine
from distflow.scheduling.group_states import Version
from tests.e2e.runs import Playground
from tests.rollout.drive import FIRST, Served, forward_log_probs, make_model, prompt_of, request_of
from tests.rollout.servers.sglang_server import LIES, Running
from tests.tiny_models import tiny_tokenizer

SERVER = Path(__file__).with_name("sglang_server.py")
ROOT = Path(__file__).parents[3]

Story = Callable[[Any], Awaitable[Any]]


def with_server(story: Story, lie: str = "", **options: Any) -> None:
    """The server begins to lie when it has its first weights."""
    model = make_model()

    async def run(url: str, state: Any) -> None:
        made = SGLangEngine(model, tiny_tokenizer(), version=FIRST, url=url, **options)
        async with Served(made) as engine:
            await engine.load_weights(Version(0, 1), list(model.named_parameters()))
            state.lie = lie
            await asyncio.wait_for(story(engine), 100)

    with Running(
        make_model(seed=5), tiny_tokenizer(), enable_deterministic_inference=True
    ) as server:
        asyncio.run(run(server.url, server.state))


async def generate(engine: Any) -> Any:
    return await engine.generate(request_of(prompt_of(5), (0, 1)))


async def update(engine: Any) -> None:
    await engine.load_weights(Version(0, 2), list(make_model(seed=1).named_parameters()))


@pytest.mark.parametrize(
    ("lie", "story", "error", "text"),
    [
        ("other form", generate, TrustError, "in a form .*meta_info"),
        ("other tokens", generate, TrustError, "token 1000000, "),
        ("too short", generate, TrustError, "'length' after 1 of 12 tokens"),
        ("one log-prob", generate, TrustError, "token None, "),
        ("older label", generate, TrustError, "weights 'default' instead of '0.1'"),
        ("aborts", generate, ServerFailed, "aborted .*: Abort in waiting queue"),
        ("keeps its label", update, ServerFailed, "weights '0.1' instead of '0.2'"),
        ("refuses", update, ServerFailed, "with 400: .*weights iterator"),
        pytest.param(
            "error", generate, ServerFailed, "/generate with 500: .*CUDA", marks=pytest.mark.slow
        ),
    ],
)
def test_a_server_that_lies_is_named(lie, story, error, text):
    assert lie in LIES

    async def asked(engine: Any) -> None:
        with pytest.raises(error, match=text) as found:
            await story(engine)
        assert engine.url and engine.url in str(found.value), "which server"

    with_server(asked, lie)


def test_a_server_that_keeps_its_old_weights_is_found_by_what_it_answers():
    async def check(engine: Any) -> None:
        bench = Bench(
            engine, make_model(), tiny_tokenizer(), 32, 1e-4, torch.float32, 1, {1: make_model()}
        )
        found: list[Finding] = [
            each async for each in check_engine(bench, [FIRST_WEIGHTS, "new weights"])
        ]
        assert [each.outcome for each in found] == [
            "held",
            "failed",
        ] and "log-probs differ" in found[1].text

    with_server(check, "keeps its weights")


def test_a_server_that_falls_silent_is_given_up_in_seconds(monkeypatch):
    monkeypatch.setattr(http_engine, "ATTACH_S", 1.0)
    monkeypatch.setattr(http_engine, "SILENT_S", 1.0)
    monkeypatch.setattr(http_engine, "BACK_OFF_S", 0.001)
    monkeypatch.setattr(http_engine, "LOOKS_EVERY_S", 0.1)
    monkeypatch.setattr(sglang_engine, "HEALTH_S", 0.2)

    async def asked(engine: Any) -> None:
        with pytest.raises(ServerFailed, match=r"rollout\.url=http://127\.0\.0\.1:\d+: no server"):
            await generate(engine)

    with_server(asked, "stalls")


def test_a_server_that_answers_everything_but_requests_is_asked_again(monkeypatch):
    """It has its speed measured, which stands still."""
    monkeypatch.setattr(http_engine, "LOOKS_EVERY_S", 0.02)

    async def story(server: Running) -> None:
        model = make_model()
        made = SGLangEngine(model, tiny_tokenizer(), version=FIRST, url=server.url)
        async with Served(made) as engine:
            await engine.load_weights(Version(0, 1), list(model.named_parameters()))
            begin = engine.engine.begin

            async def begin_again() -> None:
                server.state.lie = ""
                monkeypatch.setattr(http_engine, "STUCK_S", 600.0)
                await begin()

            monkeypatch.setattr(engine.engine, "begin", begin_again)
            monkeypatch.setattr(http_engine, "STUCK_S", 0.1)
            server.state.lie = "never answers"
            (found, _) = await generate(engine)
            assert engine.number_of_server == 1 and {*found.versions} == {1}

    with Running(make_model(seed=5), tiny_tokenizer()) as server:
        asyncio.run(asyncio.wait_for(story(server), 100))


@pytest.mark.parametrize("updates", [False, True])
def test_a_pause_leaves_requests_open_and_an_update_in_it_ends_their_parts(updates):
    async def on_server(server: Running, work: Awaitable[None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, server.state.loop))  # type: ignore[arg-type]

    async def story(server: Running) -> None:
        state = server.state
        model = make_model()

        made = SGLangEngine(model, tiny_tokenizer(), version=FIRST, url=server.url)
        async with Served(made) as engine:
            await engine.load_weights(Version(0, 1), list(model.named_parameters()))
            state.modes.clear()
            await on_server(server, state.engine.pause())  # the request stays open
            task = asyncio.create_task(engine.generate(request_of(prompt_of(5))))
            while not state.open:
                await asyncio.sleep(0.001)
            await engine.pause()
            assert state.open and not task.done()

            if updates:
                await update(engine)
                assert not state.open

            await engine.resume()
            (found,) = await task
            assert len(found.token_ids) == 12 and {*found.versions} == ({2} if updates else {1})
            assert state.modes == (["in_place", "retract", "abort"] if updates else ["in_place"])
            assert updates or state.prompts == [prompt_of(5)], "the request is sent once"

    with Running(make_model(seed=5), tiny_tokenizer()) as server:
        asyncio.run(asyncio.wait_for(story(server), 100))


@pytest.mark.parametrize(
    ("served", "lie", "error", "text"),
    [
        (
            {"family": "qwen2"},
            "",
            UserError,
            "Qwen2ForCausalLM, .* LlamaForCausalLM",
        ),
        ({"vocab_size": 50}, "", ServerFailed, "with 400: .*update weights: .*shape"),
        (
            {},
            "older interface",
            UserError,
            r"/server_info with 404: .* 0\.5\.5",
        ),
    ],
)
def test_a_server_of_something_else_is_refused(served, lie, error, text):
    async def run(url: str) -> None:
        made = SGLangEngine(make_model(), tiny_tokenizer(), version=FIRST, url=url)
        async with Served(made) as engine:
            await update(engine)

    with (
        Running(make_model(**served), tiny_tokenizer()) as server,
        pytest.raises(error, match=text),
    ):
        server.state.lie = lie
        asyncio.run(run(server.url))


def test_a_prompt_longer_than_the_context_of_the_server_is_refused():
    async def run(url: str) -> None:
        made = SGLangEngine(make_model(), tiny_tokenizer(), version=FIRST, url=url)
        async with Served(made) as engine:
            with pytest.raises(UserError, match="5 tokens .* 12 .* 16"):
                await generate(engine)

    with Running(make_model(), tiny_tokenizer(), context_length=16) as server:
        asyncio.run(run(server.url))


def test_an_adapter_that_is_not_merged_is_not_sent():
    async def story(engine: Any) -> None:
        adapter = {"model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(4, 32)}
        with pytest.raises(ValueError, match="lora_A"):
            await engine.load_weights(
                Version(0, 2), [*engine.model.named_parameters(), *adapter.items()]
            )
        assert {*(await generate(engine))[0].versions} == {1}

    with_server(story)


def test_tokens_of_the_model_that_the_tokenizer_does_not_have_count_and_have_no_text():
    """As in models whose vocabulary is padded: a response with them is drawn from the policy like
    any other."""
    model, tokenizer = make_model(vocab_size=4 * len(tiny_tokenizer())), tiny_tokenizer()

    async def run(url: str) -> None:
        made = SGLangEngine(model, tokenizer, version=FIRST, url=url)
        async with Served(made) as engine:
            await engine.load_weights(Version(0, 1), list(model.named_parameters()))
            (found,) = await engine.generate(request_of(prompt_of(5), stop=("no such text",)))
            assert max(found.token_ids) >= len(tokenizer) and len(found.token_ids) == 12
            known = [token for token in found.token_ids if token < len(tokenizer)]
            assert tokenizer.decode(found.token_ids) == tokenizer.decode(known)

    with Running(model, tokenizer) as server:
        asyncio.run(run(server.url))


def test_the_same_request_has_the_same_tokens_and_greedy_ones_the_log_probs_at_its_temperature():
    async def asked(engine: Any) -> None:
        assert engine.repeats_draws and await generate(engine) == await generate(engine)
        for heat in (1.0, 0.5):
            request = request_of(prompt_of(6), greedy=True, temperature=heat)
            (found,) = await engine.generate(request)
            truth = forward_log_probs(make_model(), request.prompt_ids, found, heat)
            assert (
                found.rollout_log_probs
                == found.sampling_log_probs
                == pytest.approx(truth, abs=1e-4)
            )

    with_server(asked)


def test_keys_and_values_of_older_weights_are_refused():
    with pytest.raises(UserError, match="kv_on_update=keep: SGLang .* recompute or abort"):
        SGLangEngine.check({"kv_on_update": "keep"})


def launcher(folder: Path, **env: str) -> str:
    """What stands for the Python of SGLang's environment: `-m sglang.launch_server` is our server.
    With `-c` it is asked for the version of SGLang."""
    file = folder / "python"
    variables = "".join(
        f"export {name}='{value}'\n" for name, value in {"PYTHONPATH": str(ROOT), **env}.items()
    )
    file.write_text(
        f'#!/bin/sh\n{variables}[ "$1" = -c ] && echo sglang==0.5.0 && exit\n'
        '[ "$2" = sglang.launch_server ] || exit 7\n'
        f'exec {sys.executable} {SERVER} "$@"'
    )
    file.chmod(0o755)

    return str(file)


def started(folder: Path, story: Story, **env: str) -> None:
    model = make_model()

    async def run() -> None:
        options: dict[str, Any] = {"python": launcher(folder, **env)}
        options["engine_kwargs"] = {"enable_deterministic_inference": True}
        made = SGLangEngine(model, tiny_tokenizer(), version=FIRST, **options)
        async with Served(made) as engine:
            await engine.load_weights(Version(0, 1), list(model.named_parameters()))
            await story(engine)

    asyncio.run(run())


@contextmanager
def server_of(folder: Path, later: str, by_url: bool = True) -> Iterator[str]:
    """The key with which a run uses a server that lies from its second update on. by_url: somebody
    else started it."""
    if not by_url:
        yield f"actor_rollout_ref.rollout.python={launcher(folder, SGLANG_LIE_LATER=later)}"
        return

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).eval()
    with Running(
        model, load_tokenizer(folder / "model"), enable_deterministic_inference=True
    ) as server:
        server.state.later = later
        yield f"actor_rollout_ref.rollout.url={server.url}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lie", "text"),
    [
        ("other prompt", "canary: "),
    ],
)
def test_a_run_ends_at_the_start_with_what_its_server_answers(lie, text, tmp_path):
    ground = Playground(tmp_path, num_rows=4)
    errors = (TrustError, ServerFailed)
    with server_of(tmp_path, lie) as server, pytest.raises(errors, match=text):
        ground.run(
            "grpo",
            "actor_rollout_ref.rollout.name=sglang",
            server,
            "trainer.total_training_steps=2",
        )

    assert not (tmp_path / "run/metrics.jsonl").exists() or not list(read_metrics(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["", "ignores top_k"])
def test_draws_outside_of_top_k_are_found(lie, tmp_path):
    ground = Playground(tmp_path, num_rows=4)
    keys = ("actor_rollout_ref.rollout.name=sglang", "trust.canary_freq=0")

    with server_of(tmp_path, lie) as server, ExitStack() as fails:
        if lie:
            fails.enter_context(
                pytest.raises(
                    TrustError,
                    match=r"step 1 found \(draws\): .* top_k",
                )
            )

        ground.run(
            "grpo",
            *keys,
            server,
            "actor_rollout_ref.rollout.top_k=4",
            "trainer.total_training_steps=1",
        )


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["", "draws colder"])
def test_draws_at_another_temperature_than_that_of_the_log_probs_are_told(lie, tmp_path):
    ground = Playground(tmp_path, num_rows=4)
    keys = ("actor_rollout_ref.rollout.name=sglang", "trust.check_freq=1")

    with server_of(tmp_path, lie) as server:
        run = ground.run(
            "grpo", *keys, server, "trainer.total_training_steps=3", "data.max_response_length=40"
        )

    assert any(
        "the engine draws at another temperature" in each for each in run.notes("warning")
    ) == bool(lie)


@pytest.mark.slow
def test_a_server_of_ours_that_is_killed_is_started_again_with_its_weights(tmp_path):
    async def story(engine: Any) -> None:
        process = engine._process
        assert process is not None
        before = await generate(engine)
        server = next(
            int(stat.parent.name)
            for stat in Path("/proc").glob("[0-9]*/stat")
            if SERVER.name.encode() in stat.with_name("cmdline").read_bytes()
            and os.getpgid(int(stat.parent.name)) == process.pid
        )
        key = engine.headers["Authorization"].split()[1].encode()
        assert key not in Path(f"/proc/{server}/cmdline").read_bytes()
        os.kill(server, signal.SIGKILL)
        assert await generate(engine) == before and engine._process is not process

    started(tmp_path, story)


@pytest.mark.slow
def test_a_server_of_ours_that_dies_in_every_update_ends_the_run_with_its_log(tmp_path):
    async def story(engine: Any) -> None:
        raise AssertionError("it has no weights")

    with pytest.raises(ServerFailed, match="3 attempts"):
        started(tmp_path, story, SGLANG_LIE="dies")


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.by_hand)])
def test_a_run_trains_through_it(staleness, tmp_path):
    rollout = "actor_rollout_ref.rollout"
    keys = [
        f"{rollout}.name=sglang",
        f"{rollout}.python={launcher(tmp_path)}",
        "trainer.total_training_steps=3",
    ]
    keys += (
        [f"async.max_staleness={staleness}", f"{rollout}.kv_on_update=recompute"]
        if staleness
        else []
    )
    keys += [
        f"trainer.default_local_dir={tmp_path}/run",
        "trust.canary_freq=1",
        "trainer.logger=[jsonl]",
    ]
    assert main(["train", "examples/tiny.yaml", *keys]) == 0
    rows = [record.values for record in read_metrics(tmp_path / "run") if record.kind == "train"]
    assert len(rows) == 3 and all(row["mismatch/max_abs"] < 1e-4 for row in rows if staleness == 0)
    assert all(
        row["mismatch/same_version/max_abs"] < 1e-4
        for row in rows
        if "mismatch/same_version/max_abs" in row
    )
