"""Check: each pass of a step's updates takes every sample once, with the columns scored before."""

import math
from collections import Counter

import torch
from torch import Tensor

from distflow.checks.check import Wrong, check, is_builtin
from distflow.checks.recorded_step import RecordedStep
from distflow.checks.samples import own_tokens, samples_of
from distflow.checks.update_records import UpdateRecord
from distflow.config import Config
from distflow.config.derived_settings import algorithm_of, is_rl, takes_values, trained_policies
from distflow.data.batch import Batch

COLUMNS = (
    "response_ids",
    "loss_mask",
    "advantages",
    "returns",
    "old_log_probs",
    "ref_log_prob",
    "values",
    "selected_tokens",
)


@check(
    "mini-batches",
    "every sample of the step is in one mini-batch of each pass, and in one micro-batch of that; "
    "its log-probs, advantages and masks equal those before the first update",
    needs="the built-in update nodes",
    limit="equal",
)
def check_mini_batches(recorded: RecordedStep) -> str | None:
    if not updates_are_ours(recorded):
        if not recorded.updates:
            return "no update was recorded"
        _same_columns(recorded)
        return "a user's node chooses the mini-batches"
    for role in sorted({update.role for update in recorded.updates} | _expected(recorded)):
        _each_once(recorded, role, recorded.updates_of(role))
    for update in recorded.updates:
        _check_micro_batches(update)
    _same_columns(recorded)
    return None


def updates_are_ours(recorded: RecordedStep) -> bool:
    nodes = [step.node for step in recorded.run.training_steps if not step.node.contract.writes]
    return all(is_builtin(node.fn) for node in nodes)


def plan_of(config: Config, role: str) -> tuple[int, int]:
    """Passes over a step, and prompts in a mini-batch, by the config."""
    actor = config.actor_rollout_ref.actor
    critic = config.critic
    if role == "critic":
        return critic.ppo_epochs, critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
    return (actor.ppo_epochs if is_rl(config) else 1), actor.ppo_mini_batch_size


def planned_updates(recorded: RecordedStep, role: str) -> int:
    """Optimizer steps of the role in the step, by the config."""
    passes, num_prompts = plan_of(recorded.config, role)
    return passes * math.ceil(len(recorded.group_ids) / num_prompts)


def _check_micro_batches(update: UpdateRecord) -> None:
    uids = [uid for micro in update.micros for uid in micro.uids]
    if update.micros and sorted(uids) != sorted(update.uids):
        raise Wrong(
            f"the micro-batches of a mini-batch of the {update.role} hold {len(uids)} samples, the "
            f"mini-batch {len(update.uids)}: some were left out or used twice"
        )


def _expected(recorded: RecordedStep) -> set[str]:
    """The roles that the pipeline trains: the critic always, the policy after the critic's
    warm-up."""
    names = set[object]()
    for step in recorded.run.training_steps:
        names.add(getattr(step.node.fn, "keywords", {}).get("name"))
    roles = {"critic"} if "critic" in names else set[str]()
    if names & {"actor", "sft", "rm"} and not _warms_up(recorded):
        roles |= {*(trained_policies(recorded.config) or ("actor",))}
    return roles


def _warms_up(recorded: RecordedStep) -> bool:
    """Whether the critic alone is trained in this step."""
    return is_rl(recorded.config) and recorded.step < recorded.config.trainer.critic_warmup


def _each_once(recorded: RecordedStep, role: str, updates: list[UpdateRecord]) -> None:
    passes, num_prompts = plan_of(recorded.config, role)
    if role != "critic" and _warms_up(recorded):
        passes = 0
    wanted = passes * math.ceil(len(recorded.group_ids) / num_prompts)
    if len(updates) != wanted:
        raise Wrong(
            f"the {role} took {len(updates)} optimizer steps, but {passes} passes over "
            f"{len(recorded.group_ids)} prompts in mini-batches of {num_prompts} are {wanted}"
        )
    times = Counter(uid for update in updates for uid in update.uids)
    names = _names(recorded, _rows(recorded, role))
    wrong = [(name, times[name]) for name in names if times[name] != passes]
    if wrong:
        uid, count = wrong[0]
        raise Wrong(
            f"sample {uid} (and {len(wrong) - 1} more) was in {count} mini-batches of the {role}, "
            f"but should be in one of each of {passes} passes"
        )


def _names(recorded: RecordedStep, rows: list[int]) -> list[str]:
    """Of the samples in mini-batches, or with `algorithm.sample_level` of their decisions."""
    uids = recorded.batch["uid"]
    if recorded.config.algorithm.sample_level != "decision":
        return [uids[row] for row in rows]
    forks = recorded.batch["forks"]
    return [f"{uids[row]}/{number}" for row in rows for number in range(1 + len(forks[row]))]


def _rows(recorded: RecordedStep, role: str) -> list[int]:
    """Rows that the role trains on: a critic skips domains whose estimator reads no values."""
    domains = recorded.batch["domain"]
    if role != "critic" or not recorded.config.algorithm.domains:
        return list(range(len(domains)))
    found = list[int]()
    for row, domain in enumerate(domains):
        if takes_values(algorithm_of(recorded.config, domain)):
            found.append(row)
    return found


def _same_columns(recorded: RecordedStep) -> None:
    """An update may write old log-probs, which later updates then use: only columns that were there
    before the first are compared."""
    before = recorded.batch
    for role in sorted({update.role for update in recorded.updates}):
        for number, update in enumerate(recorded.updates_of(role), start=1):
            if update.metrics.get("skipped"):
                continue
            places = _places(before, update.batch)
            for name in COLUMNS:
                if name not in update.batch or name not in before:
                    continue
                now = update.batch.flat(name).cpu()
                then = before.flat(name).cpu()
                if name == "loss_mask" and trained_policies(recorded.config):
                    masks = [own_tokens(recorded.config, each, role) for each in samples_of(before)]
                    then = then * torch.cat([then.new_zeros(0).bool(), *masks])
                then = then[places]
                wrong = (now != then) & ~(now.isnan() & then.isnan())
                if bool(wrong.any()):
                    row = int(update.batch.rows()[int(wrong.nonzero()[0])])
                    raise Wrong(
                        f"{name} of sample {update.uids[row]} in mini-batch {number} of the {role} "
                        "differs from its value before the step's first update: it was recomputed "
                        "or rewritten between mini-batches"
                    )


def _places(before: Batch, taken: Batch) -> Tensor:
    """Where the response tokens of a mini-batch are among those of the step. The tokens of a
    decision are those of its conversation from the first drawn one on."""
    lengths = torch.bincount(before.rows().cpu(), minlength=len(before["uid"]))
    starts = (lengths.cumsum(0) - lengths).tolist()
    row_of = {uid: row for row, uid in enumerate(before["uid"])}
    decisions = taken["decision"].tolist() if "decision" in taken else None
    turns = before.flat("turn_index").cpu() if decisions else None
    places = [torch.zeros(0, dtype=torch.int64)]
    for place, uid in enumerate(taken["uid"]):
        row = row_of[uid]
        start = starts[row]
        end = start + int(lengths[row])
        if decisions is not None and turns is not None:
            cuts = [0, *(first for _, first in before["forks"][row]), end - start]
            number = decisions[place]
            end = start + cuts[number + 1]
            start += cuts[number]
            start += int((turns[start:end] >= 0).nonzero()[0])
        places.append(torch.arange(start, end))
    return torch.cat(places)
