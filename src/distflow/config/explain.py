"""One key explained: what it means, what it may be, what it is here and who says so."""

from distflow.config.errors import ConfigError, Problem
from distflow.config.keys import KeyInfo
from distflow.config.loaded import Loaded
from distflow.config.schema import schema_keys
from distflow.config.show import flatten, show_value
from distflow.config.sources import COMMAND_LINE
from distflow.config.unknown import suggest
from distflow.config.values import expected


def explain(key: str, loaded: Loaded) -> str:
    """What a key means, what it may be, what it is here and who says so. A group lists its keys.

    Raises ConfigError naming the nearest key.
    """
    keys = schema_keys()
    if key in keys:
        return _explain_key(keys[key], flatten(loaded.config)[key], loaded.origin(key))
    below = [name for name in keys if name.startswith(f"{key}.")]
    if below:
        values = flatten(loaded.config)
        return "\n".join(
            f"{name}={show_value(keys[name], values[name])}  {keys[name].spec.description}" for name in below
        )
    raise ConfigError([Problem(((key, COMMAND_LINE),), "there is no such key", suggest(key, keys))])


def _explain_key(info: KeyInfo, value: object, origin: str) -> str:
    lines = [
        info.name,
        f"  {info.spec.description}",
        f"  type     {expected(info.annotation)}",
        f"  allowed  {info.spec.allowed()}" if info.spec.allowed() else "",
        f"  default  {show_value(info, info.default)}",
        f"  value    {show_value(info, value)}",
        f"  origin   {origin}",
    ]
    return "\n".join(line for line in lines if line)
