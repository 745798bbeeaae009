"""Incidents of other systems on the way of a policy to its engine, planted into real runs from the
middle on, with every rollout engine, an adapter that is merged and one that is not. What is served
then is not the trainer's policy, though each receipt names the right bytes."""

from collections.abc import Callable, Sequence

import pytest

from distflow.errors import TrustError
from tests.e2e.runs import Playground, Run
from tests.incidents.served import (
    BEGIN,
    Late,
    as_it_began,
    of_the_version_before,
    scaled,
    serve,
    serve_old_kv,
    serve_old_prefixes,
)
from tests.sparse_params import BY_HAND

Patch = pytest.MonkeyPatch
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
LEARNING = (f"{ACTOR}.optim.lr=1e-2", f"{ACTOR}.optim.scheduler=constant")
ADAPTER = (f"{MODEL}.lora_rank=4",)
MODES: dict[str, tuple[str, ...]] = {
    "embedded, unmerged": (),
    "embedded, merged, on a copy": ("async.max_staleness=1",),
    "embedded, merged, in bfloat16": (f"{MODEL}.dtype=bfloat16",),
    "hf, unmerged": (f"{ROLLOUT}.name=hf",),
    "hf, merged": (f"{ROLLOUT}.name=hf", f"{MODEL}.dtype=bfloat16"),
}
FAULTS: dict[str, Callable[[Patch], Late]] = {
    # verl-project/verl#7495: the payload of every sync is that of the first.
    "the adapter that never reached the engine": lambda patch: serve(patch, as_it_began),
    # unslothai/unsloth-zoo#941: gate_proj is loaded twice, up_proj never.
    "one projection's adapter never loaded": lambda patch: serve(patch, scaled(0.0, "up_proj")),
    # unslothai/unsloth-zoo#941: scaling by alpha over rank happens twice.
    "an adapter scaled by another alpha": lambda patch: serve(patch, scaled(2.0)),
    # vllm-project/vllm#34186: names with another prefix fit nothing, so that the base model
    # answers.
    "the base without the adapter": lambda patch: serve(patch, scaled(0.0)),
    # NVIDIA-NeMo/RL#4018: keys and values of prompts outlive weight updates.
    "KV of old weights after a weight sync": serve_old_kv,
    "tensors of another version": lambda patch: serve(patch, of_the_version_before),
}
CAUSES = (
    r"canary: .*weights that did not arrive, KV kept|found \(versions\): .*an adapter that|found "
    r"\(draws\): .*adapter"
)


@pytest.fixture
def playground(tmp_path):
    return Playground(tmp_path, num_rows=4)


def run(playground: Playground, more: Sequence[str]) -> Run:
    return playground.run("grpo", *LEARNING, *ADAPTER, "trainer.total_training_steps=9", *more)


def marks_of(fault: str, mode: str) -> list[pytest.MarkDecorator]:
    """Each fault once and each mode once is enough for CI."""
    place = list(FAULTS).index(fault), list(MODES).index(mode)
    return [pytest.mark.slow] if place[0] % len(MODES) == place[1] else [pytest.mark.slow, BY_HAND]


CASES = [
    pytest.param(fault, mode, marks=marks_of(fault, mode))
    for fault in FAULTS
    for mode in MODES
    # That engine keeps no keys and values between requests, and scores its tokens without any. Old
    # ones would move its draws alone, of which rounding below float32 hides too many in the one
    # sample that a look takes.
    if (fault, mode) != ("KV of old weights after a weight sync", "hf, merged")
]


@pytest.mark.parametrize(("fault", "mode"), CASES)
def test_a_policy_that_is_served_otherwise(playground, monkeypatch, fault, mode):
    late = FAULTS[fault](monkeypatch)
    with pytest.raises(TrustError, match=CAUSES):
        run(playground, MODES[mode])
    assert late.times and BEGIN <= late.taken <= BEGIN + 2


TURNS = """
async def turns(chat, row):
    reply = await chat.ask(row.prompt, max_tokens=18)
    while chat.turns < 3:
        reply = await chat.ask("=?", max_tokens=18)
    return float(sum(reply.token_ids) % 7)
"""


@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_planted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_turns_over_keys_and_values_of_older_weights(
    playground, monkeypatch, is_planted, max_staleness
):
    """NVIDIA-NeMo/RL#4018 again, in the prefix cache of episodes. Without the fault the same run is
    silent."""
    (playground.folder / "turns.py").write_text(TURNS)
    playground.write_rows([{"prompt": f"{'ab' * 12}{i}=", "answer": "7"} for i in range(4)])
    keys = [line for line in playground.overrides("run") if "reward" not in line.partition("=")[0]]
    monkeypatch.setattr(playground, "overrides", lambda name, *more: [*keys, *more])
    options = (
        f"{ROLLOUT}.workflow={playground.folder}/turns.py:turns",
        f"async.max_staleness={max_staleness}",
    )
    lengths = (
        "data.max_prompt_length=32",
        "data.max_response_length=90",
        "trainer.total_training_steps=9",
    )

    if not is_planted:
        found = playground.run("grpo", *LEARNING, *options, *lengths, "trust.check_freq=2")
        assert found.notes("warning") == found.notes("finding") == found.notes("error") == []
        assert all(row["episodes/prefix_cache_hit_rate"] > 0.3 for row in found.metrics())
        return

    late = serve_old_prefixes(monkeypatch)
    with pytest.raises(TrustError, match=r"KV of old weights|canary: |found \((draws|versions)\)"):
        playground.run("grpo", *LEARNING, *options, *lengths)

    assert late.times and BEGIN <= late.taken <= BEGIN + 2
