"""Saved models in a folder, under the paths that clients use: `tinker://MODEL/KIND/NAME`."""

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from distflow.observe.crash_safe_files import sync, write_atomically
from distflow.tinker.adapter import read_note, read_state
from distflow.tinker.messages import BadRequest, Json

TRAINING = "weights"
SAMPLING = "sampler_weights"
EXTERNAL = "external_weights"
_TYPES = {TRAINING: "training", SAMPLING: "sampler", EXTERNAL: "external"}
_PATH = re.compile(rf"tinker://(\w[\w:-]*)/({'|'.join(_TYPES)})/(\w[\w.-]{{0,99}})")
_MODEL = "model.json"
_EXPIRY = ".expires"


class Checkpoints:
    """Each is a folder, which does not change once it is there."""

    def __init__(self, folder: Path) -> None:
        """Those in the folder are there for new clients."""
        self._folder = folder

    def begin(
        self, model_id: str, base_model: str, rank: int | None, metadata: Mapping[str, str] | None
    ) -> None:
        """Note a new model."""
        note = {
            "training_run_id": model_id,
            "base_model": base_model,
            "model_owner": "local",
            "is_lora": rank is not None,
            "lora_rank": rank,
            "user_metadata": metadata,
        }
        folder = self._folder / model_id
        folder.mkdir(exist_ok=True)
        write_atomically(folder / _MODEL, json.dumps(note).encode())

    def training_runs(self) -> list[Json]:
        """Of all models, the last saved first."""
        runs = [self.training_run(each.parent.name) for each in self._folder.glob(f"*/{_MODEL}")]
        return sorted(runs, key=lambda each: str(each["last_request_time"]), reverse=True)

    def training_run(self, model_id: str) -> Json:
        """Raises KeyError."""
        note = self._folder / model_id / _MODEL
        if not note.is_file():
            raise KeyError(model_id)

        saved = self.listed(model_id)
        last = {each["checkpoint_type"]: each for each in saved}
        times = [when(note.stat().st_mtime), *(each["time"] for each in saved)]
        return {
            **json.loads(note.read_text()),
            "last_request_time": max(times),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
        }

    def place(self, path: str, overwrite: bool) -> Path:
        """Where to write a new one. Raises BadRequest for a path that is taken or is none."""
        folder = self._living(path)
        if folder is None:
            name = path.rpartition("/")[2]
            raise BadRequest(f"a checkpoint cannot be called {name!r:.80}: use letters and digits")

        if folder.exists() and not overwrite:
            raise BadRequest(f"there is a checkpoint {path} already: checkpoints do not change")
        return folder

    def find(self, path: str) -> Path:
        """Its folder. Raises BadRequest for a path that is not there."""
        folder = self._living(path)
        if folder is None or not folder.is_dir():
            raise BadRequest(f"there is no checkpoint {path!r:.120} on this server")
        return folder

    def version(self, path: str) -> tuple[str, int]:
        """The model that saved it, and the steps that it had done. Raises BadRequest."""
        num_steps = int(read_state(self.find(path))["num_steps"])
        return path.removeprefix("tinker://").partition("/")[0], num_steps

    def listed(self, model_id: str = "*") -> list[Json]:
        """Those of a model, or all, the oldest first."""
        listed = list[Json]()
        for kind in _TYPES:
            for place in self._folder.glob(f"{model_id}/{kind}/[!.]*"):
                path = f"tinker://{place.parent.parent.name}/{kind}/{place.name}"
                if self._living(path) is not None and place.is_dir():
                    listed.append(_listed(path, place))

        return sorted(listed, key=lambda each: str(each["time"]))

    def info(self, path: str, base_model: str) -> Json:
        """Raises BadRequest."""
        config = read_state(self.find(path))["config"]
        return {
            "base_model": base_model,
            "is_lora": config["rank"] is not None,
            "lora_rank": config["rank"],
            "train_unembed": False,
            "train_mlp": config["mlp"],
            "train_attn": config["attention"],
        }

    def expire(self, path: str, within_s: float | None) -> None:
        """Delete it once that time is over; None keeps it. Raises BadRequest."""
        note = self.find(path) / _EXPIRY
        if within_s is None:
            note.unlink(missing_ok=True)
        else:
            write_atomically(note, json.dumps(time.time() + within_s).encode())

    def delete(self, path: str) -> None:
        """Raises BadRequest."""
        shutil.rmtree(self.find(path))

    def _living(self, path: str) -> Path | None:
        """Its folder, whether it is there or not; None if it is no path."""
        found = _PATH.fullmatch(path)
        if found is None:
            return None

        folder = self._folder.joinpath(*found.groups())
        expires = _expiry(folder)
        if expires is not None and expires < time.time():
            shutil.rmtree(folder)
        return folder


def write(folder: Path, save: Callable[[Path], None]) -> None:
    """The folder is there when all that `save` writes into it is on disk."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()

    try:
        save(new)
        for file in new.iterdir():
            sync(file)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise

    old = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        folder.replace(old)
    new.replace(folder)
    shutil.rmtree(old, ignore_errors=True)
    sync(folder.parent)


def _expiry(folder: Path) -> float | None:
    try:
        return float(json.loads((folder / _EXPIRY).read_text()))
    except FileNotFoundError:
        return None


def _listed(path: str, place: Path) -> Json:
    files = [each.stat() for each in place.glob("[!.]*")]
    written = max((each.st_mtime for each in files), default=0.0)
    expires = _expiry(place)
    kind = place.parent.name
    return {
        "checkpoint_id": f"{kind}/{place.name}",
        "checkpoint_type": _TYPES[kind],
        "time": when(written),
        "tinker_path": path,
        "size_bytes": sum(each.st_size for each in files),
        "user_metadata": read_note(place).get("user_metadata"),
        "expires_at": when(expires) if expires else None,
    }


def when(seconds: float) -> str:
    """As the protocol writes times."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
