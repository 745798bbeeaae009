"""How large the models of a config are: as it says, or counted."""

import pytest
from transformers import AutoConfig

from distflow.config import Config, load_config
from distflow.errors import UserError
from distflow.launch.configured_models import model_sizes, policy_limits
from tests.tiny_models import write_tiny_model

MODEL = "actor_rollout_ref.model"


def ppo(*overrides: str) -> Config:
    needed = (
        "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
        "actor_rollout_ref.model.init=random",
    )
    return load_config("ppo", [*needed, "data.train_files=rows.jsonl", *overrides]).config


def test_sizes_of_models_are_as_given_or_counted(tmp_path):
    write_tiny_model(tmp_path / "critic")
    own = f"critic.model.path={tmp_path}/critic"
    ray = ("trainer.launcher=ray", "trainer.n_gpus_per_node=3")
    counted = model_sizes(ppo(own), ["actor", "critic", "rollout"])
    assert counted == {"actor": 804_480, "critic": 24_928}
    said = ppo(own, *ray, "dag.model_sizes={actor: 600B, ref: 1e6}")
    assert model_sizes(said, ["actor", "critic", "ref", "rollout"]) == {
        **counted,
        "actor": 600e9,
        "ref": 10**6,
    }

    with pytest.raises(UserError, match=r"dag\.model_sizes: .*'ref'; .* actor, critic"):
        model_sizes(said, ["actor", "critic"])

    with pytest.raises(UserError, match=r"dag\.model_sizes: '7 billion' .*70B"):
        model_sizes(ppo(*ray, "dag.model_sizes.actor='7 billion'"), ["actor"])

    (tmp_path / "critic" / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(
        UserError,
        match=r"critic\.model\.path: .*'t5': .* dag\.model_sizes",
    ):
        model_sizes(ppo(own), ["actor", "critic"])


@pytest.mark.parametrize(
    ("family", "said"), [("llama", None), ("gemma2", "family 'gemma2' is not one of llama")]
)
def test_what_a_model_limits_is_known_without_its_weights(family, said, tmp_path):
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    config = AutoConfig.for_model(family, **sizes, max_position_embeddings=64)
    config.save_pretrained(tmp_path)
    limits = policy_limits(load_config("grpo", [f"{MODEL}.path={tmp_path}"], complete=False).config)
    assert limits.context == 64
    assert (
        limits.not_embedded is None if said is None else str(limits.not_embedded).startswith(said)
    )


def test_layers_of_an_adapter_are_looked_for_without_weights(tmp_path):
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()

    def limits(targets: str) -> None:
        keys = [
            f"{MODEL}.path={tmp_path}",
            f"{MODEL}.lora_rank=2",
            f"{MODEL}.target_modules={targets}",
        ]
        policy_limits(load_config("grpo", keys, complete=False).config)

    limits("[q_proj]")
    limits("all-linear")

    with pytest.raises(UserError, match=rf"^{MODEL}\.target_modules: 'c_attn' "):
        limits("[q_proj,c_attn]")
