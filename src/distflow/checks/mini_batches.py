"""Check: each pass of a step's updates takes every sample once, with the columns scored before."""

import math
from collections import Counter
from itertools import chain

import torch
from torch import Tensor

from distflow.checks.check import Wrong, check, is_builtin
from distflow.checks.recorded_step import RecordedStep
from distflow.checks.samples import own_tokens
from distflow.checks.update_records import UpdateRecord
from distflow.config import Config
from distflow.config.derived_settings import is_rl, trained_policies
from distflow.data.batch import Batch
from distflow.graph.bind_to_config import BoundNode

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
    "every sample is in one mini-batch of each pass, with the log-probs, advantages and masks "
    "from before the first update",
    needs="the built-in update nodes",
    limit="equal",
)
def check_mini_batches(recorded: RecordedStep) -> str | None:
    if not updates_are_ours(recorded):
        if not recorded.updates:
            return "no update was recorded"
        _same_columns(recorded)
        return "a user's node chooses the mini-batches"

    roles = {update.role for update in recorded.updates} | _roles_to_update(recorded)
    for role in sorted(roles):
        _each_once(recorded, role, recorded.updates_of(role))
    for update in recorded.updates:
        _check_micro_batches(update)
    _same_columns(recorded)

    return None


def updates_are_ours(recorded: RecordedStep) -> bool:
    return all(is_builtin(node.fn) for node in _update_nodes(recorded))


def _update_nodes(recorded: RecordedStep) -> list[BoundNode]:
    return [step.node for step in recorded.run.training_steps if not step.node.contract.writes]


def _roles_to_update(recorded: RecordedStep) -> set[str]:
    """Roles that take optimizer steps in this step, whatever its samples are."""
    config = recorded.config
    roles = set(chain.from_iterable(node.engines for node in _update_nodes(recorded)))
    has_warmup = is_rl(config) and recorded.step < config.trainer.critic_warmup
    if has_warmup or trained_policies(config):  # the latter have names of their own
        roles.discard("actor")
    if config.algorithm.domains:
        roles.discard("critic")
    return roles & {"actor", "critic"}


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
    uids = list(chain.from_iterable(micro.uids for micro in update.micros))
    if update.micros and sorted(uids) != sorted(update.uids):
        raise Wrong(
            f"the micro-batches of a mini-batch of the {update.role} hold {len(uids)} samples, the "
            f"mini-batch {len(update.uids)}: some were left out or used twice"
        )


def _each_once(recorded: RecordedStep, role: str, updates: list[UpdateRecord]) -> None:
    passes, num_prompts = plan_of(recorded.config, role)
    wanted = planned_updates(recorded, role)
    if len(updates) != wanted:
        raise Wrong(
            f"the {role} took {len(updates)} optimizer steps, but {passes} passes over "
            f"{len(recorded.group_ids)} prompts in mini-batches of {num_prompts} are {wanted}"
        )

    algorithm = recorded.config.algorithm

    # a decision is a part of a sample, and a critic skips domains whose estimator reads no values
    if algorithm.sample_level == "decision" or (role == "critic" and algorithm.domains):
        return

    times = Counter(chain.from_iterable(update.uids for update in updates))
    uids = recorded.batch["uid"]
    if "preferred" in recorded.batch:  # only pairs are trained on
        uids = [uids[row] for row in recorded.batch["preferred"].nonzero()[:, 0].tolist()]
    wrong = [uid for uid in uids if times[uid] != passes]
    if wrong:
        raise Wrong(
            f"sample {wrong[0]} (and {len(wrong) - 1} more) was in {times[wrong[0]]} mini-batches "
            f"of the {role}, but should be in one of each of {passes} passes"
        )


def _same_columns(recorded: RecordedStep) -> None:
    for role in sorted({update.role for update in recorded.updates}):
        for number, update in enumerate(recorded.updates_of(role), start=1):
            if not update.metrics.get("skipped") and "decision" not in update.batch:
                _same_as_before(recorded, update, number)


def _same_as_before(recorded: RecordedStep, update: UpdateRecord, number: int) -> None:
    """An update may write old log-probs, which later updates then use: only columns that were there
    before the first are compared."""
    before = recorded.batch
    places = _places(before, update.batch)

    for name in COLUMNS:
        if name not in update.batch or name not in before:
            continue

        now = update.batch.flat(name).cpu()
        then = before.flat(name).cpu()
        if name == "loss_mask" and trained_policies(recorded.config):
            masks = [
                own_tokens(recorded.config, sample, update.role) for sample in recorded.samples
            ]
            then = then * torch.cat([then.new_zeros(0).bool(), *masks])

        then = then[places]
        wrong = (now != then) & ~(now.isnan() & then.isnan())
        if bool(wrong.any()):
            row = int(update.batch.rows()[int(wrong.nonzero()[0])])
            raise Wrong(
                f"{name} of sample {update.uids[row]} in mini-batch {number} of the {update.role} "
                "differs from its value before the step's first update: it was recomputed or "
                "rewritten between mini-batches"
            )


def _places(before: Batch, taken: Batch) -> Tensor:
    """Where the response tokens of a mini-batch are among those of the step."""
    lengths = torch.bincount(before.rows().cpu(), minlength=len(before["uid"]))
    ends = lengths.cumsum(0)
    row_of = {uid: row for row, uid in enumerate(before["uid"])}

    places = [torch.zeros(0, dtype=torch.int64)]
    for uid in taken["uid"]:
        row = row_of[uid]
        places.append(torch.arange(int(ends[row] - lengths[row]), int(ends[row])))

    return torch.cat(places)
