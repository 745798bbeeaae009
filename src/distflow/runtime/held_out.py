"""Held-out prompts, answered by all workers that have an engine; or the held-out loss, where none has."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from distflow.config.errors import UserError
from distflow.rewards.tally import VALIDATION
from distflow.runtime import faults
from distflow.runtime.error_share import warn_of_errors
from distflow.runtime.ports import Ports
from distflow.runtime.recorder import Recorder
from distflow.runtime.residence import Residence
from distflow.runtime.resources import Resources
from distflow.runtime.session import Session
from distflow.runtime.spec import Spec
from distflow.runtime.validation import Answers, Validator, held_out_loss


class HeldOut:
    """A worker's part in the validation. step: of the last one."""

    def __init__(
        self,
        spec: Spec,
        resources: Resources,
        ports: Ports,
        session: Session,
        validator: Validator,
        recorder: Recorder,
        residence: Residence,
        step: int,
    ) -> None:
        """step: that the run goes on from."""
        self._spec, self._resources, self._ports, self._session = spec, resources, ports, session
        self._validator, self._recorder, self._residence = validator, recorder, residence
        self.step = step

    def validate(self, step: int) -> dict[str, float]:
        """The metrics, on the rank that leads; none where there is nothing to validate on."""
        self.step = step
        if not self._spec.validation:
            return {}
        with self._recorder.phases("eval"):
            if not self._spec.plan.generates:
                if self._resources.actor is None:
                    return {}
                self._residence.only(("actor",))
                metrics = held_out_loss(self._spec.validation, self._resources.actor)
            elif answers := self._answers(step):
                metrics = Answers.joined(answers).metrics()
            else:
                return {}
        if self._spec.options.keep_best is not None:
            score(self._spec.options.keep_best, metrics)
        with self._recorder.phases("record"):
            self._recorder.validation(step, metrics, ())
        return metrics

    def answer(self, step: int, part: int, num_parts: int) -> Answers:
        """Answer every `num_parts`-th held-out prompt from number `part` on; on any thread."""
        faults.reach("validate")
        answers = self._session.call(self._validator.run(step, part, num_parts))
        self._recorder.validation(step, {}, answers.rows)
        warn_of_errors(self._validator.plane.tally.take(VALIDATION), partial(self._recorder.note, "warning"))
        return replace(answers, rows=[])

    def _answers(self, step: int) -> Sequence[Answers]:
        """Of all workers that have an engine. None where others have them, and another rank asks."""
        self._residence.only(())
        if self._resources.rollout is None:
            return self._ports.validate(step)
        ranks = self._ports.collective
        return ranks.gather(self.answer(step, ranks.rank, ranks.size))


def score(name: str, validated: Mapping[str, float]) -> float:
    """What `keep_best` compares, higher being better; of a loss its negative. Raises UserError for an unknown name."""
    if name not in validated:
        raise UserError(
            f"trainer.keep_best_metric={name} is nothing that the validation measures; "
            f"choose one of {', '.join(sorted(validated))}"
        )
    return -validated[name] if name.endswith("loss") else validated[name]
