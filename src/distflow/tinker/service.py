"""The state behind the Tinker API: sessions, the models that they train, samplers of saved
versions, and checkpoints in a folder."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from distflow.rollout.engine import Stream
from distflow.tinker.adapter import (
    AdapterConfig,
    StepOptions,
    read_state,
)
from distflow.tinker.checkpoints import EXTERNAL, SAMPLING, TRAINING, Checkpoints, write
from distflow.tinker.futures import Futures, Result, Turns
from distflow.tinker.messages import BadRequest, read_pass, write_pass
from distflow.tinker.model_run import ModelRun
from distflow.tinker.runs import SESSIONS, Runs
from distflow.tinker.sampler import read_sample
from distflow.tinker.saved_sessions import SavedSessions

Json = dict[str, Any]
_EXPIRES_S = 1800.0
"""Without a heartbeat, which clients send every 10 s."""


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
    adapter: Any
    """Of `BaseModel.make_adapter`."""
    run: ModelRun
    turns: Turns = field(default_factory=Turns)


@dataclass(frozen=True)
class _SamplingSession:
    path: str | None
    """Of the weights; None for the base."""
    seed: int
    version: tuple[str, int] | None
    """The model of the weights, and the steps that it had done."""
    follows: str | None = None
    """The model whose newest weights for such sessions it takes; None: it keeps its own."""


class Service:
    """Its coroutines run on one event loop; models are computed on one thread."""

    def __init__(self, base: BaseModel, folder: Path) -> None:
        """folder: of the checkpoints and runs; checkpoints in it are there for new clients. Raises
        UserError if another server has it."""
        self.base = base
        self._runs = Runs(folder, base.name, base.decode)
        self.futures = Futures()
        self.checkpoints = Checkpoints(folder)
        self.saved_sessions = SavedSessions(folder / SESSIONS)
        self._states: dict[str, Path | None] = {}
        """Of models that a server before had: the folder of the last one that was saved."""
        self._computing = ThreadPoolExecutor(1, "tinker")
        self._sessions: dict[str, float] = {}
        self._models: dict[str, _Model] = {}
        self._samplings: dict[str, _SamplingSession] = {}
        self._samplers = base.make_samplers(self._computing)

    async def close(self) -> None:
        self.futures.cancel_all("")
        await self._samplers.close()
        self._computing.shutdown(cancel_futures=True)
        await asyncio.to_thread(self._runs.close)

    def create_session(self) -> str:
        self._end_silent_sessions()
        session = f"session-{secrets.token_hex(6)}"
        self.saved_sessions.add(session)
        self._sessions[session] = time.monotonic()
        return session

    def restore_sessions(self) -> list[str]:
        """Take up those of the server before, with their samplers."""
        recent = self.saved_sessions.take_recent(_EXPIRES_S)
        for session in recent:
            self._sessions[session] = time.monotonic()
            for number, path in self.saved_sessions.samplers(session):
                with suppress(BadRequest):  # its weights were deleted
                    self._add_sampling(session, number, path)
        return recent

    def heartbeat(self, session: str) -> None:
        """Raises KeyError for a session that has ended."""
        self._sessions[session]
        self._sessions[session] = time.monotonic()
        self.saved_sessions.note_seen(session)

    def end_session(self, session: str) -> None:
        """End its requests and forget its models; checkpoints stay. Idempotent."""
        self._sessions.pop(session, None)
        self.saved_sessions.end(session)
        self.futures.cancel_all(f"{session}:")

        for model_id in [each for each in self._models if each.startswith(f"{session}:")]:
            self._forget(model_id)

        for name in [each for each in self._samplings if each.startswith(f"{session}:")]:
            del self._samplings[name]

    async def create_model(self, model_id: str, body: Json) -> Result:
        self._check_base(body.get("base_model"))
        given = body.get("lora_config")
        if given is None:
            config = AdapterConfig(None, 0, attention=True, mlp=True)
        else:
            config = AdapterConfig(
                int(given["rank"]),
                int(given.get("seed") or 0),
                bool(given.get("train_attn", True)),
                bool(given.get("train_mlp", True)),
            )

        await self._add_model(model_id, config, body, 0)

        return {"type": "create_model", "model_id": model_id}

    async def create_from(self, model_id: str, body: Json) -> Result:
        """A model from a checkpoint."""
        folder = self.checkpoints.find(body["path"])
        state = read_state(folder)
        config = AdapterConfig(**state["config"])
        model = await self._add_model(model_id, config, body, int(state["num_steps"]))
        try:
            await self._compute(model.adapter.load, folder, bool(body["optimizer"]))
        except BaseException:
            if model_id in self._models:
                self._forget(model_id)
            raise

        return {"type": "load_weights", "path": body["path"], "model_id": model_id}

    async def load(self, model_id: str, body: Json) -> Result:
        folder = self.checkpoints.find(body["path"])
        model = self.model(model_id)
        await self._compute(model.adapter.load, folder, bool(body["optimizer"]))
        await asyncio.wrap_future(model.run.begin(model.adapter.num_steps, resumes=True))
        return {"type": "load_weights", "path": body["path"], "model_id": model_id}

    async def run(self, message: Any) -> Result:
        """A `forward_backward`, as a protobuf message."""
        model = self.model(message.model_id)
        # tens of megabytes take a while to read
        request = await asyncio.to_thread(read_pass, message)
        log_probs, metrics = await self._compute(
            model.run.timed, "forward_backward", model.adapter.run, request
        )
        metrics = await asyncio.to_thread(
            model.run.passed, request, log_probs, metrics, model.adapter.num_steps
        )
        return write_pass(log_probs, metrics)

    async def step(self, model_id: str, body: Json) -> Result:
        given = body.get("adam_params")
        if given is None:
            raise BadRequest("adam_params are missing: AdamW is the only optimizer here")

        try:
            options = StepOptions(**given)
        except TypeError as error:
            raise BadRequest(f"adam_params: {error}") from error

        model = self.model(model_id)
        metrics = await self._compute(model.run.timed, "optim_step", model.adapter.step, options)
        return {
            "metrics": model.run.stepped(model.adapter.num_steps, options.learning_rate, metrics)
        }

    async def save(self, model_id: str, body: Json) -> Result:
        adapter = self.model(model_id).adapter
        path = await self._save(model_id, TRAINING, f"step-{adapter.num_steps}", body)
        return {"type": "save_weights", "path": path}

    async def save_external(self, model_id: str, body: Json) -> Result:
        """For downloads."""
        if body.get("age_encryption_recipients"):
            raise BadRequest("age_encryption_recipients are not supported: leave them out")
        path = await self._save(model_id, EXTERNAL, "external", body)
        return {"type": "save_weights_external", "path": path}

    async def save_for_sampler(self, model_id: str, body: Json) -> Result:
        """Under a name, or for a sampling session that this opens."""
        kind = body.get("kind", "snapshot")
        if kind not in ("snapshot", "inflight"):
            raise BadRequest(f"kind is {kind!r:.60}: it is 'snapshot' or 'inflight'")

        adapter = self.model(model_id).adapter
        number = body.get("sampling_session_seq_id")
        default = f"session-{number}-step-{adapter.num_steps}"
        path = await self._save(model_id, SAMPLING, default, body)
        if number is None:
            return {"type": "save_weights_for_sampler", "path": path}

        session = model_id.partition(":")[0]
        opened = self.open_sampling(session, number, path)
        if kind == "inflight":
            self._publish(model_id, opened, path)
        return {"type": "save_weights_for_sampler", "path": path, "sampling_session_id": opened}

    def _publish(self, model_id: str, opened: str, path: str) -> None:
        """Have a new session and those that follow the model sample from these weights; what is
        being drawn goes on with the weights that it began with."""
        version = self.checkpoints.version(path)
        for name, each in self._samplings.items():
            if name == opened or each.follows == model_id:
                own = replace(each, path=path, version=version, follows=model_id)
                self._samplings[name] = own

    def open_sampling(self, session: str, number: int, path: str | None) -> str:
        """Raises BadRequest for a path that is not there, KeyError for an unknown session."""
        self._sessions[session]
        name = self._add_sampling(session, number, path)
        self.saved_sessions.note_sampler(session, number, path)
        return name

    def _add_sampling(self, session: str, number: int, path: str | None) -> str:
        name = f"{session}:sample:{number}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
        self._samplings.setdefault(name, self._sampling(path, seed))
        return name

    def _sampling(self, path: str | None, seed: int) -> _SamplingSession:
        version = None if path is None else self.checkpoints.version(path)
        return _SamplingSession(path, seed, version)

    def sampling(self, name: str) -> Json:
        """Raises KeyError."""
        found = self._samplings[name]
        return {"sampler_id": name, "base_model": self.base.name, "model_path": found.path}

    async def sample(self, number: int, body: Json) -> Result:
        """number: of the request in its sampling session. Raises BadRequest."""
        name = body.get("sampling_session_id")
        if name is not None:
            session = self._samplings[name]
        else:
            path = body.get("model_path")
            if path is None:
                self._check_base(body.get("base_model"))
            session = self._sampling(path, secrets.randbits(48))

        request = read_sample(body, self.base.stop_ids, self.base.context)
        if request.seed is None:
            stream = Stream(session.seed, "serve", 0, number)
        else:
            stream = Stream(request.seed, "seed", 0, 0)

        started = time.time()
        folder = None if session.path is None else self.checkpoints.find(session.path)
        result = await self._samplers.sample(folder, request, stream)
        self._runs.note_samples(session.version, request, result, started)
        return result

    def sessions(self) -> list[str]:
        """The newest first."""
        return [*reversed(self._sessions)]

    def session(self, session: str) -> Json:
        """Raises KeyError."""
        self._sessions[session]
        models = [each for each in self._models if each.startswith(f"{session}:")]
        samplers = [each for each in self._samplings if each.startswith(f"{session}:")]
        return {"training_run_ids": models, "sampler_ids": samplers}

    def model(self, model_id: str) -> _Model:
        """Raises BadRequest."""
        model = self._models.get(model_id)
        if model is None:
            raise BadRequest(
                f"there is no model {model_id!r:.80}: it was never created, its session has ended, "
                "or the server was started again; create it from a checkpoint"
            )

        return model

    def info(self, model_id: str) -> Json:
        """Raises BadRequest."""
        rank = self.model(model_id).adapter.config.rank
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

    async def _add_model(
        self, model_id: str, config: AdapterConfig, body: Json, num_steps: int
    ) -> _Model:
        """num_steps: of the checkpoint that it is to begin with."""
        adapter = await self._compute(self.base.make_adapter, model_id, config)
        run = self._runs.add(model_id, asdict(config))
        is_known = model_id in self._states
        state = self._states.pop(model_id, None)
        if state is not None:
            num_steps = int(read_state(state)["num_steps"])
        await asyncio.wrap_future(run.begin(num_steps, resumes=is_known))
        self.checkpoints.begin(model_id, self.base.name, config.rank, body.get("user_metadata"))
        model = self._models[model_id] = _Model(adapter, run)
        return model

    def expect(self, model_id: str, state: Path | None) -> None:
        """A model that a server before had is going to be made again. state: a folder that
        `save_state` wrote."""
        self._states[model_id] = state

    async def restore_model(self, model_id: str, state: Path, number: int) -> None:
        """Bring a model to the state after a request."""
        model = self.model(model_id)
        await self._compute(model.adapter.load, state, True)
        model.turns.start_after(number)

    async def save_state(
        self, model_id: str, write: Callable[[Callable[[Path], None]], None]
    ) -> None:
        """write: calls what it is given with a folder. Raises OSError."""
        save = partial(self.model(model_id).adapter.save, with_optimizer=True)
        await self._compute(write, save)

    async def _compute(self, function: Callable[..., Any], *arguments: object) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._computing, partial(function, *arguments))

    async def _save(self, model_id: str, kind: str, default: str, body: Json) -> str:
        path = f"tinker://{model_id}/{kind}/{body.get('path') or default}"
        place = self.checkpoints.place(path, bool(body.get("overwrite")))
        adapter = self.model(model_id).adapter
        metadata = body.get("user_metadata")
        save = partial(adapter.save, with_optimizer=kind == TRAINING, metadata=metadata)
        await self._compute(write, place, save)
        self.checkpoints.expire(path, body.get("ttl_seconds"))
        return path

    def _forget(self, model_id: str) -> None:
        model = self._models.pop(model_id)
        self._computing.submit(model.adapter.close)
        self._runs.end(model_id, "finished")

    def _check_base(self, name: object) -> None:
        if name not in (self.base.name, self.base.folder):
            raise BadRequest(
                f"there is no base model {name!r:.80} here: this server has {self.base.name!r}"
            )

    def _end_silent_sessions(self) -> None:
        for session, seen in [*self._sessions.items()]:
            if seen < time.monotonic() - _EXPIRES_S:
                self.end_session(session)
