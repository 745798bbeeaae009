"""Saved models in a folder, under the paths that clients use: `tinker://MODEL/KIND/NAME`."""

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distflow.tinker.adapter import read_state
from distflow.tinker.messages import BadRequest

Json = dict[str, Any]
TRAINING = "weights"
SAMPLING = "sampler_weights"
_PATH = re.compile(r"tinker://([\w:-]+)/(weights|sampler_weights)/([\w.-]+)")


class Checkpoints:
    """Each is a folder, which does not change once it is there."""

    def __init__(self, folder: Path) -> None:
        """Those in the folder are there for new clients."""
        self._folder = folder

    def place(self, path: str, overwrite: bool) -> Path:
        """Where to write a new one. Raises BadRequest for a path that is taken or is none."""
        found = _PATH.fullmatch(path)
        if found is None:
            name = path.rpartition("/")[2]
            raise BadRequest(f"a checkpoint cannot be called {name!r:.80}: use letters and digits")

        folder = self._folder / found[1] / found[2] / found[3]
        if folder.exists() and not overwrite:
            raise BadRequest(f"there is a checkpoint {path} already: checkpoints do not change")
        return folder

    def find(self, path: str) -> Path:
        """Its folder. Raises BadRequest for a path that is not there."""
        found = _PATH.fullmatch(path)
        folder = self._folder / found[1] / found[2] / found[3] if found else None
        if folder is None or not folder.is_dir():
            raise BadRequest(f"there is no checkpoint {path!r:.120} on this server")
        return folder

    def listed(self, model_id: str | None = None) -> list[Json]:
        """Those of a model, or all, the oldest first."""
        listed = list[Json]()
        for owner in sorted(self._folder.iterdir()):
            if model_id is not None and owner.name != model_id:
                continue
            for kind in (TRAINING, SAMPLING):
                for place in (owner / kind).glob("*"):
                    listed.append(_listed(owner.name, kind, place))

        return sorted(listed, key=lambda each: str(each["time"]))

    def info(self, path: str, base_model: str) -> Json:
        """Raises BadRequest."""
        config = read_state(self.find(path))["config"]
        return {
            "base_model": base_model,
            "is_lora": True,
            "lora_rank": config["rank"],
            "train_unembed": False,
            "train_mlp": config["mlp"],
            "train_attn": config["attention"],
        }

    def delete(self, path: str) -> None:
        """Raises BadRequest."""
        shutil.rmtree(self.find(path))


def write(folder: Path, save: Callable[[Path], None]) -> None:
    """The folder is there when all that `save` writes into it is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    save(new)
    shutil.rmtree(folder, ignore_errors=True)
    new.replace(folder)


def _listed(model_id: str, kind: str, place: Path) -> Json:
    files = [each.stat() for each in place.iterdir()]
    written = max((each.st_mtime for each in files), default=0.0)
    return {
        "checkpoint_id": f"{kind}/{place.name}",
        "checkpoint_type": "training" if kind == TRAINING else "sampler",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(written)),
        "tinker_path": f"tinker://{model_id}/{kind}/{place.name}",
        "size_bytes": sum(each.st_size for each in files),
    }
