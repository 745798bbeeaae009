"""What a client does with one model, as a run: metrics of its steps, its samples, and its mistakes,
each told once."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from distflow.observe.report.activity import TRAINING
from distflow.observe.writing.run_folder import Span
from distflow.tinker.data_checks import TrainedDatum, mistake_in, mistakes_of_step, trained_datum
from distflow.tinker.draws import Draw, Draws
from distflow.tinker.losses import LOSSES
from distflow.tinker.messages import PassRequest
from distflow.tinker.run_writer import RunFacts, RunWriter

Metrics = dict[str, float]
_log = logging.getLogger(__name__)


class ModelRun:
    """Called by whoever has the model's turn. Its files are written by another thread."""

    def __init__(self, path: Path, facts: RunFacts, draws: Draws, recording: Executor) -> None:
        """path: of the run's folder. recording: one thread."""
        self._path = path
        self._facts = facts
        self._draws = draws
        self._recording = recording
        self._writer: RunWriter | None = None
        self._data: list[TrainedDatum] = []
        self._spans: list[Span] = []
        """Of its passes and steps, not yet written."""
        self._sums = defaultdict[str, float](float)
        """Of the passes since the last step: losses, clipped tokens, seconds by phase."""
        self._named = set[str]()
        """The mistakes that were told."""
        self._stepped_at = time.time()

    def begin(self, step: int) -> Future[None]:
        """Open the folder after so many steps. Done when it is there, or with an OSError."""
        self._data = []
        return self._recording.submit(self._open, step)

    def _open(self, step: int) -> None:
        if self._writer is not None:
            self._writer.close("stopped")
        self._writer = RunWriter(self._path, self._facts, step)

    def timed(self, phase: str, function: Callable[..., Any], *arguments: object) -> Any:
        """The function's result. Its time is a phase of the step."""
        started = time.time()
        result = function(*arguments)
        ended = time.time()
        self._sums[f"timing_s/{phase}"] += ended - started
        self._spans.append(Span(started, ended, "phase", phase))
        return result

    def drawn(self, draws: Sequence[Draw]) -> None:
        """Samples of a version of this model."""
        group = draws[0].group
        decoded = Span(group.started, group.ended, "decode", TRAINING, version=group.version)
        self._write(lambda writer: writer.drawn(draws, decoded))

    def passed(
        self, request: PassRequest, log_probs: Sequence[Tensor], metrics: Metrics, num_steps: int
    ) -> Metrics:
        """The metrics of a pass, with the number of data that have a mistake."""
        if request.forward_only:
            return metrics

        found = defaultdict[str, float](float)
        for number, (datum, own) in enumerate(zip(request.data, log_probs, strict=True)):
            trained = trained_datum(datum, own, self._draws)
            self._data.append(trained)
            self._sums["clipped"] += _num_clipped(request, trained)
            mistake = mistake_in(trained, self._facts.model_id, num_steps)
            if mistake is not None:
                name, sentence = mistake
                found[f"warning/{name}:sum"] += 1
                self._tell(name, num_steps + 1, f"datum {number}: {sentence}")

        self._sums["loss"] += metrics["loss:sum"]
        return {**metrics, **found}

    def stepped(self, step: int, learning_rate: float, metrics: Metrics) -> Metrics:
        """The metrics of a step, counted from 1, with the mistakes in what it was made of."""
        data = self._data
        sums = self._sums
        self._data = []
        self._sums = defaultdict(float)
        now = time.time()
        sums["timing_s/step"] = now - self._stepped_at
        self._stepped_at = now

        norm = metrics["grad_norm"]
        mistakes = mistakes_of_step(data, learning_rate, norm)
        for name, sentence in mistakes.items():
            self._tell(name, step, sentence)

        values = _metrics(data, sums, self._facts.model_id, step)
        role = "sft" if "sft/loss" in values else "actor"
        values[f"{role}/grad_norm"] = norm
        values[f"{role}/lr"] = learning_rate
        spans = self._spans
        self._spans = []
        self._write(lambda writer: writer.step(step, data, values, spans))
        return {**metrics, **{f"warning/{name}": 1.0 for name in mistakes}}

    def end(self, status: str) -> None:
        """status: "finished" or "stopped"."""
        self._write(lambda writer: writer.close(status))

    def _tell(self, name: str, step: int, sentence: str) -> None:
        if name in self._named:
            return
        self._named.add(name)
        _log.warning("%s, step %d: %s [%s]", self._facts.model_id, step, sentence, name)
        self._write(lambda writer: writer.event("warning", f"{sentence} [{name}]", step))

    def _write(self, write: Callable[[RunWriter], None]) -> None:
        def guarded() -> None:
            try:
                if self._writer is not None:
                    write(self._writer)
            except OSError as error:  # a full disk ends no training
                _log.warning("%s: %s", self._facts.model_id, error)

        # an error of ours is raised in the callback, which logs it
        self._recording.submit(guarded).add_done_callback(Future.result)


def _num_clipped(request: PassRequest, datum: TrainedDatum) -> int:
    """Tokens whose ratio is outside of the bounds of a loss that clips."""
    settings = {**LOSSES[request.loss].settings, **request.settings}
    if datum.sent is None or "clip_low_threshold" not in settings:
        return 0

    ratios = np.exp(datum.log_ratios())
    is_low = ratios < settings["clip_low_threshold"]
    is_high = ratios > settings["clip_high_threshold"]
    return int((is_low | is_high).sum())


def _metrics(
    data: Sequence[TrainedDatum], sums: Mapping[str, float], model_id: str, step: int
) -> Metrics:
    """Of a step, by the names of `observe/metrics.toml`."""
    values = {name: value for name, value in sums.items() if name.startswith("timing_s/")}
    seconds = values["timing_s/step"]
    values["timing_s/other"] = 2 * seconds - sum(values.values())
    if not data:
        return values

    num_tokens = sum(len(each.token_ids) for each in data)
    prompts = [each.prompt_length for each in data]
    responses = [len(each.token_ids) - each.prompt_length for each in data]
    values["throughput/tokens_per_s"] = num_tokens / max(seconds, 1e-9)
    values["rollout/avg_prompt_length"] = float(np.mean(prompts))
    values["rollout/avg_response_length"] = float(np.mean(responses))
    values["rollout/max_response_length"] = float(max(responses))

    log_ratios = np.concatenate([each.log_ratios() for each in data])
    total = float(sum(each.factors.sum() for each in data))
    if all(each.sent is None and each.factors.min() >= 0.0 for each in data) and total:
        values["sft/loss"] = sums["loss"] / total
    else:
        values["actor/loss"] = sums["loss"]
    if len(log_ratios):
        values["actor/ppo_kl"] = -float(log_ratios.mean())
        values["actor/log_ratio_abs"] = float(np.abs(log_ratios).mean())
        values["actor/pg_clipfrac"] = sums["clipped"] / len(log_ratios)

    draws = [draw for each in data for draw in each.draws]
    ages = [step - 1 - each.group.version for each in draws if each.group.model_id == model_id]
    if draws:
        values["rollout/truncated"] = float(np.mean([not each.stopped for each in draws]))
    if ages:
        values["async/version_diff/mean"] = float(np.mean(ages))
        values["async/version_diff/max"] = float(max(ages))
    return values
