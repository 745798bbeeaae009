"""Keys of `reward`, `custom_reward_function` and `reward_model`: how responses are scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from distflow.builtin_names import REWARDS
from distflow.config.compose.typed_values import (
    Differing,
    Mismatch,
    convert,
    parse_differing,
    plain_differing,
    show,
)
from distflow.config.keys.declare import collect, group, key, plain_settings
from distflow.config.keys.fsdp import RefFsdpConfig

OnError: TypeAlias = Literal["mask", "drop"] | float
"""The treatment of a sample with a reward error: mask it in the loss, drop its group, or assign
this score."""
Option: TypeAlias = bool | int | float | str
_FORM = (
    "write e.g. {default: [math], code: [{name: format, weight: 0.1}, {name: repetition, options: "
    "{n: 4}}]}"
)
_PART = {"name", "weight", "options"}


class RewardPart(NamedTuple):
    """One reward function of a domain; a sample's score is the weighted sum of its parts.

    options: further keyword arguments of the function: int, float, str, bool.
    """

    name: str
    weight: float = 1.0
    options: Mapping[str, Option] = {}

    def plain(self) -> object:
        """The shortest form that a config accepts."""
        weight = {} if self.weight == 1.0 else {"weight": self.weight}
        options = {"options": dict(self.options)} if self.options else {}
        if weight or options:
            return {"name": self.name, **weight, **options}
        return self.name


def parse_functions(value: object) -> dict[str, tuple[RewardPart, ...]]:
    """Reward functions by domain from plain data. Raises Mismatch."""
    if not isinstance(value, Mapping):
        raise Mismatch("is not a mapping from domains to reward functions", _FORM)

    for name in value:
        if not isinstance(name, str):
            what = f"has the domain {name!r}, which is not a str"
            raise Mismatch(what, "put the name of the domain in quotes")

    return {domain: parse_parts(f"the domain '{domain}'", parts) for domain, parts in value.items()}


def plain_parts(parts: Sequence[RewardPart]) -> list[object]:
    """The inverse of `parse_parts`."""
    return [part.plain() for part in parts]


def parse_parts(whose: str, value: object) -> tuple[RewardPart, ...]:
    """Reward functions of one domain, from a name, {name, weight} or a list of these. whose: the
    domain's name in messages. Raises Mismatch."""
    entries = value if isinstance(value, list | tuple) else [value]
    if not entries:
        raise Mismatch(f"has no reward function for {whose}", _FORM)

    parts = tuple(_parse_part(whose, entry) for entry in entries)
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise Mismatch(
                f"has '{name}' twice for {whose}", "name it once, with the sum of the weights"
            )

    return parts


def _parse_part(whose: str, value: object) -> RewardPart:
    if isinstance(value, str):
        return RewardPart(value)

    if isinstance(value, Mapping) and set(value) <= _PART and isinstance(value.get("name"), str):
        try:
            weight = convert(value.get("weight", 1.0), float)
        except Mismatch as error:
            raise Mismatch(
                f"has a weight of '{value['name']}' that {error.what}", error.advice
            ) from None

        assert isinstance(weight, float)
        return RewardPart(
            value["name"], weight, _parse_options(value["name"], value.get("options", {}))
        )

    raise Mismatch(
        f"has {value!r} for {whose}, neither a name nor {{name, weight, options}}", _FORM
    )


def _parse_options(name: str, value: object) -> dict[str, Option]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Mismatch(
            f"has options of '{name}' that are no mapping of names", "write e.g. options: {n: 4}"
        )

    wrong = [
        key for key, option in value.items() if not isinstance(option, bool | int | float | str)
    ]
    if wrong:
        raise Mismatch(
            f"has an option '{wrong[0]}' of '{name}' that is not of type bool, int, float or str",
            "",
        )

    return dict(value)


def parse_on_error(value: object) -> OnError:
    """`mask`, `drop`, or the score of `{score: x}`. Raises Mismatch."""
    if value in ("mask", "drop"):
        return cast(OnError, value)
    if isinstance(value, Mapping) and set(value) == {"score"}:
        return cast(float, convert(value["score"], float))

    raise Mismatch(
        f"is {show(value)}, not mask, drop or {{score: x}}", "write e.g. drop, or {score: 0}"
    )


_PATIENCE = ("timeout_s", "num_workers", "retries", "backoff_s")
JUDGED_BY_DOMAIN = (*_PATIENCE, "on_error")
"""Keys of `reward` that a domain may override."""


def parse_domains(value: object) -> Differing:
    """Settings by domain from plain data. Raises Mismatch."""
    form = "write e.g. {code: {timeout_s: 30, num_workers: 4}}"
    keys = collect(RewardConfig())
    return parse_differing(value, {name: keys[name] for name in JUDGED_BY_DOMAIN}, form)


@dataclass(frozen=True)
class OverlongConfig:
    """Linear penalty on responses that end close to the length limit (DAPO)."""

    buffer_tokens: int = key(
        0, "tokens before data.max_response_length that are penalised; 0 is off", minimum=0
    )
    factor: float = key(
        1.0, "penalty at the limit", minimum=0, taken_if=lambda own: own.buffer_tokens > 0
    )


@dataclass(frozen=True)
class LimitPenaltyConfig:
    """What an episode of a workflow loses from its score if a limit ended it, by its finish
    reason."""

    max_turns: float = key(0.0, "penalty at the limit of turns", minimum=0)
    length: float = key(0.0, "penalty at data.max_response_length", minimum=0)
    context: float = key(0.0, "penalty if the context has no room", minimum=0)


@dataclass(frozen=True)
class RewardConfig:
    """Reward functions by domain; `default` applies to all other domains."""

    functions: dict[str, tuple[RewardPart, ...]] = key(
        {"default": (RewardPart("math"),)},
        f"domain → list of names or {{name, weight, options}}; names: {', '.join(REWARDS)}",
        parse=parse_functions,
        plain=lambda functions: {domain: plain_parts(parts) for domain, parts in functions.items()},
        taken_by="reward_fn",
    )
    timeout_s: float = key(
        10.0,
        "timeout of one call of a reward function in seconds",
        above=0,
        taken_by=("reward_fn", "run_workflow", "called_in_threads"),
    )
    max_error_rate: float = key(
        0.5,
        "stop the run if a step has a higher share of reward errors; 1 never stops",
        minimum=0,
        maximum=1,
        taken_by=("scores", "reward_fn"),
    )
    num_workers: int = key(
        2, "worker processes of each domain; a reward model has 1", minimum=1, taken_by="reward_fn"
    )
    retries: int = key(0, "retries of a failed call", minimum=0, taken_by="reward_fn")
    backoff_s: float = key(
        1.0,
        "seconds before the first retry, doubled each time",
        above=0,
        taken_by="reward_fn",
        taken_if=lambda own: (
            own.retries > 0 or any("retries" in each for each in own.domains.values())
        ),
    )
    on_error: OnError = key(
        "mask",
        (
            "after a reward error: mask the sample from baselines and loss, drop its group, or "
            "{score: x} to score it"
        ),
        parse=parse_on_error,
        plain=lambda value: value if isinstance(value, str) else {"score": value},
        taken_by=("compute_reward", "take_scores", "add_model_scores"),
    )
    domains: Differing = key(
        {},
        (
            f"domain → {', '.join(JUDGED_BY_DOMAIN)} that differ in it; such a domain has its own "
            "worker processes"
        ),
        parse=parse_domains,
        plain=lambda domains: plain_differing(domains, collect(RewardConfig())),
        taken_by=("reward_fn", "compute_reward", "take_scores", "add_model_scores"),
    )
    overlong: OverlongConfig = group(OverlongConfig, taken_by="reward_fn")
    limit_penalty: LimitPenaltyConfig = group(LimitPenaltyConfig, taken_by="run_workflow")


@dataclass(frozen=True)
class SrpoConfig:
    """Rewards of failures in the pipeline embodied_srpo, by their distance to successes."""

    embedder: str = key(
        "pixels",
        "frames (T, H, W, 3) of uint8 to a vector: pixels, or file.py:function",
        taken_by="embed",
    )
    eps: float = key(
        0.5,
        "radius of DBSCAN over the successes, in standard deviations of each dimension",
        above=0,
        taken_by="srpo_reward",
    )
    min_samples: int = key(
        2,
        "neighbours of a core point of DBSCAN, itself included",
        minimum=1,
        taken_by="srpo_reward",
    )
    max: float = key(0.6, "largest reward of a failure", minimum=0, taken_by="srpo_reward")
    steepness: float = key(10.0, "of the sigmoid of the distance", above=0, taken_by="srpo_reward")
    reward_coef: float = key(1.0, "factor of all rewards", above=0, taken_by="srpo_reward")


@dataclass(frozen=True)
class CustomRewardConfig:
    """The function of the reward named `custom`."""

    path: str | None = key(None, "Python file or module of the function")
    name: str = key(
        "compute_score", "name of the function", taken_if=lambda own: own.path is not None
    )


@dataclass(frozen=True)
class RewardModelPathConfig:
    """The source of the reward model's weights."""

    path: str | None = key(
        None, "folder or hub id of a reward model, or a run of the pipeline rm; null is none"
    )


@dataclass(frozen=True)
class ScoringModelConfig:
    """A model of `reward_model.models`."""

    path: str = key(
        "", "folder or hub id of a reward model (for a judge: language model), or a run"
    )
    weight: float = key(1.0, "weight of its score, which is added to that of the reward functions")
    domains: tuple[str, ...] = key((), "the only domains whose responses it scores; [] is all")
    judge: bool = key(False, "the model generates its score, from 0 to 1, as text")
    template: str = key(
        "", "prompt template of a judge: a text, or a file with it; empty: built in"
    )
    answer_tokens: int = key(1024, "maximum length of a judge's reply in tokens", minimum=1)
    param_offload: bool = key(False, "keep weights in host memory while they are not in use")


_OF_JUDGES = {"template", "answer_tokens"}
REWARD_MODEL = "reward_model"
"""The name of the model of `reward_model.model.path`."""
_MODELS_FORM = "write e.g. {helpful: {path: DIR, weight: 0.5}, critique: {path: DIR, judge: true}}"
_TAKEN = (
    REWARD_MODEL,
    "actor",
    "critic",
    "ref",
    "rollout",
    "reward_fn",
    "policy",
    "tokenizer",
    "stop_token_ids",
    # other names that a worker's factories look up
    "collective",
    "sharding",
    "shards",
)


def parse_models(value: object) -> dict[str, ScoringModelConfig]:
    """Scoring models by name from plain data. Raises Mismatch."""
    if isinstance(value, Mapping):
        for name, settings in value.items():
            if isinstance(settings, Mapping) and "sharded" in settings:
                raise Mismatch(
                    f"has 'sharded' of '{name}', but every device of a judge has it whole",
                    "remove it; serve a judge that is larger than a device, and set "
                    "reward.functions",
                )

    found = parse_differing(value, collect(ScoringModelConfig()), _MODELS_FORM, of="model")
    for name, settings in found.items():
        if (
            name in _TAKEN
            or name.startswith("teacher")
            or not (name.isidentifier() and name[0].isalpha())
        ):
            raise Mismatch(f"has a model '{name}'", "choose a word that names no other engine")
        if not settings.get("path"):
            raise Mismatch(f"has no 'path' of the model '{name}'", _MODELS_FORM)

        if not settings.get("judge"):
            for of_judges in settings.keys() & _OF_JUDGES:
                raise Mismatch(
                    f"has '{of_judges}' of '{name}', which is a reward model",
                    "add judge: true, or remove it",
                )

    return {name: ScoringModelConfig(**settings) for name, settings in found.items()}


@dataclass(frozen=True)
class RewardModelConfig:
    """Reward models and judges that run as engines and score whole steps."""

    model: RewardModelPathConfig = group(RewardModelPathConfig, taken_by="reward_model")
    weight: float = key(
        1.0,
        "weight of its score, which is added to that of the reward functions",
        taken_by="reward_model",
    )
    fsdp_config: RefFsdpConfig = group(RefFsdpConfig, taken_by="reward_model")
    models: dict[str, ScoringModelConfig] = key(
        {},
        (
            f"name → {', '.join(collect(ScoringModelConfig()))}: additional scoring models, each "
            "an engine of that name"
        ),
        parse=parse_models,
        plain=plain_settings,
        taken_by="scoring_model",
    )


def scoring_models(
    config: RewardModelConfig, domain: str | None = None
) -> dict[str, ScoringModelConfig]:
    """The scoring models by engine name: all, or those of a domain."""
    models = {}
    path = config.model.path
    if path is not None:
        offloads = config.fsdp_config.param_offload
        models[REWARD_MODEL] = ScoringModelConfig(path, config.weight, param_offload=offloads)

    models |= config.models

    if domain is None:
        return models
    return {name: model for name, model in models.items() if domain in (model.domains or (domain,))}


def patience_of(reward: RewardConfig, domain: str) -> dict[str, Any]:
    """Timeout, workers and retries of the domain's reward functions by key, and the number of
    timeouts after which a function that never returned is given up."""
    own = reward.domains.get(domain, {})
    patience = {name: own.get(name, getattr(reward, name)) for name in _PATIENCE}
    calls = max(4, 2 * patience["num_workers"]) * (1 + patience["retries"])
    return {**patience, "give_up_after": calls if reward.max_error_rate < 1 else 0}


def on_error_of(reward: RewardConfig, domain: str) -> OnError:
    """The treatment of the domain's samples with a reward error."""
    return cast(OnError, reward.domains.get(domain, {}).get("on_error", reward.on_error))
