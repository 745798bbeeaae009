"""A real vLLM server as rollout engine; `make vllm` installs it beside, `make test-vllm` runs
this."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

import distflow
from distflow.data.sample import Segment
from distflow.models.lora import add_lora, named_weights
from distflow.rollout.engine import GenerateRequest
from distflow.rollout.engine_weights import stripe_hashes
from distflow.rollout.servers import http_engine
from distflow.rollout.servers.vllm_engine import VllmEngine
from distflow.scheduling.group_states import Version
from tests.models.families import FAMILIES
from tests.rollout.drive import (
    FIRST,
    Served,
    forward_log_probs,
    generate_all,
    make_model,
    prompt_of,
    request_of,
    run_all,
)
from tests.rollout.servers.test_server_process import is_gone, wait_until
from tests.rollout.test_hf_engine import OPTIONS, make_hf
from tests.tiny_models import tiny_tokenizer, write_tiny_model

PYTHON = Path(__file__).parents[3] / ".venv-vllm/bin/python"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.by_hand,
    pytest.mark.alone,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not PYTHON.exists(), reason="there is no .venv-vllm: `make vllm` installs vLLM into it"
    ),
]
SIZES = {"head_dim": 32, "max_position_embeddings": 2048}
"""vLLM's attention on a CPU has no smaller heads."""


def model_of(seed: int, family: str = "qwen3", **changes: Any) -> Any:
    return make_model(family, seed=seed, **SIZES, **changes)


class Do(Protocol):
    def __call__(self, work: Coroutine[Any, Any, Any]) -> Any: ...


@pytest.fixture(scope="module")
def do():
    """Runs on the one loop on which the engine is."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(600)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture(scope="module")
def entered(do):
    counts = {"disable_log_stats": None}
    engine = Served(
        VllmEngine(
            model_of(0),
            tiny_tokenizer(),
            version=FIRST,
            python=str(PYTHON),
            num_threads=1,
            engine_kwargs=counts,
        )
    )
    do(engine.__aenter__())
    yield engine
    process = engine._process
    do(engine.__aexit__())
    assert process is not None and not process.is_running()
    wait_until(lambda: is_gone(process.pid))


@pytest.fixture
def engine(entered, do):
    """With the weights of model 0, as the next version."""
    load(do, entered, 0)
    entered.engine.kv_on_update = "recompute"
    return entered


def load(do: Do, engine: Served, seed: int) -> None:
    weights = list(model_of(seed).named_parameters())
    version = Version(0, engine.version.step + 1)
    receipt = do(engine.load_weights(version, weights))
    assert receipt.version == engine.version == version
    assert receipt.hashes == stripe_hashes(weights) == do(engine.hashes())


def test_a_model_over_two_devices_answers_as_the_whole_one():
    weights, version = list(model_of(1).named_parameters()), Version(0, FIRST.step + 1)
    requests = [
        request_of(prompt_of(n), (0, 5, 2), row=n, max_tokens=40, top_p=0.9) for n in (1, 9, 300)
    ]

    async def two() -> Any:
        python = str(PYTHON)
        size = 2

        engine = Served(
            VllmEngine(
                model_of(0),
                tiny_tokenizer(),
                version=FIRST,
                python=python,
                num_threads=1,
                tensor_model_parallel_size=size,
            )
        )
        async with engine:
            assert (await engine.load_weights(version, weights)).hashes == stripe_hashes(weights)
            return await generate_all(engine, requests)

    pairs = zip(asyncio.run(two()), run_all(make_hf(model_of(1)), requests), strict=True)
    for one, other in ((a, b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)):
        assert one.token_ids == other.token_ids
        assert one.rollout_log_probs == pytest.approx(other.rollout_log_probs, abs=1e-4)


VLLM_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "olmo2": {},
    "phi3": {},
    "mixtral": {},
    "qwen2_moe": {"moe_intermediate_size": 32, "hidden_size": 128},
    "qwen3_moe": {"moe_intermediate_size": 32},
    "olmoe": {"hidden_size": 128},
    "ernie4_5": {},
    "exaone4": {},
    "gemma2": {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "glm4": {},
    "glm4_moe": {"moe_intermediate_size": 32, "hidden_size": 128},
    "granite": {},
    "granitemoe": {"intermediate_size": 32, "hidden_size": 128},
    "olmo": {},
    "olmo3": {},
    "smollm3": {},
    "stablelm": {"hidden_size": 128},
}


@pytest.mark.parametrize("name", VLLM_FAMILIES)
def test_other_families_have_transformers_log_probs(name, do):
    """After an update, so the names of their weights are those that vLLM reads."""
    changes = {**SIZES, **FAMILIES[name].changes, **VLLM_FAMILIES[name]}

    async def story() -> None:
        make = {"version": FIRST, "python": str(PYTHON), "num_threads": 1}
        async with Served(
            VllmEngine(make_model(name, seed=0, **changes), tiny_tokenizer(), **make)
        ) as engine:
            model = make_model(name, seed=1, **changes)
            weights = list(model.named_parameters())
            assert (await engine.load_weights(Version(0, 1), weights)).hashes == stripe_hashes(
                weights
            )

            for request in [
                request_of(prompt_of(n), (0, 1), row=n, max_tokens=20) for n in (1, 9, 60)
            ]:
                for each in await engine.generate(request):
                    truth = forward_log_probs(model, request.prompt_ids, each)
                    assert each.rollout_log_probs == pytest.approx(truth, abs=1e-4)

    do(story())


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_the_tokens_are_those_of_the_reference_engine(engine, do, options):
    """Which draws by the same counters, and whose forward, penalties and truncations are
    transformers' own."""
    lengths = (1, 9, 300)
    requests = [
        request_of(prompt_of(n), (0, 5, 2), row=n, **{"max_tokens": 40, **options}) for n in lengths
    ]
    requests.append(
        GenerateRequest(
            requests[1].prompt_ids, (1,), requests[1].params, requests[1].stream, num_drawn=7
        )
    )

    pairs = zip(
        do(generate_all(engine, requests)), run_all(make_hf(model_of(0)), requests), strict=True
    )
    for ours, theirs in pairs:
        for one, other in zip(ours, theirs, strict=True):
            assert (one.sample, one.token_ids, one.finish_reason) == (
                other.sample,
                other.token_ids,
                other.finish_reason,
            )
            assert one.rollout_log_probs == pytest.approx(other.rollout_log_probs, abs=1e-4)
            assert one.sampling_log_probs == pytest.approx(other.sampling_log_probs, abs=1e-4)
            assert set(one.versions) == {engine.version.step}


async def below(
    engine: Served, request: GenerateRequest, change: Callable[[], Coroutine[Any, Any, Any]]
) -> Any:
    """Change something while some of the tokens are there, and not all."""
    # `num_generated_tokens` may still lack tokens of an earlier request
    first = await engine.count_tokens()
    task = asyncio.create_task(engine.generate(request))

    while await engine.count_tokens() < first + 5:
        await engine.resume()
        await asyncio.sleep(0.01)
        await engine.pause()

    assert not task.done()
    await change()
    await engine.resume()
    return await task


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute", "abort"])
def test_new_weights_below_a_response(engine, do, kv_on_update):
    engine.engine.kv_on_update = kv_on_update
    old, request = engine.version.step, request_of(prompt_of(9), max_tokens=1500)
    weights = list(model_of(1).named_parameters())
    (response,) = do(
        below(engine, request, lambda: engine.load_weights(Version(0, old + 1), weights))
    )
    before = response.versions.count(old)

    # a token under way when the request is computed anew, with new weights
    drawn_again = kv_on_update == "recompute"
    assert before >= 5 - drawn_again
    assert list(response.versions) == [old] * before + [old + 1] * (len(response.versions) - before)

    def part(model: Any, first: int, last: int | None) -> list[float]:
        return forward_log_probs(model, request.prompt_ids, response)[first:last]

    assert response.rollout_log_probs[:before] == pytest.approx(
        part(model_of(0), 0, before), abs=1e-4
    )
    if kv_on_update == "abort":
        assert response.finish_reason == "abort" and before == len(response.token_ids) < 1500
        return

    assert response.finish_reason == "length" and len(response.token_ids) == 1500
    later = response.rollout_log_probs[before:]
    is_close = pytest.approx(part(model_of(1), before, None), abs=1e-4)
    assert (later == is_close) == (kv_on_update == "recompute")


def answered(engine: Served, do: Do, strike: Callable[[], None]) -> tuple[Segment, Segment]:
    """A response, and the same with a server that is struck below it."""
    request = request_of(prompt_of(5), max_tokens=1500)
    (calm,) = do(engine.generate(request))

    async def struck() -> None:
        strike()

    (other,) = do(below(engine, request, struck))
    return calm, other


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_falls_silent_is_replaced(engine, do, number, monkeypatch):
    """The next has the current weights, and answers as it would have: draws are counted."""
    monkeypatch.setattr(http_engine, "SILENT_S", 2.0)
    load(do, engine, 1)
    assert engine._process is not None
    pid = engine._process.pid
    calm, other = answered(engine, do, lambda: os.killpg(pid, number))
    assert engine._process.pid != pid and (other.token_ids, other.versions) == (
        calm.token_ids,
        calm.versions,
    )


@pytest.mark.faults
def test_a_server_that_dies_in_an_update_has_the_new_weights_afterwards(engine, do, monkeypatch):
    set_label, struck = engine.set_label, list[str]()

    async def strike_first(label: str) -> None:
        if not struck:
            struck.append(label)
            assert engine._process is not None
            os.killpg(engine._process.pid, signal.SIGKILL)
        await set_label(label)

    monkeypatch.setattr(engine.engine, "set_label", strike_first)
    load(do, engine, 1)
    request = request_of(prompt_of(4))
    (response,) = do(engine.generate(request))
    assert struck and set(response.versions) == {engine.version.step}
    assert response.rollout_log_probs == pytest.approx(
        forward_log_probs(model_of(1), request.prompt_ids, response), abs=1e-4
    )


@pytest.mark.parametrize("staleness", [0, 1])
def test_two_workers_share_a_server_of_two_devices(tmp_path, staleness):
    """Both generate and train, in step; or both generate, beside one that trains."""
    write_tiny_model(
        tmp_path / "model", "llama", head_dim=32, num_attention_heads=4, num_key_value_heads=2
    )
    overrides = {
        "actor_rollout_ref.model.path": str(tmp_path / "model"),
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.python": str(PYTHON),
        "async.max_staleness": staleness,
        "trainer.allocation": "vllm:d1t2+torch:d1" if staleness else "vllm:d1t2|torch:d2",
        "trainer.launcher": "ray" if staleness else "local",
        "trainer.device": "cpu",
        "trainer.default_local_dir": str(tmp_path / "run"),
        "trainer.total_training_steps": 3,
        "trust.canary_freq": 1,
    }
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    done = distflow.train("quickstart_grpo", overrides=overrides, data=rows, reward=score)
    same = [
        row[name]
        for row in done.metrics("train")
        for name in row
        if name == "mismatch/same_version/max_abs"
    ]
    assert same and max(same) < 1e-4 and len(done.metrics("train")) == 3
    assert not list((tmp_path / "run").glob(".meeting-*"))


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_learns_as_with_the_embedded_engine(tmp_path, staleness):
    """Tied embeddings, of which a CPU build of vLLM keeps a packed copy. In step the tokens, and so
    all numbers, are those of the other engine; ahead of training only the checks of the run are the
    same."""
    write_tiny_model(tmp_path / "model", "llama", tie_word_embeddings=True, head_dim=32)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]

    def run(name: str, *more: str) -> list[dict[str, float]]:
        overrides = {
            "actor_rollout_ref.model.path": str(tmp_path / "model"),
            "actor_rollout_ref.rollout.name": name,
            "async.max_staleness": staleness,
            "trainer.default_local_dir": str(tmp_path / name),
            "trainer.total_training_steps": 3,
            "trust.canary_freq": 1,
        }
        python = {"actor_rollout_ref.rollout.python": str(PYTHON)} if name == "vllm" else {}
        done = distflow.train(
            "quickstart_grpo", overrides=overrides | python, data=rows, reward=score
        )

        return done.metrics("train")

    of_vllm = run("vllm")

    # a run ahead of training also has tokens of older ones
    of_same_weights = "mismatch/same_version/max_abs"
    assert max(row[of_same_weights] for row in of_vllm if of_same_weights in row) < 1e-4

    if staleness == 0:
        names = ("reward/mean_score", "actor/grad_norm")
        for one, other in zip(of_vllm, run("embedded"), strict=True):
            assert [one[name] for name in names] == pytest.approx(
                [other[name] for name in names], rel=1e-3
            )


def adapted(seed: int, base: int = 0, **options: Any) -> Any:
    """Model `base` with an adapter that changes its answers."""
    model: Any = add_lora(model_of(base), rank=4, seed=seed, **options)
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]], ids=str)
def test_an_adapter_is_applied_unmerged(targets):
    """The answers are those of the merged model, from the first adapter and the next, and after a
    restart."""
    requests = [request_of(prompt_of(n), (0, 5), row=n, max_tokens=40) for n in (1, 9, 300)]
    empty = add_lora(model_of(3), rank=4, target_modules=targets)
    made = VllmEngine(empty, tiny_tokenizer(), version=FIRST, python=str(PYTHON), num_threads=1)
    engine = Served(made)

    async def answers() -> list[Any]:
        found = []
        async with engine:
            for step, model in enumerate(models, 1):
                weights = [
                    (name, tensor.clone()) for name, tensor in named_weights(model, merge=False)
                ]
                receipt = await engine.load_weights(Version(0, step), weights)
                assert receipt.hashes == stripe_hashes(weights) == await engine.hashes()
                found.append(await generate_all(engine, requests))

            assert engine._process is not None
            os.kill(engine._process.pid, signal.SIGKILL)
            found.append(await generate_all(engine, requests))

        return found

    models = [
        adapted(seed, base, target_modules=targets) for seed, base in ((1, 0), (2, 0), (2, 1))
    ]
    for model, found in zip([*models, models[-1]], asyncio.run(answers()), strict=True):
        merged = model_of(7)
        merged.load_state_dict(dict(named_weights(model)))
        for ours, theirs in zip(found, run_all(make_hf(merged), requests), strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one.token_ids == other.token_ids
                assert one.rollout_log_probs == pytest.approx(other.rollout_log_probs, abs=1e-4)


def score(solution_str: str, ground_truth: str) -> float:
    return sum(character in solution_str for character in ground_truth) / len(ground_truth)


def test_this_is_a_decoder_with_logits_that_matter():
    """Else everything above would hold for any two models."""
    prompt = torch.tensor([prompt_of(9)])
    logits = [model_of(seed)(prompt).logits for seed in (0, 1)]
    assert not torch.allclose(*logits, atol=0.5)
