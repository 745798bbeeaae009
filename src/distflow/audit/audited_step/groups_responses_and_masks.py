"""Checks: a step holds its groups, each complete, and no group that the filter should have dropped;
a sample is the engine's response to the row's prompt; the loss mask is on exactly the policy's
tokens of samples that have a score."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from distflow.audit.audited_step.normalization_formulas import share_right
from distflow.audit.check import (
    NOT_APPLICABLE,
    Sample,
    Wrong,
    check,
    check_close,
    check_tokens,
    doubles,
    is_builtin,
)
from distflow.audit.recorded_step import RecordedStep, by_group_of, conversations_of
from distflow.builtin_names import CUSTOM_REWARD, ESTIMATORS, REWARDS, WHOLE_SCORE
from distflow.config import Config
from distflow.config.derived_settings import (
    algorithm_of,
    filters_groups,
    is_rl,
    response_limit,
    unfiltered_domains,
)
from distflow.config.keys.algorithm import AlgorithmConfig, spread
from distflow.config.keys.reward import RewardPart, scoring_models
from distflow.data.encoded_prompts import PromptRow
from distflow.data.sample import Segment
from distflow.graph import NodeRole
from distflow.graph.fields import TOKEN_AXES
from distflow.models.image_inputs import images_of
from distflow.rewards.foreign_signatures import DOES_NOT_APPLY
from distflow.rewards.reward_results import RewardResult, Score
from distflow.scheduling.group_states import PromptGroup

MOST = 64
MOST_LOOKED = 2
ON_DRAWN = ": it is 1 on exactly the tokens that the policy generated"
ROUNDING = 1e-6
"""A mismatch this close to a bound may be on either side."""


@check(
    "groups",
    "the step contains its groups, each with all of its samples exactly once; if groups are "
    "filtered, no group "
    "has equal values on all samples, or a mean outside `mean_range`; each domain has its share of "
    "all groups so far; "
    "complete groups are taken in order",
    needs=(
        "for shares: one rank, and no curriculum, which has a separate check; for the order: one "
        "process"
    ),
    limit="equal",
)
def audit_groups(recorded: RecordedStep) -> str | None:
    data = recorded.run.spec.data
    ours = recorded.is_ours("responses")
    names = ("group_index", "domain", "uid")
    own = [tuple(sample[name] for name in names) for sample in recorded.samples]
    samples = [
        (int(group), domain, uid)
        for rank in recorded.run.ranks.gather(own)
        for group, domain, uid in rank
    ]
    sizes = Counter(group for group, _, _ in samples)
    if sorted(sizes) != sorted(recorded.group_ids):
        several = len(recorded.group_ids)
        differing = sorted(set(recorded.group_ids) ^ set(sizes))[:4]
        raise Wrong(
            f"the step has {several} groups, but its samples are of {len(sizes)} ({differing} "
            "differ)"
        )
    size_of = {domain.name: domain.group_size for domain in data.domains}
    for number, domain, _ in samples:
        size = size_of.get(str(domain)) or data.group_size
        if ours and sizes[number] != size:
            raise Wrong(f"group {number} has {sizes[number]} samples, and should have {size}")
    for uid, times in Counter(uid for _, _, uid in samples).most_common(1):
        if times > 1:
            raise Wrong(f"sample {uid} is in the step {times} times")
    _check_filter(recorded, by_group_of(recorded.samples))
    _check_shares(recorded)
    _first_come(recorded)
    return None


@check(
    "responses",
    "prompt, tokens, versions and text of a sample equal those of the row and the engine; a "
    "response is finished "
    "only if it ends with a stop; an episode's text is that of its last turn (with branches, one "
    "branch's last turn); "
    "the model gets the pixels of each image's file",
    needs="the built-in generation, or a workflow; for the engine's response, and with domains: "
    "samples that this "
    "process generated",
    limit="equal",
)
def audit_responses(recorded: RecordedStep) -> str | None:
    most = MOST_LOOKED if recorded.partial else MOST
    if not recorded.partial:
        _check_pixels(recorded)
    if not recorded.is_ours("responses"):
        return _check_episodes(recorded, most)
    known = [(sample, recorded.prompt_group(sample)) for sample in recorded.some_samples(most)]
    samples = [(sample, prompt_group) for sample, prompt_group in known if prompt_group is not None]
    for sample, prompt_group in samples:
        row = recorded.run.row(_place_of(recorded, prompt_group))
        _same(
            sample,
            "prompt_ids",
            sample["prompt_ids"].tolist(),
            list(row.prompt_ids),
            "the row of its group",
        )
        _same(sample, "domain", sample["domain"], row.domain, "the row of its group")
        images = [path for own in sample.get("images", ()) for path in own]
        _same(sample, "images", images, list(row.images), "the row of its group")
        # both texts of a pair are tokenised in full
        if row.rejected_ids is None and not recorded.partial:
            _tokenised(recorded, sample, row)
        found = recorded.requests(sample)
        if found:
            _generated(sample, found[0][1], prompt_group.version)
            _same(sample, "images", images, list(found[0][0].images), "the engine's request")
        elif recorded.record_of(sample) is not None and row.response_ids is None:
            raise Wrong(f"no request to the engine was recorded for sample {sample['uid']}")
        if row.response_ids is None:
            _ended(recorded, sample)
        elif row.rejected_ids is not None:
            ids = row.response_ids if sample["uid"].endswith("-0") else row.rejected_ids
            _same(sample, "response_ids", sample["response_ids"].tolist(), list(ids), "the data")
        else:
            _same(
                sample,
                "response_ids",
                sample["response_ids"].tolist(),
                list(row.response_ids),
                "the data",
            )
            full = len(row.response_ids) >= recorded.config.data.max_response_length
            if not full and row.response_ids[-1] not in recorded.run.resources.stop_token_ids:
                raise Wrong(
                    f"the response of sample {sample['uid']} does not end with a stop token"
                )
            spans = row.turns or ((0, len(row.response_ids)),)
            mask = (sample["response_mask"] > 0).tolist()
            turns = [any(start <= i < end for start, end in spans) for i in range(len(mask))]
            _same(sample, "response_mask", mask, turns, "the turns of its row")
        # A conversation from the data keeps its special tokens, which mark where each turn begins.
        tokenizer = recorded.run.resources.tokenizer
        ids = sample["response_ids"].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=row.turns is None)
        _same(sample, "responses", sample["responses"], text, "its decoded tokens")
    return None if samples else "no sample's row is known: other processes generated them"


def _check_pixels(recorded: RecordedStep) -> None:
    """What the model gets of some samples' images is what its family's processor makes of each
    file, read again."""
    processor = images_of(recorded.run.resources.tokenizer)
    drawn = recorded.some_samples(MOST_LOOKED)
    paths = [path for sample in drawn for own in sample.get("images", ()) for path in own]
    if processor is None or not paths:
        return
    from PIL import Image

    given = processor.inputs(paths)["pixel_values"]
    start = 0
    for path in paths:
        with Image.open(path) as image:
            made = processor._processor.image_processor(
                images=[image.convert("RGB")], return_tensors="pt"
            )
        wanted = made["pixel_values"]
        number = len(made["pixel_values"])
        found = given[(slice(start, start + number), *map(slice, wanted.shape[1:]))]
        if not torch.equal(found, wanted):
            raise Wrong(
                f"the model gets other pixels than those of {path}: the image was mixed up with "
                "another, its channels "
                "were swapped, or it was changed before the model's processor read it"
            )
        start += number


def _check_episodes(recorded: RecordedStep, most: int) -> str | None:
    """Check that an episode of a workflow belongs to its row, and its response is the text of the
    last turn that the engine drew; with branches, of the last turn of one of them."""
    if recorded.config.actor_rollout_ref.rollout.workflow is None:
        return "a user's node generates the responses"
    asked = [
        (sample, turns)
        for sample in recorded.some_samples(most)
        if (turns := recorded.turns(sample))
    ]
    for sample, turns in asked:
        row = recorded.run.row(
            _place_of(recorded, recorded.records[int(sample["group_index"])].prompt_group)
        )
        ids = sample["response_ids"].tolist()
        tokenizer = recorded.run.resources.tokenizer
        kept = {name: number or None for name, number in recorded.num_used(sample).items()}
        last = {turn.conversation.name: ids[turn.start : turn.end] for turn in turns}
        last = {name: own[: kept.get(name)] for name, own in last.items()}
        texts = [tokenizer.decode(each, skip_special_tokens=True) for each in last.values()]
        if sample["responses"] not in texts:
            _same(
                sample, "responses", sample["responses"], texts[-1], "the tokens of its last turn"
            )
        _same(sample, "prompts", sample["prompts"], row.prompt_text, "the row of its group")
    return None if asked else "no sample's requests are known: other processes generated them"


@check(
    "turns",
    "if a user's node calls the engine, the policy's tokens are exactly those that the engine "
    "generated for the "
    "sample after the preceding tokens, with their log-probs and versions",
    needs="samples that this process generated",
    limit="equal",
)
def audit_turns(recorded: RecordedStep) -> str | None:
    if recorded.is_ours("responses") or not recorded.is_written("rollout_log_probs"):
        return NOT_APPLICABLE
    asked = [sample for sample in recorded.samples if recorded.requests(sample)]
    for sample in asked:
        _check_turns(recorded, sample)
    return None if asked else "no request of this process to the engine is for its samples"


@check(
    "masks",
    "loss_mask covers exactly the tokens that the policy generated, including the end token; "
    "samples that are "
    "truncated, too long or too hard, and tokens rejected for their mismatch, are excluded as "
    "configured",
    needs="no custom node that writes loss_mask",
    limit="equal",
)
def audit_masks(recorded: RecordedStep) -> str | None:
    if recorded.is_written("loss_mask") and not recorded.is_ours("loss_mask"):
        return "a user's node writes loss_mask"
    groups = by_group_of(recorded.samples)
    is_ours = recorded.is_ours("responses")
    rejects = bool(recorded.config.algorithm.rollout_correction.rollout_rs)
    left_out, drawn, trained = dict[str, str](), list[list[float]](), list[list[float]]()
    for sample in recorded.samples:
        of_policy = [float(version >= 0) for version in sample["versions"].tolist()]
        found = recorded.requests(sample) if is_ours else ()
        if found and sum(of_policy) != len(found[0][1].token_ids):
            raise Wrong(
                f"sample {sample['uid']}: {sum(of_policy):.0f} tokens are marked as the policy's, "
                "but it generated "
                f"{len(found[0][1].token_ids)}"
            )
        why = left_out[sample["uid"]] = _left_out(recorded, sample, groups[sample["group_index"]])
        expected = of_policy if sample["valid"] and not why else [0.0] * len(of_policy)
        if rejects:
            rejected, near = _rejected(recorded, sample)
            expected = torch.where(
                near, sample["loss_mask"].double(), torch.tensor(expected) * ~rejected
            ).tolist()
            expected = [each * inside for each, inside in zip(expected, of_policy, strict=True)]
        drawn.append(of_policy)
        trained.append(expected)

    def reason(sample: Sample) -> str:
        more = f", and is not left out for it: {why}" if (why := left_out[sample["uid"]]) else ""
        return (
            f"{ON_DRAWN}, if the sample has a score, and this one has "
            f"{'one' if sample['valid'] else 'none'}{more}"
        )

    check_close(recorded.samples, "response_mask", drawn, 0.0, lambda sample: ON_DRAWN)
    check_close(recorded.samples, "loss_mask", trained, 0.0, reason)
    return None


def remember_domains(recorded: RecordedStep) -> None:
    """Add the step's groups to the counts of each domain's groups since the run's start."""
    kept = recorded.run.state.setdefault("domains", {})
    if (
        recorded.run.ranks.size == 1
        and recorded.run.spec.data.domains
        and (kept or recorded.step == 0)
    ):
        pairs = zip(recorded.batch["group_index"].tolist(), recorded.batch["domain"], strict=True)
        for domain, count in Counter(dict(pairs).values()).items():
            kept[domain] = kept.get(domain, 0) + count


def _check_shares(recorded: RecordedStep) -> None:
    data = recorded.run.spec.data
    counts = recorded.run.state.get("domains")
    if not counts or data.curriculum is not None:
        return
    weights = sum(domain.weight for domain in data.domains)
    total = sum(counts.values())
    missing = data.consumer_batch * (recorded.step + 1) - total  # missing because of short steps
    for domain in data.domains:
        due = domain.weight / weights * total
        if abs(counts.get(domain.name, 0) - due) >= 1 + max(missing, 0):
            raise Wrong(
                f"domain '{domain.name}' has had {counts.get(domain.name, 0)} of {total} groups, "
                "but its share is "
                f"{due:.1f}: groups of other domains took its place"
            )


def _left_out(recorded: RecordedStep, sample: Sample, group: list[Sample]) -> str:
    """Why the config masks the whole sample in the loss; empty if it does not."""
    algorithm = algorithm_of(recorded.config, sample["domain"])
    if (why := _masked(algorithm, sample, group)) or algorithm.mask_type != "all":
        return why
    estimator = ESTIMATORS.get(algorithm.adv_estimator)
    scored = [other for other in group if other["valid"]]
    num_left = sum(not _masked(algorithm, other, group) for other in scored)
    is_alone = estimator is not None and estimator.needs_group and num_left < min(2, len(scored))
    return f"{num_left} of its group are left (mask_type)" if is_alone else ""


def in_baselines(
    recorded: RecordedStep, algorithm: AlgorithmConfig, samples: Sequence[Sample]
) -> list[Sample]:
    """Samples with these settings; those that `mask_type` excludes from baselines appear without a
    score."""
    if algorithm.mask_type != "all":
        return list(samples)
    groups = by_group_of(samples)
    left_out = [
        _left_out(recorded, sample, groups[int(sample["group_index"])]) for sample in samples
    ]
    return [
        {**each, "valid": bool(each["valid"]) and not why}
        for each, why in zip(samples, left_out, strict=True)
    ]


def _masked(algorithm: AlgorithmConfig, sample: Sample, group: list[Sample]) -> str:
    if algorithm.mask_truncated and bool(sample["truncated"]):
        return "it is truncated (mask_truncated)"
    if algorithm.mask_max_turns and sample["finish_reason"] == "max_turns":
        return "it reached its limit of turns (mask_max_turns)"
    length = int((sample["response_mask"] > 0).sum())
    longest = algorithm.mask_long_errors
    if longest is not None and length >= longest and float(sample["acc"]) < 1.0 - 1e-6:
        return f"it is incorrect and {length} tokens long (mask_long_errors)"
    if (band := algorithm.difficulty_mask) is not None:
        share = share_right(group)
        if not band[0] < share < band[1]:
            return f"{share:.0%} of its group are right (difficulty_mask)"
    return ""


def _rejected(recorded: RecordedStep, sample: Sample) -> tuple[Tensor, Tensor]:
    """Which tokens are rejected because of the mismatch of trainer and engine (verl's
    `rollout_rs`), and for which this depends on rounding."""
    settings = recorded.config.algorithm.rollout_correction
    none = torch.zeros(len(sample["response_ids"])).bool()
    own = "prox_log_probs" if recorded.is_written("prox_log_probs") else "old_log_probs"
    if own not in sample:
        return none, ~none
    inside = (sample["response_mask"] > 0) & bool(sample["valid"])
    gap = ((doubles(sample[own]) - doubles(sample["rollout_log_probs"])).clamp(-20, 20)) * inside
    rejected = none
    near = none
    bounds = spread(settings.rollout_rs_threshold, len(settings.rollout_rs))
    for name, (low, high) in zip(settings.rollout_rs, bounds, strict=True):
        level, _, kind = name.rpartition("_")
        values = {"k1": -gap, "k2": gap**2 / 2, "k3": gap.exp() - 1 - gap}[kind]
        own_tokens = values[inside] if bool(inside.any()) else torch.zeros(1, dtype=torch.float64)
        by = {
            "seq_sum": own_tokens.sum(),
            "seq_mean": own_tokens.mean(),
            "seq_max": own_tokens.max(),
        }
        values = values if level == "token" else torch.full_like(values, float(by[level]))
        least = -math.inf
        most = high
        if kind == "k1":
            least = -math.log(high) if low is None else math.log(low)
            most = math.log(high)
        rejected = rejected | (values > most) | (values < least)
        near = near | ((values - most).abs() < ROUNDING) | ((values - least).abs() < ROUNDING)
    return rejected, near


def _check_filter(recorded: RecordedStep, groups: dict[int, list[Sample]]) -> None:
    settings = recorded.config.algorithm.filter_groups
    nodes = recorded.run.pipeline.nodes
    filters = any(
        node.node_role == NodeRole.DYNAMIC_SAMPLING and is_builtin(node.fn) for node in nodes
    )
    if not filters_groups(recorded.config) or not filters:
        return
    unfiltered = unfiltered_domains(recorded.config)
    for number, group in groups.items():
        if group[0]["domain"] in unfiltered:
            continue
        before = _before_models(recorded, group)
        values = filtered_values(settings.metric, before or [])
        if before is None or any(map(math.isnan, values)):
            continue  # a judge's error replaced a score that is not recorded
        if len(set(values)) < 2:
            what = f"{settings.metric} {set(values)}: its advantage is 0"
            raise Wrong(f"group {number} was kept, but all its samples have the {what}")
        mean, (low, high) = (
            math.fsum(values) / len(values),
            settings.mean_range or (-math.inf, math.inf),
        )
        near = rounding_of_mean(recorded)
        if not low - near < mean < high + near:
            outside = f"outside mean_range [{low:g}, {high:g}]"
            raise Wrong(
                f"group {number} was kept, but its mean {settings.metric} is {mean:g}, {outside}"
            )


def rounding_of_mean(recorded: RecordedStep) -> float:
    """How close to a bound of `mean_range` a mean may be on either side: accuracies are added up
    exactly."""
    config = recorded.config
    is_exact = config.algorithm.filter_groups.metric == "acc" and not scoring_models(
        config.reward_model
    )
    return 0.0 if is_exact else ROUNDING


def audit_kept(recorded: RecordedStep) -> str | None:
    names = [
        name for name in recorded.batch.names if recorded.batch.field(name).axis not in TOKEN_AXES
    ]
    part = (
        replace(recorded, batch=recorded.batch.only(names))
        if filters_groups(recorded.config)
        else recorded
    )
    _check_filter(part, by_group_of(part.samples) if part is not recorded else {})
    return None


def _before_models(recorded: RecordedStep, group: list[Sample]) -> list[Sample] | None:
    """The group as it was filtered, before models of the run scored it; None if unknown. A score is
    NaN if a model's error replaced it."""
    models = scoring_models(recorded.config.reward_model)
    before = []
    for sample in group if models else ():
        parts = sample["reward_parts"]
        was_scored = sample["reward_errors"] is None
        if not was_scored:
            if not recorded.is_ours("reward_parts"):  # a workflow may omit parts
                return None
            known = {*parts, *does_not_apply(sample)}
            was_scored = known.issuperset(functions_of(recorded, sample))
        own = scoring_models(recorded.config.reward_model, sample["domain"]).items()
        added = sum(parts.get(name, math.nan) * model.weight for name, model in own)
        as_it_was = {
            "valid": True,
            "reward_errors": None,
            "scores": float(sample["scores"]) - added,
        }
        before.append({**sample, **as_it_was} if was_scored else sample)
    return before if models else group


def does_not_apply(sample: Sample) -> list[str]:
    """Reward functions that returned None for the sample, as TRL's may: they do not apply to it."""
    found: list[str] = []
    for key in sample["reward_extra"]:
        for name, _, what in [key.rpartition("/")]:
            if what == DOES_NOT_APPLY:
                found.append(name)
    return found


def functions_of(recorded: RecordedStep, sample: Sample) -> dict[str, float]:
    """Names and weights of the reward functions of the sample's domain."""
    return {part.name: part.weight for part in parts_of_domain(recorded.config, sample["domain"])}


def parts_of_domain(config: Config, name: str) -> Sequence[RewardPart]:
    domain = config.data.domains.get(name)
    functions = config.reward.functions
    return (domain and domain.reward) or functions.get(name) or functions.get("default") or ()


def accuracies(
    parts: Sequence[RewardPart], given: Iterable[tuple[str, RewardResult]]
) -> list[float]:
    """Of the one function that decides whether a response is right: of positive weight, if any is;
    that states it in `acc`, before a built-in that compares with the answer, before the user's;
    then of the largest weight. given: by each function."""
    scores = [
        (name, own)
        for name, own in given
        if isinstance(own, Score) and DOES_NOT_APPLY not in own.extra
    ]
    states = {name for name, own in scores if own.extra.get("acc") is not None}
    known = [part for part in parts if part.name in {name for name, _ in scores}]
    known = [part for part in known if part.weight > 0] or known

    def place(part: RewardPart) -> tuple[bool, bool, bool, float]:
        builtin = None if part.name == CUSTOM_REWARD else REWARDS.get(part.name)
        compares = builtin is not None and builtin.needs_answer
        return part.name not in states, not compares, builtin is not None, -part.weight

    deciding = min(known, key=place).name if known else ""
    stated = [(own.value, own.extra.get("acc")) for name, own in scores if name == deciding]
    return [value if acc is None else cast(float, acc) for value, acc in stated]


def filtered_values(metric: str, group: Iterable[Sample]) -> list[float]:
    """The values that a filter by that metric compares, for the samples that count."""
    scored = [sample for sample in group if sample["valid"]]
    if metric in WHOLE_SCORE:
        return [float(sample["scores"]) for sample in scored]
    scored = [sample for sample in scored if not sample.get("reward_errors")]
    if metric == "acc":
        return [float(sample["acc"]) for sample in scored]
    return [
        float(sample["reward_parts"][metric])
        for sample in scored
        if metric in sample["reward_parts"]
    ]


def _check_turns(recorded: RecordedStep, sample: Sample) -> None:
    of_policy = sample["versions"] >= 0
    drawn = torch.zeros(len(sample["versions"])).bool()
    uid = sample["uid"]
    kept = recorded.num_used(sample)
    seen = dict(
        zip(
            (talk.first for talk in conversations_of(sample)),
            sample.get("images", ()),
            strict=False,
        )
    )
    for turn in recorded.turns(sample):
        tokens = slice(turn.start, turn.end)
        made = turn.generation
        number = turn.end - turn.start
        drawn[tokens] = True
        images = seen.get(turn.conversation.first, [])
        _same(sample, "images", images, list(turn.request.images), "the engine's request")
        used = slice(turn.start, turn.start + kept.get(turn.conversation.name, number))
        if bool(of_policy[used.stop : turn.end].any()):
            raise Wrong(
                f"sample {uid} is trained on tokens from {used.stop} on, which its workflow did "
                "not use"
            )
        given = (~of_policy[used]).nonzero()
        if len(given) and number == len(made.token_ids):
            token = turn.start + int(given[0])
            raise Wrong(
                f"token {token} of sample {uid} counts as given, but the engine drew it for the "
                "sample"
            )
        columns = {
            "rollout_log_probs": "rollout_log_probs",
            "versions": "versions",
            "action_values": "values",
        }
        for column, name in columns.items():
            if column not in sample:
                continue
            expected = sample[column].clone()
            expected[tokens] = torch.tensor(getattr(made, name)[:number], dtype=expected.dtype)
            check_tokens(
                sample, column, expected, (sample[column] != expected) & of_policy, " by the engine"
            )
    if len(others := (of_policy & ~drawn).nonzero()):
        raise Wrong(
            f"token {int(others[0])} of sample {uid} counts as the policy's, but no request for "
            "this sample drew it "
            "after the tokens before it: it was given, tokenised again, or drawn for another "
            "sample or prompt"
        )


def _same(sample: Sample, column: str, found: object, expected: object, source: str) -> None:
    if found != expected:
        what = f"{column} of sample {sample['uid']}"
        raise Wrong(f"{what} is {_short(found)}, but should be {_short(expected)} by {source}")


def audit_rows(recorded: RecordedStep) -> str | None:
    """Every group generated here is of the row given by its number; positions in a domain are
    consecutive."""
    if not recorded.is_ours("responses"):
        return "a user's node generates the responses"
    last = recorded.run.positions
    for number, record in sorted(recorded.records.items()):
        group = record.prompt_group
        _place_of(recorded, group)
        known = last.setdefault(group.stream, [-1, -1])
        if recorded.run.spec.data.domains and (number > known[0]) != (group.position > known[1]):
            raise Wrong(
                f"group {number} is at position {group.position} of its domain, but {known[0]} at "
                f"{known[1]}"
            )
        last[group.stream] = max(known, [number, group.position])
    _first_come(recorded)
    if recorded.config.actor_rollout_ref.rollout.workflow is None and is_rl(recorded.config):
        _all_ended(recorded)
    return None


def _all_ended(recorded: RecordedStep) -> None:
    """Check on all samples that a response ends with a stop token or string, or has the maximum
    length."""
    batch = recorded.batch
    stop_ids = recorded.run.resources.stop_token_ids
    lengths = batch.lengths("response")
    last = (
        batch.flat("response_ids")[(lengths.cumsum(0) - 1).clamp(min=0)]
        if int(lengths.sum())
        else lengths - 1
    )
    texts = batch["responses"]
    tokens = batch.flat("response_ids").split(lengths.tolist())
    columns = zip(
        batch["uid"],
        batch["domain"],
        batch["finish_reason"],
        last.tolist(),
        lengths.tolist(),
        strict=True,
    )
    for row, (uid, domain, reason, token, length) in enumerate(columns):
        sampling = recorded.sampling({"domain": domain})
        ended = bool(length) and token in stop_ids
        is_known = reason in ("stop", "length") and (
            bool(sampling.stop) or (reason == "stop") == ended
        )
        if not is_known or (reason == "length" and length != sampling.max_tokens):
            raise Wrong(
                f"sample {uid} is trained on with the finish reason '{reason}' after {length} of "
                f"{sampling.max_tokens} "
                f"tokens, {'with' if ended else 'without'} a stop token at its end: it is a part "
                "of a response, which "
                "a weight update or a lost request cut off, or its end is misread"
            )
        stops = sampling.stop
        text = texts[row]
        has_stop = any(stop in text for stop in stops)
        earlier = any(stop in text[:-1] for stop in stops)
        # the text alone does not tell
        if stops and (earlier or (has_stop or ended) != (reason == "stop")):
            own = {
                "uid": uid,
                "domain": domain,
                "response_ids": tokens[row],
                "finish_reason": reason,
            }
            _ended(recorded, own | {"truncated": batch["truncated"][row]})


def _first_come(recorded: RecordedStep) -> None:
    """Check, in one process, that no complete group is passed over by one that is due later, or has
    a later number."""
    data = recorded.run.spec.data
    if not recorded.passed_over or data.oversampling or len(recorded.run.spec.plan.ranks) > 1:
        return
    for waits, taken in recorded.passed_over:
        if waits.row < data.num_rows:  # not a caller's own
            raise Wrong(
                f"the step has group {taken.group_id} (issued at version {taken.version}), though "
                "group "
                f"{waits.group_id} (version {waits.version}) was complete before it and comes "
                "first: groups wait too "
                "long, and their tokens become older"
            )


def _place_of(recorded: RecordedStep, prompt_group: PromptGroup) -> int:
    """The number of the group's row."""
    _, row = recorded.place_of(prompt_group)
    if prompt_group.row != row:
        group = f"group {prompt_group.group_id}"
        raise Wrong(
            f"{group} was generated from row {prompt_group.row} of the data, but its number gives "
            f"row {row}"
        )
    return row


def _tokenised(recorded: RecordedStep, sample: Sample, row: PromptRow) -> None:
    """The prompt's tokens are those of its text, with or without special tokens; a truncated prompt
    may differ."""
    tokenizer = recorded.run.resources.tokenizer
    text = row.prompt_text
    processor = images_of(tokenizer) if row.images else None
    texts = [
        processor.encode(text, row.images, add_special_tokens=special)
        if processor is not None
        else tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        for special in (True, False)
    ]
    if (
        list(row.prompt_ids) not in texts
        and len(row.prompt_ids) < recorded.config.data.max_prompt_length
    ):
        raise Wrong(
            f"the prompt of sample {sample['uid']} is not the tokens of its text "
            f"{_short(row.prompt_text)}"
        )


def _generated(sample: Sample, generation: Segment, version: int) -> None:
    """Check that the sample is the engine's generation. version: of the engine when the group was
    requested."""
    _same(
        sample,
        "response_ids",
        sample["response_ids"].tolist(),
        list(generation.token_ids),
        "the engine",
    )
    log_probs = torch.tensor(generation.rollout_log_probs, dtype=torch.float32)
    if not torch.equal(sample["rollout_log_probs"], log_probs):
        raise Wrong(
            f"rollout_log_probs of sample {sample['uid']} are not those that the engine returned"
        )
    if "prox_log_probs" in sample and not torch.equal(sample["old_log_probs"], log_probs):
        raise Wrong(
            f"old_log_probs of sample {sample['uid']} must be the engine's where there are "
            "prox_log_probs"
        )
    _same(sample, "versions", sample["versions"].tolist(), list(generation.versions), "the engine")
    if min(generation.versions, default=version) < version:
        raise Wrong(
            f"sample {sample['uid']} was requested when the engine had version {version}, but has "
            "tokens of version "
            f"{min(generation.versions)}: the engine went back to older weights"
        )


def _ended(recorded: RecordedStep, sample: Sample) -> None:
    """Check that a sample ends with a stop token or string, or else has the maximum length."""
    sampling = recorded.sampling(sample)
    ids = sample["response_ids"].tolist()
    stop_ids = recorded.run.resources.stop_token_ids
    text = recorded.run.resources.tokenizer.decode(ids, skip_special_tokens=False)
    stopped = bool(ids) and (ids[-1] in stop_ids or any(stop in text for stop in sampling.stop))
    earlier = [token for token in ids[:-1] if token in stop_ids]
    if earlier:
        raise Wrong(f"sample {sample['uid']} continues after the stop token {earlier[0]}")
    text = (
        recorded.run.resources.tokenizer.decode(ids[:-1], skip_special_tokens=False)
        if sampling.stop
        else ""
    )
    if any(stop in text for stop in sampling.stop):
        raise Wrong(
            f"sample {sample['uid']} continues after a string of rollout.stop: {_short(text)}"
        )
    expected = "stop" if stopped else "length"
    if sample["finish_reason"] != expected or bool(sample["truncated"]) == stopped:
        raise Wrong(
            f"sample {sample['uid']} counts as "
            f"{'truncated' if sample['truncated'] else 'finished'} "
            f"({sample['finish_reason']}), but its {len(ids)} tokens "
            f"{'end' if stopped else 'do not end'} with a stop "
            "token or text"
        )
    if sampling.max_tokens != response_limit(recorded.config, sample["domain"]):
        raise Wrong(
            f"responses may have {sampling.max_tokens} tokens, which is not "
            "data.max_response_length"
        )
    if not stopped and len(ids) != sampling.max_tokens:
        raise Wrong(
            f"sample {sample['uid']} ended after {len(ids)} of {sampling.max_tokens} tokens "
            "without a stop"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:80]} … {text[-60:]}"
