"""What a client does with one model, as a run: metrics of its steps, its samples, and its mistakes,
each told once."""

import logging
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import yaml
from torch import Tensor

from distflow import __version__
from distflow.observe.report.activity import TRAINING
from distflow.observe.sample_files import DROPPED
from distflow.observe.writing.run_folder import RunFolder, Span, claimed
from distflow.scheduling.ledger import Ledger, Mark, ledger_id, timeline
from distflow.tinker.adapter import AdapterConfig
from distflow.tinker.data_checks import TrainedDatum, mistake_in, mistakes_of_step, trained_datum
from distflow.tinker.draws import Draw, Draws
from distflow.tinker.losses import LOSSES
from distflow.tinker.messages import PassRequest

Metrics = dict[str, float]
T = TypeVar("T")
Item = TypeVar("Item", TrainedDatum, Draw)
_UNUSED = "no step trained on it"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFacts:
    """What describes a model's run."""

    model_id: str
    base_model: str
    config: AdapterConfig
    decode: Callable[[Sequence[int]], str]


class ModelRun:
    """Called by whoever has the model's turn; `recording`, a thread, makes it and writes its
    files."""

    def __init__(
        self,
        path: Path,
        facts: RunFacts,
        draws: Draws,
        recording: Executor,
        step: int,
        told: set[str],
    ) -> None:
        """Opens the folder after so many steps: records of later ones no longer count. told: the
        names of mistakes that were told. Raises OSError."""
        self.told = told
        self._facts = facts
        self._draws = draws
        self._recording = recording
        self._data: list[TrainedDatum] = []
        """Of the passes since the last step, like the sums of losses, clipped tokens and seconds by
        phase."""
        self._sums = defaultdict[str, float](float)
        self._stepped_at = time.time()
        self._step = step
        """The last that was written."""
        self._unused: dict[bytes, tuple[Draw, int]] = {}
        """Samples that nothing was trained on yet, by their tokens, with the step they began in."""

        self._claim = ExitStack()
        self._claim.enter_context(claimed(path))
        ledger = path / "ledger.jsonl"
        mark = _mark_after(ledger, step)
        self._ledger = Ledger(ledger, mark)
        self._folder = RunFolder(path, self._ledger.restart, None if mark is None else step)
        self._num_groups = sum(record["kind"] == "issued" for _, record in timeline(ledger))
        about = {
            "distflow": __version__,
            "python": platform.python_version(),
            "pipeline": "tinker",
            "model": facts.base_model,
            "data": "what a client of the Tinker API sends",
            "title": facts.model_id,
        }
        self._folder.write_json("run.json", about)
        config = {"tinker": asdict(facts.config), "base_model": facts.base_model}
        self._folder.write_text("config.yaml", yaml.safe_dump(config))

    def timed(self, phase: str, function: Callable[..., T], *arguments: object) -> T:
        """The function's result. Its time is a phase of the step."""
        started = time.time()
        result = function(*arguments)
        ended = time.time()
        self._sums[f"timing_s/{phase}"] += ended - started
        self._folder.span("training", Span(started, ended, "phase", phase), self._step + 1)
        return result

    def drawn(self, draws: Sequence[Draw]) -> None:
        """Samples of a version of this model."""
        first = draws[0]
        span = Span(first.started, first.ended, "decode", TRAINING, version=first.version)
        self._folder.span("engine", span, self._step + 1)
        self._later(self._keep, draws)

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
        self._later(self._write_step, step, data, values)
        return {**metrics, **{f"warning/{name}": 1.0 for name in mistakes}}

    def end(self, status: str) -> Future[None]:
        """status: "finished" or "stopped"."""
        return self._later(self._close, status)

    def _tell(self, name: str, step: int, sentence: str) -> None:
        if name not in self.told:
            self.told.add(name)
            _log.warning("%s, step %d: %s [%s]", self._facts.model_id, step, sentence, name)
            self._folder.event("warning", f"{sentence} [{name}]", step=step)

    def _later(self, write: Callable[..., None], *arguments: object) -> Future[None]:
        def guarded() -> None:
            try:
                write(*arguments)
            except OSError as error:  # a full disk ends no training
                _log.warning("%s: %s", self._facts.model_id, error)

        submitted = self._recording.submit(guarded)
        # an error of ours is raised in the callback, which logs it
        submitted.add_done_callback(Future.result)
        return submitted

    def _keep(self, draws: Sequence[Draw]) -> None:
        """Until a step trains on them, or two have not."""
        for draw in draws:
            self._unused[draw.token_ids.tobytes()] = (draw, self._step)

    def _write_step(self, step: int, data: Sequence[TrainedDatum], values: Metrics) -> None:
        self._step = step
        for datum in data:
            for draw in datum.draws:
                self._unused.pop(draw.token_ids.tobytes(), None)

        rows = []
        group_ids = []
        for alike in _by_prompt(data):
            group_id = self._begin_group(alike)
            group_ids.append(group_id)
            for number, datum in enumerate(alike):
                row = self._row(f"{group_id}-{number}", datum)
                rows.append({**row, **_training_of(datum)})

        num_tokens = sum(len(each.token_ids) for each in data)
        self._ledger.append("consumed", step=step, group_ids=group_ids, tokens=num_tokens)
        self._ledger.append("version", step=step, weights=step)
        if rows:
            self._folder.samples(step, rows)
        self._drop_unused(step - 2)
        self._folder.metrics(step, "train", values)

    def _drop_unused(self, last: int) -> None:
        """Write the samples of this step and earlier ones, which nothing was trained on."""
        old = [draw for draw, began in self._unused.values() if began <= last]
        rows = []
        for alike in _by_prompt(old):
            group_id = self._begin_group(alike)
            self._ledger.append("dropped", group_id=group_id, reason=_UNUSED)
            for number, draw in enumerate(alike):
                del self._unused[draw.token_ids.tobytes()]
                rows.append({**self._row(f"{group_id}-{number}", draw), "dropped": _UNUSED})
        if rows:
            self._folder.samples(self._step + 1, rows, split=DROPPED)

    def _close(self, status: str) -> None:
        self._drop_unused(self._step)
        self._folder.event("end", f"the run {status}", step=self._step, status=status)
        with self._claim, self._ledger:
            self._folder.close()

    def _begin_group(self, alike: Sequence[TrainedDatum | Draw]) -> int:
        """Note when the samples of a group were drawn; now, if they came from elsewhere."""
        self._num_groups += 1
        draws = [draw for each in alike for draw in each.draws]
        own = [draw for draw in draws if draw.model_id == self._facts.model_id]
        now = time.time()
        common = {
            "group_id": self._num_groups,
            "version": min((draw.version for draw in own), default=None),
        }
        started = min((draw.started for draw in own), default=now)
        ended = max((draw.ended for draw in own), default=now)
        num_tokens = sum(len(draw.log_probs) for draw in draws)
        self._ledger.append("issued", **common, attempt=1, t=started)
        self._ledger.append("complete", **common, tokens=num_tokens, t=ended)
        return self._num_groups

    def _row(self, uid: str, item: TrainedDatum | Draw) -> dict[str, object]:
        first = item.prompt_length
        ended = ""
        if item.draws:
            ended = "stop" if item.draws[-1].stopped else "length"
        return {
            "uid": uid,
            "prompt": self._facts.decode(item.token_ids[:first].tolist()),
            "response": self._facts.decode(item.token_ids[first:].tolist()),
            "prompt_length": first,
            "response_length": len(item.token_ids) - first,
            "finish_reason": ended,
            "versions": sorted({draw.version for draw in item.draws}),
        }


def _training_of(datum: TrainedDatum) -> Mapping[str, float]:
    """What a row has of a datum beside its text."""
    factors = datum.factors[datum.prompt_length - 1 :]
    counting = factors[factors != 0.0]
    found = {"masked": 1.0 - len(counting) / max(len(factors), 1)}
    if datum.sent is not None:
        found["advantage"] = float(counting.mean()) if len(counting) else 0.0
    return found


def _by_prompt(items: Sequence[Item]) -> list[list[Item]]:
    groups: dict[bytes, list[Item]] = {}
    for item in items:
        prompt = item.token_ids[: item.prompt_length].tobytes()
        groups.setdefault(prompt, []).append(item)
    return list(groups.values())


def _num_clipped(request: PassRequest, datum: TrainedDatum) -> int:
    """Tokens whose ratio is outside of the bounds of a loss that clips."""
    settings = {**LOSSES[request.loss].settings, **request.settings}
    if "clip_low_threshold" not in settings:
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

    total = float(sum(each.factors.sum() for each in data))
    if all(each.sent is None and each.factors.min() >= 0.0 for each in data) and total:
        values["sft/loss"] = sums["loss"] / total
    else:
        values["actor/loss"] = sums["loss"]

    log_ratios = np.concatenate([each.log_ratios() for each in data])
    if len(log_ratios):
        values["actor/ppo_kl"] = -float(log_ratios.mean())
        values["actor/log_ratio_abs"] = float(np.abs(log_ratios).mean())
        values["actor/pg_clipfrac"] = sums["clipped"] / len(log_ratios)

    draws = [draw for each in data for draw in each.draws]
    if draws:
        values["rollout/truncated"] = float(np.mean([not draw.stopped for draw in draws]))
    ages = [step - 1 - draw.version for draw in draws if draw.model_id == model_id]
    if ages:
        values["async/version_diff/mean"] = float(np.mean(ages))
        values["async/version_diff/max"] = float(max(ages))
    return values


def _mark_after(path: Path, step: int) -> Mark | None:
    """Where the records of later steps begin; None for a new ledger."""
    known = ledger_id(path)
    if known is None:
        return None

    begin = 0
    for offset, record in timeline(path):
        begin = begin or offset
        if record["kind"] == "version":
            if record["step"] > step:
                return Mark(known, begin, 0)
            begin = 0
    return Mark(known, path.stat().st_size, 0)
