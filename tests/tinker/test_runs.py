"""The folder of a model that a client trains is a run: its metrics, its samples, where they come
from, and the client's mistakes, each told once."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from distflow.observe.run_reader import read_events, read_metrics, read_samples
from tests.tinker.server import Served, tinker_server

tinker = pytest.importorskip("tinker")
pytestmark = pytest.mark.slow

IDS = [5, 9, 7, 8, 6, 10, 11]
PROMPT = IDS[:3]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tinker")
    with tinker_server(folder, checkpoints=folder / "checkpoints") as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    made = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    yield made
    made.close("success")


def draw(sampler: Any, temperature: float = 1.0) -> list[Any]:
    params = tinker.types.SamplingParams(max_tokens=4, temperature=temperature)
    prompt = tinker.types.ModelInput.from_ints(PROMPT)
    answer = sampler.sample(prompt, num_samples=6, sampling_params=params).result()
    return list(answer.sequences)


def datum(
    tokens: Sequence[int], log_probs: Sequence[float], advantage: float, shifted: bool = True
) -> Any:
    """With all of its inputs at the places of the sampled tokens."""
    ids = [*PROMPT, *tokens]
    nothing = [0.0] * (len(PROMPT) - 1)
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": ids[1:] if shifted else ids[:-1],
            "logprobs": [*nothing, *log_probs],
            "advantages": [*nothing, *([advantage] * len(tokens))],
        },
    )


def step(model: Any, data: list[Any], lr: float = 1e-2) -> tuple[Any, Any]:
    passed = model.forward_backward(data, "ppo")
    stepped = model.optim_step(tinker.types.AdamParams(learning_rate=lr))
    return passed.result(), stepped.result()


def distflow(*arguments: object) -> str:
    command = [sys.executable, "-m", "distflow", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_models_folder_is_a_run(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with tinker_server(tmp_path, checkpoints=kept) as served:
        client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
        model = client.create_lora_training_client(base_model=served.model, rank=4).result()
        advantages = [1.0, -0.5, 2.0, -1.0, 0.5, 0.0]
        sent = []
        for _ in range(2):
            sampler = model.save_weights_and_get_sampling_client().result()
            data = []
            for drawn, advantage in zip(draw(sampler), advantages, strict=True):
                data.append(datum(drawn.tokens, drawn.logprobs, advantage))
            passed, stepped = step(model, data)
            sent.append((passed.metrics, stepped.metrics))
        draw(sampler)
        other = client.create_lora_training_client(base_model=served.model, rank=4).result()
        other.forward_backward(
            [
                tinker.types.Datum(
                    model_input=tinker.types.ModelInput.from_ints(IDS[:-1]),
                    loss_fn_inputs={"target_tokens": IDS[1:], "weights": [0.0, 1, 1, 1, 1, 1]},
                )
            ],
            "cross_entropy",
        ).result()
        supervised = other.optim_step(tinker.types.AdamParams()).result()
        client.close("success")

    assert not [name for each in sent for part in each for name in part if "warning" in name]
    run = kept / model.model_id
    records = read_metrics(run)
    assert [each.step for each in records] == [1, 2]
    for record, (passed, stepped) in zip(records, sent, strict=True):
        values = record.values
        assert values["actor/loss"] == pytest.approx(passed["loss:sum"])
        assert values["actor/grad_norm"] == pytest.approx(stepped["grad_norm"])
        assert values["actor/lr"] == pytest.approx(1e-2)
        assert values["actor/log_ratio_abs"] < 1e-4
        assert values["actor/pg_clipfrac"] == 0.0
        assert values["async/version_diff/max"] == 0.0
        assert values["rollout/avg_prompt_length"] == len(PROMPT)

    rows = read_samples(run, 2)
    assert [row["advantage"] for row in rows] == advantages
    assert {row["uid"].partition("-")[0] for row in rows} == {"2"}  # type: ignore[union-attr]
    assert [row["versions"] for row in rows] == [[1]] * 6
    unused = read_samples(run, 3, "dropped")
    assert {row["dropped"] for row in unused} == {"no step trained on it"}

    found = json.loads(distflow("why", run, 2, "--json"))
    assert [group["version"] for group in found["groups"]] == [1]
    assert read_events(run)[-1].fields["status"] == "finished"

    of_other = read_metrics(kept / other.model_id)[0].values
    assert of_other["sft/grad_norm"] == pytest.approx(supervised.metrics["grad_norm"])
    assert 3.0 < of_other["sft/loss"] < 10.0

    listed = distflow("runs", kept)
    assert listed.count("finished, step 2") == 1
    assert listed.count("finished, step 1") == 1
    assert "report.html" in distflow("report", run)
    assert "actor/grad_norm" in distflow("diff", run, run)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other_logprobs", r"datum 1: logprobs\[2\] is 0.000"),
        ("ratios", "at temperature 0.2"),
        ("not_shifted", "datum 1: target_tokens"),
        ("trains_nothing", "all 6 data are 0"),
        ("no_learning_rate", "learning_rate is 0"),
    ],
)
def test_a_mistake_is_told_once_with_its_datum(
    client: Any, served: Served, name: str, says: str
) -> None:
    model = client.create_lora_training_client(base_model=served.model, rank=8).result()
    told = set[str]()
    for _ in range(2):
        sampler = model.save_weights_and_get_sampling_client().result()
        data = []
        for place, drawn in enumerate(draw(sampler, 0.2 if name == "ratios" else 1.0)):
            is_bad = place > 0
            log_probs = drawn.logprobs
            if name == "other_logprobs" and is_bad:
                log_probs = [0.0] * len(drawn.tokens)
            advantage = 0.0 if name == "trains_nothing" else 1.0
            is_shifted = name != "not_shifted" or not is_bad
            data.append(datum(drawn.tokens, log_probs, advantage, is_shifted))
        passed, stepped = step(model, data, 0.0 if name == "no_learning_rate" else 1e-6)
        told.update(each for each in passed.metrics if "warning" in each)
        told.update(each for each in stepped.metrics if "warning" in each)

    assert {each.partition("/")[2].partition(":")[0] for each in told} == {name}
    model.save_state("after").result()  # by then the events are written
    events = read_events(served.checkpoints / model.model_id)
    warnings = [each.message for each in events if each.kind == "warning"]
    assert len(warnings) == 1
    assert re.search(says, warnings[0])
