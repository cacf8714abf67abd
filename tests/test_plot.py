"""reproduce/curves.py and plot.py: what is read, compared, said and drawn, with numbers that can be checked by hand."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from reproduce import beside, curves, fast, field, film, held_out, plot, search
from reproduce.studies import STUDIES

ROOT = Path(__file__).parent.parent
RUN, FIGURE = "SafetyBallRun-v0", [task for task in curves.TASKS if task != "CartSafe-v0"]


def runs_of(returns, costs, batch=32000, safe=None):
    """The runs of an algorithm, (seeds, iterations) each; ten episodes an iteration."""
    returns = np.atleast_2d(np.asarray(returns, dtype=float))
    shape = returns.shape
    iterations = np.broadcast_to(np.arange(1.0, shape[1] + 1), shape)
    columns = dict(iteration=iterations, global_step=batch * iterations, episodic_return=returns)
    columns.update(episodic_cost=np.broadcast_to(costs, shape), episodic_cost_std=np.full(shape, 3.0))
    columns.update(episodic_length=np.full(shape, 250.0), episodes=np.full(shape, 10.0))
    columns["safe_episode_rate"] = np.broadcast_to(1.0 if safe is None else safe, shape)
    return dict(columns, seed=np.arange(1, shape[0] + 1), revision=np.array(["a1"] * shape[0]))


def write_run(results, name, iterations, returned=1.0, batch=32000, revision="a1"):
    """Keeps a run of constant return in a results folder."""
    (results / "runs").mkdir(parents=True, exist_ok=True)
    with open(results / "runs" / f"{name}.csv", "w") as file:
        print(*curves.COLUMNS, sep=",", file=file)
        for iteration in range(1, iterations + 1):
            print(iteration, iteration * batch, returned, 1, 1, 250, 1, 10, iteration, sep=",", file=file)
    (results / "runs" / f"{name}.json").write_text(json.dumps(dict(revision=revision)))


def published_as(returns, task=RUN, algos=("SCPO", "CPO", "TRPO"), iterations=100):
    at = np.arange(1, iterations + 1)
    return {(task, algo, "return"): (at, np.broadcast_to(np.asarray(returns, dtype=float), at.shape)) for algo in algos}


def rows_of(published, **algos):
    return {row["algorithm"]: row for row in plot.campaign({RUN: algos}, published)}


# Reading ------------------------------------------------------------------------------------------------------------


def test_a_last_line_that_was_cut_off_is_dropped(tmp_path):
    whole = "iteration,cost\n1,0.5\n2,1.25\n"
    for cut, left in ((0, [0.5, 1.25]), (1, [0.5]), (4, [0.5]), (6, [0.5])):  # in the middle of a number, of a line
        (tmp_path / "x.csv").write_text(whole[: len(whole) - cut])
        assert list(curves.read(tmp_path / "x.csv")["cost"]) == left, cut


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "has no complete row"),
        ("iteration,cost\n", "has no complete row"),
        ("iteration,cost\n1,a\n", "isn't a table of numbers"),
        ("iteration,cost\n1,2\n1\n", "isn't a table of numbers"),
        ("iteration,cost\n1,2,3\n", "isn't a table of numbers"),
        ("iteration,cost\n1,2,3\n4,5,6\n", "isn't a table of numbers"),
        (b"\xff\xfe\x00\n", "can't be read (not a text file)"),
        pytest.param("x" * 200_000 + "\n1\n", "can't be read (not a text file)", id="long"),
        (None, "can't be read (No such file or directory)"),
    ],
)
def test_what_is_no_curve_is_named(tmp_path, text, says):
    path = tmp_path / "x.csv"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(curves.BadFile) as error:
        curves.read(path)
    assert str(error.value) == f"{path} {says}" and curves.length(path) == 0


def test_what_results_keep_of_a_run(tmp_path):
    progress = {name: [f"{number}.123456789", "nan"] for number, name in enumerate(curves.COLUMNS, 100)}
    progress.update(losses=["1", "2"], iteration=["1", "2"], global_step=["16384000", "32768000"])
    (tmp_path / "progress.csv").write_text("\n".join(map(",".join, [progress, *zip(*progress.values())])) + "\n")
    (tmp_path / "config.json").write_text('{"seed": 7}')
    curves.keep(tmp_path, f"{RUN}__SCPO__7", tmp_path / "results")
    kept = curves.read(tmp_path / "results" / "runs" / f"{RUN}__SCPO__7.csv")
    assert list(kept) == list(curves.COLUMNS) and list(kept["global_step"]) == [16384000, 32768000]
    for name, values in kept.items():
        assert np.allclose(values, np.array(progress[name], dtype=float), rtol=1e-4, equal_nan=True), name
    assert json.loads(next(tmp_path.rglob("*__7.json")).read_text()) == {"seed": 7}


def odd(results, fault):
    path = results / "runs" / f"{RUN}__CPO__2.csv"
    if fault == "a folder":
        path.mkdir()
    elif fault == "empty":
        path.touch()
    elif fault == "header alone":
        path.write_text(",".join(curves.COLUMNS) + "\n")
    elif fault == "cut last line":
        write_run(results, path.stem, 100)
        os.truncate(path, path.stat().st_size - 3)
    else:
        shutil.copy(results / "runs" / f"{RUN}__CPO__1.csv", results / "runs" / fault)
    return path


@pytest.mark.parametrize("fault", ["notes.csv", f"{RUN}__CPO__1 (copy).csv", f"{RUN}__DQN__1.csv", "cut last line"])
def test_files_that_are_no_complete_run_are_left_out(tmp_path, fault, capsys):
    write_run(tmp_path, f"{RUN}__CPO__1", 100)
    odd(tmp_path, fault)
    plot.main(["--results", str(tmp_path)])
    said = capsys.readouterr().out
    assert f"| {RUN} | CPO | 1 |" in said and (tmp_path / "campaign.png").exists()
    if fault == "cut last line":
        assert f"- {RUN} CPO: seed 2 has 99 of 100 iterations; not made: seed 3, 4" in said


@pytest.mark.parametrize("fault", ["empty", "header alone", "a folder"])
def test_files_that_cannot_be_read_are_named(tmp_path, fault, capsys):
    write_run(tmp_path, f"{RUN}__CPO__1", 100)
    path = odd(tmp_path, fault)
    with pytest.raises(SystemExit) as stop:
        plot.main(["--results", str(tmp_path)])
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.err.startswith(f"plot.py: {path} ") and said.err.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--iterations", "0"],
        ["--iterations", "x"],
        ["--results", "/nowhere"],
        ["--results", ""],
        ["--figure", "", "RUN"],
        ["--figure", "x/..", "RUN"],
        ["--measure", "x"],
        ["--figure", "x"],
        ["--runs-dir", "x"],
        ["--runs-dir", "x", "--measure", "targets"],
        *(
            [flag, value, "RUN"]
            for flag, value in (("--iterations", "9"), ("--measure", "targets"), ("--results", "x"))
        ),
    ],
)
def test_bad_input_gets_one_line_and_status_2(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        plot.main(flags)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and flags[0] in said
    assert flags[1] or flags[0] == "--figure" or "invalid folder value: ''" in said


@pytest.mark.parametrize(
    "module, function, argv, name",
    [
        (plot, "make", [], "plot.py"),
        (plot, "measure_targets", ["--measure", "targets"], "plot.py"),
        (beside, "main", ["RUN"], "plot.py"),
        (field, "make", ["--draw"], "field.py"),
        (film, "film", ["RUN"], "reproduce.film"),
        (held_out, "held_out", ["RUN"], "reproduce.held_out"),
        (search, "check_trial", [RUN], "reproduce.search"),
    ],
)
def test_ctrl_c_gets_one_line_and_status_130(module, function, argv, name, monkeypatch, capsys):
    monkeypatch.setattr(module, function, lambda *_: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may have been started without one
    try:
        with pytest.raises(SystemExit) as stop:
            (plot if module is beside else module).main(argv)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop.value.code == 130 and capsys.readouterr().err == f"{name}: interrupted\n"


def test_seeds_of_other_settings_are_not_averaged(tmp_path, capsys):
    for seed, k in ((1, 4), (2, 2), (3, 4)):
        write_run(tmp_path, f"{RUN}__SCPO__{seed}", 100)
        (tmp_path / "runs" / f"{RUN}__SCPO__{seed}.json").write_text(json.dumps(dict(k=k, seed=seed)))
    with pytest.raises(SystemExit) as stop:
        plot.main(["--results", str(tmp_path)])
    assert stop.value.code == 2 and f"{RUN}__SCPO__2.csv can't be averaged" in capsys.readouterr().err


def test_seeds_of_another_total_length_are_not_averaged(tmp_path, capsys):
    """With an annealed learning rate the first 100 iterations of 200 aren't those of 100."""
    for seed in (1, 2):
        write_run(tmp_path, f"{RUN}__SCPO__{seed}", 100 * seed)
        settings = dict(seed=seed, total_timesteps=3276800 * seed)
        (tmp_path / "runs" / f"{RUN}__SCPO__{seed}.json").write_text(json.dumps(settings))
    with pytest.raises(SystemExit) as stop:
        plot.main(["--results", str(tmp_path)])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "total_timesteps 6553600, not 3276800" in said


def test_a_run_copied_to_another_seed_is_not_counted_as_one(tmp_path, capsys):
    for seed in (1, 2):
        write_run(tmp_path, f"{RUN}__SCPO__{seed}", 100)
        (tmp_path / "runs" / f"{RUN}__SCPO__{seed}.json").write_text(json.dumps(dict(seed=1)))
    with pytest.raises(SystemExit) as stop:
        plot.main(["--results", str(tmp_path)])
    assert stop.value.code == 2 and f"{RUN}__SCPO__2.csv is a run of seed 1, not of 2" in capsys.readouterr().err


def test_the_readme_has_full_length_runs_alone(monkeypatch):
    written = []
    monkeypatch.setattr(plot, "write_blocks", lambda page, blocks: written.append(page))
    for module, name in ((plot, "draw"), (plot, "draw_velocity"), (plot, "draw_targets"), (curves, "write_rows")):
        monkeypatch.setattr(module, name, lambda *args: None)
    for module in (fast, field):
        monkeypatch.setattr(module, "make", lambda *args: {})
    for cap in (20, None):
        plot.make(curves.RESULTS, cap)
        assert (ROOT / "README.md" in written) == (cap is None)


# Comparing ----------------------------------------------------------------------------------------------------------


def test_runs_of_unequal_length_are_not_compared(tmp_path):
    for name, length in (
        (f"{RUN}__CPO__1", 100),
        (f"{RUN}__CPO__2", 61),
        (f"{RUN}__CPO__3", 120),
        (f"{RUN}__PDO__1", 99),
    ):
        write_run(tmp_path, name, length, returned=length)
    groups, missing = plot.load_campaign(tmp_path)
    assert list(groups) == [RUN] and list(groups[RUN]) == ["CPO"]
    assert list(groups[RUN]["CPO"]["seed"]) == [1, 3] and groups[RUN]["CPO"]["episodic_return"].shape == (2, 100)
    assert f"{RUN} CPO: seed 2 has 61 of 100 iterations; not made: seed 4" in missing
    assert f"{RUN} PDO: seed 1 has 99 of 100 iterations; not made: seed 2, 3, 4" in missing
    assert len(missing) == 4 * 6 + 2 and f"{RUN} TRPO: not made: seed 1, 2, 3, 4" in missing
    groups, missing = plot.load_campaign(tmp_path, 61)
    assert {algo: runs["episodic_return"].shape for algo, runs in groups[RUN].items()} == {
        "CPO": (3, 61),
        "PDO": (1, 61),
    }


def test_which_revision_made_what_is_shown(tmp_path):
    for seed, revision in ((1, "a1"), (2, "b2-dirty"), (3, "a1"), (4, "b2-dirty-0123456789ab")):
        write_run(tmp_path, f"{RUN}__CPO__{seed}", 100, revision=revision)
    (tmp_path / "runs" / f"{RUN}__CPO__3.json").write_text(json.dumps(dict(revision="a1", revisions=["a1", "c3"])))
    (row,) = plot.campaign(plot.load_campaign(tmp_path)[0], {})
    assert row["revision"] == "a1 b2* a1+c3 b2*" and "a1 b2* a1+c3 b2*" in plot.table(plot.BESIDE, [row])[-1]


def test_the_final_numbers_by_hand():
    returns = np.arange(1.0, 101) + np.array([[0], [2], [4]])
    costs = np.array([[20.0], [22.0], [33.0]])
    safe = np.array([[0.9], [0.8], [0.7]])
    row = rows_of(published_as(np.minimum(np.arange(1, 101), 50.0)), CPO=runs_of(returns, costs, safe=safe))["CPO"]
    assert row["return"] == pytest.approx((97.5, 95.5, 99.5)) and row["published return"] == 50  # mean and range
    assert row["cost"] == pytest.approx((25, 20, 33)) and row["seeds within it"] == "2 of 3" and row["limit"] == 25
    assert row["safe"] == pytest.approx((0.8, 0.7, 0.9)) and np.isnan(row["published cost"])
    assert (row["iterations"], row["seeds"], row["steps"]) == (100, 3, 3_200_000)
    assert row["cost paid"] == pytest.approx(25 * 10 * 100)
    assert plot.table("task, return", [row])[-1] == f"| {RUN} | 97.5 (95.5 to 99.5) |"


def test_the_last_tenth_is_the_published_curves_too():
    values = np.where(np.arange(1, 101) > 90, 7.0, 1000.0)
    assert plot.published_mean(published_as(values), RUN, "CPO", "return", 100) == 7
    assert plot.published_mean(published_as(values), RUN, "CPO", "return", 50) == 1000
    assert np.isnan(plot.published_mean({}, RUN, "CPO", "return", 50))
    assert (
        curves.last_tenth(np.array([[1.0] * 19 + [4.0, 5.0]])) == 4.5 and curves.last_tenth(np.array([1.0, 2.0])) == 2
    )


def test_verdicts():
    close = np.array([-0.1, 0.1, -0.1, 0.1])
    assert (
        plot.verdict(100 + close, 90, [20] * 4, 25) == "ahead"
        and plot.verdict(80 + close, 90, [20] * 4, 25) == "behind"
    )
    assert plot.verdict(92 + close, 90, [25] * 4, 25) == "equal"
    assert plot.verdict(200 + close, 90, [20, 20, 30, 30.1], 25) == "over the limit"  # within it means within it
    assert plot.verdict([60, 130, 120, 90], 90, [20] * 4, 25) == "unclear"  # its interval is 52 to 148
    assert plot.verdict([100, 101], 90, [20] * 2, 25) == "unclear"  # of two seeds it is 94.1 to 106.9
    assert plot.verdict([110, 111], 90, [20] * 2, 25) == "ahead"  # 104.1 to 116.9
    assert plot.verdict(-0.5 + close / 100, -1.0, [5] * 4, 10) == "ahead"
    assert (
        plot.verdict([100], 90, [20], 25) == "one seed" and plot.verdict(close, np.nan, [20] * 4, 25) == "not published"
    )
    for returns, costs in ((np.nan, np.nan), (500, np.nan), (np.nan, 20), ([1, np.nan], [20, 20])):
        assert plot.verdict(returns, 379.4, costs, 25) == "no verdict"


def test_only_what_is_constrained_has_to_keep_the_limit():
    costly = runs_of([[100.0] * 100, [100.1] * 100], 90)
    rows = rows_of(published_as(50), TRPO=costly, CPO=costly)
    assert rows["TRPO"]["verdict"] == "ahead" and rows["CPO"]["verdict"] == "over the limit"
    for row in rows.values():  # but nobody reaches the target within the limit at such a cost
        assert row["steps within the limit"] == "not reached" and row["steps at any cost"] == "320,000 (2 of 2 seeds)"


def test_a_target_is_reached_when_it_stays():
    reached = lambda returns, costs=0.0: plot.reached(*np.broadcast_arrays([returns], costs), 10, 25)[0]  # noqa: E731
    low, high = [0.0] * 30, [10.0] * 40
    assert reached(low + high) == 40  # all ten of the window at the target
    assert np.isnan(reached(low + [10.0] + low))  # one iteration
    assert np.isnan(reached(low + [10.0] * 18 + low))  # not for ten more
    assert reached(low + [10.0] * 19 + low) == 40
    assert reached([1000.0] + low + high) == 41  # an outlier moves the mean for ten iterations, which don't stay
    assert reached(high, 25.0) == 10 and np.isnan(reached(high, 25.1))
    assert np.isnan(reached([np.nan] * 40)) and np.isnan(reached([10.0] * 19))


def test_the_target_is_common_to_a_task():
    published = published_as(100)
    published[RUN, "CPO", "return"] = (np.arange(1, 101), np.full(100, 1.0))  # reached at once, were it CPO's own
    rows = rows_of(published, SCPO=runs_of([[90.0] * 100], 1), CPO=runs_of([[89.0] * 100], 1))
    assert rows["SCPO"]["target"] == rows["CPO"]["target"] == 90
    assert rows["CPO"]["steps within the limit"] == "not reached" != rows["SCPO"]["steps within the limit"]


def test_algorithms_are_compared_at_equal_steps():
    ours = runs_of(np.arange(1.0, 101) + np.zeros((2, 1)), 5, batch=32768)  # 3,276,800 steps
    theirs = runs_of(np.arange(1.0, 101) + np.zeros((2, 1)), 5, batch=32000)  # 3,200,000
    rows = rows_of(published_as(50), SCPO=ours, CPO=theirs)
    assert rows["SCPO"]["steps"] == 97 * 32768 and rows["CPO"]["steps"] == 3_200_000
    assert rows["SCPO"]["return then"][0] == np.arange(89.0, 98).mean() and rows["SCPO"]["return"][0] == 95.5
    assert rows["SCPO"]["cost paid"] == 97 * 10 * 5 and rows["CPO"]["cost paid"] == 100 * 10 * 5


def test_the_interval_of_a_difference_is_welchs():
    ours = runs_of(np.array([[10.0], [12.0], [14.0]]) + np.zeros(100), 5)
    theirs = runs_of(np.array([[4.0], [6.0]]) + np.zeros(100), 5)
    more = rows_of(published_as(50), SCPO=ours, CPO=theirs)["CPO"]["SCPO's more (95 %)"]
    # means 12 and 5, variances 4 / 3 and 2 / 2 of the means: 1.5275 x t(0.975, 2.8824 degrees of freedom) = 4.976
    assert more == pytest.approx((7, 7 - 4.976, 7 + 4.976), abs=1e-3)
    assert "SCPO's more (95 %)" not in rows_of(published_as(50), SCPO=ours, CPO=runs_of([[4.0] * 100], 5))["CPO"]


def four_tasks(returns, costs=0.0, algo="SCPO"):
    return {task: {algo: runs_of(np.asarray(returns, dtype=float)[:, None] + np.zeros(20), costs)} for task in FIGURE}


def test_pooling_waits_for_four_seeds_of_each_task():
    published = {key: value for task in FIGURE for key, value in published_as(1, task, iterations=500).items()}
    assert plot.over_tasks(four_tasks([1, 2, 3]), published) == []
    groups = four_tasks([1, 2, 3, 4])
    del groups[RUN]
    assert plot.over_tasks(groups, published) == []
    groups = four_tasks([1, 2, 3, 100])
    for task, algos in four_tasks([0, 2, 2, 2], 50, "CPO").items():
        groups[task].update(algos)
    ours, theirs = plot.over_tasks(groups, published)
    assert ours["algorithm"] == "SCPO" and ours["return (%)"][0] == 250  # 1, 2, 3, 100 four times: the middle half
    assert ours["return (%)"][1] < 250 < ours["return (%)"][2] and "SCPO earns more" not in ours
    # 1 beats 0; 2 beats 0 and ties thrice; 3 and 100 beat all: (1 + 2.5 + 4 + 4) / 16
    assert theirs["SCPO earns more"][0] == pytest.approx(11.5 / 16) and theirs["SCPO costs less"] == (1, 1, 1)
    low, high = theirs["SCPO earns more"][1:]
    assert 0.4 < low < 11.5 / 16 < high < 0.95
    # a cost of 50 is 2, 2, 250 and 5 limits, four seeds each: the middle half are 2 and 5
    assert theirs["cost (%)"] == pytest.approx((350, 350, 350))


def test_the_bootstrap_resamples_within_each_task():
    published = {key: value for task in FIGURE for key, value in published_as(1, task, iterations=500).items()}
    groups = {task: {"SCPO": runs_of(np.full((4, 20), 10.0 * i), 1)} for i, task in enumerate(FIGURE, 1)}
    (row,) = plot.over_tasks(groups, published)
    assert row["return (%)"] == pytest.approx((2500, 2500, 2500))  # a task's seeds are equal: nothing to resample


# Figures and pages --------------------------------------------------------------------------------------------------


def test_a_panel_has_a_line_a_group_its_range_and_the_published_curve():
    groups = {"SCPO": runs_of([[1.0] * 100, [3.0] * 100], 1), "CPO": runs_of([[5.0] * 100], 1)}
    figure, axis = plot.plt.subplots()
    plot.panel(axis, RUN, groups, "episodic_return", published_as(2, iterations=200, algos=("SCPO",)))
    ours, published, theirs = axis.lines
    assert set(ours.get_ydata()) == {2} and set(theirs.get_ydata()) == {5} and set(published.get_ydata()) == {2}
    assert max(published.get_xdata()) == pytest.approx(3.2) == max(ours.get_xdata())  # no further than the runs
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (1, 3)
    plot.panel(axis, RUN, groups, "episodic_cost", {})
    assert 25 in axis.lines[-1].get_ydata()
    plot.plt.close(figure)


def test_the_panels_of_all_figures_are_alike(monkeypatch):
    """Titles of one size, a grid, and where costs are drawn the limit dash-dotted and an axis from 0."""
    figures, published = [], curves.load_published()
    for module in (plot, beside):
        monkeypatch.setattr(module, "save", lambda figure, path: figures.append(figure))
    groups = fast.load(ROOT / "results")[RUN]
    fast.draw("fast", {RUN: groups}, published)
    plot.draw("campaign", [[(RUN, {"SCPO": groups["SCPO"]}, metric) for metric in plot.METRICS]], published)
    beside.draw("beside", [beside.load(ROOT / "results" / "runs" / f"{RUN}__SCPO__1.csv")])
    costs = [axis for figure in figures for axis in figure.axes if axis.get_title().endswith(": cost")]
    assert len(costs) == len(figures) == 3
    for axis in [axis for figure in figures for axis in figure.axes]:
        assert axis.title.get_fontsize() == 9 and axis.get_xgridlines()[0].get_visible(), axis.get_title()
    for axis in costs:
        limits = [line for line in axis.lines if line.get_linestyle() == "-." and set(line.get_ydata()) == {25}]
        assert len(limits) == 1 and axis.get_yscale() == "symlog" and axis.get_ylim()[0] == 0
    bands = [len(axis.collections) for axis in costs]
    assert bands == [2, 1, 0]  # a seed a line in the last one
    for figure in figures:
        plot.plt.close(figure)


def test_what_is_drawn_are_means_of_blocks():
    assert list(plot.thinned(np.arange(500.0))[:3]) == [2, 7, 12]
    assert plot.thinned(np.zeros((3, 503))).shape == (3, 100) and plot.thinned(np.zeros(100)).shape == (100,)


def test_words_around_a_block_stay(tmp_path):
    page = tmp_path / "README.md"
    plot.write_blocks(page, {"a": ["| 1 |"], "b": ["| 2 |"]})
    page.write_text("Before.\n" + page.read_text().replace("<!-- b:", "Between.\n\n<!-- b:") + "After.\n")
    plot.write_blocks(page, {"b": ["| 3 |"]})
    text = page.read_text()
    assert [word in text for word in ("| 1 |", "| 2 |", "| 3 |")] == [True, False, True]
    assert text.startswith("Before.") and text.endswith("After.\n") and text.count("<!--") == 4
    assert text.index("Between.") < text.index("| 3 |") < text.index("After.")
    plot.write_blocks(page, {"b": ["| 3 |"]})
    assert page.read_text() == text


def test_a_page_that_lost_an_end_mark_is_named_and_left_alone(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("<!-- x: made by python -m reproduce.plot -->\nrest\n")
    with pytest.raises(curves.BadFile, match="README.md has no <!-- end of x -->"):
        plot.write_blocks(page, {"x": ["new"]})
    assert page.read_text().endswith("rest\n")


@pytest.mark.parametrize("limit", [25, 0.2])
def test_a_panel_of_costs_shows_the_number_of_the_limit(limit):
    figure, axis = plot.plt.subplots()
    axis.plot([0, 1], [0, 3 * limit])
    plot.frame(axis, "cost", limit)
    assert [text.get_text() for text in axis.get_yticklabels()] == [f"{x * limit:g}" for x in (0, 0.5, 1, 2)]
    plot.plt.close(figure)


def test_another_folder_gets_its_own_page(tmp_path):
    write_run(tmp_path, f"{RUN}__SCPO__1", 2)
    plot.main(["--results", str(tmp_path), "--iterations", "2"])
    page = (tmp_path / "README.md").read_text()
    assert f"| {RUN} | SCPO | 1 | 1.0 |" in page and "one seed" in page
    with open(tmp_path / "campaign.csv") as file:
        (row,) = csv.DictReader(file)
    assert (row["return"], row["return low"], row["iterations"]) == ("1", "1", "2")


@pytest.fixture(scope="module")
def remade(tmp_path_factory):
    """What plot.py makes of the committed runs, in a folder of its own: the tables, and empty figures."""
    results = tmp_path_factory.mktemp("results")
    for path in (ROOT / "results").iterdir():
        if path.suffix in (".csv", ".md"):
            shutil.copy(path, results)
    (results / "runs").symlink_to(ROOT / "results" / "runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot, "save", lambda figure, path: [Path(f"{path}.{x}").touch() for x in ("png", "svg")])
        plot.make(results, None)
    return results


def test_committed_tables_are_made_from_the_committed_runs(remade):
    for name in ("README.md", "campaign.csv"):
        assert (remade / name).read_text() == (ROOT / "results" / name).read_text(), name
    with open(ROOT / "results" / "campaign.csv") as file:
        assert len(list(csv.DictReader(file))) >= 11
    rows = plot.campaign(plot.load_campaign(ROOT / "results")[0], curves.load_published())
    summary = plot.table(plot.SUMMARY, [row for row in rows if row["algorithm"] == "SCPO"])
    assert len(summary) == 2 + 5 and "\n".join(summary) in (ROOT / "README.md").read_text()


def test_every_figure_is_there_and_results_stay_small(remade):
    drawn = {path.name for path in remade.glob("*.png")} | {path.name for path in remade.glob("*.svg")}
    assert drawn == {path.name for path in (ROOT / "results").iterdir() if path.suffix in (".png", ".svg")}
    assert {f"{study}.png" for study in STUDIES} < drawn
    assert sum(path.stat().st_size for path in (ROOT / "results").rglob("*") if path.is_file()) < 8e6


def test_a_figure_is_saved_small_and_the_same_each_time(tmp_path):
    """An SVG's lines go in steps of tenths of a point. They add up to where matplotlib has drawn them."""
    for name in ("one", "two"):
        figure, axis = plot.plt.subplots()
        axis.plot(np.random.default_rng(0).random(500))
        figure.savefig(tmp_path / "whole.svg")
        plot.save(figure, tmp_path / name)
    assert plot.Image.open(tmp_path / "one.png").mode == "P"
    whole = max(re.findall(r"M [^\"a-zC-KN-Z]*", (tmp_path / "whole.svg").read_text()), key=len).replace("L", "M")
    points = np.array(whole.replace("M", "").split(), float).reshape(-1, 2)
    svg = (tmp_path / "one.svg").read_text()
    start, steps = max(re.findall(r'd="M ([^"l]*)l([^"]*)', svg), key=lambda line: len(line[1]))
    steps = np.array(re.findall(r"-?(?:\d+(?:\.\d)?|\.\d)(?!\d)", steps), float).reshape(-1, 2)
    np.testing.assert_allclose(np.array(start.split(), float) + steps.cumsum(axis=0), points[1:], atol=0.051)
    assert len(steps) > 400 and ">0.2</text>" in svg
    for x in ("png", "svg"):
        assert (tmp_path / f"one.{x}").read_bytes() == (tmp_path / f"two.{x}").read_bytes()


def test_every_study_has_all_its_runs():
    for study in STUDIES.values():
        for label in study.labels:
            runs, _ = curves.load(ROOT / "results", study.task, label, study.iterations)
            assert len(runs["seed"]) >= study.seeds, label


def test_a_study_compares_the_same_seeds():
    for study in STUDIES.values():
        labels = plot.load_study(ROOT / "results", study, study.iterations)
        assert [[*runs["seed"]] for runs in labels.values()] == len(labels) * [[*range(1, study.seeds + 1)]]


def test_the_targets_are_measured_with_todays_code(tmp_path):
    plot.measure_targets(tmp_path)
    measured, kept = (curves.read(folder / "targets.csv") for folder in (tmp_path, ROOT / "results"))
    assert list(measured) == list(kept) and len(measured["step"]) == 250
    for name, values in kept.items():
        assert np.allclose(measured[name], values, atol=2e-6), name


def test_the_velocity_is_that_of_the_saved_policies(tmp_path, capsys):
    where = ["--results", str(tmp_path), "--measure", "velocity", "--runs-dir", str(tmp_path)]
    write_run(tmp_path, f"{RUN}__SCPO__1", 1)
    with pytest.raises(SystemExit) as stop:
        plot.main(where)
    assert (
        stop.value.code == 2 and "has no complete run of benchmark.sh --study augmentation" in capsys.readouterr().err
    )
    command = (
        f"scpo_continuous.py --env-id {RUN} --seed 3 --num-envs 1 --num-steps 250 --minibatch-size 50 --no-compile"
    )
    command += f" --total-timesteps 250 --runs-dir {tmp_path}/{RUN}__SCPO__3"
    subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True, capture_output=True)
    (last,) = tmp_path.glob("*__SCPO__3/*/last.pt")
    checkpoint = torch.load(last, weights_only=True)
    biases = [x for name, x in checkpoint["agent"].items() if name.startswith("actor") and name.endswith("bias")]
    biases[-1][:] = torch.tensor([1.0, 0.0])  # full throttle along x
    torch.save(checkpoint, last)
    plot.write_columns(tmp_path / "velocity.csv", {name: np.zeros(250) for name in ("step", "SCPO, seed 1")})
    plot.measure_velocity(tmp_path, tmp_path)
    measured = curves.read(tmp_path / "velocity.csv")
    assert list(measured) == ["step", "SCPO, seed 1", "SCPO, seed 3"] and list(measured["step"]) == [*range(1, 251)]
    assert not measured["SCPO, seed 1"].any()  # no such policy is here, so what is known of it stays
    speeds = measured["SCPO, seed 3"]
    assert speeds[0] < 0.5 and speeds[-1] > 2.5 and np.diff(speeds).min() > -1e-3  # from rest, ever faster
    checkpoint["args"]["total_timesteps"] = 500  # so it was stopped after half of its run
    torch.save(checkpoint, last)
    for said in ("has no complete run", f"{last}"):
        with pytest.raises(SystemExit) as stop:
            plot.main(where)
        assert stop.value.code == 2 and said in capsys.readouterr().err
        last.write_text("damaged")
