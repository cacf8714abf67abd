"""The documentation's links and flags exist."""

import re
from pathlib import Path

import pytest

import scpo_continuous

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (ROOT / page).parent.joinpath(target).exists(), target


def test_line_numbers_are_those_of_the_functions():
    source = (ROOT / "scpo_continuous.py").read_text().splitlines()
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./scpo_continuous\.py#L(\d+)\)", (ROOT / "docs/scpo.md").read_text())
    assert len(links) >= 8
    for name, line in links:
        assert re.match(rf"\s*(def|class) {name.split('.')[-1]}\b", source[int(line) - 1]), (name, line)


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_real_flags(page):
    for flag in re.findall(r"scpo_\w+\.py [^`\n]*?(--[a-z-]+)", (ROOT / page).read_text()):
        name = flag.replace("--no-", "--")[2:].replace("-", "_")  # a switch has a --no- form
        assert hasattr(scpo_continuous.Args(), name) or flag == "--help", flag


@pytest.mark.parametrize("page", PAGES)
def test_no_placeholder_is_left(page):
    assert not re.search(r"[A-Z]_(TABLE|SECTION)\b|TODO", (ROOT / page).read_text())


def test_the_tests_that_docs_name_exist():
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", (ROOT / page).read_text())}
    defined = {name for path in (ROOT / "tests").glob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert named and named <= defined, named - defined
