"""One word a thing (docs/glossary.md): words that other words have replaced stand in no code, message or page."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "distflow"
SANDBOX = ("src/distflow/sandbox", "src/distflow/rewards", "src/distflow/commands/sandbox.py", "docs/sandbox.md")
"""Where a program is what a model wrote."""

# word → (what to say, files that may use it in another meaning)
RETIRED: dict[str, tuple[str, tuple[str, ...]]] = {
    "ticket": ("prompt group, group id", ()),
    "verdict": ("score, reward result, reward error", ()),
    "incarnation": ("restart", ()),
    "handover": ("reshard", ()),
    "learner": ("trainer, training worker", ()),
    "witness": ("group recorder", ()),
    "evidence": ("recorded step", ()),
    "quarantine": ("dropped(max_retries)", ()),
    "quarantined": ("dropped(max_retries)", ()),
    "certify": ("self-check", ()),
    "certified": ("self-checked", ()),
    "experience": ("rollout", ()),
    "credit": ("rollout capacity", ()),
    "program": (
        "pipeline",
        (
            *SANDBOX,
            "docs/rewards.md",
            "docs/migrating.md",
            "docs/rlvr.md",
            "docs/observe.md",
            "src/distflow/data",
            "src/distflow/config",
            "src/distflow/launch",
        ),
    ),
}
PLURALS = {f"{word}s": word for word in RETIRED}
PHRASES = {
    "learning plane": "training loop",
    "experience edge": "sample queue",
    "held-out": "validation",
    "held out": "validation",
}
PARTICIPLES = ("told", "given", "made", "saved", "held", "kept", "sent", "taken", "served", "published")

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES = [*sorted(SOURCE.rglob("*.py")), *PAGES]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def text_of(path: Path) -> str:
    """What a person reads: of code its names, strings and comments; of a page all but what is quoted from outside."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    kinds = (tokenize.NAME, tokenize.STRING, tokenize.COMMENT)
    return "\n".join(t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type in kinds)


def words_of(text: str) -> set[str]:
    """Single words, lower-case, of identifiers too: `RewardResult`, `group_id`."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)}


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_no_retired_word(path: Path) -> None:
    words = {PLURALS.get(word, word) for word in words_of(text_of(path))}
    found = {
        word: instead
        for word, (instead, elsewhere) in RETIRED.items()
        if word in words and not shown(path).startswith(elsewhere) and path.name != "glossary.md"
    }
    assert not found, f"{shown(path)} says {', '.join(f'{word} (say: {new})' for word, new in found.items())}"
    prose = " ".join(text_of(path).lower().split())
    phrases = {phrase: new for phrase, new in PHRASES.items() if phrase in prose and path.name != "glossary.md"}
    assert not phrases, f"{shown(path)} says {', '.join(f'{old} (say: {new})' for old, new in phrases.items())}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=shown)
def test_no_lone_participle_names_a_file_a_class_or_a_function(path: Path) -> None:
    tree = ast.parse(path.read_text())
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = [path.stem, *(node.name for node in ast.walk(tree) if isinstance(node, kinds))]
    lone = [name for name in names if name.strip("_").lower() in PARTICIPLES]
    assert not lone, f"{shown(path)}: {', '.join(lone)} says nothing of what was made, given or kept"
