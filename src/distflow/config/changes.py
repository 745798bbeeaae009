"""What a config says differently from the preset that it builds on."""

from omegaconf import DictConfig, OmegaConf

from distflow.config.build import ConfigBuilder
from distflow.config.loaded import Loaded
from distflow.config.schema import Config, schema_keys
from distflow.config.show import diff, show_value
from distflow.config.sources import PRESETS, preset_names


def changes(loaded: Loaded) -> tuple[str, list[dict[str, str]]]:
    """The preset that was built on ("" where it was none) and each key that now has another value.

    A change is `{"key", "before", "now", "where"}`, its values as they would be written in YAML, `where` as of
    `Loaded.origin`. Without a preset the schema's defaults are what was before.
    """
    preset = _preset(loaded)
    before = ConfigBuilder({}).build(_preset_values(preset)) if preset else Config()
    keys = schema_keys()
    return preset, [
        {
            "key": key,
            "before": show_value(keys[key], old),
            "now": show_value(keys[key], new),
            "where": loaded.origin(key),
        }
        for key, old, new in diff(before, loaded.config)
    ]


def _preset(loaded: Loaded) -> str:
    """Of the presets that set a key the one that builds on the others."""
    set_by = [
        name for name in preset_names() if any(o.startswith(f"presets/{name}.yaml:") for o in loaded.origins.values())
    ]
    return max(set_by, key=lambda name: len(_chain(name)), default="")


def _chain(name: str) -> list[str]:
    """The preset behind those that it builds on."""
    return [*(part for base in _read(name).get("defaults", []) if base != "_self_" for part in _chain(base)), name]


def _preset_values(name: str) -> dict[str, object]:
    # Read without Hydra, which would cost every start a tenth of a second.
    values = OmegaConf.to_container(OmegaConf.merge(*map(_read, _chain(name))), resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items() if key != "defaults"}


def _read(name: str) -> DictConfig:
    preset = OmegaConf.load(PRESETS / f"{name}.yaml")
    assert isinstance(preset, DictConfig), "a preset is a mapping"
    return preset
