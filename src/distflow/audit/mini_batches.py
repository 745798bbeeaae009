"""Check: each pass of an update takes every sample of the step once, with the columns scored before the update."""

from collections import Counter
from math import ceil

from distflow.audit.recorded_data import RecordedStep, Wrong, check, is_builtin, samples_of, shuffled
from distflow.audit.recorder import UpdateRecord
from distflow.config import Config
from distflow.config.derived_settings import algorithm_of, is_rl, takes_values

SCORED = ("advantages", "returns", "old_log_probs", "ref_log_prob", "values", "selected_tokens")
COLUMNS = ("response_ids", "loss_mask", *SCORED)


@check(
    "mini-batches",
    "every sample of the step is in one mini-batch of each pass, and its log-probs, advantages and masks are those "
    "from before the first update",
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
    """Every pass took every sample, in the order that is drawn. Reads no column but the samples' uids."""
    if not _is_ours(recorded):
        return "a user's node chooses the mini-batches"
    for role in sorted({update.role for update in recorded.updates} | _expected(recorded)):
        _each_once(recorded, role, recorded.updates_of(role))
    return None


def _is_ours(recorded: RecordedStep) -> bool:
    nodes = [step.node for step in recorded.run.training_steps if not step.node.contract.writes]
    return all(is_builtin(node.fn) for node in nodes)


def _expected(recorded: RecordedStep) -> set[str]:
    """The roles that the pipeline trains: the critic always, the policy after the critic's warm-up."""
    names = {getattr(step.node.fn, "keywords", {}).get("name") for step in recorded.run.training_steps}
    roles = {"critic"} & names
    warm = recorded.step >= recorded.config.trainer.critic_warmup
    return roles | ({"actor"} if names & {"actor", "sft"} and (warm or not is_rl(recorded.config)) else set())


def _each_once(recorded: RecordedStep, role: str, updates: list[UpdateRecord]) -> None:
    passes, num_prompts = plan_of(recorded.config, role)
    if role == "actor" and is_rl(recorded.config) and recorded.step < recorded.config.trainer.critic_warmup:
        passes = 0
    groups = len(set(recorded.batch["group_index"].tolist()))
    uids = [str(recorded.batch["uid"][row]) for row in _rows(recorded, role)]
    wanted = passes * ceil(groups / num_prompts)
    if len(updates) != wanted and recorded.run.num_ranks == 1:
        raise Wrong(
            f"the {role} took {len(updates)} optimizer steps, but {passes} passes over {groups} prompts in "
            f"mini-batches of {num_prompts} are {wanted}"
        )
    _in_order(recorded, role, updates, passes, num_prompts)
    times = Counter(uid for update in updates for uid in update.uids)
    wrong = [(uid, times[uid]) for uid in uids if times[uid] != passes]
    if wrong:
        uid, count = wrong[0]
        raise Wrong(
            f"sample {uid} (and {len(wrong) - 1} more) was in {count} mini-batches of the {role}, but should be in one "
            f"of each of {passes} passes"
        )


def _rows(recorded: RecordedStep, role: str) -> list[int]:
    """Rows that the role trains on: a critic skips domains whose estimator reads no values."""
    domains = recorded.batch["domain"]
    if role != "critic" or not recorded.config.algorithm.domains:
        return list(range(len(domains)))
    return [row for row, domain in enumerate(domains) if takes_values(algorithm_of(recorded.config, domain))]


def _in_order(recorded: RecordedStep, role: str, updates: list[UpdateRecord], passes: int, num_prompts: int) -> None:
    """Groups are put into mini-batches in the order of sorted raw Philox words, keyed by seed, step and pass."""
    if recorded.run.num_ranks > 1 or not updates:
        return
    group_ids, wanted = list(recorded.group_ids), list[set[int]]()
    trained = set(recorded.batch["group_index"][_rows(recorded, role)].tolist())
    for epoch in range(passes):
        order = shuffled(len(group_ids), (recorded.config.trainer.seed, 1), (recorded.step, epoch))
        starts = range(0, len(order), num_prompts)
        wanted += [{group_ids[i] for i in order[k : k + num_prompts]} & trained for k in starts]
    for number, (update, groups) in enumerate(zip(updates, wanted, strict=False), start=1):
        if set(update.batch["group_index"].tolist()) != groups:
            what = f"mini-batch {number} of the {role}"
            raise Wrong(f"{what} does not hold the groups that seed, step and pass draw: {sorted(groups)[:6]}")


def plan_of(config: Config, role: str) -> tuple[int, int]:
    """Passes over a step, and prompts in a mini-batch, by the config."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    if role == "critic":
        return critic.ppo_epochs, critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
    return (actor.ppo_epochs if is_rl(config) else 1), actor.ppo_mini_batch_size


def _same_columns(recorded: RecordedStep, updates: list[UpdateRecord]) -> None:
    known = {sample["uid"]: sample for sample in recorded.samples}
    for number, update in enumerate(updates, start=1):
        if update.metrics.get("skipped"):
            continue
        for sample in samples_of(update.batch.only([n for n in ("uid", *COLUMNS) if n in update.batch])):
            for name in (name for name in COLUMNS if name in sample):
                now, before = sample[name], known[sample["uid"]][name]
                if not bool(((now == before) | (now.isnan() & before.isnan())).all()):
                    raise Wrong(
                        f"{name} of sample {sample['uid']} in mini-batch {number} of the {update.role} differs from "
                        "its value before the step's first update: it was recomputed or rewritten between mini-batches"
                    )
