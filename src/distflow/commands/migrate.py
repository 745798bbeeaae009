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
    parser.add_argument("--to", metavar="FILE", type=Path, help="write the config there, not to the screen")
    parser.add_argument(
        "--devices", metavar="N", type=int, help="devices that it trains on, where the file does not say it, or others"
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
        raise UserError(f"--to {path}: a config is called NAME.yaml, and NAME has no dots and is that of no preset")
    if path.exists() or not path.parent.is_dir():
        what = "is there already" if path.exists() else "lies in no folder that is there"
        raise UserError(f"--to {path}: it {what}; name another file")


def _without_unread_keys(draft: "Conversion", loaded: "Loaded") -> "Loaded":
    """The config without keys that its pipeline does not read; what else a run would be refused for is said."""
    from distflow.commands.migration.conversion import compose
    from distflow.config import UserError
    from distflow.config.derived_settings import train_files
    from distflow.launch.load_inputs import InertKeys, read_config

    model, files = loaded.config.actor_rollout_ref.model.path, train_files(loaded.config)
    for key, found in (("actor_rollout_ref.model.path", model), ("data.train_files", any(files.values()))):
        if not found:
            draft.missing.append(f"{key} is to be set: the file does not name it")
    while model and any(files.values()):
        try:
            read_config(loaded)
            break
        except InertKeys as error:
            for key in [
                name for name in draft.overrides if any(f"{name}.".startswith(f"{key}.") for key in error.keys)
            ]:
                draft.drop(key, f"nothing reads it in the pipeline of {draft.preset}")
            loaded = compose(draft)
        except UserError as error:
            draft.missing.append(f"a run would be refused: {error}")
            break
    return loaded


def _print_missing(draft: "Conversion", to: Path | None) -> None:
    if to is not None:
        print(f"wrote {to}: distflow config {to} shows all of it", file=sys.stderr)
    if draft.missing:
        print(f"\nnot in the config, or to be looked at ({len(draft.missing)}):", file=sys.stderr)
    for line in dict.fromkeys(draft.missing):
        print(f"  {line}", file=sys.stderr)
