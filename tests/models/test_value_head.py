"""Critics: a fresh head on a language model, values as `transformers` computes them, and the way to
disk and back."""

import pytest
import torch
from transformers import AutoModelForTokenClassification

from distflow.errors import UserError
from distflow.launch.run_folders.export_checkpoint import export_model
from distflow.models.loading import load_model
from distflow.models.packed_forward import output_head, packed_hidden_states
from tests.tiny_models import write_tiny_model

IDS = torch.arange(3, 40)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_language_model_gets_a_small_head_by_seed_and_keeps_its_decoder(tmp_path, family):
    folder = write_tiny_model(tmp_path / "m", family)
    first, again, other = (load_model(folder, seed=seed, critic=True) for seed in (1, 1, 2))
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    assert torch.equal(
        first.model.layers[0].mlp.up_proj.weight, other.model.layers[0].mlp.up_proj.weight
    )
    values = output_head(first)(packed_hidden_states(first, IDS, torch.tensor([30, 7])))[:, 0]
    assert values.shape == (37,) and 0 < values.abs().max() < 1.0
    plain = torch.cat([first(part[None]).logits[0, :, 0] for part in IDS.split([30, 7])])
    torch.testing.assert_close(values, plain, rtol=0, atol=1e-5)


def test_a_critic_goes_to_disk_and_back_with_its_head(tmp_path):
    critic = load_model(write_tiny_model(tmp_path / "m"), seed=1, critic=True)
    with torch.no_grad():
        critic.score.weight.fill_(0.3)
        critic.score.bias.fill_(0.7)

    export_model(critic, None, tmp_path / "critic")
    again = load_model(tmp_path / "critic", seed=2, critic=True)
    by_transformers = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    assert torch.equal(again(IDS[None]).logits, critic(IDS[None]).logits)
    torch.testing.assert_close(
        by_transformers(IDS[None]).logits, critic(IDS[None]).logits, rtol=0, atol=1e-5
    )


def test_random_critics_depend_on_the_seed_alone(tmp_path):
    folder = write_tiny_model(tmp_path / "m")
    first, again = (load_model(folder, init="random", seed=3, critic=True) for _ in range(2))
    assert torch.equal(first(IDS[None]).logits, again(IDS[None]).logits)


@pytest.mark.parametrize("family", ["granite", "gpt_neox"])
def test_families_without_a_value_head_are_refused(tmp_path, family):
    folder = write_tiny_model(tmp_path / "m", family)
    for init in ("pretrained", "random"):
        with pytest.raises(UserError, match=f"critic.*'{family}'"):
            load_model(folder, init=init, critic=True)
