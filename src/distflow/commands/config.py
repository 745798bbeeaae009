"""`distflow config`: the resolved config, one key of it explained, or its pipeline drawn."""

import argparse
import sys
from typing import TYPE_CHECKING

from distflow.commands.arguments_and_run_folders import add_preset_arguments, add_trust_argument

if TYPE_CHECKING:
    from distflow.config import Config, Loaded


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset_arguments(parser)
    parser.add_argument("--explain", metavar="KEY", help="show a key's meaning, its default and where it was set")
    parser.add_argument("--graph", action="store_true", help="draw the pipeline as text")
    parser.add_argument("--mermaid", action="store_true", help="print the pipeline as a Mermaid flowchart")
    add_trust_argument(parser, "the config names, if it has its own groups or pipeline")


def run_config(arguments: argparse.Namespace) -> int:
    from distflow.config import explain, load_config, to_yaml

    trusted = arguments.trust_code
    loaded = load_config(arguments.preset, arguments.overrides, complete=False, trust_code=trusted)
    for line in loaded.notes:
        _note(line)
    if loaded.config.trainer.imports and not (trusted or arguments.graph or arguments.mermaid):
        named = ", ".join(loaded.config.trainer.imports)
        _note(f"note: trainer.imports names Python code, which was not run: {named}")
    if not arguments.graph:
        loaded = _fitted(loaded, trusted)
    if arguments.explain:
        print(explain(arguments.explain, loaded))
    elif arguments.graph or arguments.mermaid:
        from distflow.launch.code_named_by_config import only_if_trusted, pipeline_code
        from distflow.launch.select_pipeline import bind, import_user_modules

        only_if_trusted(pipeline_code(loaded.config), trusted, say=_note)
        import_user_modules(loaded.config)
        pipeline = bind(loaded.config)
        print(pipeline.to_mermaid() if arguments.mermaid else pipeline.to_text(), end="")
    else:
        print(to_yaml(loaded.config), end="")
    return 0


def _fitted(loaded: "Loaded", trusted: bool) -> "Loaded":
    """The config as a run would have it, where files of this machine suffice to find it; else unchanged."""
    from distflow.config import UserError
    from distflow.config.derived_settings import train_files

    if not loaded.config.actor_rollout_ref.model.path or not any(train_files(loaded.config).values()):
        return loaded
    if reason := _not_from_files(loaded.config, trusted):
        _note(f"note: sizes are not fitted to the data: {reason}")
        return loaded
    from distflow.launch.fit_config_to_inputs import fit_to_files

    try:
        return fit_to_files(loaded)
    except UserError as err:
        _note(f"note: a run would be rejected: {err}")
        return loaded


def _not_from_files(config: "Config", trusted: bool) -> str:
    """Why model and data are not read: the config may be another person's, and the hub is slow."""
    from distflow.config.compose.check_paths import is_local_data
    from distflow.config.derived_settings import train_files, val_files
    from distflow.hub import is_local_model
    from distflow.launch.code_named_by_config import data_code, pipeline_code
    from distflow.runtime.checkpoint.find_checkpoint import is_of_a_run

    files = (train_files(config) | val_files(config)).values()
    elsewhere = [file for named in files for file in named if not is_local_data(file)]
    if elsewhere:
        return f"'{elsewhere[0]}' is not a file on this machine"
    model = config.actor_rollout_ref.model
    for path in (model.path, model.tokenizer_path):
        if path and is_of_a_run(path):
            return f"'{path}' is a run, whose policy is only exported when needed"
        if path and not is_local_model(path):
            return f"'{path}' is not a folder on this machine"
    if (pipeline_code(config) or data_code(config) or model.trust_remote_code) and not trusted:
        return "it names Python code, which --trust-code would run"
    return ""


def _note(line: str) -> None:
    print(line, file=sys.stderr)
