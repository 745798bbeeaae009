"""How much of a device's memory the models of a config take, by formula: nothing is loaded."""

from typing import Final

from transformers import AutoModelForCausalLM, PreTrainedModel

from distflow.config import Config
from distflow.config.derived_settings import is_sharded
from distflow.launch.engine_factories import engine_dtype, shares_weights
from distflow.launch.model_sources import Source, critic_source, policy_adapter, policy_source
from distflow.launch.select_pipeline import bind
from distflow.models.loading import ModelSource
from distflow.models.sharding import empty_model

_MOMENT_BYTES: Final = {"adamw": 8, "adamw_8bit": 2, "sgd": 0}
"""A trained number."""


def resident_bytes(config: Config) -> dict[str, float]:
    """What lies on one device while the models of the config's pipeline are trained, without activations, keys and
    values. Trained weights and the reference's are float32."""
    engines, trainer, settings = bind(config).engines, config.trainer, config.actor_rollout_ref
    adapt, policy = policy_adapter(config), _empty(policy_source(config))
    whole = policy.num_parameters()
    actor = policy if adapt is None else adapt(policy)
    num_trained = {"actor": sum(p.numel() for p in actor.parameters() if p.requires_grad)}
    num_weights = sum(p.numel() for p in actor.parameters())
    if "critic" in engines:
        num_trained["critic"] = _empty(critic_source(config)).num_parameters()
        num_weights += num_trained["critic"]
    optimizers = {"actor": settings.actor.optim.optimizer, "critic": config.critic.optim.optimizer}
    moments = sum(_MOMENT_BYTES[optimizers[role]] * number for role, number in num_trained.items())
    parts = {"weights": 4 * num_weights, "gradients": 4 * sum(num_trained.values()), "optimizer": moments}
    if "ref" in engines and adapt is None:
        parts["reference"] = 4 * whole
    ranks = trainer.nnodes * trainer.n_gpus_per_node if is_sharded(config) else 1
    found = {name: size / ranks for name, size in parts.items()}
    if "rollout" in engines and not shares_weights(config):
        found["rollout engine"] = float(engine_dtype(config).itemsize * whole)
    return found


def _empty(source: Source) -> PreTrainedModel:
    """A critic has a head of one number in place of the language model's: it is counted as if it had that."""
    return empty_model(AutoModelForCausalLM, ModelSource(**source).config())


def kv_bytes_of_token(config: Config) -> int:
    """Keys and values of one token in the rollout engine."""
    model = ModelSource(**policy_source(config)).config().get_text_config()
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return int(2 * model.num_hidden_layers * heads * head_dim * engine_dtype(config).itemsize)
