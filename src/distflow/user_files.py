"""The modules of a user's files that are named by their path.

The module of a file is `distflow.user_files.` and its quoted path, so that every process that has
distflow can import it: what the file defines can be pickled for the processes that a user's code
starts, forked or spawned.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NoReturn
from urllib.parse import quote_from_bytes, unquote_to_bytes

PREFIX = f"{__name__}."
__path__: list[str] = []
"""Makes this module a package, whose modules the finder below finds."""


def module_of(file: Path) -> str:
    """The name of a file's module. file: its absolute path."""
    return PREFIX + quote_from_bytes(os.fsencode(file)).replace(".", "%2E")


def file_of(module: str) -> Path | None:
    """The file of a module, if it is one of these."""
    if module.startswith(PREFIX):
        return Path(os.fsdecode(unquote_to_bytes(module.removeprefix(PREFIX))))
    return None


class _Loader(SourceFileLoader):
    """Reads the source each time. Bytecode is told from that of an earlier source only by size and
    second, which a script that writes its reward function again can meet."""

    def path_stats(self, path: object) -> NoReturn:
        raise OSError("bytecode is neither read nor written")


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = file_of(name)
        if file is None or not file.is_file():
            return None
        return spec_from_file_location(name, file, loader=_Loader(name, str(file)))


sys.meta_path.append(_Finder)
