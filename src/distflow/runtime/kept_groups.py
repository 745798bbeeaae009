"""`tokens/` of a run's folder: every column of the samples of a step, a file for each worker that trained on some."""

from itertools import groupby
from pathlib import Path

from distflow.data.batch import Batch
from distflow.observe.files import replacing

TOKENS = "tokens"


def keep_groups(run_dir: Path, step: int, batch: Batch, part: int = 0, num_parts: int = 1) -> None:
    """Write a worker's share. part: its number among the `num_parts` of the run. The first removes what another start,
    with more workers, left of the step."""
    folder = run_dir / TOKENS
    folder.mkdir(mode=0o700, exist_ok=True)
    with replacing(folder / f"{step:06d}{f'.{part}' if part else ''}.safetensors") as aside:
        batch.save(aside)
    if part == 0:
        for path in _saved(folder, f"{step:06d}.*.safetensors"):
            if int(path.name.split(".")[1]) >= num_parts:
                path.unlink(missing_ok=True)


def forget_groups(run_dir: Path, num_steps: int) -> None:
    """Remove what was kept of all steps but the last `num_steps`."""
    steps = [list(files) for _, files in groupby(_saved(run_dir / TOKENS, "*.safetensors"), _step)]
    for path in (path for files in steps[:-num_steps] for path in files):
        path.unlink(missing_ok=True)


def load_groups(run_dir: Path, step: int) -> Batch:
    """A step as its workers kept it, in the order of tickets. Raises FileNotFoundError, and ValueError where workers
    run other nodes and so have other columns."""
    folder = run_dir / TOKENS
    first = folder / f"{step:06d}.safetensors"
    shares = [Batch.load(path) for path in (first, *_saved(folder, f"{step:06d}.*.safetensors"))]
    batch = Batch.concat([share for share in shares if len(share)] or shares[:1])
    return batch.select(batch["group_index"].argsort(stable=True))


def _saved(folder: Path, pattern: str) -> list[Path]:
    """Of those that fit, the files that we wrote, by step."""
    return sorted(filter(Batch.is_saved, folder.glob(pattern)), key=lambda path: (_step(path), path.name))


def _step(path: Path) -> str:
    return path.name.split(".")[0]
