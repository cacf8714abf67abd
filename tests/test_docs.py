"""The documentation's links, commands, flags and test names exist."""

import csv
import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import scpo_continuous
import scpo_run

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "results/README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:python|bash) (-m [\w.]+|[\w/{},]+\.(?:py|sh))((?:(?!`|\n|#|&&).)*)")


def commands():
    """(page, script, flags) of each command in the pages."""
    for page in PAGES:
        for script, rest in COMMAND.findall((ROOT / page).read_text()):
            yield page, script, re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)


def flags_of(script):
    """The flags that a script takes, as `--help` or its dataclass tells them."""
    path = ROOT / script
    if path.suffix == ".py" and (
        path.parent.name == "baselines" or path.name in ("scpo_continuous.py", "scpo_discrete.py")
    ):
        module = importlib.import_module(script[:-3].replace("/", "."))
        names = [*module.Args.__dataclass_fields__, *scpo_run.RunArgs.__dataclass_fields__]
        flags = {f"--{name.replace('_', '-')}" for name in names}
        return flags | {flag.replace("--", "--no-", 1) for flag in flags} | {"--help"}
    command = {"benchmark.sh": ["-m", "reproduce.benchmark"]}.get(script, script.split())
    told = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0, (script, told.stderr)
    return set(re.findall(r"--[a-z][a-z-]*", told.stdout))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target, anchor in re.findall(r"\]\(([^)#]*)(#[^)]*)?\)", text):
        if target.startswith("http"):
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor[1:] in anchors, (target, anchor)


def test_commands_name_real_scripts_and_flags():
    found = [command for command in commands() if not command[1].startswith(("-m pip", "-m venv", "-m pytest"))]
    assert len(found) > 20
    known = {}
    for page, script, flags in found:
        for one in re.sub(r"\{.*\}", "cpo", script).split(","):
            path = ROOT / (one[3:].replace(".", "/") + ".py" if one.startswith("-m ") else one)
            assert path.is_file(), (page, one)
            if flags:
                known[one] = known.get(one) or flags_of(one)
                assert set(flags) <= known[one], (page, script, set(flags) - known[one])


def test_functions_of_the_table_of_equations_exist():
    """`name` in it is a function or class of scpo_continuous.py."""
    source, page = (ROOT / "scpo_continuous.py").read_text(), (ROOT / "docs/scpo.md").read_text()
    rows = re.findall(r"^\| [^|]* \| ((?:`[\w.]+`(?:, )?)+) \|", page, re.M)
    names = [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]
    assert len(names) > 5
    for name in names:
        assert re.search(rf"\b(def|class) {name.split('.')[-1]}\b", source), name


@pytest.mark.parametrize("page", PAGES)
def test_links_name_functions_of_their_file(page):
    """[`name`](file.py) leads to a file that defines the name."""
    for names, target in re.findall(r"\[(`[\w.`, ]+`)\]\(([^)]+\.py)\)", (ROOT / page).read_text()):
        source = ((ROOT / page).parent / target).read_text()
        for name in re.findall(r"`([\w.]+)`", names):
            if not name.endswith(".py"):
                assert re.search(rf"^ *(def|class) {name.split('.')[-1]}\b", source, re.M), (name, target)


@pytest.mark.parametrize("page", PAGES)
def test_no_placeholder_is_left(page):
    assert not re.search(r"[A-Z]_(TABLE|SECTION)\b|TODO|XXX", (ROOT / page).read_text())


def test_the_tests_that_docs_name_exist():
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", (ROOT / page).read_text())}
    sources = [path.read_text() for path in (ROOT / "tests").glob("test_*.py")]
    defined = {name for source in sources for name in re.findall(r"def (test_\w+)", source)}
    assert named and named <= defined, named - defined


def test_the_toys_in_the_theory_page():
    """The table of advantages, by our functions; the diagrams have the same probabilities and rewards."""
    page = (ROOT / "docs" / "theory.md").read_text()
    toys = re.findall(r"^\| (?:first|second) \| (.*) \|$", page, re.M)
    diagrams = re.findall(r"```mermaid\n(.*?)```", page, re.S)
    assert len(toys) == 2
    for toy, diagram in zip(toys, diagrams):
        *q, _, _, _, _, _ = numbers = np.array(toy.split(" | "), dtype=float)
        assert q == [float(p) for p in re.findall(r'a[01] -->\|"([\d.]+)"\| safe', diagram)]
        rewards = np.array(re.findall(r"reward (\d+)", diagram), dtype=float)
        for k, printed in zip((0, 1, 4, 8, np.inf), numbers[2:]):
            first, second = scpo_continuous.nullify(rewards, np.zeros(2), np.array(q), k, 0.0, 0.0)
            assert (first - second) / 2 == pytest.approx(printed, abs=0.00501)


def on_run():
    """{algorithm: (return, cost, share of safe episodes, seeds)} of the full-length runs on Run."""
    with open(ROOT / "results" / "campaign.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == "SafetyBallRun-v0"]
    return {row["algorithm"]: tuple(float(row[x]) for x in ("return", "cost", "safe", "seeds")) for row in rows}


def test_how_the_baselines_do():
    """The table in docs/baselines.md is of results/campaign.csv."""
    page, words = (
        (ROOT / "docs" / "baselines.md").read_text(),
        {1: "", 2: ", two seeds", 3: ", three seeds", 4: ", four seeds"},
    )
    for algorithm, (returned, cost, safe, seeds) in on_run().items():
        assert f"| {algorithm}{words[seeds]} | {returned:,.0f} | {cost:.1f} | {safe:.0%} |".replace("%", " %") in page


def test_the_readme_says_for_whom_by_what_was_measured():
    text, run = " ".join((ROOT / "README.md").read_text().split()), on_run()
    ours, lagrangian, cpo = (run[algorithm] for algorithm in ("SCPO", "TRPO-L", "CPO"))
    share = f"On Run {ours[2]:.0%} of SCPO's episodes are safe at the end"
    share += f", {lagrangian[2]:.0%} with TRPO-L and {cpo[2]:.0%} with CPO"
    assert share.replace("%", " %") in text
    assert min(lagrangian[0], cpo[0]) > 0.95 * ours[0]  # about the same return
    assert "(four seeds each)" in text
    assert [x[3] for x in (ours, lagrangian, cpo)] == [4, 4, 4]


def test_the_results_page_names_each_file_beside_it():
    named = re.findall(r"`([^`]+)`", (ROOT / "results" / "README.md").read_text().split("## Files")[1])
    there = {path.name + "/" * path.is_dir() for path in (ROOT / "results").iterdir()}
    assert there - {"README.md"} - {name for name in there if name.endswith((".png", ".svg"))} == {*named} & there


def test_the_film_is_small_and_moves():
    path = ROOT / "results" / "film.gif"
    with Image.open(path) as film:
        assert film.is_animated and path.stat().st_size < 1.5e6
