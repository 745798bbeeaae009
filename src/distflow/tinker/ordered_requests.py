"""The numbered requests of models: each is on disk before it is carried out, so that a server that
was killed carries it out again."""

import hashlib
import json
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from distflow.tinker.futures import Result
from distflow.tinker.journal import Journal
from distflow.tinker.messages import BadRequest, parse_pass
from distflow.tinker.service import Service

Json = dict[str, Any]
Work = Callable[[], Awaitable[Result]]
_PASS: Final = "forward_backward"
_STEP: Final = "optim_step"
_LONG_S = 60.0
_log = logging.getLogger(__name__)


class OrderedRequests:
    """Used on one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._journals: dict[str, Journal] = {}
        self._creations = {
            "create_model": service.create_model,
            "load_weights": service.create_from,
        }
        self._kinds = {
            _STEP: service.step,
            "save_weights": service.save,
            "save_weights_for_sampler": service.save_for_sampler,
            "save_weights_external": service.save_external,
            "load_weights": service.load,
        }

    def create(self, kind: str, body: bytes) -> Json:
        """Begin a model. Raises KeyError for an unknown session, BadRequest."""
        given = read_json(body)
        self._service.heartbeat(given["session_id"])
        return self._create(kind, body, given)

    def _create(self, kind: str, body: bytes, given: Json) -> Json:
        session = given["session_id"]
        number = int(given["model_seq_id"])
        model_id = f"{session}:train:{number}"
        if model_id not in self._journals:
            folder = self._service.saved_sessions.journal(session, number)
            self._journals[model_id] = Journal(folder)

        work = partial(self._creations[kind], model_id, given)
        return self._submit(model_id, 0, kind, body, digest_of(given), work)

    def accept(self, kind: str, body: bytes, again: bool = False) -> Json:
        """Carry out a request in its turn. again: a server that was killed may have done so. Raises
        BadRequest."""
        if kind == _PASS:
            message = parse_pass(body)
            model_id = message.model_id
            number = message.seq_id
            # a client that sends a request again may write its maps in another order
            known_by = _sha256(message.SerializeToString(deterministic=True))
            work: Work = partial(self._service.run, message)
        else:
            given = read_json(body)
            model_id = given["model_id"]
            number = given.get("seq_id")
            known_by = digest_of(given)
            if again:
                given["overwrite"] = True
            work = partial(self._kinds[kind], model_id, given)

        if not isinstance(number, int) or number < 1:
            raise BadRequest(f"seq_id is {number!r:.40}: requests of a model are numbered from 1")
        turns = self._service.model(model_id).turns
        kept = partial(self._kept, model_id, number, kind, work)
        return self._submit(
            model_id, number, kind, body, known_by, partial(turns.take, number, kept)
        )

    async def restore(self) -> None:
        """Make sessions and models as they were when the server on this folder ended."""
        saved_sessions = self._service.saved_sessions
        for session in self._service.restore_sessions():
            for number in saved_sessions.models(session):
                model_id = f"{session}:train:{number}"
                try:
                    await self._restore_model(
                        model_id, Journal(saved_sessions.journal(session, number))
                    )
                except Exception as error:  # the others can go on
                    _log.warning("%s cannot be restored: %s", model_id, error)

    async def _restore_model(self, model_id: str, journal: Journal) -> None:
        """Raises whatever damaged files raise, and BadRequest for a model that was refused."""
        (_, kind, body), *later = journal.requests()
        state = journal.state()
        saved = 0 if state is None else int(state.stem)

        self._service.expect(model_id, state)
        self._create(kind, body, read_json(body))
        futures = self._service.futures
        while await futures.result(f"{model_id}:0", _LONG_S) is None:
            pass
        if state is not None:
            await self._service.restore_model(model_id, state, saved)

        for number, result in journal.results():
            if 0 < number <= saved:
                futures.restore(f"{model_id}:{number}", result)
        for _, kind, body in later:
            self.accept(kind, body, again=True)
        _log.warning("%s is restored, and carries out %d requests again", model_id, len(later))

    def _submit(
        self, model_id: str, number: int, kind: str, body: bytes, known_by: bytes, work: Work
    ) -> Json:
        request_id = f"{model_id}:{number}"
        self._journals[model_id].add(number, kind, body)
        self._service.futures.submit(request_id, known_by, work)
        return {"request_id": request_id, "model_id": model_id}

    async def _kept(self, model_id: str, number: int, kind: str, work: Work) -> Result:
        """Do the work, and keep its result, and after a step perhaps the model."""
        journal = self._journals[model_id]
        result: Result
        try:
            result = await work()
        except BadRequest as error:
            result = {"error": str(error), "category": "user"}

        try:
            journal.answer(number, result)
            if kind == _STEP and journal.is_due:
                await self._service.save_state(model_id, partial(journal.save, number))
        except OSError as error:
            _log.warning("%s: a killed server would not restore it: %s", model_id, error)
        return result


def read_json(body: bytes) -> Json:
    """Raises BadRequest."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error

    if not isinstance(found, dict):
        raise BadRequest("the body is no JSON object")
    return found


def digest_of(body: Json) -> bytes:
    """The same for the same JSON."""
    return _sha256(json.dumps(body, sort_keys=True).encode())


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
