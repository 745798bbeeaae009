"""`distflow eval`: the validation of a run, without a run."""

from distflow.config.errors import UserError
from distflow.flow.ticket import Version
from distflow.runtime.context import Contexts
from distflow.runtime.experience import ExperiencePlane
from distflow.runtime.parts import Parts
from distflow.runtime.session import Session
from distflow.runtime.validation import Validator, held_out_loss
from distflow.training.collective import OneRank


def evaluate(parts: Parts) -> dict[str, float]:
    """The metrics of `data.val_files` under the model as it is. Raises UserError where no file is named."""
    if not parts.validation:
        raise UserError("nothing to evaluate on: set data.val_files")
    if parts.engines.rollout is None:
        return held_out_loss(parts.validation, parts.engines.actor)
    contexts = Contexts(parts, _no_update, {})
    engines = parts.engines.by_name()
    plane = ExperiencePlane(
        parts.program.experience, engines, contexts.training, OneRank(), parts.config.reward.timeout_s
    )
    with Session(parts) as session:
        session.publish(Version(0, 0), at_start=True)
        metrics, _ = session.call(Validator(parts.validation, contexts, plane).run(0))
    return metrics


def _no_update(*arguments: object) -> None:
    raise AssertionError("evaluation updates nothing")
