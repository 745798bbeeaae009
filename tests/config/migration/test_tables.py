"""Tables of other systems' keys: what their TOML says, what is refused, and that nobody reads them without need."""

import re
import tomllib
from pathlib import Path

import pytest

from distflow.config import load_config
from distflow.config.migration import tables
from distflow.config.migration.tables import ANY, Name, TableError, all_tables, read_table

FOLDER = Path(tables.__file__).parent
ACTOR = "actor_rollout_ref.actor"


def read(folder: Path, text: str, sources: str = 'sources = ["owner/name at 1a2b3c4: config.py"]') -> tables.Table:
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
        """,
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
    assert [name.ours for name in map(table.find, ("a.b", "a.c.b", "c.b")) if name] == ["third", "first", "second"]
    assert table.find("c") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[keys]\nlr = 3", "'lr' has 3, where a table must stand"),
        ("[keys]\nlr = {our = 'data.seed'}", "'lr' has a field 'our'"),
        ("[keys]\na.lr = 'data.seed'", "'a' has a field 'lr', which no entry has; keys with dots stand in quotes"),
        ("[keys]\nlr = {harmless = 'any'}", "'lr' has neither a key of ours nor a note nor values"),
        ("[keys]\nlr = {ours = 1}", "'lr' has 1 for 'ours', where a text must stand"),
        ("[keys]\nlr = {values = {a = 1}}", "'lr' has 1 for 'a', where a text must stand"),
        ("[keys]\nlr = {values = ['a']}", "'lr' has ['a'], where a table must stand"),
        ("[keys]\nlr = {note = 'a', harmless = 'all'}", "'lr' is harmless at 'all', which is neither 'any' nor 'off'"),
        ("[keys]\nlr = {note = 'a', harmless = {}}", "'lr' is harmless at {}"),
        ("[keys]\nlr.as = 'speed'", "'lr' is answered as 'speed', which [answers] does not have"),
        ("[answers]\na.as = 'b'\nb.note = 'c'\n[keys]\nlr.as = 'a'", "'a' is answered as 'b'"),
        ("[keys]\nlr = 'a'\n'{l,m}r' = 'b'", "'lr' stands there twice"),
        ("[keys]\nlr = 'a'\nlr = 'b'\nn = 'c'", "line 4"),
        ("[key]\nlr = 'a'", "there is no group 'key'"),
        ("keys = 3", "'keys' has 3, where a table must stand"),
        ("[defaults]\n'lr=1' = 1", "'defaults' has 1 for 'lr=1', where a text must stand"),
    ],
)
def test_what_is_no_table_is_refused_with_its_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TableError, match=re.escape(said)) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith("other.toml: ")


@pytest.mark.parametrize("sources", ["", "sources = []", "sources = 'config.py'"])
def test_a_table_without_its_sources_is_refused(tmp_path: Path, sources: str) -> None:
    with pytest.raises(TableError, match=r"other.toml: 'sources' must list the files"):
        read(tmp_path, "[keys]\nlr = 'a'", sources)


def test_every_file_belongs_to_a_system() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == {system.lower() for system in all_tables()}


@pytest.mark.parametrize("path", FOLDER.glob("*.toml"), ids=lambda path: path.stem)
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
