"""Writes what a client trained on into the run's folder of its model."""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from distflow import __version__
from distflow.observe.sample_files import DROPPED
from distflow.observe.writing.run_folder import RunFolder, Span, claimed
from distflow.scheduling.ledger import Ledger, Mark, ledger_id, timeline
from distflow.tinker.data_checks import TrainedDatum
from distflow.tinker.draws import Draw

_UNUSED = "no step trained on it"
_MOST_UNUSED = 4096


@dataclass(frozen=True)
class RunFacts:
    """What describes a model's run."""

    model_id: str
    base_model: str
    config: Mapping[str, Any]
    """Of the adapter."""
    decode: Callable[[Sequence[int]], str]


class RunWriter:
    """Used by one thread. Its methods raise OSError for a disk that is full."""

    def __init__(self, path: Path, facts: RunFacts, step: int) -> None:
        """Opens the folder after so many steps: records of later ones no longer count."""
        self._facts = facts
        self._step = step
        self._unused: dict[object, tuple[Draw, int]] = {}
        """Samples that nothing was trained on yet, by what is equal in them; and the step that they
        were drawn in."""

        self._claim = ExitStack()
        self._claim.enter_context(claimed(path))
        ledger = path / "ledger.jsonl"
        mark = _mark_after(ledger, step)
        self._ledger = Ledger(ledger, mark)
        self._folder = RunFolder(path, self._ledger.restart, None if mark is None else step)
        self._num_groups = sum(record["kind"] == "issued" for _, record in timeline(ledger))
        self._folder.write_json(
            "run.json",
            {
                "distflow": __version__,
                "python": platform.python_version(),
                "pipeline": "tinker",
                "model": facts.base_model,
                "data": "what a client of the Tinker API sends",
                "title": facts.model_id,
            },
        )
        config = {"tinker": dict(facts.config), "base_model": facts.base_model}
        self._folder.write_text("config.yaml", yaml.safe_dump(config))

    def event(self, kind: str, message: str, step: int) -> None:
        self._folder.event(kind, message, step=step)

    def drawn(self, draws: Sequence[Draw], span: Span) -> None:
        """Keep samples, until a step trains on them or two have not. span: in which they were
        drawn."""
        self._folder.span("engine", span, self._step + 1)
        for draw in draws[:_MOST_UNUSED]:
            self._unused[draw.key] = (draw, self._step)

    def step(
        self,
        step: int,
        data: Sequence[TrainedDatum],
        values: Mapping[str, float],
        spans: Sequence[Span],
    ) -> None:
        """spans: of the training, since the last step."""
        for span in spans:
            self._folder.span("training", span, step)

        self._step = step
        for datum in data:
            for draw in datum.draws:
                self._unused.pop(draw.key, None)

        rows = list[dict[str, object]]()
        group_ids = []
        for alike in _by_prompt(data).values():
            group_id = self._begin_group([draw for each in alike for draw in each.draws])
            group_ids.append(group_id)
            for number, datum in enumerate(alike):
                rows.append({"uid": f"{group_id}-{number}", **self._trained_row(datum)})

        num_tokens = sum(len(each.token_ids) for each in data)
        self._ledger.append("consumed", step=step, group_ids=group_ids, tokens=num_tokens)
        self._ledger.append("version", step=step, weights=step)
        if rows:
            self._folder.samples(step, rows)
        self._drop_unused(step - 2)
        self._folder.metrics(step, "train", values)

    def close(self, status: str) -> None:
        self._drop_unused(self._step)
        self._folder.event("end", f"the run {status}", step=self._step, status=status)
        with self._claim, self._ledger:
            self._folder.close()

    def _begin_group(self, draws: Sequence[Draw]) -> int:
        """Note a group whose samples were drawn so; none if they came from elsewhere."""
        self._num_groups += 1
        group_id = self._num_groups
        own = [each.group for each in draws if each.group.model_id == self._facts.model_id]
        version = min((each.version for each in own), default=None)
        now = time.time()
        started = min((each.started for each in own), default=now)
        ended = max((each.ended for each in own), default=now)
        num_tokens = sum(len(each.log_probs) for each in draws)

        self._ledger.append("issued", group_id=group_id, version=version, attempt=1, t=started)
        self._ledger.append(
            "complete", group_id=group_id, version=version, tokens=num_tokens, t=ended
        )
        return group_id

    def _drop_unused(self, last: int) -> None:
        """Write the samples of this step and earlier ones, which nothing was trained on."""
        rows = list[dict[str, object]]()
        groups = dict[object, int]()
        for draw in [each for each, drawn_in in self._unused.values() if drawn_in <= last]:
            del self._unused[draw.key]
            if draw.group not in groups:
                group_id = self._begin_group([draw])
                groups[draw.group] = group_id
                self._ledger.append("dropped", group_id=group_id, reason=_UNUSED)
            uid = f"{groups[draw.group]}-{len(rows)}"
            rows.append({"uid": uid, "dropped": _UNUSED, **self._row(draw.token_ids, [draw])})

        if rows:
            self._folder.samples(self._step + 1, rows, split=DROPPED)

    def _trained_row(self, datum: TrainedDatum) -> dict[str, object]:
        factors = datum.factors[datum.prompt_length - 1 :]
        counting = factors[factors != 0.0]
        row = self._row(datum.token_ids, datum.draws, datum.prompt_length)
        if datum.sent is not None:
            row["advantage"] = float(counting.mean()) if len(counting) else 0.0
        row["masked"] = 1.0 - len(counting) / max(len(factors), 1)
        return row

    def _row(
        self, token_ids: Any, draws: Sequence[Draw], prompt_length: int | None = None
    ) -> dict[str, object]:
        first = draws[0].prompt_length if prompt_length is None else prompt_length
        ended = ""
        if draws:
            ended = "stop" if draws[-1].stopped else "length"
        return {
            "prompt": self._facts.decode(token_ids[:first].tolist()),
            "response": self._facts.decode(token_ids[first:].tolist()),
            "prompt_length": first,
            "response_length": len(token_ids) - first,
            "finish_reason": ended,
            "versions": sorted({each.group.version for each in draws}),
        }


def _by_prompt(data: Sequence[TrainedDatum]) -> Mapping[bytes, list[TrainedDatum]]:
    groups = dict[bytes, list[TrainedDatum]]()
    for datum in data:
        prompt = datum.token_ids[: datum.prompt_length]
        groups.setdefault(np.asarray(prompt).tobytes(), []).append(datum)
    return groups


def _mark_after(path: Path, step: int) -> Mark | None:
    """Where the records of later steps begin; None for a new ledger."""
    known = ledger_id(path)
    if known is None:
        return None

    begin = None
    for offset, record in timeline(path):
        if begin is None:
            begin = offset
        if record["kind"] == "version":
            if record["step"] > step:
                return Mark(known, begin, 0)
            begin = None

    return Mark(known, path.stat().st_size, 0)
