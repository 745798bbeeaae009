"""Rules of sizes that somebody chose: each fits the others, and into the room that the run has."""

from collections.abc import Callable, Iterator

from distflow.config.program import is_rl, may_have_critic
from distflow.config.rules.finding import Finding
from distflow.config.schema import Config
from distflow.config.sizes import Room, learning_rate_warm_ups, mini_batch_sizes, run_steps


def mini_batches(config: Config, room: Room) -> Iterator[Finding]:
    """A mini-batch is a part of the batch; it need not divide it."""
    batch = config.data.train_batch_size
    for key, size in mini_batch_sizes(config):
        if size > batch:
            yield Finding(
                (key, "data.train_batch_size"),
                f"a mini-batch of {size} prompts cannot be taken from a batch of {batch} (neither counts samples)",
                f"set {key}={batch} or less, or data.train_batch_size={size} or more",
            )


def batch(config: Config, room: Room) -> Iterator[Finding]:
    """The first pass over the data fills a batch."""
    size, most = config.data.train_batch_size, config.data.train_max_samples
    if 0 < most < size:
        yield Finding(
            ("data.train_batch_size", "data.train_max_samples"),
            f"a batch of {size} is larger than the {most} rows that are used",
            f"set data.train_batch_size={most} or less, or use more rows",
        )
    elif room.rows is not None and room.rows < size:
        yield Finding(
            ("data.train_batch_size", "data.train_files"),
            f"a batch of {size} is larger than the data set, which has {room.rows} rows to train on",
            f"set data.train_batch_size={room.rows} or less, or leave it out",
        )


def lengths(config: Config, room: Room) -> Iterator[Finding]:
    """The longest prompt and the longest response fit into the model's context."""
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
        f"prompts of up to {prompt} and responses of up to {response} tokens make {prompt + response}, "
        f"and the model has a context of {context}",
        f"{advice}, or take a model with a longer context",
    )


def overlong_zone(config: Config, room: Room) -> Iterator[Finding]:
    """The zone of the penalty is a part of the response."""
    zone, limit = config.reward.overlong.buffer_tokens, config.data.max_response_length
    if zone >= limit and is_rl(config):
        yield Finding(
            ("reward.overlong.buffer_tokens", "data.max_response_length"),
            f"a zone of {zone} tokens covers the whole response of at most {limit}",
            f"set it to less than {limit}, e.g. {limit // 4}",
        )


def warm_ups(config: Config, room: Room) -> Iterator[Finding]:
    """What warms up is warm before the run ends."""
    steps, length = run_steps(config, room), "trainer.total_training_steps"
    if config.trainer.total_training_steps is None:
        length = "trainer.total_epochs"
    if steps is None:
        return
    critic_warmup = config.trainer.critic_warmup
    if may_have_critic(config) and critic_warmup >= steps:
        yield Finding(
            ("trainer.critic_warmup", length),
            f"the actor would never be trained: the critic warms up for {critic_warmup} of {steps} steps",
            "set trainer.critic_warmup to less than the steps of the run",
        )
        return
    for key, warmup, updates in learning_rate_warm_ups(config, steps):
        if warmup >= updates:
            yield Finding(
                (key, length),
                f"the learning rate rises for {warmup} of {updates} optimizer steps and never gets to lr",
                f"set {key} to less than {updates}, e.g. {updates // 10}",
            )


SIZE_RULES: tuple[Callable[[Config, Room], Iterator[Finding]], ...] = (
    mini_batches,
    batch,
    lengths,
    overlong_zone,
    warm_ups,
)
