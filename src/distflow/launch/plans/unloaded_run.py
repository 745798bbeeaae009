"""What a config tells about a run without weights: its pipeline, the shapes of its
models, its rows, and the Python code that it names."""

from collections.abc import Sequence
from pathlib import Path

from distflow.config import Config
from distflow.config.derived_settings import model_of
from distflow.data.sources import BUILTIN_FOLDER, read_file
from distflow.errors import UserError, blaming
from distflow.graph import BoundPipeline
from distflow.hub_id_or_local_path import is_local_model
from distflow.launch.select_pipeline import bind, import_user_modules
from distflow.launch.user_code import pipeline_code
from distflow.models.model_paths import BUILTIN_PREFIX, PACKAGE_PREFIX, resolve_path
from distflow.planning.model_shapes import ModelShape, find_shape

_MOST_ROWS_BYTES = 32 * 2**20
"""Of a file whose rows are counted."""


def bind_named(config: Config) -> BoundPipeline:
    """The pipeline of a config, bound by the code that binds it for a run."""
    if pipeline_code(config):
        import_user_modules(config)
    return bind(config)


def shapes_of(config: Config, pipeline: BoundPipeline) -> dict[str, ModelShape]:
    """The shape of each role's model; raises UserError with the key of a model without a config."""
    if not pipeline.engines:
        raise UserError(
            f"no node of the pipeline '{pipeline.graph_id}' uses a model: there is nothing to plan"
        )

    found = {}
    for role in sorted(pipeline.engines):
        key, path = model_of(config, role)
        if path is None:
            raise UserError(f"{key} is not set: a plan needs a model, e.g. {key}=qwen2.5-7b")
        with blaming(key):
            found[role] = find_shape(path, _folder_of(path))

    return found


def _folder_of(path: str) -> Path | None:
    """None for an id of the hub, or a name."""
    is_ours = path.startswith((BUILTIN_PREFIX, PACKAGE_PREFIX))
    if is_ours or is_local_model(path) or Path(path).expanduser().is_dir():
        return Path(resolve_path(path))
    return None


def num_rows(config: Config) -> int | None:
    """Rows to train on, before any are left out; None if counting them takes long."""
    data = config.data
    found = [_rows_of(data.train_files, data.train_max_samples)]
    for domain in data.domains.values():
        if domain.weight:
            found.append(_rows_of(domain.train_files, domain.train_max_samples))

    total = 0
    for rows in found:
        if rows is None:
            return None
        total += rows

    return total or None


def _rows_of(names: Sequence[str], most: int) -> int | None:
    """At most so many, if that is not below 0."""
    rows = 0
    for name in names:
        file = Path(name).expanduser()
        if name.startswith("builtin:"):
            found = sorted(BUILTIN_FOLDER.glob(f"{name.removeprefix('builtin:')}.*"))
            file = found[0] if found else file

        if not file.is_file() or file.stat().st_size > _MOST_ROWS_BYTES:
            return None
        rows += sum(1 for _ in read_file(file, "data.train_files"))

    return rows if most < 0 else min(rows, most)
