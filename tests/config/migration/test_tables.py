"""Tables of other systems' keys: what their TOML says, what is refused, and that nobody reads them
without need."""

import re
import tomllib
from pathlib import Path

import pytest

from distflow.config import load_config
from distflow.config.migration import tables
from distflow.config.migration.tables import ANY, Name, all_tables, read_table

FOLDER = Path(tables.__file__).parent
ACTOR = "actor_rollout_ref.actor"


def read(
    folder: Path, text: str, sources: str = 'sources = ["owner/name at 1a2b3c4: config.py"]'
) -> tables.Table:
    path = folder / "other.toml"
    path.write_text(f"{sources}\n{text}", encoding="utf-8")
    return read_table(path)


def test_an_entry_is_a_key_of_ours_or_fields_or_an_answer(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        """
        [answers]
        speed = {note = "it changes ACTOR.n only", harmless = "any"}

        [keys]
        lr = "ACTOR.optim.lr"
        "a.b" = {ours = "data.seed", note = "in rows", values = {null = "1", true = "2", -1 = "3", x = "4"}}
        fast.as = "speed"
        slow = {as = "speed", harmless = "off"}
        strict.note = "TRACTOR and REFS are no short forms"
        loose = {note = "leave it out", harmless = ["null", 0, 0.5, false, ""]}
        """,  # noqa: E501
    )
    assert table.sources == ("owner/name at 1a2b3c4: config.py",)
    assert table.names == {
        "lr": Name(f"{ACTOR}.optim.lr"),
        "a.b": Name("data.seed", "in rows", {None: "1", True: "2", -1: "3", "x": "4"}),
        "fast": Name(note=f"it changes {ACTOR}.n only", harmless=ANY),
        "slow": Name(note=f"it changes {ACTOR}.n only", harmless=(None, False)),
        "strict": Name(note="TRACTOR and REFS are no short forms"),
        "loose": Name(note="leave it out", harmless=(None, 0, 0.5, False, "")),
    }


def test_braces_are_several_keys_in_their_order(tmp_path: Path) -> None:
    table = read(tmp_path, '[keys]\n"{a,b.}{c,}" = "data.seed"\n"d.{e.*,f}" = "data.seed"')
    assert list(table.names) == ["ac", "a", "b.c", "b.", "d.e.*", "d.f"]


def test_a_key_comes_before_a_pattern_and_the_first_pattern_before_others(tmp_path: Path) -> None:
    table = read(tmp_path, '[keys]\n"a.*" = "first"\n"*.b" = "second"\n"a.b" = "third"')
    assert [name.ours for name in map(table.find, ("a.b", "a.c.b", "c.b")) if name] == [
        "third",
        "first",
        "second",
    ]
    assert table.find("c") is None


FILES = pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
GROUPS = {
    "answers",
    "keys",
    "fine_tuning",
    "values",
    "defaults",
    "computed",
    "beside_keys",
    "newer_names",
    "example",
}
METHODS = {"all", "rl", "tuning", "grpo", "rloo", "ppo", "sft", "rm", "end"}


def texts(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(text, str) for text in found.values())


@FILES
def test_a_table_names_its_sources_and_holds_known_groups_of_texts(path: Path) -> None:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    assert table.keys() <= {"sources", *GROUPS}
    assert isinstance(table["sources"], list) and table["sources"]
    assert texts(table.get("beside_keys", {})) and all(
        map(texts, table.get("computed", {}).values())
    )
    keys = {key for keys in table["keys"] for key in tables.expand(keys)}
    assert {*table.get("defaults", {}), *table.get("computed", {})} <= METHODS | keys
    assert all(map(texts, table.get("values", {}).values()))


@FILES
def test_an_entry_has_known_fields_and_says_what_is_to_be_done(path: Path) -> None:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    answers = table.get("answers", {})
    assert not any("as" in answer for answer in answers.values())
    entries = [*table["keys"].values(), *table.get("fine_tuning", {}).values()]
    entries = [entry for entry in entries if not isinstance(entry, str)]
    for entry in (*answers.values(), *entries):
        assert entry.keys() <= {"ours", "note", "values", "harmless", "as"}, (
            f"{entry}: keys with dots stand in quotes"
        )
        assert texts(
            {name: text for name, text in entry.items() if name in ("ours", "note", "as")}
        ), entry
        assert texts(entry.get("values", {})), entry
        assert (
            isinstance(entry.get("harmless", []), list) or entry["harmless"] in tables.HARMLESS
        ), entry
    for entry in entries:
        assert {*entry, *answers.get(entry.get("as"), {})} & {"ours", "note", "values"}, entry
        assert "as" not in entry or entry["as"] in answers, entry
    named = [key for keys in table["keys"] for key in tables.expand(keys)]
    assert sorted(set(named)) == sorted(named), "a key stands there once"


def test_every_file_belongs_to_a_system() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == {
        system.lower() for system in all_tables()
    }


@FILES
def test_every_answer_has_a_key(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    answers = tomllib.loads(text).get("answers", {})
    assert set(answers) == set(re.findall(r'\bas = "(\w+)"', text))


def test_a_config_without_keys_of_others_reads_no_table() -> None:
    all_tables.cache_clear()
    for preset in ("grpo", "verl_ppo"):
        load_config(preset, ["data.train_batch_size=8"], complete=False)
    assert all_tables.cache_info().currsize == 0
    load_config("grpo", ["use_liger_kernel=true"], complete=False)
    assert all_tables.cache_info().currsize == 1
