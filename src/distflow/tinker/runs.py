"""The runs of all models of a server: their folders, and the samples that they share."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np

from distflow.errors import UserError
from distflow.observe.writing.run_folder import RunFolderError, claimed
from distflow.tinker.adapter import AdapterConfig
from distflow.tinker.draws import Draw, Draws, SampleGroup
from distflow.tinker.messages import protocol
from distflow.tinker.model_run import ModelRun
from distflow.tinker.run_writer import RunFacts
from distflow.tinker.sampler import SampleRequest

SESSIONS = "sessions"


class Runs:
    """Owns the server's folder, so that no other server writes there."""

    def __init__(
        self, folder: Path, base_model: str, decode: Callable[[Sequence[int]], str]
    ) -> None:
        """Raises UserError if another server has the folder."""
        self._folder = folder
        self._base_model = base_model
        self._decode = decode
        self._draws = Draws()
        self._runs: dict[str, ModelRun] = {}
        self._recording = ThreadPoolExecutor(1, "tinker-recording")
        self._claim = ExitStack()
        try:
            self._claim.enter_context(claimed(folder / SESSIONS))
        except RunFolderError as error:
            raise UserError(f"{error}; --folder {folder} is of one server at a time") from error

    def add(self, model_id: str, config: AdapterConfig) -> ModelRun:
        facts = RunFacts(model_id, self._base_model, asdict(config), self._decode)
        run = ModelRun(self._folder / model_id, facts, self._draws, self._recording)
        self._runs[model_id] = run
        return run

    def end(self, model_id: str, status: str) -> None:
        self._runs.pop(model_id).end(status)

    def note_samples(
        self, version: tuple[str, int] | None, request: SampleRequest, result: bytes, started: float
    ) -> None:
        """version: the model that drew them and its steps, None for the base. result: a
        `SampleResponse`. started: in seconds since the epoch."""
        model_id, num_steps = version or (None, 0)
        group = SampleGroup(model_id, num_steps, request.params.temperature, started, time.time())
        classes = protocol()
        draws = []
        for sequence in classes.SampleResponse.FromString(result).sequences:
            response = np.frombuffer(sequence.tokens, np.int32)
            draws.append(
                Draw(
                    group,
                    np.append(np.array(request.prompt_ids), response),
                    len(request.prompt_ids),
                    np.frombuffer(sequence.logprobs, np.float32),
                    sequence.stop_reason == classes.STOP_REASON_STOP,
                )
            )

        self._draws.add(draws)
        run = self._runs.get(model_id or "")
        if run is not None:
            run.drawn(draws)

    def close(self) -> None:
        for model_id in [*self._runs]:
            self.end(model_id, "stopped")
        self._recording.shutdown()
        self._claim.close()
