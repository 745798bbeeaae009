"""Text that would act on whoever shows it, and how to see that it did not."""

import json
import re
import string
from collections.abc import Iterator
from pathlib import Path

# Clear the screen, set the clipboard (OSC 52), link elsewhere (OSC 8), ring, overwrite the line,
# C1's CSI and OSC, turn what follows around, hide; markup of rich and of HTML.
CANARY = (
    "\x1b[2J\x1b]52;c;aGk=\x07\x1b]8;;http://evil\x1b\\link\x07\rover\x08\x9b31m\x9d0;t\x9c\u202egnp\u2066x\u200b"
    "[red]boo[/red]<script>document.documentElement.dataset.hacked=1</script>"
)
ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
HOSTILE_CHARACTERS = "\x1b\x07\r\x08\x9b\x9d\u202e\u2066\u200b\x7f\x00\x85\u2028"


def assert_harmless(text: str, where: object = "") -> None:
    """Nothing in it acts on a terminal."""
    found = ACTING.search(text)
    assert found is None, (
        f"{where}: {found[0]!r} in {text[max(found.start() - 80, 0) : found.end() + 20]!r}"
    )


def speak_hostile(model: Path) -> None:
    """The tokenizer of a tiny model has such characters for its letters: answers are full of
    them."""
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())

    vocabulary = content["model"]["vocab"]
    for own, other in zip(string.ascii_uppercase, HOSTILE_CHARACTERS * 2, strict=False):
        if other not in vocabulary:
            vocabulary[other] = vocabulary.pop(own)

    file.write_text(json.dumps(content))


def text_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """What a person may look into."""
    for path in sorted(folder.rglob("*")):
        if (
            path.suffix in (".json", ".jsonl", ".yaml", ".html", ".txt", ".md", ".csv")
            and path.is_file()
        ):
            yield path, path.read_bytes().decode("utf-8")
