"""Figures and tables from the runs in results/: python plot.py [--results results].

campaign.png and .svg: the paper's figure, a row a task: return, cost, its deviation over episodes, share of safe episodes, over
environment steps; mean over seeds with a 95 % bootstrap band, published curves dashed, the cost limit dash-dotted.
campaign.md and .csv: final return and cost, steps until the published final return is reached safely, cost paid, ours beside
the published value at the same iteration, and paired comparisons over all tasks (Wilcoxon's signed-rank test, SciPy).
"""

import argparse
import csv
import gzip
import sys
from pathlib import Path

import matplotlib
import numpy as np
from scipy import stats

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "scpo"  # the same drawing gives the same file
import matplotlib.pyplot as plt  # noqa: E402

from benchmark import LENGTHS, LIMITS, SCRIPTS, TASKS  # noqa: E402
from evaluate import bootstrap  # noqa: E402
from studies import read  # noqa: E402

ROOT = Path(__file__).parent
# Okabe and Ito's colours, told apart by the colour-blind, and line widths and styles, told apart in grey print
COLOURS = dict(zip(SCRIPTS, ("#0072B2", "#000000", "#E69F00", "#D55E00", "#CC79A7", "#009E73", "#56B4E9")))
UNCONSTRAINED = ("TRPO", "PPO")
METRICS = {
    "episodic_return": ("return", "return"),
    "episodic_cost": ("cost", "cost"),
    "episodic_cost_std": ("cost_std", "cost, std over episodes"),
    "safe_episode_rate": (None, "share of safe episodes"),
}


def load_runs(results):
    """Returns {(task, algo): {seed: {column: array}}} of results/runs."""
    runs = {}
    for path in sorted((results / "runs").glob("*.csv")):
        task, algo, seed = path.stem.split("__")
        if task in TASKS and algo in SCRIPTS:
            runs.setdefault((task, algo), {})[int(seed)] = read(path)
    return runs


def load_published():
    """Returns {(task, algo, metric): (iterations, values)}, read off the paper's figures."""
    curves = {}
    with gzip.open(ROOT / "results" / "published_curves.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            curves.setdefault((row["env_id"], row["algo"], row["metric"]), []).append(
                (int(row["iteration"]), float(row["value"]))
            )
    return {key: tuple(map(np.array, zip(*sorted(points)))) for key, points in curves.items()}


def stacked(seeds, metric):
    """(seeds, iterations), cut to the shortest."""
    length = min(len(run["iteration"]) for run in seeds.values())
    return np.array([run[metric][:length] for run in seeds.values()])


def published_mean(published, key, first, last):
    """Mean of a published curve over the iterations first to last; NaN where there is none."""
    iterations, values = published.get(key, (np.array([]), np.array([])))
    inside = values[(iterations >= first) & (iterations <= last)]
    return inside.mean() if len(inside) else np.nan


def thinned(x):
    """Every nth value of the last axis, so that some hundred are left: what can be seen, and a small file."""
    return x[..., :: max(1, x.shape[-1] // 125)]


def draw(runs, published, results):
    tasks = [task for task in TASKS if any(key[0] == task for key in runs)]
    figure, axes = plt.subplots(
        len(tasks), 4, figsize=(15, 2.9 * len(tasks)), layout="constrained", squeeze=False, sharex="row"
    )
    for row, task in zip(axes, tasks):
        for (_, algo), seeds in ((key, seeds) for key, seeds in runs.items() if key[0] == task):
            batch = next(iter(seeds.values()))["global_step"][0]
            for axis, (metric, (name, title)) in zip(row, METRICS.items()):
                values = stacked(seeds, metric)
                steps = 1e-6 * batch * np.arange(1, values.shape[1] + 1)
                width = 2 if algo == "SCPO" else 1.1
                steps, values = thinned(steps), thinned(values)
                axis.plot(steps, values.mean(0), color=COLOURS[algo], linewidth=width, label=f"{algo} ({len(values)} seeds)")
                if len(values) > 1:
                    low, high = bootstrap(values, samples=500)
                    axis.fill_between(steps, low, high, color=COLOURS[algo], alpha=0.15, linewidth=0)
                if (task, algo, name) in published:
                    iterations, curve = map(thinned, published[task, algo, name])
                    axis.plot(1e-6 * batch * iterations, curve, "--", color=COLOURS[algo], linewidth=0.8, alpha=0.7)
                axis.set_title(f"{task[:-3]}: {title}", fontsize=9)
                axis.grid(alpha=0.3)
        row[1].axhline(LIMITS[task], color="black", linestyle="-.", linewidth=0.8)
        row[1].set_yscale("symlog", linthresh=LIMITS[task])
        row[1].set_ylim(bottom=0)
        row[0].legend(fontsize=6)
        for axis in row:
            axis.set_xlabel("million environment steps", fontsize=8)
    for ending in ("png", "svg"):
        figure.savefig(results / f"campaign.{ending}", dpi=80, metadata={"Date": None} if ending == "svg" else None)
    plt.close(figure)


def verdict(ours, theirs, cost, limit):
    """ahead, equal (within 5 %) or behind the published return; "over the limit" where the cost says more than 110 % of it."""
    if cost > 1.1 * limit:
        return "over the limit"
    if np.isnan(theirs):
        return "not published"
    margin = 0.05 * abs(theirs)
    return "ahead" if ours > theirs + margin else "behind" if ours < theirs - margin else "equal"


def table(runs, published):
    """Returns a dict a (task, algorithm), over the last 10 % of the iterations that all its seeds have."""
    rows = []
    for task in TASKS:
        for algo in SCRIPTS:
            if (task, algo) not in runs:
                continue
            seeds, limit = runs[task, algo], LIMITS[task]
            returns, costs, safe = (stacked(seeds, name) for name in ("episodic_return", "episodic_cost", "safe_episode_rate"))
            length, full = returns.shape[1], LENGTHS.get(task, 500)
            window = slice(length - max(1, length // 10), length)
            finals, final_costs = returns[:, window].mean(1), costs[:, window].mean(1)
            theirs = published_mean(published, (task, algo, "return"), window.start + 1, length)
            target = published_mean(published, (task, algo, "return"), full - full // 10 + 1, full)
            batch = next(iter(seeds.values()))["global_step"][0]
            bound = np.inf if algo in UNCONSTRAINED else limit
            reached = [np.flatnonzero((r >= target) & (c <= bound)) for r, c in zip(returns, costs)]
            reached = [hit[0] + 1 if len(hit) else None for hit in reached]
            timed = None not in reached and all("seconds" in run for run in seeds.values())
            minutes = [run["seconds"][hit - 1] / 60 for run, hit in zip(seeds.values(), reached)] if timed else None
            episodes = stacked(seeds, "episodes")
            rows.append({
                "task": task, "algorithm": algo, "iterations": length, "of": full, "seeds": len(seeds),
                "return": finals.mean(), "return_low": bootstrap(finals)[0], "return_high": bootstrap(finals)[1],
                "worst_return": finals.min(), "published_return": theirs,
                "cost": final_costs.mean(), "cost_low": bootstrap(final_costs)[0], "cost_high": bootstrap(final_costs)[1],
                "worst_cost": final_costs.max(),
                "published_cost": published_mean(published, (task, algo, "cost"), window.start + 1, length),
                "limit": limit, "safe_episodes": safe[:, window].mean(),
                "steps_to_published_final": None if None in reached else np.mean(reached) * batch,
                "minutes_to_published_final": np.mean(minutes) if timed else None,
                "total_cost_paid": np.nansum(costs * episodes, axis=1).mean(),
                "beside_published": verdict(finals.mean(), theirs, final_costs.mean(), bound),
            })  # fmt: skip
    return rows


def number(value):
    return (
        ""
        if value is None or value != value
        else f"{value:.3g}"
        if abs(value) < 1
        else f"{value:,.1f}"
        if abs(value) < 1e4
        else f"{value:,.0f}"
    )


def as_markdown(rows):
    heads = "task, algorithm, iterations, seeds, return (95 %), worst, published, cost (95 %), worst, published, limit"
    heads += ", safe episodes, steps to the published final return within the limit, minutes, cost paid, beside published"
    lines = ["| " + heads.replace(", ", " | ") + " |", "|" + "---|" * 16]
    for row in rows:
        cells = [row["task"], row["algorithm"], f"{row['iterations']} of {row['of']}", row["seeds"]]
        for name in ("return", "cost"):
            spread = f" ({number(row[name + '_low'])} to {number(row[name + '_high'])})" if row["seeds"] > 1 else ""
            cells += [number(row[name]) + spread, number(row[f"worst_{name}"]), number(row[f"published_{name}"])]
        cells += [f"{row['limit']:g}", f"{row['safe_episodes']:.3f}", number(row["steps_to_published_final"]) or "not reached"]
        cells += [number(row["minutes_to_published_final"]), number(row["total_cost_paid"]), row["beside_published"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def aggregate(runs):
    """Lines on SCPO against each other algorithm, paired by task and seed over the iterations both have."""
    heads = "SCPO against, pairs, earns more, median difference of return, costs less, p of the return, p of the cost"
    lines = ["| " + heads.replace(", ", " | ") + " |", "|" + "---|" * 7]
    for algo in SCRIPTS:
        returns, costs = [], []
        for task in TASKS:
            ours, theirs = runs.get((task, "SCPO"), {}), runs.get((task, algo), {})
            for seed in sorted(ours.keys() & theirs.keys()) if algo != "SCPO" else ():
                length = min(len(ours[seed]["iteration"]), len(theirs[seed]["iteration"]))
                window = slice(length - max(1, length // 10), length)
                pair = [
                    [run[seed][name][window].mean() for run in (ours, theirs)] for name in ("episodic_return", "episodic_cost")
                ]
                returns.append(pair[0])
                costs.append([cost / LIMITS[task] for cost in pair[1]])
        if len(returns) < 2:
            continue
        returns, costs = np.array(returns), np.array(costs)
        gain = (returns[:, 0] - returns[:, 1]) / np.abs(returns[:, 1])
        p = [stats.wilcoxon(x).pvalue if np.any(x) else 1.0 for x in (gain, costs[:, 0] - costs[:, 1])]
        cells = [
            algo,
            len(gain),
            f"{(gain > 0).mean():.0%}",
            f"{np.median(gain):+.0%}",
            f"{(costs[:, 0] < costs[:, 1]).mean():.0%}",
        ]
        lines.append("| " + " | ".join(map(str, [*cells, f"{p[0]:.3f}", f"{p[1]:.3f}"])) + " |")
    return lines


def speed(path):
    """Lines of a Markdown table of what benchmarks/training_speed.py --csv has measured."""
    with open(path) as file:
        rows = list(csv.DictReader(file))
    lines = ["| task | script or peer | steps a second | the first one's, as a multiple |", "|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row['task']} | {row['script']} | {float(row['steps_per_second']):,.0f} | {row['ratio']} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder that has runs/*.csv")
    results = parser.parse_args().results
    runs = load_runs(results)
    if not runs:
        print(f"plot.py: --results {results} has no runs/TASK__ALGO__SEED.csv", file=sys.stderr)
        raise SystemExit(2)
    published = load_published()
    draw(runs, published, results)
    rows = table(runs, published)
    with open(results / "campaign.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({name: f"{x:.6g}" if isinstance(x, float) else x for name, x in row.items()} for row in rows)
    text = [
        "# The campaign",
        "",
        "`python plot.py` makes this from `runs/`. Means over the last 10 % of the iterations that all seeds",
    ]
    text += [
        "have; the published columns are the published curve's mean over the same iterations. Minutes: of one of two runs at a"
    ]
    text += ["time on 2 cores, start-up excluded.", "", *as_markdown(rows), ""]
    text += ["## Over all tasks", "", *aggregate(runs), ""]
    if (results / "speed.csv").exists():
        text += ["## Steps a second of training", "", *speed(results / "speed.csv"), ""]
    (results / "campaign.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
