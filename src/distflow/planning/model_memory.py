"""How many bytes a model takes: its weights and what trains them, activations and caches, as the
engines allocate them."""

from math import ceil

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config import Config
from distflow.config.derived_settings import is_rl, is_sharded
from distflow.config.keys.actor import ActorConfig
from distflow.config.keys.critic import CriticConfig
from distflow.config.keys.reward import scoring_models
from distflow.planning.layouts import Sizes
from distflow.planning.model_shapes import ModelShape
from distflow.planning.plan import Plan

MICRO_TOKENS = {"cpu": 4096, "gpu": 16384}
"""Of a micro-batch whose size nobody set, as in training/torch_engine.py."""
CACHE_SHARE = 0.5
"""Of the free memory, which the embedded engine's cache takes at most, as in
rollout/embedded/decode_steps.py."""
SERVER_SHARES = {"vllm": ("gpu_memory_utilization", 0.92), "sglang": ("mem_fraction_static", 0.9)}
"""The server's option for the share of a GPU that it takes when it starts, and its default: vLLM's
of all memory with its activations, SGLang's of the free memory (by default about so much, more or
less by device)."""
_MOMENTS = {"adamw": 8, "adamw_8bit": 2, "sgd": 0}
"""Bytes for each trained weight."""


def sizes_of(plan: Plan, role: str) -> Sizes:
    """The sizes of a role's model; one rank without layouts has all of it."""
    layout = plan.layout(role)
    return Sizes() if layout is None else layout.sizes


def shards_of(plan: Plan, config: Config, role: str) -> int:
    """On how many ranks one copy of a role's weights lies."""
    layout = plan.layout(role)
    if layout is None or is_judge(config, role):
        return 1
    if role == "rollout":
        return layout.sizes.tensor

    own = layout.sizes.tensor
    if is_sharded(config):
        own *= layout.shard or layout.sizes.tokens
    return own


def shares_storage(config: Config, dtype: str) -> bool:
    """Whether the rollout engine may compute on the trainer's storage: weights are whole, both use
    the stored dtype, and nothing is generated while the trainer updates them. dtype: that the
    models compute in."""
    in_server = ROLLOUT_ENGINES[config.actor_rollout_ref.rollout.name].in_server
    if in_server or dtype != "float32" or is_sharded(config):
        return False
    return not is_rl(config) or config.async_.max_staleness == 0


def is_judge(config: Config, role: str) -> bool:
    model = scoring_models(config.reward_model).get(role)
    return model is not None and model.judge


def trainer_keys(config: Config, role: str) -> ActorConfig | CriticConfig:
    """The keys of the model that a role trains."""
    if role == "critic":
        return config.critic
    return config.actor_rollout_ref.actor


def trained_bytes(weights: float, trained: float, optimizer: str) -> dict[str, float]:
    """Of a model with so many weights, of which so many are trained, and that are all stored in
    float32."""
    return {
        "weights": 4 * weights,
        "gradients": 4 * trained,
        "optimizer": _MOMENTS[optimizer] * trained,
    }


def frozen_bytes(config: Config, role: str, weights: float) -> float:
    """Of a reference, reward model, judge or teacher. A rollout engine computes with a whole
    judge's weights."""
    return weights * (itemsize_of(config) if is_judge(config, role) else 4)


def adapter_weights(shape: ModelShape, rank: int) -> float:
    """Of LoRA on all matrices of the layers."""
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    attention = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    return rank * shape.layers * (attention + 3 * (shape.hidden + shape.intermediate))


def activation_bytes(
    shape: ModelShape, itemsize: int, tensor: int, trains: bool, checkpointed: bool
) -> float:
    """Of one token: what the backward pass needs of all layers; with checkpointing each layer's
    input, and all of one layer; without a backward pass what one layer holds at a time. Norms and
    the residual stream are not divided by tensor parallelism, and are float32."""
    hidden = shape.hidden
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    inner = shape.intermediate * shape.active_experts
    products = 2 * queries + 2 * keys + 4 * inner

    # inputs of norms, normalised, and (here in one type) scaled
    streams = 4 * hidden * 6
    if itemsize == 2:
        products += 2 * hidden
        streams = 4 * hidden * 4

    products_bytes = itemsize * products / tensor
    if not trains:
        return 4 * hidden * 3 + products_bytes

    layer = streams + products_bytes
    if checkpointed:
        return 4 * hidden * shape.layers + layer
    return layer * shape.layers


def cache_in_advance(
    config: Config, free: float, token_bytes: float, context: int | None
) -> float | None:
    """Bytes of keys and values that the embedded engine takes on a GPU when it first generates, and
    keeps; None for engines that take what they need. free: at that time."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "embedded":
        return None
    longest = context or longest_sequence(config)
    return min(CACHE_SHARE * free, 2 * rollout.max_num_seqs * longest * token_bytes)


def server_share(config: Config) -> float:
    """The share of a GPU that the rollout's server takes."""
    rollout = config.actor_rollout_ref.rollout
    option, default = SERVER_SHARES[rollout.name]
    options = rollout.engine_kwargs.get(rollout.name)
    chosen = options.get(option) if isinstance(options, dict) else None
    return chosen if isinstance(chosen, int | float) else default


def micro_tokens(config: Config, role: str, sizes: Sizes, kind: str) -> int:
    """Tokens of a role's micro-batches on each rank if all samples have the greatest length. kind:
    of the device."""
    settings = config.actor_rollout_ref
    limit = settings.actor.ppo_max_token_len_per_gpu
    batch = config.data.train_batch_size
    if role == "actor":
        batch = settings.actor.ppo_mini_batch_size
    elif role == "critic":
        batch = config.critic.ppo_mini_batch_size or settings.actor.ppo_mini_batch_size
        limit = config.critic.ppo_max_token_len_per_gpu or limit
    elif role == "ref":
        limit = settings.ref.log_prob_max_token_len_per_gpu or limit

    longest = longest_sequence(config)
    tokens = ceil(batch * samples_per_prompt(config) / sizes.data) * longest
    micro_batches = ceil(tokens / (limit or MICRO_TOKENS[kind]) / sizes.context)
    row = max(longest, ceil(tokens / micro_batches))  # packing evens them out
    return ceil(row / sizes.context)


def longest_sequence(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def samples_per_prompt(config: Config) -> int:
    if is_rl(config):
        return config.actor_rollout_ref.rollout.n
    return 1


def samples_per_step(config: Config) -> int:
    return config.data.train_batch_size * samples_per_prompt(config)


def itemsize_of(config: Config) -> int:
    """Bytes of a number that the models compute with."""
    if config.actor_rollout_ref.model.dtype == "float32":
        return 4
    return 2


def steps_under_way(config: Config) -> int:
    """Steps whose responses may be generated at once."""
    return config.async_.max_staleness + 1 if is_rl(config) else 1


def running_responses(config: Config, engines: int) -> int:
    """The most responses that an engine generates at once: of so many steps as may be under way."""
    groups = config.data.train_batch_size * steps_under_way(config)
    groups = min(groups, config.async_.max_concurrent_rollouts or groups)
    wanted = ceil(groups * samples_per_prompt(config) / engines)
    return min(config.actor_rollout_ref.rollout.max_num_seqs, wanted)
