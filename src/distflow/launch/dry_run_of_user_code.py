"""Calls a user's loss, estimator and nodes on a made-up batch before a model is loaded: a result of
the wrong form, a loss without a gradient, or a name that does not exist, is found in milliseconds
instead of after the first rollout.

Other errors that a function raises are left to the run, since the batch's numbers are meaningless.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

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
from distflow.launch.configured_models import tokenizer_loader
from distflow.launch.select_pipeline import takes_policy_loss
from distflow.pipelines.nodes.workflow_dry_run import tried_workflow
from distflow.rewards.reward_check import WARNING
from distflow.runtime.compiled_node import NodeContext, compile_steps
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
    with torch.random.fork_rng(devices=()):
        _check_scores(pipeline.nodes)
        losses = []
        for node in filter(takes_policy_loss, pipeline.training_nodes):
            losses.append(node.fn.keywords["objective"])  # type: ignore[attr-defined]  # a partial
        parts = [
            {POLICY_LOSS: replace(each, domains={}), **_keys_of(each.domains)} for each in losses
        ]
        found = [
            note for each in parts for key, own in each.items() if (note := _try_loss(own, key))
        ]
        _try_nodes(config, pipeline)
    return found


def try_users_code(spec: Spec, say: Callable[[str], None]) -> Spec:
    """Call the user's reward functions and workflow on the first rows before anything is loaded.
    say: called with notes and warnings; the spec that is returned has the warnings, for the run's
    records. Raises UserError for what a run could not use."""
    with tried_workflow(spec, tokenizer_loader(spec.config)) as trial:
        said = [*try_rewards(spec), *trial.notes()]
    for line in said:
        say(line)
    found = [line.removeprefix(WARNING) for line in said if line.startswith(WARNING)]
    return replace(spec, warnings=(*spec.warnings, *found))


def _keys_of(domains: Mapping[str, PolicyObjective]) -> dict[str, PolicyObjective]:
    return {f"algorithm.domains.{domain}.policy_loss": each for domain, each in domains.items()}


def _try_loss(objective: PolicyObjective, key: str) -> str | None:
    """How the gradient depends on advantages, on-policy, if that is probably a mistake."""
    if is_ours(objective.policy_loss.fn):
        return None
    batch = made_up(
        {*objective.reads, *objective.optional, "loss_mask", "advantages", "old_log_probs"}
    )
    if batch is None:
        return None
    shape = batch["loss_mask"].shape
    name = objective.policy_loss.name
    advantages = torch.randn(sum(LENGTHS))
    log_probs = (-torch.rand(shape)).requires_grad_()
    gradients = list[Tensor]()
    for column in {"old_log_probs", "prox_log_probs", "rollout_log_probs"} & {*batch.names}:
        batch[column] = log_probs
    try:
        for signed in (advantages, -advantages):
            batch["advantages"] = signed
            outputs = {"log_probs": log_probs, "entropy": torch.rand(shape).requires_grad_()}
            loss, _ = objective(outputs, batch, objective.counts(batch))
            gradients += torch.autograd.grad(loss, log_probs)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    except MISTAKES as error:
        what = (
            f"policy loss '{name}' raised {type(error).__name__}: {error} (at "
            f"{users_place(error) or name})"
        )
        raise UserError(f"{key}: {what}") from error
    except Exception:  # the user's own, see above
        return None
    tokens = batch.mask(Axis.RESPONSE)
    if not any(gradient[tokens].isfinite().any() for gradient in gradients):
        what = (
            "no finite gradient for ordinary log-probs and advantages, so that every update would "
            "be skipped"
        )
        raise UserError(f"{key}: policy loss '{name}' gives {what}")
    changes = gradients[0] - gradients[1]
    if not changes.any() and "advantages" in inspect.signature(objective.policy_loss.fn).parameters:
        return f"the loss '{name}' takes advantages, but does not depend on them"
    if (changes * batch.pad(advantages, Axis.RESPONSE))[tokens].gt(0).all():
        what = (
            "it is minimised, and would lower the probability of tokens with positive advantages "
            "and raise others"
        )
        return f"the loss '{name}' seems to have its sign reversed: {what}"
    return None


def _try_nodes(config: Config, pipeline: BoundPipeline) -> None:
    """The user's estimator and nodes, but for those that need more than columns."""
    estimator = inspect.unwrap(innermost(find_adv_est(config.algorithm.adv_estimator).fn))
    for node in pipeline.nodes:
        fn = inspect.unwrap(innermost(node.fn))
        contract = node.contract
        more = {*contract.reserved} & {"batch", "ctx"} if fn is estimator else set()
        needs_more = (
            contract.engines
            or contract.services
            or {*contract.reserved} - {"config", "reduce"} - more
        )
        if is_ours(fn) or contract.is_async or needs_more:
            continue
        named = {
            *contract.reads,
            *STANDARD_FIELDS.keys() & {*contract.by_keyword},
        }
        batch = made_up(named | (_all_columns() - {*contract.writes} if "batch" in more else set()))
        if batch is None:
            continue
        (step,) = compile_steps([node], {"reduce": OneRank(), "dp_group": OneRank()})
        try:
            written, _ = step(batch, NodeContext(config, 0, None))
        except NodeError as error:
            cause = error.__cause__
            # of what the made-up context lacks
            by_ctx = "ctx" in more and isinstance(cause, AttributeError)
            if (isinstance(cause, MISTAKES) and not by_ctx) or (
                cause is not None and users_place(cause) is None
            ):
                key = "algorithm.adv_estimator" if fn is estimator else "dag.pipeline"
                raise UserError(f"{key}: {error}") from error
        except UserError:  # due to meaningless numbers
            continue
        else:
            if fn is estimator and (
                missing := [name for name in contract.writes if name not in written]
            ):
                what = (
                    f"returned no {', '.join(missing)}: end it with return "
                    f"{', '.join(contract.writes)}"
                )
                raise UserError(f"algorithm.adv_estimator: {output_error(node, what)}")


def _check_scores(nodes: Sequence[BoundNode]) -> None:
    """Raises UserError for a node of the user's that replaces what the reward functions gave."""
    scored = any("scores" in node.contract.writes for node in nodes)
    for node in nodes if scored else ():
        if "token_level_scores" in node.contract.writes and not is_ours(node.fn):
            raise UserError(
                f"dag.pipeline: node '{node.node_id}' writes token_level_scores, which are the "
                "scores of the reward "
                'functions: declare @node(writes="token_level_rewards"), from which advantages are '
                "computed"
            )


def made_up(names: Iterable[str]) -> Batch | None:
    """A batch with these columns; None if one cannot be made up."""
    lengths = torch.tensor(LENGTHS)
    sizes = {Axis.SAMPLE: len(LENGTHS), Axis.RESPONSE: sum(LENGTHS)}
    batch = Batch(torch.full_like(lengths, 2), lengths)
    batch["uid"] = [f"{row // 2}-{row % 2}" for row in range(len(LENGTHS))]
    for name in sorted({*names, "response_mask", "valid"} - {"uid"}):
        known = find_field(name)
        column = (
            _column(name, known.dtype, sizes[known.axis]) if known and known.axis in sizes else None
        )
        if column is None:
            return None
        batch[name] = column
    return batch


def _all_columns() -> set[str]:
    """The standard columns that can be made up."""
    sized = {
        name: known.dtype
        for name, known in STANDARD_FIELDS.items()
        if known.axis in (Axis.SAMPLE, Axis.RESPONSE)
    }
    return {name for name, dtype in sized.items() if _column(name, dtype, 1) is not None}


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
