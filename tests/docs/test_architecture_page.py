"""`docs/architecture.md` speaks of the code as it is: folders, words, states and files."""

import re

from tests.oracle.ranks import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
SOURCES = {path: path.read_text() for path in (ROOT / "lightning_zero").rglob("*.py")}


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_tree_is_the_packages() -> None:
    named = re.findall(r"^([a-z]+) {2,}\S", section("The tree"), re.MULTILINE)
    package = ROOT / "lightning_zero"
    assert sorted(named) == sorted(path.parent.name for path in package.glob("*/__init__.py"))


def test_every_word_of_the_glossary_is_in_the_code() -> None:
    rows = re.findall(r"^\| (.+?) \|", section("Words"), re.MULTILINE)[2:]
    assert len(rows) > 15
    code = "\n".join(SOURCES.values())
    for row in rows:
        for word in re.findall(r"`(\w+)`", row) or row.split(", "):
            assert re.search(rf"(?:class|def) {word}\b|\b{word}\b", code), word
        for name in re.findall(r"`([A-Z]\w+)`", row):
            assert re.search(rf"^class {name}\b", code, re.MULTILINE), name


def test_the_states_are_the_enums() -> None:
    states = "\n".join(re.findall(r"^```\n(.*?)^```", section("The life of a step"), re.M | re.S))
    named = set(re.findall(r"\b[A-Z]{4,}(?:_[A-Z]+)*\b", states))
    members = set(re.findall(r"^    ([A-Z_]+) = ", "\n".join(SOURCES.values()), re.MULTILINE))
    assert named
    assert named <= members


def test_every_file_that_is_named_is_there() -> None:
    for name in re.findall(r"`([a-z_]+/[a-z_/]*\.py)`", PAGE):
        assert (ROOT / name).exists() or (ROOT / "lightning_zero" / name).exists(), name
    for name in re.findall(r"`((?:tests|lightning_zero)/[a-z_]+)`", PAGE):
        assert (ROOT / name).is_dir(), name
