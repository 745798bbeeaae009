"""Calls a user's loss, estimator and nodes on a made-up batch before a model is loaded: a result of
the wrong form, a loss without a gradient, or a name that does not exist, is found in milliseconds
instead of after the first rollout.

Other errors that a function raises are left to the run, since the batch's numbers are meaningless.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from distflow.algorithms.objectives import PolicyObjective
from distflow.algorithms.registry import find_adv_est
from distflow.config import Config
from distflow.config.derived_settings import POLICY_LOSS, is_rl
from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.graph import BoundNode, BoundPipeline
from distflow.graph.fields import STANDARD_FIELDS, Axis, find_field
from distflow.import_target import innermost, is_ours
from distflow.launch.configured_models import load_policy_tokenizer
from distflow.launch.select_pipeline import takes_policy_loss
from distflow.pipelines.nodes.workflow_dry_run import tried_workflow
from distflow.rewards.reward_check import WARNING
from distflow.runtime.compiled_node import compile_steps
from distflow.runtime.node_context import NodeContext
from distflow.runtime.rollout_loop.rollout_services import try_rewards
from distflow.runtime.run_errors import NodeError, output_error, users_place
from distflow.runtime.spec import Spec
from distflow.training.engine import OneRank

MISTAKES = (NameError, AttributeError, ImportError)
"""What a function raises on any batch."""
LENGTHS = (3, 5, 4, 2)
"""Lengths of responses: two to each of two prompts."""


def try_algorithms(config: Config, pipeline: BoundPipeline) -> list[str]:
    """Notes on probable mistakes. Raises UserError for a user's loss, estimator or node that a run
    could not use."""
    if not is_rl(config):
        return []

    notes = []
    with torch.random.fork_rng(devices=()):
        _check_scores(pipeline.nodes)
        for node in filter(takes_policy_loss, pipeline.training_nodes):
            objective: PolicyObjective = node.fn.keywords["objective"]  # type: ignore[attr-defined]
            notes.append(_try_loss(replace(objective, domains={}), POLICY_LOSS))
            for domain, own in objective.domains.items():
                notes.append(_try_loss(own, f"algorithm.domains.{domain}.policy_loss"))

        estimator = inspect.unwrap(innermost(find_adv_est(config.algorithm.adv_estimator).fn))
        for node in pipeline.nodes:
            fn = inspect.unwrap(innermost(node.fn))
            if not is_ours(fn) and not node.contract.is_async:
                _try_node(node, config, is_estimator=fn is estimator)

    return [note for note in notes if note]


def try_users_code(spec: Spec, say: Callable[[str], None]) -> Spec:
    """Call the user's reward functions and workflow on the first rows before anything is loaded.
    say: called with notes and warnings; the spec that is returned has the warnings, for the run's
    records. Raises UserError for what a run could not use."""
    with tried_workflow(spec, partial(load_policy_tokenizer, spec.config)) as trial:
        lines = [*try_rewards(spec), *trial.notes()]
    for line in lines:
        say(line)
    warnings = [line.removeprefix(WARNING) for line in lines if line.startswith(WARNING)]
    return replace(spec, warnings=(*spec.warnings, *warnings))


def _try_loss(objective: PolicyObjective, key: str) -> str:
    """How the gradient depends on advantages, on-policy, if that is probably a mistake."""
    loss = objective.policy_loss
    names = {*objective.reads, *objective.optional, "loss_mask", "advantages", "old_log_probs"}
    batch = None if is_ours(loss.fn) else made_up(names)
    if batch is None:
        return ""

    try:
        raised, lowered = _gradients(objective, batch)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    except MISTAKES as error:
        place = users_place(error) or loss.name
        raise UserError(
            f"{key}: policy loss '{loss.name}' raised {type(error).__name__}: {error} (at {place})"
        ) from error
    except Exception:  # the user's own, see above
        return ""

    if not (raised.isfinite().any() or lowered.isfinite().any()):
        raise UserError(
            f"{key}: policy loss '{loss.name}' gives no finite gradient for ordinary log-probs and "
            "advantages, so that every update would be skipped"
        )

    changes = raised - lowered
    if not changes.any() and "advantages" in inspect.signature(loss.fn).parameters:
        return f"the loss '{loss.name}' takes advantages, but does not depend on them"
    if changes.gt(0).all():
        return (
            f"the loss '{loss.name}' seems to have its sign reversed: it is minimised, and would "
            "lower the probability of tokens with positive advantages and raise others"
        )

    return ""


def _gradients(objective: PolicyObjective, batch: Batch) -> list[Tensor]:
    """The gradient of the log-prob of each token, times the sign of its advantage, for advantages
    and for their negatives."""
    advantages = torch.randn(sum(LENGTHS))
    log_probs = (-torch.rand(batch["loss_mask"].shape)).requires_grad_()
    for column in {"old_log_probs", "prox_log_probs", "rollout_log_probs"} & {*batch.names}:
        batch[column] = log_probs
    tokens = batch.mask(Axis.RESPONSE)

    found = []
    for signed in (advantages, -advantages):
        batch["advantages"] = signed
        outputs = {"log_probs": log_probs, "entropy": torch.rand_like(log_probs).requires_grad_()}
        loss, _ = objective(outputs, batch, objective.counts(batch))
        (gradient,) = torch.autograd.grad(loss, log_probs)
        found.append(gradient[tokens] * batch.pad(advantages, Axis.RESPONSE)[tokens].sign())

    return found


def _try_node(node: BoundNode, config: Config, is_estimator: bool) -> None:
    """A node of the user's that needs nothing but columns, or an estimator, which may need the
    whole batch."""
    contract = node.contract
    takes = {*contract.reserved} - {"config", "reduce"}
    granted = {"batch", "ctx"} if is_estimator else set()
    if contract.engines or contract.services or takes - granted:
        return

    columns = {*contract.reads, *STANDARD_FIELDS.keys() & {*contract.by_keyword}}
    if "batch" in takes:
        columns |= _all_columns() - {*contract.writes}
    batch = made_up(columns)
    if batch is None:
        return

    key = "algorithm.adv_estimator" if is_estimator else "dag.pipeline"
    (step,) = compile_steps([node], {"reduce": OneRank(), "dp_group": OneRank()})
    try:
        written, _ = step(batch, NodeContext(config, 0, None))
    except NodeError as error:
        cause = error.__cause__
        if cause is None or ("ctx" in takes and isinstance(cause, AttributeError)):
            return  # of what the made-up context lacks
        if isinstance(cause, MISTAKES) or users_place(cause) is None:
            raise UserError(f"{key}: {error}") from error
        return
    except UserError:  # due to meaningless numbers
        return

    missing = [name for name in contract.writes if name not in written]
    if is_estimator and missing:
        what = f"returned no {', '.join(missing)}: end it with return {', '.join(contract.writes)}"
        raise UserError(f"{key}: {output_error(node, what)}")


def _check_scores(nodes: Sequence[BoundNode]) -> None:
    """Raises UserError for a node of the user's that replaces what the reward functions gave."""
    scored = any("scores" in node.contract.writes for node in nodes)
    if scored:
        for node in nodes:
            if "token_level_scores" in node.contract.writes and not is_ours(node.fn):
                raise UserError(
                    f"dag.pipeline: node '{node.node_id}' writes token_level_scores, which are the "
                    'scores of the reward functions: declare @node(writes="token_level_rewards"), '
                    "from which advantages are computed"
                )


def made_up(names: Iterable[str]) -> Batch | None:
    """A batch with these columns; None if one cannot be made up."""
    lengths = torch.tensor(LENGTHS)
    sizes = {Axis.SAMPLE: len(LENGTHS), Axis.RESPONSE: sum(LENGTHS)}
    batch = Batch(torch.full_like(lengths, 2), lengths)
    batch["uid"] = [f"{row // 2}-{row % 2}" for row in range(len(LENGTHS))]

    for name in sorted({*names, "response_mask", "valid"} - {"uid"}):
        known = find_field(name)
        if known is None or known.many or known.axis not in sizes:
            return None

        column = _column(name, known.dtype, sizes[known.axis])
        if column is None:
            return None
        batch[name] = column

    return batch


def _all_columns() -> set[str]:
    """The standard columns that can be made up."""
    return {name for name in STANDARD_FIELDS if made_up([name]) is not None}


def _column(name: str, dtype: str, size: int) -> Tensor | None:
    if name in ("group_index", "episode_index"):
        return torch.arange(size) // (2 if name == "group_index" else 1)
    if name.endswith("mask") or name in ("valid", "in_baselines"):
        return torch.ones(size, dtype=getattr(torch, dtype))
    if dtype == "bool":
        return torch.zeros(size, dtype=torch.bool)
    if dtype not in ("float32", "float64"):
        return None

    numbers = torch.rand(size, dtype=getattr(torch, dtype))

    return -numbers if "log_prob" in name else numbers
