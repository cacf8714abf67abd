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


def test_readmes_table_is_the_committed_runs():
    import studies

    assert len(studies.summary()) == 2 + 5  # five tasks have runs in results/
    assert "\n".join(studies.summary()) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("study", ["cartsafe", "augmentation", "estimators", "box"])
def test_a_studys_table_and_figure_are_the_committed_runs(study, monkeypatch):
    import studies

    env_id, _, iterations, seeds, labels = studies.STUDIES[study]
    for label in labels:
        assert studies.curves(env_id, label, "iteration").shape == (seeds, iterations)
    assert (studies.RESULTS / f"{study}.md").read_text() == "\n".join(studies.table(study)) + "\n"
    drawn = []
    monkeypatch.setattr(studies, "save", lambda figure, name: drawn.append((name, len(figure.axes[0].lines))))
    studies.draw_curves(study, ["episodic_return", "episodic_cost"], {})
    assert drawn == [(study, len(labels))]
