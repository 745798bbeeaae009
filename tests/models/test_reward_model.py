"""Scores against `transformers`' own classifier in float64, asked one text at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from distflow.errors import UserError
from distflow.models.model_identity import identity
from distflow.models.reward_model import load_reward_model, score_ids
from tests.tiny_models import write_tiny_model, write_tiny_reward_model

# Of many lengths; some end with what is the pad and the end token, one is nothing else.
TEXTS = [
    [1, 7, 9],
    [2],
    [1, 30, 0, 0],
    [5] * 40,
    [1, 8, 2, 2],
    list(range(3, 60)),
    [1, 7, 9, 2],
    [0, 0],
]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "bert": {"type_vocab_size": 2},
    "roberta": {"pad_token_id": 90, "type_vocab_size": 1},
}


def one_by_one(folder: Path) -> list[float]:
    """Without padding, so that nothing of what is tested plays a part."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in TEXTS]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pad_id", [0, 2, 50])
def test_a_text_scores_the_same_beside_others_whatever_fills_them_up(tmp_path, family, pad_id):
    folder = write_tiny_reward_model(tmp_path, family, **FAMILIES[family])
    model = load_reward_model(folder, dtype=torch.float32, device="cpu")
    wanted = one_by_one(folder)
    assert len({round(score, 3) for score in wanted}) == len(TEXTS), "each text has its own"
    for max_tokens in (1, 100, 10_000):
        assert score_ids(model, TEXTS, pad_id, max_tokens) == pytest.approx(wanted, abs=2e-5)


def test_forwards_hold_so_many_tokens_with_their_padding(tmp_path):
    model = load_reward_model(write_tiny_reward_model(tmp_path), dtype=torch.float32, device="cpu")
    shapes = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    score_ids(model, [[3] * n for n in (5, 60, 4, 20, 30)], 0, max_tokens=50)
    assert shapes == [(1, 60), (1, 30), (2, 20), (1, 4)]


def test_the_head_is_float32_where_the_body_is_not(tmp_path):
    folder = write_tiny_reward_model(tmp_path)
    model = load_reward_model(folder, dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in model.base_model.parameters()} == {torch.bfloat16}
    assert score_ids(model, TEXTS, 0, 10_000) == pytest.approx(one_by_one(folder), abs=0.5)


def refusal(path: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        load_reward_model(path, dtype=torch.float32, device="cpu")
    return str(caught.value)


def test_what_is_no_reward_model_is_told(tmp_path):
    language_model = write_tiny_model(tmp_path / "lm")
    assert "but a LlamaForCausalLM: train one from pairs" in refusal(language_model)
    headless = write_tiny_model(tmp_path / "headless", num_labels=1)
    assert "its weights lack score.weight" in refusal(headless), "no head is made up"
    assert "of num_labels=3" in refusal(write_tiny_reward_model(tmp_path / "three", num_labels=3))
    assert "has no config.json" in refusal(tmp_path)
    assert "no such file or folder" in refusal(tmp_path / "nowhere")
    folder = write_tiny_reward_model(tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has no safetensors" in refusal(folder)
    config = (language_model / "config.json").read_text()
    code = config.replace(
        '"model_type": "llama"', '"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}'
    )
    (language_model / "config.json").write_text(code)
    (language_model / "mine.py").write_text("raise SystemExit('it ran')")
    assert "comes with Python code" in refusal(language_model)


def test_weights_that_are_none_are_refused(tmp_path):
    folder = write_tiny_reward_model(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.score.weight.data[0, 0] = float("nan")
    model.save_pretrained(folder)
    assert "weights are damaged" in refusal(folder)


def test_a_model_is_known_by_its_files(tmp_path):
    first, same = (write_tiny_reward_model(tmp_path / name, seed=3) for name in ("a", "b"))
    other = write_tiny_reward_model(tmp_path / "c", seed=4)
    assert identity(str(first))["fingerprint"] == identity(str(same))["fingerprint"]
    assert identity(str(other))["fingerprint"] != identity(str(first))["fingerprint"]
    assert identity(str(first))["path"] == str(first)
    weights = bytearray((same / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (same / "model.safetensors").write_bytes(weights)
    assert identity(str(first))["fingerprint"] != identity(str(same))["fingerprint"]
