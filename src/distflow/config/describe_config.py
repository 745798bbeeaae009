"""A short description of a config, and the explanation of one key."""

from distflow.builtin_names import POLICY_LOSSES
from distflow.config.compose.load_config import Loaded
from distflow.config.compose.setting_origins import COMMAND_LINE
from distflow.config.compose.typed_values import type_name
from distflow.config.compose.unknown_keys import suggest
from distflow.config.derived_settings import (
    CUSTOM,
    clip_range,
    config_of,
    is_online,
    is_rl,
    optimizer_steps_a_step,
    own_losses,
    pipeline_name,
    validates,
)
from distflow.config.keys.declare import KeyInfo
from distflow.config.keys.schema import Config, flatten, schema_keys, show_value
from distflow.config.keys.trainer import TrainerConfig
from distflow.errors import ConfigError, Problem, count_of
from distflow.import_target import own_name


def describe(config: Config) -> list[str]:
    """A few lines such as `64 prompts × 8 = 512 samples → 1 optimizer step of 512, on-policy`."""
    if not is_rl(config):
        examples = count_of(config.data.train_batch_size, "example")
        lines = [f"{examples} → {_updates(config, 1)}"]
    elif is_online(config):
        loss = own_name(config.algorithm.preference_loss)
        lines = [_step(config), f"{loss} loss on the best and the worst sample of each prompt"]
    else:
        lines = [_step(config), _objective(config), _kl(config)]
    return [*lines, _tokens(config), _learning_rate(config), _run(config), *_notes(config)]


def _step(config: Config) -> str:
    common = config.actor_rollout_ref.rollout.n
    domains = config.data.domains.values()
    sizes = sorted({domain.n or common for domain in domains} or {common})
    staleness = config.async_.max_staleness
    prompts = config.data.train_batch_size

    first = "the first on-policy"
    if optimizer_steps_a_step(config, "actor") == 1:
        first = "on-policy"

    if staleness == 0:
        policy = first
    else:
        policy = f"weights at most {count_of(staleness, 'step')} old"

    samples = (
        f"{count_of(prompts, 'prompt')} × {sizes[0]} = {count_of(prompts * sizes[0], 'sample')}"
    )
    if len(sizes) > 1:
        samples = f"{count_of(prompts, 'prompt')} × {sizes[0]} to {sizes[-1]} samples"
    return f"{samples} → {_updates(config, *sizes)}, {policy}"


def _updates(config: Config, group_size: int, *others: int) -> str:
    """How a batch is split into optimizer steps, in samples; in prompts if groups have several
    sizes."""
    actor = config.actor_rollout_ref.actor
    prompts = config.data.train_batch_size
    mini = actor.ppo_mini_batch_size
    passes = actor.ppo_epochs if is_rl(config) else 1
    counted, unit = (1, " prompts") if others else (group_size, "")
    steps = count_of(optimizer_steps_a_step(config, "actor"), "optimizer step")
    shape = f"{steps} of {min(mini, prompts) * counted}{unit}"
    if prompts > mini and prompts % mini:
        shape += f" (the last of a pass {prompts % mini * counted})"
    return shape if passes == 1 else f"{shape} in {passes} passes"


def _objective(config: Config) -> str:
    actor = config.actor_rollout_ref.actor
    name = "a custom pipeline"
    if pipeline_name(config) != CUSTOM:
        name = f"pipeline {pipeline_name(config)}"

    details = [actor.loss_agg_mode, *_clips(config)]
    if actor.entropy_coef:
        details.append(f"entropy bonus {actor.entropy_coef:g}")
    estimator, loss = map(own_name, (config.algorithm.adv_estimator, actor.policy_loss))
    losses = (
        (domain, config_of(config, domain).actor_rollout_ref.actor) for domain in own_losses(config)
    )
    details += [f"{own_name(own.policy_loss)} loss in {domain}" for domain, own in losses]

    return f"{name}: {estimator} advantages, {loss} loss ({', '.join(details)})"


def _clips(config: Config) -> list[str]:
    loss = POLICY_LOSSES.get(config.actor_rollout_ref.actor.policy_loss)
    if loss is None or not loss.clips_ratio:
        return []
    low, high = clip_range(config)
    return [f"ratio in [{1 - low:g}, {1 + high:g}]"]


def _kl(config: Config) -> str:
    algorithm = config.algorithm
    actor = config.actor_rollout_ref.actor

    terms = []
    if algorithm.use_kl_in_reward:
        control = algorithm.kl_ctrl
        follows = ""
        if control.target_kl is not None:
            follows = f", adaptive to {control.target_kl:g}"
        terms.append(f"in the reward ({algorithm.kl_penalty} × {control.kl_coef:g}{follows})")

    if actor.use_kl_loss:
        terms.append(f"in the loss ({actor.kl_loss_type} × {actor.kl_loss_coef:g})")

    if not terms:  # a custom pipeline may use a reference for something else
        if pipeline_name(config) == CUSTOM:
            return "no KL term"
        return "no KL term: no reference is loaded"

    return f"KL to the reference {' and '.join(terms)}"


def _tokens(config: Config) -> str:
    data = config.data
    limit = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    longest = data.max_prompt_length + data.max_response_length

    micro_batches = "of a size that fits the device"
    if limit is not None:
        micro_batches = f"of {limit} tokens"

    return (
        f"{data.max_prompt_length} + {data.max_response_length} = {longest} tokens per sample at "
        f"most, micro-batches {micro_batches}"
    )


def _learning_rate(config: Config) -> str:
    optim = config.actor_rollout_ref.actor.optim
    if optim.scheduler == "constant" or (optim.lr_warmup_steps < 0 and optim.warmup_ratio == 0):
        rise = ""
    elif optim.lr_warmup_steps >= 0:
        rise = f", rising for {count_of(optim.lr_warmup_steps, 'optimizer step')}"
    else:
        rise = f", rising for {optim.warmup_ratio:.0%} of the optimizer steps"

    return f"{optim.optimizer}, learning rate {optim.lr:g} ({optim.scheduler}{rise})"


def _run(config: Config) -> str:
    trainer = config.trainer
    if trainer.total_training_steps is None:
        length = count_of(trainer.total_epochs, "epoch")
    else:
        length = count_of(trainer.total_training_steps, "step")

    saves = f"checkpoint {_every(trainer, 'save_freq')}"
    validation = "no validation data"
    if validates(config):
        validation = f"validation {_every(trainer, 'test_freq')}"

    return f"{length}, {saves}, {validation}, in {trainer.run_dir}"


def _notes(config: Config) -> list[str]:
    rollout = config.actor_rollout_ref.rollout
    off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    shaped = [name for name, value in off.items() if getattr(rollout, name) != value]
    if not shaped or not is_rl(config):
        return []
    return [f"note: {', '.join(shaped)} in training: the sampled policy is not the trained one"]


def _every(trainer: TrainerConfig, key: str) -> str:
    units = {"": "step", "_epochs": "epoch", "_secs": "second"}
    told = []
    for end, unit in units.items():
        number = getattr(trainer, key + end) or 0
        if number > 0:
            told.append(unit if number == 1 else f"{number:g} {unit}s")

    return f"every {' or '.join(told)}" if told else "never"


def explain(key: str, loaded: Loaded) -> str:
    """The meaning of a key, its allowed values, its value here and where it was set; for a group, a
    line per key.

    Raises ConfigError naming the nearest key.
    """
    keys = schema_keys()
    if key in keys:
        return _explain_key(keys[key], flatten(loaded.config)[key], loaded.origin(key))

    below = [name for name in keys if name.startswith(f"{key}.")]
    if below:
        values = flatten(loaded.config)
        return "\n".join(
            f"{name}={show_value(keys[name], values[name])}  {keys[name].spec.description}"
            for name in below
        )

    raise ConfigError([Problem(((key, COMMAND_LINE),), "there is no such key", suggest(key, keys))])


def _explain_key(info: KeyInfo, value: object, origin: str) -> str:
    lines = [
        info.name,
        f"  {info.spec.description}",
        f"  type     {type_name(info.annotation)}",
        f"  allowed  {info.spec.allowed()}" if info.spec.allowed() else "",
        f"  default  {show_value(info, info.default)}",
        f"  value    {show_value(info, value)}",
        f"  origin   {origin}",
    ]
    return "\n".join(line for line in lines if line)
