"""`distflow rollout check`: a line for each property of the engine that a config names, and an exit
status."""

from dataclasses import replace

import pytest

from distflow.builtin_names import ROLLOUT_ENGINES, RolloutEngineEntry
from distflow.cli import main
from distflow.data.sample import Segment
from distflow.rollout.conformance import PROPERTIES
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.engine import GenerateRequest


class ShiftedEngine(EmbeddedEngine):
    """Its log-probs are off by a thousandth."""

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        generations = await super().generate(request)
        shifted = ([number - 1e-3 for number in each.rollout_log_probs] for each in generations)
        return tuple(
            replace(each, rollout_log_probs=one)
            for each, one in zip(generations, shifted, strict=True)
        )


def outcomes(out: str) -> dict[str, str]:
    return {
        name: line[21:36].strip()
        for line in out.splitlines()
        if (name := line[:20].strip()) in PROPERTIES
    }


@pytest.mark.slow
def test_an_engine_that_does_what_it_must_exits_0(capsys):
    assert main(["rollout", "check", "examples/tiny.yaml"]) == 0
    out = capsys.readouterr().out
    found = outcomes(out)
    assert set(found) == set(PROPERTIES)
    assert set(found.values()) == {"held"}, out
    assert (
        out.startswith("distflow") and "rollout engine 'embedded'" in out and "200 prompts" in out
    )


@pytest.mark.slow
def test_an_engine_of_the_users_own_that_does_not_exits_1(capsys, monkeypatch):
    entry = RolloutEngineEntry("shifted", f"{__name__}:{ShiftedEngine.__name__}")
    monkeypatch.setitem(ROLLOUT_ENGINES, "embedded", entry)
    assert main(["rollout", "check", "examples/tiny.yaml"]) == 1
    out = capsys.readouterr().out
    assert outcomes(out)["log-probs"] == outcomes(out)["new weights"] == "failed"
    assert (
        "log-probs differ by 0.001, the limit is 0.0001" in out
        and "do not train with this engine" in out
    )


def test_a_config_without_a_model_says_what_to_set(capsys):
    assert main(["rollout", "check", "grpo"]) == 2
    assert "actor_rollout_ref.model.path" in capsys.readouterr().err
