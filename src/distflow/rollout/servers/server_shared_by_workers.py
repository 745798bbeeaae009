"""One server shared by the workers on whose devices it computes (tensor parallel). The first of
them starts it and loads its weights; the others send requests, and adopt a version once the server
has it."""

import asyncio
import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, cast

import httpx
from torch import Tensor

from distflow.errors import TrustError
from distflow.rollout.engine import GenerateRequest
from distflow.rollout.engine_weights import checked, stripe_hashes
from distflow.rollout.servers.answer_checks import Answer
from distflow.rollout.servers.http_engine import CALL_S, START_S, HttpEngine, ServerFailed
from distflow.rollout.servers.server_process import WeightFiles
from distflow.scheduling.group_states import Version

_LOOKS_EVERY_S: Final = 0.02
_SERVER: Final = "server.json"


@dataclass(frozen=True)
class ServerGroup:
    """The workers of one server, on one machine. folder: the run's, through which they find each
    other; empty at the start. place: index of this worker. size: number of workers."""

    folder: Path
    place: int
    size: int

    def tell_devices(self) -> None:
        """Publish this worker's visible GPUs to the worker that starts the server."""
        self._write(f"devices-{self.place}", os.environ.get("CUDA_VISIBLE_DEVICES", ""))

    async def devices(self) -> str:
        """The GPUs of all workers, in order. Raises ServerFailed if one does not report."""
        due = time.monotonic() + START_S
        files = [self.folder / f"devices-{place}" for place in range(self.size)]
        self.tell_devices()

        while missing := [file for file in files if not file.exists()]:
            if time.monotonic() > due:
                raise ServerFailed(
                    f"no worker has written {missing[0]}, so the devices of the server are unknown"
                )
            await asyncio.sleep(_LOOKS_EVERY_S)

        return ",".join(file.read_text() for file in files)

    def publish(self, socket: Path, label: str | None) -> None:
        """Publish the server's socket. label: of the weights that it has; None before the first."""
        self._write(_SERVER, json.dumps({"socket": str(socket), "label": label}))

    def forget(self) -> None:
        """Publish that there is no server now."""
        (self.folder / _SERVER).unlink(missing_ok=True)

    def server(self) -> tuple[Path | None, Version | None]:
        """The server's socket and its version; None if there is none."""
        try:
            said = json.loads((self.folder / _SERVER).read_text())
        except OSError:
            return None, None
        return Path(said["socket"]), said["label"] and version_of(said["label"])

    def has(self, version: Version) -> bool:
        """Whether the server has this version or a newer one."""
        served = self.server()[1]
        return served is not None and served >= version

    def _write(self, name: str, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / f".{name}-{self.place}"
        new.write_text(text)
        new.replace(self.folder / name)


def version_of(label: str) -> Version:
    """The inverse of `label_of`. Raises ValueError for anything else."""
    restart, _, step = label.partition(".")
    return Version(int(restart), int(step))


class _Follower(HttpEngine):
    """Leaves the other worker's server unchanged: that worker pauses, updates and releases it."""

    group: ServerGroup
    has_weights = False

    async def _start(self) -> None:
        """Find the server; if it died, the next one, with the same weights."""
        due = time.monotonic() + START_S
        self.group.tell_devices()

        while True:
            published = self.group.server()
            if published[0] is not None and (not self.has_weights or self.group.has(self.version)):
                self.socket.unlink(missing_ok=True)
                self.socket.symlink_to(published[0])

                with suppress(httpx.TransportError):
                    await self._reading(self.begin)
                    # else it may be the next one, which has no weights yet
                    if self.group.server() == published:
                        return

            if time.monotonic() > due:
                raise ServerFailed(
                    f"{self.who}, which another worker starts, was not ready within {START_S:g} s"
                )

            await asyncio.sleep(_LOOKS_EVERY_S)

    async def _answers(self, request: GenerateRequest) -> list[Answer]:
        """Checked answers. The server may have a version just before this worker learns of it."""
        answers = await super()._answers(request)
        with suppress(ValueError):  # an invalid label is reported later
            labels = chain.from_iterable(each.versions for each in answers)
            newest = max(map(version_of, labels), default=self.version)
            while self.version < newest and self.group.has(newest):
                await asyncio.sleep(_LOOKS_EVERY_S)

        return answers

    def write(self, version: Version, weights: Iterable[tuple[str, Tensor]]) -> WeightFiles:
        """Nothing is written: the other worker has the same weights, as the hashes will show."""
        hashes = stripe_hashes(checked(self.parameters(), weights))
        return WeightFiles(version, self.folder.path, hashes)

    def drop(self, files: WeightFiles) -> None: ...

    async def load(self, files: WeightFiles) -> None:
        """Wait until the server has the weights. Raises TrustError if they differ from those sent
        to this worker."""
        await self.rename(files.version)
        if files.hashes != await self.hashes():
            raise TrustError(
                f"{self.who} has other weights of {files.version} than this worker was sent"
            )

    async def rename(self, version: Version) -> None:
        """Wait until the server has the version."""
        due = time.monotonic() + CALL_S
        while not self.group.has(version):
            if time.monotonic() > due:
                raise ServerFailed(
                    f"{self.who}, which another worker updates, has no {version} after {CALL_S:g} s"
                )
            await asyncio.sleep(_LOOKS_EVERY_S)

        self.version = version
        self.has_weights = True

    async def _nothing(self) -> None: ...

    halt = halt_for_update = drop_cache = sleep = wake = go_on = _nothing


def follower_of(engine: type[HttpEngine]) -> type[HttpEngine]:
    """The engine class of a worker that uses another worker's server."""
    return cast(type[HttpEngine], type(f"Following{engine.__name__}", (_Follower, engine), {}))
