"""Sizes that fit each other, the data and the model. A default that does not fit becomes one that
does; a value that was set is a problem."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from distflow.config.derived_settings import (
    ENGINE,
    Role,
    RunLimits,
    is_rl,
    may_have_critic,
    optimizer_steps,
    run_steps,
)
from distflow.config.keys.optim import OptimConfig
from distflow.config.keys.schema import Config
from distflow.config.rules import ACTOR, MODEL, Finding
from distflow.errors import count_of

Change = tuple[str, object, str]
"""A key, the value that fits, and why."""


@dataclass(frozen=True)
class Misfit:
    """ways: changes that make it fit, the best first; they are made if nobody chose the values of
    their keys. limits: keys from which a change follows: set above a file, they also replace the
    file's values."""

    finding: Finding
    ways: tuple[tuple[Change, ...], ...] = ()
    limits: tuple[str, ...] = ()


def embedded_engine(config: Config, room: RunLimits) -> Iterator[Misfit]:
    """The embedded engine can run the model; `hf` runs any."""
    is_embedded = is_rl(config) and config.actor_rollout_ref.rollout.name == "embedded"
    if room.not_embedded and is_embedded:
        why = f"the embedded engine cannot run this model: {room.not_embedded}"
        finding = Finding((ENGINE, f"{MODEL}.path"), why, "set it to hf, or remove it")
        yield Misfit(finding, (((ENGINE, "hf", why),),))


def lengths(config: Config, room: RunLimits) -> Iterator[Misfit]:
    """The longest prompt and the longest response together fit into the model's context: both
    shrink in proportion, or one of them to what the other leaves."""
    prompt = config.data.max_prompt_length
    response = config.data.max_response_length
    context = room.context
    if context is None or prompt + response <= context:
        return

    keys = ("data.max_prompt_length", "data.max_response_length")
    share = context * prompt // (prompt + response)
    prompt_first = prompt >= context or prompt > response
    first, left = (keys[0], context - response) if prompt_first else (keys[1], context - prompt)

    advice = f"set {first}={left} or less"
    if left <= 0:
        advice = (
            f"set both, to {context} together or less, e.g. {keys[0]}={share} "
            f"{keys[1]}={context - share}"
        )

    finding = Finding(
        (*(keys if prompt_first else reversed(keys)), f"{MODEL}.path"),
        f"prompts of up to {prompt} and responses of up to {response} tokens make "
        f"{prompt + response}, but the model has a context of {context}",
        f"{advice}, or use a model with a longer context",
    )
    why = f"the model has a context of {context} tokens"
    least = max(1, share)
    ways = list[tuple[Change, ...]]()
    if context > 1:
        ways.append(((keys[0], least, why), (keys[1], context - least, why)))
    if prompt < context:
        ways.append(((keys[1], context - prompt, f"{why}, and prompts have up to {prompt}"),))
    if response < context:
        ways.append(((keys[0], context - response, f"{why}, and responses have up to {response}"),))
    yield Misfit(finding, tuple(ways))


def overlong_zone(config: Config, room: RunLimits) -> Iterator[Misfit]:
    """The penalty zone is shorter than the response."""
    zone = config.reward.overlong.buffer_tokens
    limit = config.data.max_response_length
    keys = ("reward.overlong.buffer_tokens", "data.max_response_length")

    if zone >= limit and is_rl(config):
        what = f"a buffer of {zone} tokens covers the whole response of at most {limit}"
        change = (
            keys[0],
            max(limit // 4, min(limit - 1, 1)),
            f"a response has at most {limit} tokens",
        )
        yield Misfit(
            Finding(keys, what, f"set it to less than {limit}, e.g. {limit // 4}"),
            ((change,),),
            keys[1:],
        )


def batch(config: Config, room: RunLimits) -> Iterator[Misfit]:
    """A batch is not larger than the data set."""
    size, most, key, limit = config.data.train_batch_size, config.data.train_max_samples, *_BATCH
    if 0 < most < size:
        what = f"a batch of {size} is larger than the {count_of(most, 'row')} used"
        finding = Finding((key, limit), what, f"set {key}={most} or less, or use more rows")
        yield Misfit(finding, (((key, most, f"{limit} limits the rows"),),), (limit,))
    elif room.rows is not None and room.rows < size:
        rows = f"{count_of(room.rows, 'row')} to train on"
        what = f"a batch of {size} is larger than the data set, which has {rows}"
        finding = Finding(
            (key, "data.train_files"), what, f"set {key}={room.rows} or less, or remove it"
        )
        yield Misfit(
            finding, (((key, room.rows, f"the data has {rows}"),),) if room.rows else (), (limit,)
        )


_BATCH = ("data.train_batch_size", "data.train_max_samples")


def mini_batches(config: Config, room: RunLimits) -> Iterator[Misfit]:
    """A mini-batch is not larger than the batch; it need not divide it."""
    batch = config.data.train_batch_size
    sizes = {f"{ACTOR}.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size}
    if may_have_critic(config):
        sizes["critic.ppo_mini_batch_size"] = config.critic.ppo_mini_batch_size or 0

    for key, size in sizes.items():
        if size > batch:
            what = (
                f"a mini-batch of {size} prompts cannot be taken from a batch of {batch} (neither "
                "counts samples)"
            )
            advice = f"set {key}={batch} or less, or {_BATCH[0]}={size} or more"
            change = (key, batch, f"a batch has {count_of(batch, 'prompt')}")
            yield Misfit(Finding((key, _BATCH[0]), what, advice), ((change,),), _BATCH)


_LENGTHS = ("trainer.total_training_steps", "trainer.total_epochs")


def critic_warm_up(config: Config, room: RunLimits) -> Iterator[Misfit]:
    """The critic's warm-up ends before the run; by default it takes a tenth, as that of the
    learning rate."""
    steps = run_steps(config, room)
    warmup = config.trainer.critic_warmup
    key = "trainer.critic_warmup"

    if steps is not None and may_have_critic(config) and warmup >= steps:
        run = count_of(steps, "step")
        what = f"the actor would never be trained: the critic warms up for {warmup} of {run}"
        finding = Finding(
            (key, _length(config)), what, f"set {key} to less than the steps of the run"
        )
        yield Misfit(finding, (((key, steps // 10, f"the run has {run}"),),), _LENGTHS)


def warm_ups(config: Config, room: RunLimits) -> Iterator[Misfit]:
    """Every warm-up of a learning rate ends before the run."""
    if (steps := run_steps(config, room)) is None:
        return

    optims: dict[Role, OptimConfig] = {"actor": config.actor_rollout_ref.actor.optim}
    if may_have_critic(config):
        optims["critic"] = config.critic.optim

    for role, optim in optims.items():
        key = f"{ACTOR if role == 'actor' else role}.optim.lr_warmup_steps"
        warmup = optim.lr_warmup_steps

        updates = optimizer_steps(config, role, steps)
        if optim.scheduler != "constant" and warmup >= updates > 0:
            what = (
                f"the learning rate warms up for {warmup} of {updates} optimizer steps and never "
                "reaches lr"
            )
            finding = Finding(
                (key, _length(config)),
                what,
                f"set {key} to less than {updates}, e.g. {updates // 10}",
            )
            change = (key, updates // 10, f"the run has {count_of(updates, 'optimizer step')}")
            yield Misfit(finding, ((change,),), _LENGTHS)


def _length(config: Config) -> str:
    """The key that decides how long the run is."""
    return _LENGTHS[config.trainer.total_training_steps is None]


SIZE_RULES: tuple[Callable[[Config, RunLimits], Iterator[Misfit]], ...] = (
    *(embedded_engine, lengths, overlong_zone, batch, mini_batches, critic_warm_up, warm_ups),
)
"""In the order in which defaults are made to fit."""
