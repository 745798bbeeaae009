"""Keys of `actor_rollout_ref` (model, actor, rollout, ref) and of `critic`. The names of
`fsdp_config` are verl's."""

import re
from dataclasses import dataclass

from distflow.builtin_names import (
    DTYPES,
    KL_TYPES,
    KV_ON_UPDATE,
    LOSS_AGG_MODES,
    NO_FULL_KL,
    OPTIMIZERS,
    POLICY_LOSSES,
    ROLLOUT_ENGINES,
    SCHEDULERS,
    TRAIN_ENGINES,
    VALUE_LOSSES,
    WEIGHT_UPDATE_MODES,
    not_there_yet,
)
from distflow.config.compose.typed_values import Mismatch, parse_differing
from distflow.config.keys.declare import collect, group, key, plain_settings


@dataclass(frozen=True)
class ModelConfig:
    """The model's source, and which of its weights are trained."""

    path: str | None = key(
        None, "folder or hub id of the model, builtin:NAME, or package:NAME of a Python package"
    )
    tokenizer_path: str | None = key(None, "folder or hub id of the tokenizer; null is the model's")
    gguf_file: str | None = key(None, "GGUF file with the weights, in the model's folder")
    revision: str | None = key(None, "revision of a hub id; a commit hash pins it")
    trust_remote_code: bool = key(
        False, "run Python code that comes with the model; local or pinned models only"
    )
    model_type: str | None = key(None, "family of the model if its folder does not say", later=True)
    init: str = key(
        "pretrained",
        "random: new weights by trainer.seed, from config.json",
        choices=("pretrained", "random"),
    )
    dtype: str = key(
        "auto",
        "dtype of computation; auto is float32 on a CPU, bfloat16 on a GPU",
        choices=("auto", *DTYPES),
    )
    enable_gradient_checkpointing: bool = key(
        False, "recompute activations in backward instead of storing them"
    )
    lora_rank: int = key(
        0, "rank of LoRA adapters; 0 trains all weights", minimum=0, maximum=16_384
    )
    lora_alpha: float = key(16, "scale of the adapters, divided by the rank", above=0)
    target_modules: str | tuple[str, ...] = key(
        "all-linear", "modules that get an adapter: all-linear or their names"
    )
    lora_merge: bool = key(
        True, "send adapters merged into the weights; false: vLLM applies them unmerged"
    )


@dataclass(frozen=True)
class TrainedFsdpConfig:
    """Offloading of a model that is trained; offload_policy with actor.strategy=fsdp."""

    param_offload: bool = key(False, "keep weights in host memory while they are not in use")
    optimizer_offload: bool = key(
        False, "keep the optimizer's moments in host memory between updates"
    )
    offload_policy: bool = key(
        False,
        (
            "keep weights, gradients and moments in host memory: layers are copied when they run; "
            "optimizer on the host"
        ),
    )


@dataclass(frozen=True)
class ActorFsdpConfig(TrainedFsdpConfig):
    """Sharding and offloading of the policy; fsdp_size also applies to the critic and the
    reference."""

    fsdp_size: int = key(
        -1, "data-parallel ranks that shard one copy of the weights; -1 is all", minimum=-1
    )


@dataclass(frozen=True)
class RefFsdpConfig:
    """Offloading of the frozen reference."""

    param_offload: bool = key(
        False, "keep weights in host memory: a layer is copied to the device when it runs"
    )


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule; the schedule advances per optimizer step."""

    optimizer: str = key("adamw", "optimizer", choices=OPTIMIZERS)
    lr: float = key(1e-6, "peak learning rate", minimum=0)
    weight_decay: float = key(0.01, "weight decay", minimum=0)
    betas: tuple[float, float] = key(
        (0.9, 0.999), "decay of Adam's first and second moments, each in [0, 1)"
    )
    eps: float = key(1e-8, "Adam's epsilon", above=0)
    scheduler: str = key("cosine_with_warmup", "learning-rate schedule", choices=SCHEDULERS)
    warmup_ratio: float = key(
        0.1, "warm-up, as a share of the optimizer steps", minimum=0, maximum=1
    )
    lr_warmup_steps: int = key(
        -1, "number of warm-up optimizer steps; -1: by warmup_ratio", minimum=-1
    )
    min_lr_ratio: float = key(0.0, "final learning rate, as a share of lr", minimum=0, maximum=1)


@dataclass(frozen=True)
class ActorConfig:
    """How the policy is updated."""

    strategy: str = key(
        "torch", "train engine", choices=tuple(TRAIN_ENGINES), later=not_there_yet(TRAIN_ENGINES)
    )
    policy_loss: str = key("vanilla", "policy loss", choices=tuple(POLICY_LOSSES), open_names=True)
    policy_loss_kwargs: dict[str, object] = key({}, "options of the chosen loss by name")
    prox: str = key(
        "recompute",
        (
            "proximal log-probs of decoupled PPO: a forward pass before the update, or "
            "interpolated by weight version"
        ),
        choices=("recompute", "interpolate"),
    )
    loss_agg_mode: str = key(
        "token-mean", "how token losses are aggregated", choices=LOSS_AGG_MODES
    )
    loss_scale_factor: float | None = key(
        None, "divisor in seq-mean-token-sum-norm; null is data.max_response_length", above=0
    )
    clip_ratio: float = key(0.2, "maximum distance of the ratio from 1", above=0)
    clip_ratio_low: float | None = key(
        None, "maximum decrease of the ratio; null is clip_ratio", above=0, maximum=1
    )
    clip_ratio_high: float | None = key(
        None, "maximum increase of the ratio; null is clip_ratio", above=0
    )
    clip_ratio_c: float | None = key(
        3.0, "dual clip: upper bound of the ratio for negative advantages", above=1
    )
    off_policy_mask_threshold: float | None = key(
        None,
        (
            "exclude a sequence with A < 0 from the loss if its mean log π_rollout − log π is "
            "above this; null is off"
        ),
        above=0,
    )
    entropy_coef: float = key(0.01, "coefficient of the entropy bonus; 0 is off")
    use_kl_loss: bool = key(False, "add the KL to the reference to the loss")
    kl_loss_coef: float = key(0.001, "coefficient of the KL in the loss", minimum=0)
    kl_loss_type: str = key(
        "low_var_kl", "estimator of the KL in the loss", choices=KL_TYPES, advice=NO_FULL_KL
    )
    ppo_epochs: int = key(1, "passes over the batch of a step", minimum=1)
    ppo_mini_batch_size: int = key(256, "prompts per optimizer step", minimum=1)
    # A CPU needs less: its allocator keeps the memory.
    ppo_max_token_len_per_gpu: int | None = key(
        None,
        (
            "maximum tokens in a micro-batch; a longer sample is its own micro-batch; null is "
            "16384, on a CPU 4096"
        ),
        minimum=1,
    )
    max_grad_norm: float = key(1.0, "maximum norm of the gradient", above=0)
    model_update_frequency: int = key(
        1, "steps between weight syncs to the rollout engines", minimum=1
    )
    weight_update_mode: str = key(
        "store",
        "weight sync to workers that only generate (launcher=ray): Ray's object store, files in "
        "the run's folder, or "
        "process groups (gloo; nccl between GPUs)",
        choices=WEIGHT_UPDATE_MODES,
    )
    optim: OptimConfig = group(OptimConfig)
    fsdp_config: ActorFsdpConfig = group(ActorFsdpConfig)


@dataclass(frozen=True)
class RefConfig:
    """The frozen reference policy; built only if a KL term is on."""

    log_prob_max_token_len_per_gpu: int | None = key(
        None, "maximum tokens in a micro-batch; null is the actor's", minimum=1
    )
    fsdp_config: RefFsdpConfig = group(RefFsdpConfig)


@dataclass(frozen=True)
class CriticModelConfig:
    """The source of the critic's weights."""

    path: str | None = key(
        None, "folder or hub id of the critic; null: the actor's with a new value head"
    )


@dataclass(frozen=True)
class CriticConfig:
    """How the critic is updated."""

    model: CriticModelConfig = group(CriticModelConfig)
    value_loss: str = key(
        "mse", "value loss: half the squared error, or the Huber loss", choices=VALUE_LOSSES
    )
    huber_delta: float = key(10.0, "error above which the Huber loss is linear", above=0)
    cliprange_value: float = key(0.5, "maximum distance of a value from the old value", above=0)
    loss_agg_mode: str = key(
        "token-mean", "how token losses are aggregated", choices=LOSS_AGG_MODES
    )
    ppo_epochs: int = key(1, "passes over the batch of a step", minimum=1)
    ppo_mini_batch_size: int | None = key(
        None, "prompts per optimizer step; null is the actor's", minimum=1
    )
    ppo_max_token_len_per_gpu: int | None = key(
        None, "maximum tokens in a micro-batch; null is the actor's", minimum=1
    )
    max_grad_norm: float = key(1.0, "maximum norm of the gradient", above=0)
    optim: OptimConfig = group(OptimConfig, lr=1e-5)
    fsdp_config: TrainedFsdpConfig = group(TrainedFsdpConfig)


_NO_ZERO = "greedy responses belong to validation: actor_rollout_ref.rollout.val_kwargs.greedy=true"


@dataclass(frozen=True)
class ValKwargsConfig:
    """Generation in validation."""

    greedy: bool = key(True, "generate one greedy response per prompt")
    n: int = key(0, "additional sampled responses per prompt, for pass@k and mean@k", minimum=0)
    temperature: float = key(0.6, "temperature of the sampled responses", above=0, advice=_NO_ZERO)
    top_p: float = key(
        1.0, "sample from the smallest set of tokens with this mass; 1 is off", above=0, maximum=1
    )
    top_k: int = key(-1, "sample from the k most likely tokens; -1 is off", minimum=-1)


@dataclass(frozen=True)
class AgentConfig:
    """An agent of an episode."""

    policy: str = key("actor", "whose replies it gives: actor, or one of dag.policies")
    trainable: bool = key(True, "train on what it says")
    system_prompt: str = key("", "message that its conversation begins with; empty: none")
    max_tokens: int | None = key(
        None, "maximum length of its replies in tokens; null: what is left", minimum=1
    )
    stop: tuple[str, ...] = key(
        (), "strings that end its replies, in addition to rollout.stop: one or a list"
    )
    temperature: float | None = key(
        None, "of its replies in training; null: rollout.temperature", above=0
    )
    top_p: float | None = key(
        None, "of its replies in training; null: rollout.top_p", above=0, maximum=1
    )
    top_k: int | None = key(None, "of its replies in training; null: rollout.top_k", minimum=-1)

    @property
    def sampling(self) -> dict[str, float]:
        """The settings that replace those of the rollout."""
        own = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in own.items() if value is not None}


def parse_agents(value: object) -> dict[str, AgentConfig]:
    """Agents by name from plain data. Raises Mismatch."""
    form = "write e.g. {solver: {max_tokens: 64}, checker: {trainable: false}}"
    found = parse_differing(value, collect(AgentConfig()), form, of="agent")
    for name in found:
        if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
            raise Mismatch(f"has an agent '{name}'", "name it by letters, digits and underscores")
    return {name: AgentConfig(**settings) for name, settings in found.items()}


@dataclass(frozen=True)
class RolloutConfig:
    """Generation in training."""

    name: str = key(
        "embedded",
        "rollout engine",
        choices=tuple(ROLLOUT_ENGINES),
        later=not_there_yet(ROLLOUT_ENGINES),
    )
    tensor_model_parallel_size: int = key(1, "devices that share one engine (name=vllm)", minimum=1)
    n: int = key(8, "responses per prompt (group size)", minimum=1)
    temperature: float = key(
        1.0, "the policy is softmax(logits / temperature)", above=0, advice=_NO_ZERO
    )
    top_p: float = key(
        1.0, "sample from the smallest set of tokens with this mass; 1 is off", above=0, maximum=1
    )
    top_k: int = key(-1, "sample from the k most likely tokens; -1 is off", minimum=-1)
    min_p: float = key(
        0.0, "minimum probability, relative to the most likely token; 0 is off", minimum=0, below=1
    )
    repetition_penalty: float = key(
        1.0, "penalty on tokens that already occurred; 1 is off", above=0
    )
    stop: tuple[str, ...] = key((), "strings that end a response: one or a list")
    max_num_seqs: int = key(256, "maximum number of responses generated concurrently", minimum=1)
    kv_on_update: str = key(
        "keep",
        (
            "running responses at a weight sync (max_staleness > 0): keep their KV cache, "
            "recompute it, or restart them"
        ),
        choices=KV_ON_UPDATE,
    )
    num_threads: int | None = key(
        None,
        (
            "CPU threads of generation if max_staleness > 0; null: half, or the rest after "
            "trainer.num_threads"
        ),
        minimum=1,
    )
    batch_invariant: bool = key(False, "make responses bit-equal in any batch; about half as fast")
    enforce_eager: bool = key(
        False, "run each operation of a decode step separately: no CUDA graphs or native CPU step"
    )
    free_cache_engine: bool = key(
        False,
        (
            "free KV cache and engine-owned weights while training, on workers that do both "
            "(max_staleness=0)"
        ),
    )
    timeout_s: float | None = key(
        1800.0,
        (
            "stop the run if the engine returns nothing and samples no token for this many "
            "seconds; null: never"
        ),
        above=0,
    )
    python: str | None = key(
        None, "Python of the environment that has the engine's server; null is this one"
    )
    url: tuple[str, ...] = key(
        (), "addresses of running servers, one or a list; empty: the run starts them"
    )
    data_parallel_size: int = key(
        1, "servers that each rollout worker starts, as one engine", minimum=1
    )
    engine_kwargs: dict[str, object] = key(
        {}, "options of the engine's server, by engine: vllm: {OPTION: VALUE}"
    )
    workflow: str | None = key(
        None,
        "episodes of several turns: single_turn, multi_turn, tools, environment, or your async "
        "function or class as "
        "module:attribute or file.py:attribute (docs/workflows.md); null: one prompt, one response",
    )
    workflow_kwargs: dict[str, object] = key({}, "options of the workflow")
    agents: dict[str, AgentConfig] = key(
        {},
        (
            f"name → {', '.join(collect(AgentConfig()))}: agents of an episode, for a workflow "
            "with the parameter agents"
        ),
        parse=parse_agents,
        plain=plain_settings,
    )
    val_kwargs: ValKwargsConfig = group(ValKwargsConfig)


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    """The policy: its model, its update, its rollout, its reference."""

    model: ModelConfig = group(ModelConfig)
    actor: ActorConfig = group(ActorConfig)
    rollout: RolloutConfig = group(RolloutConfig)
    ref: RefConfig = group(RefConfig)
