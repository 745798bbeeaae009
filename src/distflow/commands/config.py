"""`distflow config`: the resolved config, one key explained, or its pipeline drawn."""

import argparse
import sys
from typing import TYPE_CHECKING

from distflow.commands.arguments import add_preset_arguments, add_trust_argument
from distflow.errors import UserError

if TYPE_CHECKING:
    from distflow.config import Config, Loaded


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset_arguments(parser)
    parser.add_argument(
        "--explain", metavar="KEY", help="show a key's meaning, its default and where it was set"
    )
    parser.add_argument("--graph", action="store_true", help="draw the pipeline as text")
    parser.add_argument(
        "--mermaid", action="store_true", help="print the pipeline as a Mermaid flowchart"
    )
    add_trust_argument(parser, "the config names, if it has its own groups or pipeline")


def run_config(arguments: argparse.Namespace) -> int:
    from distflow.config import explain, load_config, to_yaml

    trusted = arguments.trust_code
    loaded = load_config(arguments.preset, arguments.overrides, complete=False, trust_code=trusted)
    refused: UserError | None = None
    for line in loaded.notes:
        _note(line)

    if loaded.config.trainer.imports and not (trusted or arguments.graph or arguments.mermaid):
        named = ", ".join(loaded.config.trainer.imports)
        _note(f"note: trainer.imports names Python code, which was not run: {named}")

    if not arguments.graph:
        loaded, refused = _checked(loaded, trusted)

    if arguments.explain:
        print(explain(arguments.explain, loaded))
    elif arguments.graph or arguments.mermaid:
        from distflow.launch.select_pipeline import bind, import_user_modules
        from distflow.launch.user_code import only_if_trusted, pipeline_code

        only_if_trusted(pipeline_code(loaded.config), trusted, say=_note)
        import_user_modules(loaded.config)
        pipeline = bind(loaded.config)
        print(pipeline.to_mermaid() if arguments.mermaid else pipeline.to_text(), end="")
    else:
        print(to_yaml(loaded.config), end="")

    if refused is not None:
        raise refused
    return 0


def _checked(loaded: "Loaded", trusted: bool) -> tuple["Loaded", UserError | None]:
    """The config that a run would have, if local files suffice to determine it, else unchanged; and
    what a run would refuse."""
    from distflow.config.compose.check_paths import is_incomplete
    from distflow.config.compose.load_config import check_named_files

    try:
        check_named_files(loaded)
        if is_incomplete(loaded.config):
            return loaded, None
        if reason := why_not_from_files(loaded.config, trusted):
            _note(f"note: only the config itself was checked: {reason}")
            return loaded, None

        from distflow.launch.make_spec import check_run

        return check_run(loaded), None
    except UserError as error:
        return loaded, error


def why_not_from_files(config: "Config", trusted: bool) -> str:
    """Why model and data are not read: the config may be another person's, and the hub is slow."""
    from distflow.config.compose.check_paths import is_local_data
    from distflow.config.derived_settings import data_files
    from distflow.hub_id_or_local_path import is_local_model
    from distflow.launch.user_code import data_code, pipeline_code
    from distflow.runtime.checkpoint.find_checkpoint import is_of_a_run

    files = (data_files(config, "train_files") | data_files(config, "val_files")).values()
    elsewhere = []
    for named in files:
        for file in named:
            if not is_local_data(file):
                elsewhere.append(file)

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
