"""A config that was loaded, and where each of its keys was set."""

from dataclasses import dataclass

from distflow.config.compose.shrink_to_fit import Fitted
from distflow.config.keys.schema import Config, schema_keys
from distflow.config.rules.check import where
from distflow.config.serialize import flatten, to_yaml


@dataclass(frozen=True)
class Loaded:
    """A config and where it came from. origins: key → "file:line" or "command line", for each key that was set.
    fitted: what nobody chose and was made to fit. notes: lines about settings of another system that were accepted."""

    config: Config
    origins: dict[str, str]
    fitted: tuple[Fitted, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The resolved config as YAML."""
        return to_yaml(self.config)

    def origin(self, key: str) -> str:
        """Where a key was set, or "default"; of one that was made to fit, why."""
        why = [fitted.why for fitted in self.fitted if fitted.key == key]
        return f"made to fit: {why[-1]}" if why else where(key, self.origins)

    @property
    def set_keys(self) -> dict[str, str]:
        """The keys that somebody set to something else than the default, with their origin: those must do something."""
        values, keys = flatten(self.config), schema_keys()
        return {key: origin for key, origin in self.origins.items() if key in keys and values[key] != keys[key].default}
