"""`distflow migrate`: a config of ours from a script, a command or a config of another system."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distflow.commands.migration.conversion import Conversion
    from distflow.config import Loaded


def add_migrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", help="a Python script, a shell script or a YAML file of TRL, OpenRLHF, verl, ROLL or AReaL"
    )
    parser.add_argument("--to", metavar="FILE", type=Path, help="write the config to this file instead of the screen")
    parser.add_argument(
        "--devices", metavar="N", type=int, help="number of training devices, if different from the file"
    )


def run_migrate(arguments: argparse.Namespace) -> int:
    import yaml

    from distflow.commands.migration.conversion import as_file, compose, convert
    from distflow.commands.migration.read_files import read_foreign
    from distflow.config import UserError

    if arguments.devices is not None and arguments.devices < 1:
        raise UserError(f"--devices {arguments.devices}: a run has at least one device")
    if arguments.to is not None:
        _check_target(arguments.to)
    theirs = read_foreign(Path(arguments.file).expanduser())
    draft = convert(theirs, arguments.devices)
    loaded = _without_unread_keys(draft, compose(draft))
    text = f"# From {Path(arguments.file).name}, of {theirs.system}, by distflow migrate\n"
    text += yaml.safe_dump(as_file(draft, loaded), sort_keys=False, allow_unicode=True, width=120)
    if arguments.to is None:
        print(text, end="")
    else:
        arguments.to.write_text(text, encoding="utf-8")
    _print_missing(draft, arguments.to)
    return 0


def _check_target(path: Path) -> None:
    from distflow.config import UserError, preset_names

    if path.suffix != ".yaml" or "." in path.stem or path.stem in preset_names():
        raise UserError(f"--to {path}: the file must be NAME.yaml, where NAME has no dots and is not a preset's")
    if path.exists() or not path.parent.is_dir():
        what = "is there already" if path.exists() else "is in a folder that does not exist"
        raise UserError(f"--to {path}: it {what}; name another file")


def _without_unread_keys(draft: "Conversion", loaded: "Loaded") -> "Loaded":
    """The config without keys that its pipeline does not read; what else a run would be refused for is said."""
    from distflow.commands.migration.conversion import compose
    from distflow.config import UserError
    from distflow.config.derived_settings import train_files
    from distflow.launch.fit_config_to_inputs import InertKeys, read_config

    model, files = loaded.config.actor_rollout_ref.model.path, train_files(loaded.config)
    for key, found in (("actor_rollout_ref.model.path", model), ("data.train_files", any(files.values()))):
        if not found:
            draft.missing.append(f"{key} must be set: it is not in the file")
    while model and any(files.values()):
        try:
            read_config(loaded)
            break
        except InertKeys as error:
            for key in [
                name for name in draft.overrides if any(f"{name}.".startswith(f"{key}.") for key in error.keys)
            ]:
                draft.drop(key, f"it is not used by the pipeline of {draft.preset}")
            loaded = compose(draft)
        except UserError as error:
            draft.missing.append(f"a run would be rejected: {error}")
            break
    return loaded


def _print_missing(draft: "Conversion", to: Path | None) -> None:
    if to is not None:
        print(f"wrote {to}: distflow config {to} shows the complete config", file=sys.stderr)
    if draft.missing:
        print(f"\nnot in the config, or to be checked ({len(draft.missing)}):", file=sys.stderr)
    for line in dict.fromkeys(draft.missing):
        print(f"  {line}", file=sys.stderr)
