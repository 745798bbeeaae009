"""The models that clients train, each by numbered requests that are carried out in order and again
after a kill, and samplers of saved versions."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from distflow.rollout.engine import Stream
from distflow.tinker.adapter import AdapterConfig, StepOptions, read_state
from distflow.tinker.checkpoints import EXTERNAL, SAMPLING, TRAINING, Checkpoints, write
from distflow.tinker.futures import Futures, Result, Turns, Work
from distflow.tinker.journal import Journal
from distflow.tinker.messages import (
    BadRequest,
    Json,
    WorkerLost,
    digest_of,
    parse_pass,
    read_json,
    read_pass,
    write_pass,
)
from distflow.tinker.model_run import ModelRun
from distflow.tinker.runs import SESSIONS, Runs
from distflow.tinker.sampler import read_sample
from distflow.tinker.sessions import Sessions

_PASS: Final = "forward_backward"
_LONG_S = 60.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseModel:
    """What the server serves, and how its parts are made."""

    name: str
    """For clients."""
    folder: str
    """Of its tokenizer, for clients on this machine."""
    kind: str
    """Its architecture."""
    context: int
    """In tokens."""
    stop_ids: Sequence[int]
    make_adapter: Callable[[str, AdapterConfig], Any]
    """A `TrainedAdapter`, or one that is divided over workers."""
    make_samplers: Callable[[Executor], Any]
    """`Samplers`, or those of workers."""
    decode: Callable[[Sequence[int]], str]
    """Tokens as text."""


@dataclass
class _Model:
    name: str
    adapter: Any
    """Of `BaseModel.make_adapter`."""
    run: ModelRun
    journal: Journal
    turns: Turns
    has_gradients: bool = False
    """They are not in a saved state."""


class Service:
    """Its coroutines run on one event loop; models are computed on one thread."""

    def __init__(
        self, base: BaseModel, folder: Path, on_loss: Callable[[WorkerLost], None]
    ) -> None:
        """folder: of the checkpoints and runs; checkpoints in it are there for new clients.
        on_loss: called when a worker was found dead. Raises UserError if another server has the
        folder."""
        self.base = base
        self._runs = Runs(folder, base.name, base.decode)
        self.futures = Futures(on_loss)
        self.checkpoints = Checkpoints(folder)
        self.sessions = Sessions(folder / SESSIONS)
        self._computing = ThreadPoolExecutor(1, "tinker")
        self._models: dict[str, _Model] = {}
        self._samplers = base.make_samplers(self._computing)
        self._kinds = {
            "optim_step": self._step,
            "save_weights": self._save_training,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "load_weights": self._load,
        }

    async def close(self) -> None:
        self.futures.cancel_all()
        await self._samplers.close()
        self._computing.shutdown(cancel_futures=True)
        await asyncio.to_thread(self._runs.close)

    async def restore(self) -> None:
        """Make sessions and models as they were when the server on this folder ended."""
        for session in self.sessions.restore():
            for model_id in self.sessions.models(session):
                try:
                    await self._restore_model(model_id)
                except Exception as error:  # the others can go on
                    self._forget(model_id)
                    _log.warning("%s cannot be restored: %s", model_id, error)

    async def _restore_model(self, model_id: str) -> None:
        """Raises whatever damaged files raise, and BadRequest for a model that was refused."""
        journal = self.sessions.journal(model_id)
        made, *later = journal.requests()
        self._submit(made.kind, made.body)
        while await self.futures.result(f"{model_id}:0", _LONG_S) is None:
            pass

        for number, result in journal.results():
            self.futures.restore(f"{model_id}:{number}", result)
        for request in later:
            self._submit(request.kind, request.body, again=True)
        _log.warning("%s is restored, and carries out %d requests again", model_id, len(later))

    def create_session(self) -> str:
        for silent in self.sessions.silent():
            self.end_session(silent)
        return self.sessions.create()

    def end_session(self, session: str) -> None:
        """End its requests and forget its models; checkpoints stay. Idempotent."""
        self.futures.cancel_session(session)
        self.sessions.end(session)
        for name in self.models_of(session):
            self._forget(name)

    def _forget(self, model_id: str) -> None:
        """Idempotent."""
        model = self._models.pop(model_id, None)
        if model is not None:
            self._computing.submit(model.adapter.close)
            self._runs.end(model_id, "finished")

    def models_of(self, session: str) -> list[str]:
        return [each for each in self._models if each.startswith(f"{session}:")]

    async def accept(self, kind: str, content: bytes) -> Json:
        """Carry out a request in its turn; returns when it is on disk. Raises BadRequest, KeyError
        for an unknown session."""
        model_id, number = self._submit(kind, content)
        journal = self.sessions.journal(model_id)
        await asyncio.to_thread(journal.add, number, kind, content)
        return {"request_id": f"{model_id}:{number}", "model_id": model_id}

    def _submit(self, kind: str, content: bytes, again: bool = False) -> tuple[str, int]:
        """Its model and number. again: a server that was killed may have done so."""
        work: Work
        if kind == _PASS:
            message = parse_pass(content)
            model_id = message.model_id
            number = message.seq_id
            # a client that sends a request again may write its maps in another order
            digest = hash(message.SerializeToString(deterministic=True))
            model = self._model(model_id)
            work = partial(self._run, model, message)
        else:
            given = read_json(content)
            digest = digest_of(given)
            if given.get("session_id") is not None:
                return self._submit_creation(kind, given)

            model_id = given["model_id"]
            number = given.get("seq_id")
            if again:
                given["overwrite"] = True
            model = self._model(model_id)
            work = partial(self._kinds[kind], model, given)

        if not isinstance(number, int) or number < 1:
            raise BadRequest(f"seq_id is {number!r:.40}: requests of a model are numbered from 1")
        kept = partial(self._kept, model, number, work)
        in_turn = partial(model.turns.take, number, kept)
        self.futures.submit(f"{model_id}:{number}", digest, in_turn)
        return model_id, number

    def _submit_creation(self, kind: str, given: Json) -> tuple[str, int]:
        session = given["session_id"]
        self.sessions.note_seen(session)
        model_id = f"{session}:train:{int(given['model_seq_id'])}"
        work = partial(self._create, model_id, kind, given)
        self.futures.submit(f"{model_id}:0", digest_of(given), work)
        return model_id, 0

    async def _kept(self, model: _Model, number: int, work: Work) -> Result:
        """Do the work, and perhaps save the model with the result."""
        try:
            result = await work()
        except BadRequest as error:
            result = as_json({"error": str(error), "category": "user"})

        if model.journal.is_due and not model.has_gradients:
            save = partial(model.adapter.save, with_optimizer=True)
            results = [*self.futures.results(model.name), (number, result)]
            try:
                await self._compute(model.journal.save, number, save, results)
            except OSError as error:
                _log.warning("%s: a killed server would not restore it: %s", model.name, error)
        return result

    async def _create(self, model_id: str, kind: str, given: Json) -> Result:
        """A model from the base, from a checkpoint, or from the state that a server before
        saved."""
        journal = self.sessions.journal(model_id)
        number, folder = journal.saved()
        with_optimizer = folder is not None or bool(given.get("optimizer"))
        if folder is None and kind == "load_weights":
            folder = self.checkpoints.find(given["path"])

        if folder is None:
            config = self._config_of(given)
        else:
            config = AdapterConfig(**read_state(folder)["config"])

        adapter = await self._compute(self.base.make_adapter, model_id, config)
        try:
            if folder is not None:
                await self._compute(adapter.load, folder, with_optimizer)
            run = await self._runs.open(model_id, config, adapter.num_steps)
            self.checkpoints.begin(
                model_id, self.base.name, config.rank, given.get("user_metadata")
            )
        except BaseException:
            self._computing.submit(adapter.close)
            raise

        self._models[model_id] = _Model(model_id, adapter, run, journal, Turns(number + 1))
        return as_json({"type": kind, "path": given.get("path"), "model_id": model_id})

    def _config_of(self, given: Json) -> AdapterConfig:
        self._check_base(given.get("base_model"))
        lora = given.get("lora_config")
        if lora is None:
            return AdapterConfig(None, 0, attention=True, mlp=True)
        return AdapterConfig(
            int(lora["rank"]),
            int(lora.get("seed") or 0),
            bool(lora.get("train_attn", True)),
            bool(lora.get("train_mlp", True)),
        )

    async def _load(self, model: _Model, given: Json) -> Result:
        folder = self.checkpoints.find(given["path"])
        await self._compute(model.adapter.load, folder, bool(given["optimizer"]))
        model.has_gradients = False
        model.run = await self._runs.open(model.name, model.adapter.config, model.adapter.num_steps)
        return as_json({"type": "load_weights", "path": given["path"], "model_id": model.name})

    async def _run(self, model: _Model, message: Any) -> Result:
        """A pass, as a protobuf message."""
        # tens of megabytes take a while to read
        request = await asyncio.to_thread(read_pass, message)
        model.has_gradients |= not request.forward_only
        log_probs, metrics = await self._compute(model.run.timed, _PASS, model.adapter.run, request)
        metrics = await asyncio.to_thread(
            model.run.passed, request, log_probs, metrics, model.adapter.num_steps
        )
        return write_pass(log_probs, metrics)

    async def _step(self, model: _Model, given: Json) -> Result:
        if given.get("adam_params") is None:
            raise BadRequest("adam_params are missing: AdamW is the only optimizer here")
        try:
            options = StepOptions(**given["adam_params"])
        except TypeError as error:
            raise BadRequest(f"adam_params: {error}") from error

        adapter = model.adapter
        metrics = await self._compute(model.run.timed, "optim_step", adapter.step, options)
        model.has_gradients = False
        metrics = model.run.stepped(adapter.num_steps, options.learning_rate, metrics)
        return as_json({"metrics": metrics})

    async def _save_training(self, model: _Model, given: Json) -> Result:
        path = await self._save(model, TRAINING, f"step-{model.adapter.num_steps}", given)
        return as_json({"type": "save_weights", "path": path})

    async def _save_external(self, model: _Model, given: Json) -> Result:
        """For downloads."""
        if given.get("age_encryption_recipients"):
            raise BadRequest("age_encryption_recipients are not supported: leave them out")
        path = await self._save(model, EXTERNAL, "external", given)
        return as_json({"type": "save_weights_external", "path": path})

    async def _save_for_sampler(self, model: _Model, given: Json) -> Result:
        """Under a name, or for a sampler that this opens."""
        kind = given.get("kind", "snapshot")
        if kind not in ("snapshot", "inflight"):
            raise BadRequest(f"kind is {kind!r:.60}: it is 'snapshot' or 'inflight'")

        number = given.get("sampling_session_seq_id")
        default = f"session-{number}-step-{model.adapter.num_steps}"
        path = await self._save(model, SAMPLING, default, given)
        answer = {"type": "save_weights_for_sampler", "path": path}
        if number is not None:
            opened = self.sessions.open_sampler(model.name.partition(":")[0], number, path)
            answer["sampling_session_id"] = opened
            if kind == "inflight":
                self.sessions.follow(model.name, opened, path)
        return as_json(answer)

    async def _save(self, model: _Model, kind: str, default: str, given: Json) -> str:
        path = f"tinker://{model.name}/{kind}/{given.get('path') or default}"
        place = self.checkpoints.place(path, bool(given.get("overwrite")))
        metadata = given.get("user_metadata")
        save = partial(model.adapter.save, with_optimizer=kind == TRAINING, metadata=metadata)
        await self._compute(write, place, save)
        self.checkpoints.expire(path, given.get("ttl_seconds"))
        return path

    def open_sampler(self, session: str, number: int, path: str | None) -> str:
        """Raises BadRequest for a path that is not there, KeyError for an unknown session."""
        if path is not None:
            self.checkpoints.find(path)
        return self.sessions.open_sampler(session, number, path)

    async def sample(self, number: int, given: Json) -> Result:
        """number: of the request for its sampler. Raises BadRequest."""
        name = given.get("sampling_session_id")
        if name is not None:
            path = self.sessions.weights_of(name)
            seed = int.from_bytes(sha256(name.encode()).digest()[:6], "big")
        else:
            path = given.get("model_path")
            if path is None:
                self._check_base(given.get("base_model"))
            seed = secrets.randbits(48)

        request = read_sample(given, self.base.stop_ids, self.base.context)
        stream = Stream(seed, "serve", 0, number)
        if request.seed is not None:
            stream = Stream(request.seed, "seed", 0, 0)

        started = time.time()
        folder = None
        version: tuple[str | None, int] = (None, 0)
        if path is not None:
            folder = self.checkpoints.find(path)
            version = self.checkpoints.version(path)
        result: Result = await self._samplers.sample(folder, request, stream)
        self._runs.note_samples(version, request, result, started)
        return result

    def info(self, model_id: str) -> Json:
        """Raises BadRequest."""
        rank = self._model(model_id).adapter.config.rank
        base = self.base
        data = {"arch": base.kind, "model_name": base.name, "tokenizer_id": base.folder}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model_id,
            "is_lora": rank is not None,
            "lora_rank": rank,
            "model_name": base.name,
        }

    def _model(self, model_id: str) -> _Model:
        model = self._models.get(model_id)
        if model is None:
            raise BadRequest(
                f"there is no model {model_id!r:.80}: it was never created, its session has ended, "
                "or the server was started again; create it from a checkpoint"
            )
        return model

    def _check_base(self, name: object) -> None:
        if name not in (self.base.name, self.base.folder):
            raise BadRequest(
                f"there is no base model {name!r:.80} here: this server has {self.base.name!r}"
            )

    async def _compute(self, function: Callable[..., Any], *arguments: object) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._computing, partial(function, *arguments))


def as_json(value: Json) -> Result:
    return json.dumps(value).encode()
