"""Whole runs of models of other families, by the engine `hf`: what is sampled is what is
trained."""

import pytest

from tests.e2e.runs import OF_TOYS, Playground
from tests.models.families import FAMILIES

CHOSEN = ("deepseek_v3", "gemma3_text", "gpt_oss", "qwen3_5_text", "qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in CHOSEN else pytest.mark.by_hand) for name in FAMILIES],
)
def test_it_trains_and_the_run_finds_nothing(name, tmp_path):
    ground = Playground(tmp_path, FAMILIES[name].family, **FAMILIES[name].changes)
    run = ground.run("grpo", "actor_rollout_ref.rollout.name=hf", "trainer.total_training_steps=3")
    assert len(run.metrics()) == 3
    for values in run.metrics():
        assert values["mismatch/max_abs"] < 1e-4 and values["actor/grad_norm"] > 0.01
    assert [note for note in run.notes("warning") if not any(toy in note for toy in OF_TOYS)] == []
