"""One word a thing (docs/glossary.md): words that other words have replaced stand in no code, message or page."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

from tests.source_trees import SOURCE, modules, nodes_of

ROOT = Path(__file__).parents[1]
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
            "src/distflow/environments/verifiers_episode.py",  # a name of that package
            "src/distflow/models/gpu_kernels",  # `tl.program_id`
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


def faults_of(path: Path) -> list[str]:
    """The retired words and phrases of a file, each with what to say instead."""
    words = {PLURALS.get(word, word) for word in words_of(text_of(path))}
    found = {
        word: instead
        for word, (instead, elsewhere) in RETIRED.items()
        if word in words and not shown(path).startswith(elsewhere)
    }
    prose = " ".join(text_of(path).lower().split())
    found |= {phrase: new for phrase, new in PHRASES.items() if phrase in prose}
    return [f"{shown(path)} says {old} (say: {new})" for old, new in found.items()]


def test_no_retired_word() -> None:
    faults = [fault for path in FILES if path.name != "glossary.md" for fault in faults_of(path)]
    assert not faults, "\n".join(faults)


def test_no_lone_participle_names_a_file_a_class_or_a_function() -> None:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lone = [
        f"{shown(path)}: {name}"
        for path in modules().values()
        for name in (path.stem, *(node.name for node in nodes_of(path) if isinstance(node, kinds)))
        if name.strip("_").lower() in PARTICIPLES
    ]
    assert not lone, "these names say nothing of what was made, given or kept:\n" + "\n".join(lone)
