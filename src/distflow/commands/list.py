"""`distflow list`: presets and built-in models."""

import argparse
from collections.abc import Iterator

from distflow.commands.printing import print_rows
from distflow.commands.quick_start import importing


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=["presets", "models"],
        metavar="presets|models",
        help="what to list",
    )


def run_list(arguments: argparse.Namespace) -> int:
    print_rows(_presets() if arguments.what == "presets" else _models())
    return 0


def _presets() -> Iterator[tuple[str, str]]:
    """Each preset with the first sentence of its description."""
    from distflow.config.compose.setting_origins import describe_preset, preset_names

    for name in preset_names():
        yield name, describe_preset(name).partition(". ")[0].rstrip(".")


def _models() -> Iterator[tuple[str, str]]:
    with importing():
        from distflow.launch.configured_models import builtin_models

    for path, config, has_weights in builtin_models():
        size = (
            f"{config['model_type']}, {config['num_hidden_layers']} layers of width "
            f"{config['hidden_size']}"
        )
        yield (
            path,
            size
            if has_weights
            else f"{size}; without weights: actor_rollout_ref.model.init=random",
        )
