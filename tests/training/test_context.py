"""Packed rows that ranks divide: outputs and gradients against transformers in float64, and memory
that shrinks with the ranks."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from distflow.models.loading import load_model
from tests.made_once import made_once
from tests.models.families import FAMILIES as CHANGES
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny_model
from tests.training.batches import ragged_batch
from tests.training.context_worker import (
    FAMILIES,
    LAYOUTS,
    LONG,
    heats,
    kept_bytes,
    loss_of,
    mixed_batch,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def make(folder):
        for family in FAMILIES:
            changes = CHANGES[family].changes if family in CHANGES else {}
            write_tiny_model(folder / family, family, max_position_embeddings=4096, **changes)
        run_ranks("tests.training.context_worker", 3, folder)

    return made_once(tmp_path_factory, "context", make)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_each_sequence_alone(folder, family):
    model = AutoModelForCausalLM.from_pretrained(
        folder / family,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    batch = mixed_batch()
    prompts = batch.flat("prompt_ids").split(batch.lengths("prompt").tolist())
    responses = batch.flat("response_ids").split(batch.lengths("response").tolist())
    temperatures = heats(batch).double().split(batch.lengths("response").tolist())
    chosen = []
    entropies = []
    for prompt, response, heat in zip(prompts, responses, temperatures, strict=True):
        logits = model(input_ids=torch.cat((prompt, response))[None], use_cache=False).logits[0]
        own = logits[len(prompt) - 1 : len(prompt) + len(response) - 1] / heat[:, None]
        log_probs = own.log_softmax(-1)
        chosen.append(log_probs.gather(-1, response[:, None])[:, 0])
        entropies.append(-(log_probs.exp() * log_probs).sum(-1))

    wanted = {"log_probs": torch.cat(chosen), "entropy": torch.cat(entropies)}
    loss_of(wanted, batch).backward()
    for layout in LAYOUTS:
        for rank in layout.ranks:
            outputs, grads = torch.load(folder / f"{family}-{layout.role}-{rank}.pt")
            for name, values in wanted.items():
                torch.testing.assert_close(outputs[name].double(), values, rtol=0, atol=1e-5)
            for name, weight in model.named_parameters():
                if weight.grad is None:  # an expert that no token chose
                    assert not grads[name].any()
                    continue
                torch.testing.assert_close(grads[name], weight.grad.float(), rtol=0, atol=1e-5)


def test_all_ranks_have_the_same_outputs(folder):
    for layout in LAYOUTS:
        first, *others = [
            torch.load(folder / f"qwen3-{layout.role}-{rank}.pt")[0] for rank in layout.ranks
        ]
        assert all(torch.equal(other[name], first[name]) for other in others for name in first)


def test_a_long_sequence_takes_its_share_of_memory_on_each_rank(folder):
    """So one that exceeds a rank's memory fits several. Besides its own rows a rank keeps the keys
    and values of all, and masks."""
    model = load_model(folder / "qwen3")
    model.config._attn_implementation = "sdpa"  # layers by torch, as those of the ranks
    alone = kept_bytes(model, ragged_batch(LONG))
    for layout, share in zip(LAYOUTS, (0.45, 0.6), strict=True):
        for rank in layout.ranks:
            kept = json.loads((folder / f"kept-{layout.role}-{rank}.json").read_text())
            assert 0.9 / len(layout.ranks) < kept / alone < share
