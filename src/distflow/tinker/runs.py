"""The runs of all models of a server: their folders, and the samples that they share."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from distflow.errors import UserError
from distflow.observe.writing.run_folder import RunFolderError, claimed
from distflow.tinker.adapter import AdapterConfig
from distflow.tinker.draws import Draw, Draws
from distflow.tinker.messages import protocol
from distflow.tinker.model_run import ModelRun, RunFacts
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

    async def open(self, model_id: str, config: AdapterConfig, step: int) -> ModelRun:
        """The run of a model after so many steps. Raises OSError."""
        told = set[str]()
        before = self._runs.pop(model_id, None)
        if before is not None:
            told = before.told
            before.end("stopped")

        facts = RunFacts(model_id, self._base_model, config, self._decode)
        folder = self._folder / model_id
        opened = self._recording.submit(
            ModelRun, folder, facts, self._draws, self._recording, step, told
        )
        run = self._runs[model_id] = await asyncio.wrap_future(opened)
        return run

    def end(self, model_id: str, status: str) -> None:
        self._runs.pop(model_id).end(status)

    def note_samples(
        self, version: tuple[str | None, int], request: SampleRequest, result: bytes, started: float
    ) -> None:
        """version: the model that drew them, None for the base, and its steps. result: a
        `SampleResponse`. started: in seconds since the epoch."""
        model_id, num_steps = version
        ended = time.time()
        prompt = np.array(request.prompt_ids)
        classes = protocol()
        draws = []
        for sequence in classes.SampleResponse.FromString(result).sequences:
            draw = Draw(
                model_id,
                num_steps,
                request.params.temperature,
                started,
                ended,
                np.append(prompt, np.frombuffer(sequence.tokens, np.int32)),
                len(prompt),
                np.frombuffer(sequence.logprobs, np.float32),
                sequence.stop_reason == classes.STOP_REASON_STOP,
            )
            draws.append(draw)

        self._draws.add(draws)
        run = self._runs.get(model_id or "")
        if run is not None:
            run.drawn(draws)

    def close(self) -> None:
        for model_id in [*self._runs]:
            self.end(model_id, "stopped")
        self._recording.shutdown()
        self._claim.close()
