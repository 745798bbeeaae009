"""Builds reward models, judges and teachers, which score whole steps as engines of the run."""

from functools import partial

import torch

from distflow.config import Config
from distflow.config.keys.distill import teachers_of
from distflow.config.keys.reward import scoring_models
from distflow.errors import UserError, blaming
from distflow.launch.configured_models import (
    compute_dtype,
    frozen_source,
    load_policy_tokenizer,
    policy_source,
)
from distflow.launch.rollout_engines import cast_weights, engine_options, make_engine
from distflow.launch.train_engines import reference_options, scorer_options, sharding_of
from distflow.models.loading import (
    ModelSource,
    context_length,
    load_model,
    load_tokenizer,
    stop_token_ids,
)
from distflow.models.reward_model import check_config, longest_text
from distflow.rewards.judge_prompt import judge_template
from distflow.rollout.engine import SamplingParams
from distflow.runtime.checkpoint.find_checkpoint import is_of_a_run
from distflow.runtime.judge_engine import Judge
from distflow.runtime.spec import Get
from distflow.training.torch_engine import RewardModelScorer, TeacherScorer


def check_judge(config: Config, name: str) -> None:
    """Raises UserError for a template that a judge cannot use."""
    model = scoring_models(config.reward_model)[name]
    if model.judge:
        with blaming(f"reward_model.models.{name}.template"):
            judge_template(model.template)


def check_teacher(config: Config, name: str) -> None:
    """Raises UserError for a teacher whose tokens are not the policy's, or are fewer than
    `distill.top_k`."""
    key, source = frozen_source(config, name)
    tokenizer = config.actor_rollout_ref.model.tokenizer_path or policy_source(config)["path"]
    if is_of_a_run(source["path"]) or is_of_a_run(tokenizer):
        return  # it is checked once the run's policy is exported

    policy = load_policy_tokenizer(config)
    with blaming(key):
        model = ModelSource(**source).config()
        own = load_tokenizer(source["path"], generates=False, model=model).get_vocab()
        theirs = policy.get_vocab()
        if own != theirs:
            differing = sorted(own.items() ^ theirs.items(), key=lambda token: token[1])
            token, number = differing[0]
            raise UserError(
                f"the teacher has another vocabulary than the policy: {len(own):,} tokens, not "
                f"{len(theirs):,}; e.g. {token!r} is {number} in one of them alone. Choose a "
                "teacher of the policy's family"
            )

    if config.distill.signal == "top_k" and config.distill.top_k > len(own):
        raise UserError(
            f"distill.top_k={config.distill.top_k}: the teacher has {len(own):,} tokens; set at "
            "most as many"
        )


def build_teacher(config: Config, name: str, get: Get, device: torch.device) -> TeacherScorer:
    key, source = frozen_source(config, name)
    settings = teachers_of(config.distill)[name]
    sharding = sharding_of(config, get, settings.param_offload)
    with blaming(key):
        model = load_model(**source, sharding=sharding, device=device)

    top_k = config.distill.top_k if config.distill.signal == "top_k" else 0
    return TeacherScorer(
        model.requires_grad_(False),
        num_likeliest=top_k,
        num_tokens=len(get("tokenizer")),
        group=get("collective"),
        **reference_options(config),
    )


def build_scoring_model(
    config: Config, name: str, get: Get, device: torch.device
) -> RewardModelScorer | Judge:
    is_judge = scoring_models(config.reward_model)[name].judge
    if is_judge:
        return _build_judge(config, name, device)
    return _build_reward_model(config, name, get, device)


def _build_reward_model(
    config: Config, name: str, get: Get, device: torch.device
) -> RewardModelScorer:
    """A reward model, whose tokenizer may differ from the policy's."""
    on_host = scoring_models(config.reward_model)[name].param_offload
    key, source = frozen_source(config, name)
    with blaming(key):
        found = ModelSource(**source)
        check_config(found, found.config())
        sharding = sharding_of(config, get, on_host)
        model = load_model(**source, sharding=sharding, device=device, draws_head=False)
        tokenizer = load_tokenizer(source["path"], generates=False, model=model.config)

    longest = longest_text(model.config, tokenizer)
    max_tokens = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    options = scorer_options(config, max_tokens)
    options |= {"temperatures": {}, "agent_temperatures": {}}

    return RewardModelScorer(
        model.requires_grad_(False),
        tokenizer=tokenizer,
        max_length=longest,
        group=get("collective"),
        **options,
    )


def _build_judge(config: Config, name: str, device: torch.device) -> Judge:
    """A judge in a rollout engine of its own, with its own tokenizer."""
    settings = scoring_models(config.reward_model)[name]
    key, source = frozen_source(config, name)
    with blaming(key):
        model_config = ModelSource(**source).config()
        longest = context_length(**source)
        tokenizer = load_tokenizer(source["path"], model=model_config)

        answer_tokens = settings.answer_tokens
        if longest is not None and answer_tokens >= longest:
            raise UserError(
                f"a reply of {answer_tokens:,} tokens (answer_tokens) leaves no room for a "
                f"question: the model reads at most {longest:,} tokens; set a smaller answer_tokens"
            )

        model = load_model(**source, device=device)
        cast_weights(model, compute_dtype(config))
        options = engine_options(config)
        make = partial(make_engine, config, model, tokenizer, False, options)
        make()  # rejects a family that the engine cannot run

    stops = stop_token_ids(model, tokenizer)
    return Judge(
        model,
        tokenizer,
        make,
        judge_template(settings.template),
        SamplingParams(answer_tokens, greedy=True, stop_token_ids=stops),
        longest,
    )
