"""The tiny policy and critic. Their weights are the same bits on every machine: torch draws by the processor's own
vector instructions, Python's generator does not."""

import random
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from distflow.models.loading import quiet_transformers
from distflow.models.paths import resolve_path

TOKENIZER = "builtin:tiny-arithmetic"
_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
_SPREAD = 0.4  # large enough that neighbouring tokens matter: a leak between sequences shows


def write_models(folder: Path) -> None:
    """`folder`/policy and `folder`/critic, as Hugging Face folders without a tokenizer."""
    config = AutoConfig.from_pretrained(resolve_path(TOKENIZER), **_SIZES)
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.num_labels = 1
    critic = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    with quiet_transformers():
        _drawn(policy, "policy").save_pretrained(folder / "policy")
        _drawn(critic, "critic").save_pretrained(folder / "critic")


def _drawn(model: PreTrainedModel, seed: str) -> PreTrainedModel:
    """Matrices around 0, norms (of one axis) around 1."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            draw = random.Random(f"{seed} {name}")
            numbers = torch.tensor([2 * draw.random() - 1 for _ in range(weight.numel())], dtype=torch.float64)
            weight.copy_((_SPREAD * numbers + (weight.ndim == 1)).view_as(weight))
    return model
