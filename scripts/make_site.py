"""Builds the site of the docs in build/docs/site, for `make docs`.

Pages link to files beside docs/, such as an example, by their place in the repository. These files
are copied into the site, and the links lead to the copies. No page of the site may load anything
from another host.
"""

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "docs"
PAGES = BUILD / "pages"
"""The `docs_dir` of docs/mkdocs.yml."""
BESIDE = "repository/"
"""The folder of the site with files from beside docs/."""

LINK = re.compile(r"\]\(([\w./-]+)(#[^)\s]*)?\)")
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def main() -> int:
    shutil.rmtree(BUILD, ignore_errors=True)
    waiting = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
    staged = set[str]()
    while waiting:
        file = waiting.pop()
        if file not in staged:
            staged.add(file)
            waiting += stage(file)

    # Zensical keeps its cache beside its configuration.
    shutil.copy(ROOT / "docs" / "mkdocs.yml", BUILD)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    status = subprocess.run(command, cwd=BUILD).returncode
    if status != 0:
        return status

    faults = loaded_from_elsewhere()
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def stage(file: str) -> list[str]:
    """Copy a file of the repository to its place in the site. Returns the files to which it
    links."""
    place = PAGES / in_site(file)
    place.parent.mkdir(parents=True, exist_ok=True)
    if not file.endswith(".md"):
        shutil.copyfile(ROOT / file, place)
        return []

    linked = list[str]()

    def moved(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), found[1]))
        if not (ROOT / target).is_file():
            return found[0]
        linked.append(target)
        link = posixpath.relpath(in_site(target), posixpath.dirname(in_site(file)))
        return f"]({link}{found[2] or ''})"

    place.write_text(LINK.sub(moved, (ROOT / file).read_text()))
    return linked


def in_site(file: str) -> str:
    return file.removeprefix("docs/") if file.startswith("docs/") else BESIDE + file


def loaded_from_elsewhere() -> list[str]:
    """The tags of pages that make a browser load something from another host."""
    found = list[str]()
    for page in sorted((BUILD / "site").rglob("*.html")):
        for tag in LOADED.findall(page.read_text()):
            found.append(f"{page}: {tag}")
    return found


if __name__ == "__main__":
    sys.exit(main())
