"""Columns of a row that a verifier reads."""

import json


def decoded(value: object) -> object:
    """What a column means that holds a list or a mapping as JSON, as some data sets write them; any other as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
