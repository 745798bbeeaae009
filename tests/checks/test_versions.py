"""Draws of a model that rounding moves far: no alarm where nothing is wrong, and still one where
something is."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from distflow.checks import draws, losses
from distflow.errors import TrustError
from distflow.rollout.embedded import host_lane as embedded
from distflow.rollout.embedded import sampler
from distflow.rollout.embedded import scheduler as sequences
from tests.e2e.runs import Playground

pytestmark = pytest.mark.slow

BFLOAT16 = (
    "actor_rollout_ref.model.dtype=bfloat16",
    "actor_rollout_ref.rollout.enforce_eager=true",  # native code rounds as the trainer does
    "data.max_response_length=40",
    "trust.on_mismatch=warn",
    "trust.check_freq=1",
    "trainer.total_training_steps=1",
)


@pytest.fixture
def rough(tmp_path, monkeypatch):
    """A model whose draws rounding moves by 0.03, ten times as far as is allowed without a second
    look."""
    monkeypatch.setattr(draws, "ROUNDED", 0.003)
    return Playground(tmp_path, initializer_range=0.5, num_hidden_layers=4)


def test_moves_by_rounding_are_no_alarm(rough, monkeypatch):
    measured: list[float] = []
    original = draws.moved_draws
    monkeypatch.setattr(
        draws,
        "moved_draws",
        lambda recorded: measured.append(original(recorded)) or measured[0],
    )
    run = rough.run("grpo", *BFLOAT16)
    (own,) = run.checks()
    assert "draws" in own["passed"]
    assert 0.01 < measured[0] < 0.06


def test_too_large_moves_by_rounding_are_not_checked(rough, monkeypatch):
    monkeypatch.setattr(draws, "WIDEST", 0.05)
    run = rough.run("grpo", *BFLOAT16)
    (own,) = run.checks()
    assert "too far" in own["not_checked"]["draws"]


def test_gradients_that_rounding_does_not_explain_are_an_alarm(rough, monkeypatch):
    original, calls = losses._gradients, list[bool]()

    def gradients(loss: Any, inputs: Any) -> list[Any]:
        calls.append(isinstance(inputs[0], nn.Parameter))
        # after those of each sequence
        is_packed = calls[-1] and sum(calls) == 1 + losses.NUM_SEQUENCES
        return [each * (1.05 if is_packed else 1.0) for each in original(loss, inputs)]

    monkeypatch.setattr(losses, "_gradients", gradients)
    with pytest.raises(TrustError, match=r"\(loss\): .* differs by 0\.05"):
        rough.run("grpo", "trust.check_freq=1", "trainer.total_training_steps=1")


def test_another_stream_is_an_alarm(rough, monkeypatch):
    key = sequences.sample_key
    monkeypatch.setattr(
        sequences, "sample_key", lambda stream, sample: key(replace(stream, row=0), sample)
    )
    with pytest.raises(TrustError, match=r"\(draws\): \d+ of \d+ tokens "):
        rough.run("grpo", *BFLOAT16)


def test_another_distribution_is_an_alarm(rough, monkeypatch):
    original = embedded.sample

    def sharper(logits: Any, rows: Any) -> Any:
        drawn = original(logits * 2, rows)
        own = logits.double().log_softmax(-1).gather(-1, drawn.token_ids[:, None])[:, 0]
        return drawn._replace(rollout_log_probs=own)

    monkeypatch.setattr(embedded, "sample", sharper)
    with pytest.raises(TrustError, match=r"\(draws\): \d+ of \d+ tokens "):
        rough.run("grpo", *BFLOAT16)


def without_prompts(sequences_drawn: list[sequences.Sequence]) -> sequences.DrawInputs:
    """The inputs of draws whose penalty does not reach the tokens of the prompt."""
    inputs = sequences.draw_inputs(sequences_drawn)
    return inputs._replace(contexts=[tuple(sequence.token_ids) for sequence in sequences_drawn])


def of_the_policy(logits: Any, rows: Any) -> Any:
    """Draws that report the policy's log-probs as those of the distribution that they were drawn
    from."""
    drawn = sampler.sample(logits, rows)
    return drawn._replace(sampling_log_probs=drawn.rollout_log_probs)


@pytest.mark.parametrize(
    ("name", "planted", "says"),
    [
        ("draw_inputs", without_prompts, r"\(draws\): \d+ of \d+ tokens "),
        ("sample", of_the_policy, r"\(draws\): sampling_log_probs of token \d+ of sample \S+ is"),
    ],
)
def test_penalties_and_the_log_probs_of_draws(tmp_path, monkeypatch, name, planted, says):
    playground = Playground(tmp_path)
    law = ("rollout.repetition_penalty=1.5", "rollout.top_k=20", "rollout.top_p=0.9")
    keys = (*(f"actor_rollout_ref.{key}" for key in law), "trainer.total_training_steps=2")
    (first, *_) = playground.run("grpo", *keys, name="healthy").checks()
    assert "draws" in first["passed"]
    monkeypatch.setattr(embedded, name, planted)
    with pytest.raises(TrustError, match=says):
        playground.run("grpo", *keys, name="planted")
