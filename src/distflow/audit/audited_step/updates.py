"""Checks of a step's updates: each pass takes every sample once, with the columns scored before;
packed sequences give the same weight gradients as padded ones; a mini-batch's gradient starts from
zero and is the sum of its micro-batches' gradients, clipped; the learning rate follows the
schedule, and the optimizer moves the weights by its formula."""

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from distflow.audit.audited_step.log_probs import (
    audited_samples,
    dtype_of,
    ids_of,
    is_predicted,
    joined_logits,
    numbers_of,
    sequences_of,
)
from distflow.audit.check import Sample, Wrong, check, is_builtin
from distflow.audit.model_forward import Ids, log_probs_of, logits_of, plainly
from distflow.audit.record_groups_and_updates import (
    NUM_FEW,
    OpenEngine,
    Stripe,
    UpdateRecord,
    striped,
    trained,
    whole_here,
)
from distflow.audit.recorded_step import RecordedStep, own_tokens, samples_of, shuffled
from distflow.config import Config
from distflow.config.derived_settings import (
    algorithm_of,
    config_of_policy,
    is_rl,
    reads_pairs,
    takes_values,
    trained_policies,
)
from distflow.config.keys.actor import ActorConfig
from distflow.config.keys.critic import CriticConfig
from distflow.config.keys.optim import OptimConfig
from distflow.data.batch import repeated
from distflow.models.sharding import is_spread

SCORED = ("advantages", "returns", "old_log_probs", "ref_log_prob", "values", "selected_tokens")
COLUMNS = ("response_ids", "loss_mask", *SCORED)
NUM_SAMPLES = 2
Dtype = torch.dtype | None
EXACT = 1e-3
ROUNDED = 0.5
LIMIT = 1e-3
NOISE = 1e-3
"""A smaller gradient, in units of the largest, is compared as if it had this size."""
TERMS = ("pg", "entropy", "kl")
TERM_LIMIT = 1e-6
MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENT_LIMIT = 1e-5


@check(
    "mini-batches",
    "every sample of the step is in one mini-batch of each pass, and its log-probs, advantages and "
    "masks equal "
    "those before the first update",
    needs="the built-in update nodes",
    limit="equal",
)
def audit_mini_batches(recorded: RecordedStep) -> str | None:
    if not recorded.updates and not _is_ours(recorded):
        return "no update was recorded"
    for role in sorted({update.role for update in recorded.updates}):
        _same_columns(recorded, recorded.updates_of(role))
    return audit_each_sample_once(recorded)


def audit_each_sample_once(recorded: RecordedStep) -> str | None:
    """Every pass took every sample, in the drawn order. Reads only the samples' uids."""
    if not _is_ours(recorded):
        return "a user's node chooses the mini-batches"
    for role in sorted({update.role for update in recorded.updates} | _expected(recorded)):
        _each_once(recorded, role, recorded.updates_of(role))
    for update in recorded.updates:
        if update.micros:
            check_micro_batches(update)
    return None


def check_micro_batches(update: UpdateRecord) -> None:
    """Raises Wrong if the micro-batches of a mini-batch are not exactly its samples."""
    uids = [uid for micro in update.micros for uid in micro.uids]
    if sorted(uids) != sorted(update.uids):
        raise Wrong(
            f"the micro-batches of a mini-batch of the {update.role} hold {len(uids)} samples, the "
            "mini-batch "
            f"{len(update.uids)}: some were left out or used twice"
        )


def _is_ours(recorded: RecordedStep) -> bool:
    nodes = [step.node for step in recorded.run.training_steps if not step.node.contract.writes]
    return all(is_builtin(node.fn) for node in nodes)


def _expected(recorded: RecordedStep) -> set[str]:
    """The roles that the pipeline trains: the critic always, the policy after the critic's
    warm-up."""
    names = {
        getattr(step.node.fn, "keywords", {}).get("name") for step in recorded.run.training_steps
    }
    roles = {"critic"} & names
    warm = recorded.step >= recorded.config.trainer.critic_warmup
    policies = trained_policies(recorded.config) or ("actor",)
    return roles | (
        {*policies}
        if names & {"actor", "sft", "rm"} and (warm or not is_rl(recorded.config))
        else set()
    )


def _each_once(recorded: RecordedStep, role: str, updates: list[UpdateRecord]) -> None:
    passes, num_prompts = plan_of(recorded.config, role)
    if (
        role != "critic"
        and is_rl(recorded.config)
        and recorded.step < recorded.config.trainer.critic_warmup
    ):
        passes = 0
    wanted = _drawn(recorded, passes, num_prompts)
    rows = _rows(recorded, role)
    if len(updates) != len(wanted):
        raise Wrong(
            f"the {role} took {len(updates)} optimizer steps, but {passes} passes over "
            f"{len(recorded.group_ids)} "
            f"prompts in mini-batches of {num_prompts} are {len(wanted)}"
        )
    own = set(recorded.batch["group_index"][rows].tolist())
    for number, (update, groups) in enumerate(zip(updates, wanted, strict=True), start=1):
        if set(update.batch["group_index"].tolist()) != groups & own:
            what = f"mini-batch {number} of the {role}"
            raise Wrong(
                f"{what} does not hold the groups that seed, step and pass draw: "
                f"{sorted(groups & own)[:6]}"
            )
    times = Counter(uid for update in updates for uid in update.uids)
    uids = recorded.batch["uid"]
    names = [uids[row] for row in rows]
    if recorded.config.algorithm.sample_level == "decision":
        numbers = [range(1 + len(forks)) for forks in recorded.batch["forks"]]
        names = [f"{uids[row]}/{number}" for row in rows for number in numbers[row]]
    wrong = [(name, times[name]) for name in names if times[name] != passes]
    if wrong:
        uid, count = wrong[0]
        raise Wrong(
            f"sample {uid} (and {len(wrong) - 1} more) was in {count} mini-batches of the {role}, "
            "but should be in one "
            f"of each of {passes} passes"
        )


def _drawn(recorded: RecordedStep, passes: int, num_prompts: int) -> list[set[int]]:
    """The groups of each mini-batch: in the order of sorted raw Philox words, keyed by seed, step
    and pass."""
    groups = list(recorded.group_ids)
    seed = recorded.config.trainer.seed
    orders = [shuffled(len(groups), (seed, 1), (recorded.step, epoch)) for epoch in range(passes)]
    starts = range(0, len(groups), num_prompts)
    return [
        {groups[i] for i in order[start : start + num_prompts]}
        for order in orders
        for start in starts
    ]


def _rows(recorded: RecordedStep, role: str) -> list[int]:
    """Rows that the role trains on: a critic skips domains whose estimator reads no values."""
    domains = recorded.batch["domain"]
    if role != "critic" or not recorded.config.algorithm.domains:
        return list(range(len(domains)))
    return [
        row
        for row, domain in enumerate(domains)
        if takes_values(algorithm_of(recorded.config, domain))
    ]


def plan_of(config: Config, role: str) -> tuple[int, int]:
    """Passes over a step, and prompts in a mini-batch, by the config."""
    actor = config.actor_rollout_ref.actor
    critic = config.critic
    if role == "critic":
        return critic.ppo_epochs, critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
    return (actor.ppo_epochs if is_rl(config) else 1), actor.ppo_mini_batch_size


def _same_columns(recorded: RecordedStep, updates: list[UpdateRecord]) -> None:
    places = {uid: row for row, uid in enumerate(recorded.batch["uid"])}
    for number, update in enumerate(updates, start=1):
        if update.metrics.get("skipped") or _all_equal(recorded, update, places):
            continue
        own = samples_of(update.batch.only([n for n in ("uid", *COLUMNS) if n in update.batch]))
        for known, sample in zip(map(recorded.rows.__getitem__, update.uids), own, strict=True):
            # An update may write old log-probs, which later updates then use.
            for name in (name for name in COLUMNS if name in sample and name in known):
                now = sample[name]
                before = known[name]
                if name == "loss_mask":
                    before = before * own_tokens(recorded.config, known, update.role)
                if not bool(((now == before) | (now.isnan() & before.isnan())).all()):
                    raise Wrong(
                        f"{name} of sample {sample['uid']} in mini-batch {number} of the "
                        f"{update.role} differs from "
                        "its value before the step's first update: it was recomputed or rewritten "
                        "between mini-batches"
                    )


def _all_equal(recorded: RecordedStep, update: UpdateRecord, places: Mapping[str, int]) -> bool:
    """Whether no column of the mini-batch differs from the step's; with several policies, masks
    do."""
    if "decision" in update.batch:
        return False
    before = recorded.batch.select([places[uid] for uid in update.uids])
    names = [name for name in COLUMNS if name in update.batch and name in before]
    pairs = [(update.batch.flat(name).cpu(), before.flat(name).cpu()) for name in names]
    return all(bool(((now == then) | (now.isnan() & then.isnan())).all()) for now, then in pairs)


@check(
    "backward",
    (
        "the packed pass and the model's own padded pass give the same weight gradients for the "
        "same log-prob gradients"
    ),
    needs="a train engine that exposes its model",
    limit=f"{EXACT:g} relative (bfloat16: {ROUNDED:g})",
)
def audit_backward(recorded: RecordedStep) -> str | None:
    engines = recorded.run.resources.updated()
    for role in trained_policies(recorded.config) or ("actor",):
        if (why_not := _same_backward(recorded, role, engines.get(role))) is not None:
            return why_not
    return None


def _same_backward(recorded: RecordedStep, role: str, actor: object) -> str | None:
    compute = getattr(actor, "compute", None)
    if not isinstance(actor, OpenEngine) or compute is None:
        return "the train engine does not expose its model"
    if reads_pairs(recorded.config):
        return "a reward model has no log-probs"
    turns = recorded.run.turns
    chosen = sorted(audited_samples(recorded), key=lambda sample: len(sample["response_ids"]))[
        :NUM_SAMPLES
    ]
    spread = is_spread(actor.model)  # otherwise this rank takes part in the passes of others
    if not chosen and not spread:
        return "no sample is short enough"
    names, weights = zip(*striped(trained(actor.model), recorded.step), strict=True)
    batch = recorded.batch.select(
        [list(recorded.batch["uid"]).index(sample["uid"]) for sample in chosen]
    )

    def loss() -> Tensor:
        flat: Tensor = compute(batch, ("log_probs",))["log_probs"]
        cotangents = [
            _cotangent(sample) * own_tokens(recorded.config, sample, role) for sample in chosen
        ]
        return (flat * torch.cat(cotangents or [flat.new_zeros(0)]).to(flat)).sum()

    packed = turns.gradients(actor.model, weights, loss)
    parts = [chosen[place : place + 1] for place in range(NUM_SAMPLES if spread else len(chosen))]
    low = dtype_of(actor)
    apart = [_through_padding(recorded, role, actor.model, part, weights, low) for part in parts]
    if not chosen:
        return "no sample is short enough"
    limit = recorded.limit(EXACT, ROUNDED)
    sums = [torch.stack(others).sum(0) for others in zip(*apart, strict=True)]
    # The gradient of a bias of keys without positions is rounding alone.
    least = max(1e-9, NOISE * max(float(other.norm()) for other in sums))
    for name, one, other in zip(names, packed, sums, strict=True):
        error = float((one - other).norm()) / max(float(other.norm()), least)
        if not error <= limit:
            # all ranks make equally many passes
            if not spread:
                exact = _in_more_digits(recorded, role, actor, parts, name).to(other)
                if error <= 2 * (rounding := float((other - exact).norm() / exact.norm())):
                    return (
                        f"rounding alone moves the gradient of {name} by {rounding:.2g} of itself, "
                        "which is too far"
                    )
            sharded = (
                ", or gradients are summed over the ranks in less than float32" if spread else ""
            )
            raise Wrong(
                f"the gradient of {name} by the log-probs of samples "
                f"{', '.join(s['uid'] for s in chosen)} differs by "
                f"{error:.3g} (relative; limit {limit:g}) between the packed pass and a padded "
                "one: there is "
                "attention between packed sequences, or part of the model gets no gradient"
                f"{sharded}"
            )
    return None


@check(
    "gradients",
    "a mini-batch's gradient starts from zero and is the sum of the gradients of its "
    "micro-batches' losses, each "
    "counted once, clipped to max_grad_norm; a policy's loss is the sum of its terms with their "
    "coefficients",
    needs="a train engine that exposes its model",
    limit=f"{LIMIT:g} relative",
)
def audit_gradients(recorded: RecordedStep) -> str | None:
    if not recorded.updates:
        return "no update was recorded"
    audit_leftover(recorded)
    for update in recorded.updates:
        weights = [
            float(sum(micro.weights)) for micro in update.micros if micro.weights is not None
        ]
        if odd := [weight for weight in weights if weight != 1.0]:
            raise Wrong(
                f"the loss of a micro-batch of the {update.role} entered the gradient {odd[0]:g} "
                "times instead of once "
                f"({len(odd)} of {len(weights)} micro-batches): it was scaled, left out, or used "
                "again"
            )
        if (update.norm is not None or update.stripes) and not update.metrics.get("skipped"):
            _clipped(recorded, update)
        if _is_ours(recorded):
            _sum_of_terms(update, _settings(recorded, update.role))
    if not all(isinstance(update.engine, OpenEngine) for update in recorded.updates):
        return "an engine that was updated does not expose its model"
    stripes = [stripe for update in recorded.updates for stripe in update.stripes.values()]
    if stripes and all(stripe.contributions is None for stripe in stripes):
        return "gradients of sharded weights are summed over the ranks before they are seen"
    return None


def audit_leftover(recorded: RecordedStep) -> str | None:
    """Check that no mini-batch of the step began with gradients of another."""
    for update in recorded.updates:
        if update.leftover:
            raise Wrong(
                f"a mini-batch of the {update.role} began with gradients left over from the one "
                "before "
                f"({update.leftover[0]} and {len(update.leftover) - 1} more weights): they were "
                "not cleared, "
                "or these weights are not the optimizer's"
            )
    return None if recorded.updates else "no update was recorded"


@check(
    "optimizer",
    "the learning rate follows the schedule, and sampled elements of several weights and their "
    "moments follow the "
    "optimizer's formula for gradient, moments, learning rate and weight decay; no weight moves "
    "farther than AdamW can "
    "move it, or stands still after it moved",
    needs="adamw or sgd; for other optimizers the learning rate alone",
    limit=f"{LIMIT:g} of the move",
)
def audit_optimizer(recorded: RecordedStep) -> str | None:
    if not recorded.updates:
        return "no update was recorded"
    known = [_same_weights(*each) for each in scheduled(recorded) if each[0].totals]
    audit_reach(recorded)
    if not known or not all(known):
        return (
            "only the learning rate: the optimizer is neither adamw nor sgd, or its engine does "
            "not expose it"
        )
    return None


def _in_more_digits(
    recorded: RecordedStep,
    role: str,
    actor: OpenEngine,
    parts: Sequence[Sequence[Sample]],
    name: str,
) -> Tensor:
    """The gradient of one weight, through padding, in a more exact type than the run's: weights
    that have grown without bounds make float32 rough too."""
    model = actor.model
    if dtype_of(actor) in (None, torch.float32):
        model = copy.deepcopy(model).double()
    weight = dict(trained(model))[name]
    passes = [_through_padding(recorded, role, model, part, [weight], None)[0] for part in parts]
    return torch.stack(passes).sum(0)


def _through_padding(
    recorded: RecordedStep,
    role: str,
    model: nn.Module,
    chosen: Sequence[Sample],
    weights: Sequence[nn.Parameter],
    dtype: Dtype,
) -> list[Tensor]:
    """chosen: one sample, or none: then one token runs through the model with gradient 0. dtype: of
    the products."""
    tokens = [each for sample in chosen for each in sequences_of(sample)] or [Ids((0,), (0,))]

    def loss() -> Tensor:
        logits = joined_logits(list(logits_of(nn.Module.__call__, model, tokens)))
        ids = torch.tensor(ids_of(chosen[0])[1] if chosen else [0], device=logits.device)
        temperature = recorded.temperatures(chosen[0]).to(logits) if chosen else 1.0
        scores = (logits / temperature).log_softmax(-1)
        log_probs = scores.gather(-1, ids[:, None])[:, 0]
        if chosen and (numbers := numbers_of(chosen[0])) is not None:
            log_probs = log_probs_of(logits, ids.tolist(), 1.0, numbers)
        cotangent = torch.zeros(1)
        if chosen:
            cotangent = _cotangent(chosen[0]) * own_tokens(recorded.config, chosen[0], role)
        return (log_probs * cotangent.to(log_probs)).sum()

    with plainly(model, compute_dtype=dtype):
        return recorded.run.turns.gradients(model, weights, loss)


def _cotangent(sample: Sample) -> Tensor:
    """Fixed numbers of both signs, instead of a loss's gradient; 0 where the token is not
    predicted."""
    return torch.cos(
        torch.arange(len(sample["response_ids"]), dtype=torch.float32) + 1.0
    ) * is_predicted(sample)


def _clipped(recorded: RecordedStep, update: UpdateRecord) -> None:
    settings = _settings(recorded, update.role)
    reported = float(update.metrics["grad_norm"])
    most = settings.max_grad_norm
    factor = 1.0 if most is None else min(1.0, most / (reported + 1e-6))
    if (
        update.norm is not None
        and not abs(update.norm - reported * factor) <= LIMIT * reported + 1e-9
    ):
        raise Wrong(
            f"the {update.role}'s optimizer was given a gradient of norm {update.norm:.4g}, but it "
            "was measured as "
            f"{reported:.4g} and max_grad_norm is {most}: it should be {reported * factor:.4g}"
        )
    for name, stripe in update.stripes.items():
        if stripe.gradient is None or stripe.contributions is None:
            continue
        gap = float((stripe.gradient - stripe.contributions * factor).norm())
        if not gap <= LIMIT / 5 * float(stripe.gradient.norm()) + 1e-7 * reported:
            raise Wrong(
                f"the gradient of {name} that the {update.role}'s optimizer was given is not the "
                "sum of the "
                "micro-batches' gradients over all ranks times the clip factor: some was left "
                "over, dropped, scaled or "
                "rounded"
            )


def _sum_of_terms(update: UpdateRecord, settings: ActorConfig | CriticConfig) -> None:
    """Check that the policy's loss is the sum of its reported terms with the config's
    coefficients."""
    metrics = update.metrics
    if metrics.get("skipped") or "pg_loss" not in metrics or not isinstance(settings, ActorConfig):
        return
    kl = settings.kl_loss_coef * metrics.get("kl_loss", 0.0) if settings.use_kl_loss else 0.0
    entropy = math.copysign(metrics.get("loss_term/entropy", 0.0), settings.entropy_coef)
    # the entropy of a number may be below 0, and the term is of absolute values
    if "action_values" in update.batch:
        if settings.loss_agg_mode != "token-mean":
            return
        entropy = settings.entropy_coef * metrics["entropy"]
    expected = metrics["pg_loss"] + kl - entropy
    size = sum(metrics.get(f"loss_term/{name}", 0.0) for name in TERMS)
    if not abs(metrics["loss"] - expected) <= TERM_LIMIT * size + 1e-9:
        raise Wrong(
            f"the loss of a mini-batch of the {update.role} is {metrics['loss']:.8g}, but its "
            "policy term "
            f"{metrics['pg_loss']:.6g}, KL {kl:.6g} and entropy {-entropy:.6g}, each with the "
            "config's coefficient, "
            f"add up to {expected:.8g}: a term is left out or has another coefficient"
        )


def _settings(recorded: RecordedStep, role: str) -> ActorConfig | CriticConfig:
    """Of the critic, or of the policy of that name."""
    if role == "critic":
        return recorded.config.critic
    own = role in trained_policies(recorded.config)
    return (
        config_of_policy(recorded.config, role) if own else recorded.config
    ).actor_rollout_ref.actor


def scheduled(recorded: RecordedStep) -> Iterator[tuple[UpdateRecord, OptimConfig, float, int]]:
    """Each update that was not skipped, its optimizer's config, its scheduled rate, and the number
    of updates before it. Raises Wrong if the update had another rate."""
    for role in sorted({update.role for update in recorded.updates}):
        num_before = recorded.num_updates.get(role, 0)
        settings = _settings(recorded, role).optim
        for update in recorded.updates_of(role):
            if update.metrics.get("skipped"):
                continue
            rate = settings.lr * schedule(settings, num_before, total_updates(recorded, role))
            found = float(update.metrics["lr"])
            if not abs(found - rate) <= LIMIT * rate + 1e-15:
                raise Wrong(
                    f"the learning rate of the {role} is {found:.4g}, but the schedule gives "
                    f"{rate:.4g}"
                )
            yield update, settings, rate, num_before
            num_before += 1


def audit_learning_rates(recorded: RecordedStep) -> str | None:
    """The learning rate of each update is the schedule's, and the optimizer has this rate and the
    config's other options; one weight of each update has moved by its formula."""
    for update, settings, rate, num_before in scheduled(recorded):
        _same_options(update, settings)
        if not update.totals:
            _same_weights(update, settings, rate, num_before)
        groups = (
            update.engine.optimizer.param_groups if isinstance(update.engine, OpenEngine) else ()
        )
        is_last = update is recorded.updates_of(update.role)[-1]
        if odd := [
            group["lr"]
            for group in groups
            if is_last and not abs(group["lr"] - rate) <= LIMIT * rate + 1e-15
        ]:
            raise Wrong(
                f"the {update.role}'s optimizer has the learning rate {odd[0]:.4g}, not {rate:.4g}"
            )
    return None


MOVES = 0.05
"""A move of a weight in learning rates, from which momentum moves it in the next update too."""


def audit_reach(recorded: RecordedStep) -> None:
    """No weight of any update moved farther than the optimizer can move it, or stands still that
    its momentum moves."""
    for update, settings, rate, _ in scheduled(recorded):
        _check_reach(update, settings, rate)
        _check_moved(recorded, update, settings, rate)


def _check_reach(update: UpdateRecord, settings: OptimConfig, rate: float) -> None:
    """Check that a few elements of every weight moved no farther than AdamW can. For any gradients,
    its mean over the root of its mean square is at most (1 − β₁) / √((1 − β₂)(1 − β₁²/β₂)), or 1 in
    the first step."""
    (first, second), decay = settings.betas, settings.weight_decay
    if settings.optimizer != "adamw" or len(update.few) < 2 or not first**2 < second:
        return
    before, after = update.few
    most = max((1 - first) / math.sqrt((1 - second) * (1 - first**2 / second)), 1.0)
    far = (after - before).abs() > 1.01 * rate * (
        most + decay * before.abs()
    ) + 4e-7 * before.abs() + 1e-12
    if bool(far.any()):
        weights = (
            whole_here(trained(update.engine.model))
            if isinstance(update.engine, OpenEngine)
            else []
        )
        names = [name for name, weight in weights for _ in range(min(NUM_FEW, weight.numel()))]
        place = int(far.int().argmax())
        raise Wrong(
            f"{names[place]} of the {update.role} moved by {float((after - before)[place]):.4g}, "
            "but adamw at the "
            f"learning rate {rate:.4g} moves a weight by {rate * most:.4g} at most, besides weight "
            "decay: something "
            "else wrote to it"
        )


def _check_moved(
    recorded: RecordedStep, update: UpdateRecord, settings: OptimConfig, rate: float
) -> None:
    """Check that a weight of which several elements moved in the update seen before moves in this
    one."""
    is_seen = len(update.few) == 2 and rate > 0 and not update.metrics.get("skipped")
    if not is_seen or settings.optimizer != "adamw" or settings.betas[0] < 0.5:
        return
    before, after = update.few
    moved = (after - before).abs() / rate
    last = recorded.run.moved.get(update.role)
    recorded.run.moved[update.role] = moved
    if last is None or len(last) != len(moved) or not isinstance(update.engine, OpenEngine):
        return
    # else rounding may hide a move
    must_move = (last > MOVES) & (1e-6 * before.abs() < MOVES * rate)
    if not bool((must_move & (moved == 0)).any()):
        return
    weights = list(whole_here(trained(update.engine.model)))
    parts = must_move.split([min(NUM_FEW, weight.numel()) for _, weight in weights])
    for (name, _), must, own in zip(
        weights, parts, moved.split([len(part) for part in parts]), strict=True
    ):
        if int(must.sum()) > 1 and not bool(own[must].any()):
            raise Wrong(
                f"{name} of the {update.role} did not move at the learning rate {rate:.4g}, though "
                "it did before, and "
                "its momentum moves it: the optimizer leaves it out, or something restores it"
            )


def _same_options(update: UpdateRecord, settings: OptimConfig) -> None:
    for group in (
        update.engine.optimizer.param_groups if isinstance(update.engine, OpenEngine) else ()
    ):
        for name in group.keys() & {"betas", "eps", "weight_decay"}:
            if group[name] != (wanted := getattr(settings, name)):
                raise Wrong(
                    f"the {update.role}'s optimizer has {name}={group[name]} for some weights, not "
                    f"{wanted}"
                )


def total_updates(recorded: RecordedStep, role: str) -> int:
    """Optimizer steps of the whole run: the schedule's length."""
    config = recorded.config
    passes, num_prompts = plan_of(config, role)
    warmup = config.trainer.critic_warmup if role != "critic" and is_rl(config) else 0
    steps = recorded.run.spec.data.total_steps - warmup
    return max(steps * passes * math.ceil(config.data.train_batch_size / num_prompts), 1)


def schedule(settings: OptimConfig, step: int, total: int) -> float:
    """The factor of the rate at optimizer step `step`, counted from 0."""
    if settings.scheduler == "constant":
        return 1.0
    warmup = (
        settings.lr_warmup_steps
        if settings.lr_warmup_steps >= 0
        else int(settings.warmup_ratio * total)
    )
    if step < warmup:
        return step / warmup
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    left = {
        "constant_with_warmup": 1.0,
        "linear_with_warmup": 1 - done,
        "cosine_with_warmup": (1 + math.cos(math.pi * done)) / 2,
    }
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left[settings.scheduler]


def _same_weights(
    update: UpdateRecord, settings: OptimConfig, rate: float, num_before: int
) -> bool:
    """Compare the moved weights; returns whether there is a formula to compare with."""
    if settings.optimizer not in ("adamw", "sgd") or not update.stripes:
        return False
    _same_options(update, settings)
    for name, stripe in update.stripes.items():
        if stripe.gradient is None or stripe.after is None:
            raise Wrong(
                f"the optimizer of the {update.role} was not called, or {name} had no gradient, "
                "though the update was "
                "not skipped"
            )
        steps = int(stripe.moments.get("step", 0 if settings.optimizer == "adamw" else num_before))
        if steps != num_before:
            raise Wrong(
                f"the optimizer of the {update.role} has counted {steps} steps, but {num_before} "
                "were taken: its "
                "moments were lost"
            )
    # of this rank's parts
    found = {name: stripe for name, stripe in update.stripes.items() if len(stripe.before)}
    if found:
        _same_moves(update, found, settings, rate, num_before)
    return True


def _same_moves(
    update: UpdateRecord,
    stripes: Mapping[str, Stripe],
    settings: OptimConfig,
    rate: float,
    num_before: int,
) -> None:
    """Compare all stripes at once."""
    names = [*stripes]
    lengths = torch.tensor([len(stripe.before) for stripe in stripes.values()])
    owners = repeated(torch.arange(len(names)), lengths)
    before, gradient, after = (
        torch.cat([getattr(stripe, part) for stripe in stripes.values()])
        for part in ("before", "gradient", "after")
    )
    if settings.optimizer == "adamw":
        moments = [_joined(stripes, lengths, name, moved=False) for name in MOMENTS]
        expected, wanted = _adamw(before, gradient, moments, settings, rate, num_before + 1)
        for moment, (value, size) in zip(MOMENTS, wanted, strict=True):
            near = (
                _joined(stripes, lengths, moment, moved=True) - value
            ).abs() <= MOMENT_LIMIT * size + 1e-30
            if not bool(near.all()):
                raise Wrong(
                    f"{update.role}: {moment} of {names[owners[near.int().argmin()]]} is not what "
                    "the optimizer's "
                    f"formula gives for the gradient and the previous {moment}: it was lost, or is "
                    "kept in a lower "
                    "precision than float32"
                )
    else:
        expected = before - rate * (gradient + settings.weight_decay * before)
    gap = (after - expected).abs()
    moved = (expected - before).abs()
    most = torch.zeros(len(names)).double().scatter_reduce(0, owners, moved, "amax")
    far = gap > LIMIT * most[owners] + 4e-7 * before.abs() + 1e-12  # the second is rounding
    if bool(far.any()):
        own = int(owners[far.int().argmax()])
        raise Wrong(
            f"{names[own]} of the {update.role} moved by "
            f"{float((after - before)[owners == own].abs().max()):.4g} at "
            f"most, but {settings.optimizer} at the learning rate {rate:.4g} gives "
            f"{float(most[own]):.4g} for its "
            "gradient, moments and weight decay"
        )


def _joined(stripes: Mapping[str, Stripe], lengths: Tensor, moment: str, moved: bool) -> Tensor:
    """A moment of all stripes, before or after the step; 0 before the first, and NaN where it is
    missing after one."""
    none = math.nan if moved else 0.0
    each = [
        (stripe.moved_moments if moved else stripe.moments).get(moment, none)
        for stripe in stripes.values()
    ]
    return torch.cat(
        [
            torch.as_tensor(x, dtype=torch.float64).expand(n)
            for x, n in zip(each, lengths.tolist(), strict=True)
        ]
    )


def _adamw(
    weights: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    settings: OptimConfig,
    rate: float,
    step: int,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The weights after the step, and for each moment its value then and the sum of its terms'
    sizes (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2)."""
    first, second = settings.betas
    mean = first * moments[0] + (1 - first) * gradient
    square = second * moments[1] + (1 - second) * gradient**2
    decayed = weights * (1 - rate * settings.weight_decay)
    moved = decayed - rate * (mean / (1 - first**step)) / (
        (square / (1 - second**step)).sqrt() + settings.eps
    )
    size = first * moments[0].abs() + (1 - first) * gradient.abs()
    return moved, [(mean, size), (square, square)]
