"""Rules on the metrics of a run, step by step: the same while it runs and afterwards.

A rule looks at the history up to a step and returns a sentence if the step is bad. A finding opens
after 3 such steps (hits) with fewer than 10 good ones between them, and closes after 10 good ones,
so that noise opens none.
"""

import fnmatch
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from distflow.errors import UserError
from distflow.import_target import is_ours, users_code
from distflow.observe.crash_safe_files import JSON
from distflow.observe.findings.finding import MANY_STEPS, REWARD, Finding, Tone, draws_numbers
from distflow.observe.findings.history import RECENT, History
from distflow.observe.findings.learning_rules import LEARNING_RULES, LearningRule

Level = Literal["error", "warning"]
Check = Callable[["History"], str | Finding | None]

CLEAN_STEPS = 10
_NEW = 20
"""Values at the end that are compared with those before."""
_MUCH_LONGER = 1.5


@dataclass(frozen=True)
class StepRule:
    name: str

    needs: tuple[str, ...]
    """Metrics, with "*" for any part; without one of them in a step, the rule does not look at
    it."""

    check: Check
    level: Level = "warning"

    advice: str = ""
    """A sentence."""

    action: str = ""
    """A "key=value", if one change is the remedy."""

    enough: int = 20
    """Values that the first metric must have."""

    opens: int = 3
    """Hits until a finding opens."""

    def numbers(self, history: History) -> dict[str, float] | None:
        """The metrics that it needs; None if one is missing, or has too few values."""
        names = []
        for need in self.needs:
            found = fnmatch.filter(history.metrics, need)
            if not found:
                return None
            names += found

        if names and len(history.last(names[0])) < min(self.enough, RECENT):
            return None
        return {name: history.metrics[name] for name in names}


STEP_RULES: dict[str, StepRule] = {}


def register_doctor_rule(
    name: str, needs: Sequence[str], level: Level = "warning", advice: str = "", **options: object
) -> Callable[[Check], Check]:
    """Decorator for a rule: `function(history) -> sentence, Finding or None`. options: `action`,
    `enough` and `opens` of `StepRule`. A rule in a module of `trainer.imports` looks at
    each step, and in `distflow doctor RUN`.

    Raises UserError for a name that is in use.
    """

    def register(check: Check) -> Check:
        if name in STEP_RULES and is_ours(STEP_RULES[name].check):
            raise UserError(
                f"there is already a doctor rule '{name}': register yours under another name"
            )
        STEP_RULES[name] = StepRule(name, tuple(needs), check, level, advice, **options)  # type: ignore[arg-type]
        return check

    return register


@dataclass
class _Case:
    """Bad steps with fewer than 10 good ones between them."""

    finding: Finding
    """On the first of them, with the last one as `last`."""

    hits: int = 0

    clean: int = 0
    """Good steps since the last bad one."""


class StepRules:
    """Applies all rules to one step after another."""

    def __init__(self, config: Mapping[str, JSON]) -> None:
        self.history = History(config)
        self.failed: dict[str, str] = {}
        self._cases: dict[str, list[_Case]] = {name: [] for name in STEP_RULES}
        self._unseen = set(STEP_RULES)
        """The rules that have looked at no step."""

    def step(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """The findings that open at this step."""
        self.history.add(step, metrics)
        opened = []
        for name, cases in self._cases.items():
            found = self._look(STEP_RULES[name], cases)
            if found:
                opened.append(found)

        return opened

    def lacking(self) -> dict[str, str]:
        """The rules that saw no step, with what they need; or how they failed."""
        found = {}
        for name in self._cases:
            rule = STEP_RULES[name]
            if name in self._unseen:
                found[name] = f"needs {rule.enough} steps with {', '.join(rule.needs)}"
        return found | self.failed

    def findings(self) -> list[Finding]:
        """Those that have opened."""
        found = []
        for name, cases in self._cases.items():
            found += [case.finding for case in cases if case.hits >= STEP_RULES[name].opens]
        return found

    def _look(self, rule: StepRule, cases: list[_Case]) -> Finding | None:
        """The finding, if it opens."""
        numbers = rule.numbers(self.history)
        if numbers is None or rule.name in self.failed:
            return None

        self._unseen.discard(rule.name)
        try:
            with users_code(f"the doctor rule '{rule.name}' failed:"):
                reason = rule.check(self.history)
        except UserError as error:
            self.failed[rule.name] = str(error)
            return None

        case = None
        if cases and not cases[-1].finding.is_over:
            case = cases[-1]

        if reason:
            if case is None:
                case = _Case(self._finding(rule, reason, numbers))
                cases.append(case)

            case.hits += 1
            case.clean = 0
            case.finding = case.finding._replace(last=self.history.step)
            if case.hits == rule.opens:
                return case.finding
            return None

        if case is not None:
            case.clean += 1
            is_over = case.clean >= CLEAN_STEPS
            case.finding = case.finding._replace(is_over=is_over)

        return None

    def _finding(
        self, rule: StepRule, said: str | Finding, numbers: Mapping[str, float]
    ) -> Finding:
        found = said
        if isinstance(found, str):
            found = Finding("flat", found, rule.advice, action=rule.action)
        tone: Tone = "bad" if rule.level == "error" else "flat"
        first = self.history.step

        return found._replace(
            tone=tone, rule=rule.name, level=rule.level, first=first, numbers=numbers
        )


_STALENESS = "async.max_staleness"


@register_doctor_rule(
    "rollout-never-updated",
    ("async/version_end", "actor/grad_norm"),
    "error",
    (
        "The engine does not get the weights: look at the weight syncs in events.jsonl, and at the "
        "engine's log."
    ),
    enough=8,
)
def _never_updated(h: History) -> str | None:
    versions = h.last("async/version_end", 4)
    bound = h.setting(_STALENESS)
    every = h.setting("actor_rollout_ref.actor.model_update_frequency")
    allowed = bound if isinstance(bound, int) else 0
    allowed += every if isinstance(every, int) else 1
    is_late = h.step - 1 - versions[-1] > allowed
    if not is_late or len(set(versions)) > 1 or not min(h.last("actor/grad_norm", 3)) > 0:
        return None

    return (
        f"Step {h.step} trained on tokens of version {versions[-1]:.0f} at most, although the "
        "policy still changes."
    )


@register_doctor_rule(
    "weights-differ",
    ("canary/mean_abs",),
    "error",
    "Compare the weight receipts of the last sync, and stop the run if they differ.",
    enough=2,
)
def _weights_differ(h: History) -> str | None:
    first = h.last("canary/mean_abs")[0]
    now = h.now("canary/mean_abs")

    rounding = 0.05
    if h.setting("actor_rollout_ref.model.dtype") == "float32":
        rounding = 1e-3

    if now <= max(5 * first, rounding):
        return None

    return (
        f"On fixed prompts, engine and trainer differ by {now:.2g} nats a token, at first by "
        f"{first:.2g}."
    )


@register_doctor_rule(
    "mismatch-numerics",
    ("mismatch/same_version/k3", "mismatch/same_version/ess"),
    advice=(
        "Engine and trainer compute different probabilities with the same weights: correct the "
        "loss for it."
    ),
    action="algorithm.rollout_correction.rollout_is=token",
)
def _numerics(h: History) -> str | None:
    k3 = h.now("mismatch/same_version/k3")
    ess = h.now("mismatch/same_version/ess")
    if k3 <= 1e-3 and k3 <= max(10 * h.first("mismatch/same_version/k3"), 1e-4) and ess >= 0.9:
        return None

    return (
        f"With the same weights, engine and trainer are k3 = {k3:.2g} nats apart (effective sample "
        f"size {ess:.2f})."
    )


@register_doctor_rule(
    "reward-hacking-suspect",
    (REWARD,),
    advice="Read the responses with the highest reward, and bound the part that they exploit.",
    enough=RECENT,
)
def _hacking(h: History) -> str | None:
    rewards = h.last(REWARD)
    first = rewards[:_NEW]
    rise = statistics.fmean(rewards[-_NEW:]) - statistics.fmean(first)
    accuracies = h.last("val_correct/all/mean", 30)
    if rise <= statistics.pstdev(first) or len(accuracies) < 6:
        return None

    threes = [*zip(accuracies, accuracies[1:], accuracies[2:], strict=False)]
    means = [statistics.fmean(three) for three in threes]
    noise = sorted(abs(a - 2 * b + c) for a, b, c in threes)
    if max(means) - means[-1] <= max(0.05, 5 * noise[len(noise) // 4]):
        return None

    return (
        f"The reward rises, while the validation accuracy fell from {max(means):.3f} to "
        f"{means[-1]:.3f}."
    )


@register_doctor_rule(
    "entropy-collapse",
    ("actor/entropy",),
    advice=(
        "The policy stops exploring: clip ratios higher up, raise the temperature, or add a KL "
        "term."
    ),
    action="actor_rollout_ref.actor.clip_ratio_high=0.28",
    enough=30,
)
def _collapse(h: History) -> str | None:
    if draws_numbers(h.config):
        return None

    values = h.last("actor/entropy", 20)
    first = h.first("actor/entropy")
    falls = statistics.fmean(values[10:]) < statistics.fmean(values[:10])
    if values[-1] < 0.2 * first and falls:
        return f"The entropy fell from {first:.3g} to {values[-1]:.3g} nats."

    return None


@register_doctor_rule(
    "length-drift",
    ("rollout/avg_response_length", REWARD),
    advice="Longer responses bring no reward: charge for them with reward.overlong.buffer_tokens.",
    enough=RECENT,
)
def _longer(h: History) -> str | None:
    lengths = h.last("rollout/avg_response_length")
    rewards = h.last(REWARD)
    before = statistics.fmean(lengths[:-_NEW])
    rise = statistics.fmean(rewards[-_NEW:]) - statistics.fmean(rewards[:-_NEW])
    is_longer = statistics.fmean(lengths[-_NEW:]) > _MUCH_LONGER * before
    if not is_longer or rise > statistics.pstdev(rewards[:-_NEW]):
        return None

    return f"Responses grew from {before:.0f} to {lengths[-1]:.0f} tokens, the reward did not."


@register_doctor_rule(
    "gradient-spike",
    ("*/grad_norm",),
    advice=(
        "Look at the samples of the step; `distflow replay` repeats an update whose bundle was "
        "saved."
    ),
    enough=50,
    opens=1,
)
def _spike(h: History) -> str | None:
    for name in fnmatch.filter(h.metrics, "*/grad_norm"):
        *before, now = h.last(name, 51)
        middle = statistics.median(before)

        spread = 1.4826 * statistics.median(abs(value - middle) for value in before)
        if spread > 0 and now - middle > 10 * spread and now > 5 * middle:
            return (
                f"{name} was {now:.3g} at step {h.step}; its median over the steps before is "
                f"{middle:.3g}."
            )

    return None


@register_doctor_rule(
    "skipped-updates",
    ("actor/skipped",),
    advice="Losses or gradients are not finite: `distflow replay RUN/bundles/STEP` repeats one.",
    enough=8,
    opens=1,
)
def _skipped(h: History) -> str | None:
    number = sum(value > 0 for value in h.last("actor/skipped", 20))
    if number >= 3:
        return f"In {number} of the last 20 steps the optimizer skipped an update."
    return None


@register_doctor_rule(
    "differences-lost",
    ("reward/mean_score",),
    advice=(
        "Scores are too large for their differences: subtract what all of a prompt's scores share, "
        "or divide them."
    ),
    enough=1,
    opens=1,
)
def _lost(h: History) -> str | None:
    groups = h.now("reward/lost_in_float64_frac", 0.0)
    samples = h.now("reward/lost_in_float32_frac", 0.0)
    if groups <= 0 and samples <= 0:
        return None

    return (
        f"In {groups:.0%} of the groups float64 does not hold the differences of the scores, and "
        f"of {samples:.0%} of the samples float32 does not hold the advantage."
    )


@register_doctor_rule(
    "update-too-large",
    ("actor/pg_clipfrac", "actor/ppo_kl"),
    advice=(
        "One step moves the policy too far: lower the learning rate, or use fewer passes and "
        "larger mini-batches."
    ),
    enough=8,
)
def _too_large(h: History) -> str | None:
    clipped = h.now("actor/pg_clipfrac")
    kl = abs(h.now("actor/ppo_kl"))
    if clipped > 0.3 or kl > 0.1:
        return f"Of the tokens {clipped:.0%} were clipped, and KL is {kl:.2g} nats."
    return None


def _over_window(rule: LearningRule) -> Check:
    def look(history: History) -> Finding | None:
        whole = {**history.begin, **history.window}
        found = rule.find(history.window, whole, history.config)
        if found and found.tone in ("bad", "flat"):
            return found
        return None

    return look


for _rule in LEARNING_RULES:
    register_doctor_rule(_rule.name, [_rule.needs], _rule.level, enough=MANY_STEPS)(
        _over_window(_rule)
    )


def rules_over(steps: Mapping[int, Mapping[str, float]], config: Mapping[str, JSON]) -> StepRules:
    """All rules after all steps of a run."""
    rules = StepRules(config)
    for step, metrics in sorted(steps.items()):
        rules.step(step, metrics)
    return rules
