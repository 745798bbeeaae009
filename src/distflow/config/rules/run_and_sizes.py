"""Rules of the run: validation, checkpoints, names; sizes that fit each other and the limits of the run."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from distflow.config import derived_settings
from distflow.config.derived_settings import val_files, validates
from distflow.config.keys.schema import Config
from distflow.config.keys.trainer_async_and_trust import StopCondition
from distflow.config.rules import ROLLOUT, Finding
from distflow.errors import count_of, missing_path, nearest


def validation(config: Config) -> Iterator[Finding]:
    """Validation has data, and responses per prompt."""
    val_kwargs = config.actor_rollout_ref.rollout.val_kwargs
    if config.trainer.val_before_train and not validates(config):
        yield Finding(
            ("trainer.val_before_train", _val_files(config)),
            "there is no validation data",
            f"set {_val_files(config)}, or trainer.val_before_train=false",
            missing=True,
        )
    if derived_settings.is_rl(config) and validates(config) and not val_kwargs.greedy and val_kwargs.n == 0:
        yield Finding(
            (f"{ROLLOUT}.val_kwargs.n", f"{ROLLOUT}.val_kwargs.greedy"),
            "validation would not generate any response",
            f"set {ROLLOUT}.val_kwargs.greedy=true, or {ROLLOUT}.val_kwargs.n=4",
        )


def _val_files(config: Config) -> str:
    return next(iter(val_files(config)))


def stop_when(config: Config) -> Iterator[Finding]:
    """A validation metric needs validation."""
    trainer = config.trainer
    if trainer.stop_when is None or not StopCondition.of(trainer.stop_when).is_of_validation:
        return
    if not validates(config):
        what, advice = "without validation there is no such metric", f"set {_val_files(config)}"
    elif _never(config, "test_freq") and not trainer.keep_best:
        what, advice = "trainer.test_freq disables validation, so there is no such metric", "set trainer.test_freq=10"
    else:
        return
    yield Finding(("trainer.stop_when", _val_files(config)), what, f"{advice}, or remove trainer.stop_when")


def _never(config: Config, name: str) -> bool:
    """Whether neither steps nor epochs nor seconds are set."""
    steps, *others = (getattr(config.trainer, name + unit) for unit in ("", "_epochs", "_secs"))
    return steps <= 0 and others == [None, None]


def keep_best(config: Config) -> Iterator[Finding]:
    """`keep_best` needs checkpoints and validation."""
    trainer = config.trainer
    if not trainer.keep_best:
        return
    if not validates(config):
        yield Finding(
            ("trainer.keep_best", _val_files(config)),
            "without validation there is no best checkpoint",
            f"set {_val_files(config)}, or trainer.keep_best=false",
        )
    for name in ("test_freq", "save_freq"):
        if _never(config, name):
            yield Finding(
                (f"trainer.{name}", "trainer.keep_best"),
                f"{getattr(trainer, name)} disables it, so there is no best checkpoint",
                f"set trainer.{name}=10, or trainer.keep_best=false",
            )


def resume(config: Config) -> Iterator[Finding]:
    """The checkpoint to resume from exists; a run that restarts automatically resumes from its own."""
    mode, launcher, restarts = config.trainer.resume_mode, config.trainer.launcher, config.trainer.max_restarts
    if mode not in ("auto", "never") and (launcher == "slurm" or restarts):
        keys = ("trainer.resume_mode", "trainer.launcher" if launcher == "slurm" else "trainer.max_restarts")
        what = "a run that restarts automatically must resume from its own checkpoints, and may have none yet"
        yield Finding(keys, what, f"train to the first one without {keys[1]}, then use trainer.resume_mode=auto")
    path = os.path.expanduser(mode)
    if mode not in ("auto", "never") and not os.path.isdir(path):
        what, advice = ("is a file", "name its folder") if os.path.isfile(path) else missing_path(Path(path))
        if near := nearest(mode, ("auto", "never")):
            advice = f"did you mean '{near}'"
        ways = "auto, never (verl's disable), or the folder of a run or a checkpoint"
        yield Finding(("trainer.resume_mode",), what, f"{advice}; it takes {ways}")


def run_folder(config: Config) -> Iterator[Finding]:
    """Project and experiment are names of folders inside `runs`."""
    trainer = config.trainer
    if trainer.default_local_dir is not None:
        return
    for name, value in (("project_name", trainer.project_name), ("experiment_name", trainer.experiment_name)):
        if value.strip() in ("", ".", "..") or "/" in value or "\0" in value:
            yield Finding(
                (f"trainer.{name}",),
                f"'{value}' is not a valid folder name",
                "choose a name without slashes, or set trainer.default_local_dir",
            )


def user_modules(config: Config) -> Iterator[Finding]:
    """`trainer.imports` names modules, not files."""
    for module in config.trainer.imports:
        if module.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
            advice = f"write {Path(module).stem}, and make sure that Python finds it (PYTHONPATH)"
            yield Finding(("trainer.imports",), f"'{module}' is not a module name", advice)


RULES = (validation, stop_when, keep_best, resume, run_folder, user_modules)


def mini_batches(config: Config, room: derived_settings.RunLimits) -> Iterator[Finding]:
    """A mini-batch is not larger than the batch; it need not divide it."""
    batch = config.data.train_batch_size
    for key, size in derived_settings.mini_batch_sizes(config):
        if size > batch:
            yield Finding(
                (key, "data.train_batch_size"),
                f"a mini-batch of {size} prompts cannot be taken from a batch of {batch} (neither counts samples)",
                f"set {key}={batch} or less, or data.train_batch_size={size} or more",
            )


def batch(config: Config, room: derived_settings.RunLimits) -> Iterator[Finding]:
    """A batch is not larger than the data set."""
    size, most = config.data.train_batch_size, config.data.train_max_samples
    if 0 < most < size:
        yield Finding(
            ("data.train_batch_size", "data.train_max_samples"),
            f"a batch of {size} is larger than the {count_of(most, 'row')} used",
            f"set data.train_batch_size={most} or less, or use more rows",
        )
    elif room.rows is not None and room.rows < size:
        yield Finding(
            ("data.train_batch_size", "data.train_files"),
            f"a batch of {size} is larger than the data set, which has {count_of(room.rows, 'row')} to train on",
            f"set data.train_batch_size={room.rows} or less, or remove it",
        )


def lengths(config: Config, room: derived_settings.RunLimits) -> Iterator[Finding]:
    """The longest prompt and the longest response together fit into the model's context."""
    prompt, response, context = config.data.max_prompt_length, config.data.max_response_length, room.context
    if context is None or prompt + response <= context:
        return
    prompt_first = prompt >= context or prompt > response
    keys = ("data.max_prompt_length", "data.max_response_length", "actor_rollout_ref.model.path")
    first, left = (keys[0], context - response) if prompt_first else (keys[1], context - prompt)
    advice = f"set {first}={left} or less"
    if left <= 0:
        share = context * prompt // (prompt + response)
        advice = f"set both, to {context} together or less, e.g. {keys[0]}={share} {keys[1]}={context - share}"
    yield Finding(
        (keys[1], keys[0], keys[2]) if first == keys[1] else keys,
        f"prompts of up to {prompt} and responses of up to {response} tokens make {prompt + response}, but the "
        f"model has a context of {context}",
        f"{advice}, or use a model with a longer context",
    )


def overlong_zone(config: Config, room: derived_settings.RunLimits) -> Iterator[Finding]:
    """The penalty zone is shorter than the response."""
    zone, limit = config.reward.overlong.buffer_tokens, config.data.max_response_length
    if zone >= limit and derived_settings.is_rl(config):
        yield Finding(
            ("reward.overlong.buffer_tokens", "data.max_response_length"),
            f"a buffer of {zone} tokens covers the whole response of at most {limit}",
            f"set it to less than {limit}, e.g. {limit // 4}",
        )


def warm_ups(config: Config, room: derived_settings.RunLimits) -> Iterator[Finding]:
    """Every warm-up ends before the run."""
    steps = derived_settings.run_steps(config, room)
    length = "trainer.total_epochs" if config.trainer.total_training_steps is None else "trainer.total_training_steps"
    if steps is None:
        return
    critic_warmup = config.trainer.critic_warmup
    if derived_settings.may_have_critic(config) and critic_warmup >= steps:
        yield Finding(
            ("trainer.critic_warmup", length),
            f"the actor would never be trained: the critic warms up for {critic_warmup} of {count_of(steps, 'step')}",
            "set trainer.critic_warmup to less than the steps of the run",
        )
        return
    for key, warmup, updates in derived_settings.learning_rate_warm_ups(config, steps):
        if warmup >= updates > 0:
            yield Finding(
                (key, length),
                f"the learning rate warms up for {warmup} of {updates} optimizer steps and never reaches lr",
                f"set {key} to less than {updates}, e.g. {updates // 10}",
            )


def embedded_engine(config: Config, room: derived_settings.RunLimits) -> Iterator[Finding]:
    """The embedded engine can run the model."""
    if derived_settings.refuses_model(config, room):
        keys, advice = (derived_settings.ENGINE, "actor_rollout_ref.model.path"), "set it to hf, or remove it"
        yield Finding(keys, f"the embedded engine cannot run this model: {room.not_embedded}", advice)


SIZE_RULES: tuple[Callable[[Config, derived_settings.RunLimits], Iterator[Finding]], ...] = (
    mini_batches,
    batch,
    lengths,
    overlong_zone,
    warm_ups,
    embedded_engine,
)
