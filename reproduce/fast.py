"""The figure and tables of docs/fast-settings.md, from the runs of --fast that are kept in results/runs/.

python -m reproduce.plot calls it. A block without runs stays as it is.
"""

import importlib
from dataclasses import asdict

import numpy as np

from reproduce import curves, plot
from reproduce.beside import METRICS
from reproduce.curves import ALGOS, FAST, ROOT, TASKS, last_tenth, rows_of
from reproduce.plot import reached, table, with_range

PAGE = ROOT / "docs" / "fast-settings.md"
FINALS = "task, settings, million steps, seeds, return, published return, cost, published cost, limit, safe, "
FINALS += "over the limit late"
PAID = "task, algorithm, target, million steps, minutes, cost paid, seeds, million steps to all of it, seeds there"
SB3 = "SB3 PPO on the package's task"
CHANGES = "task, seed, changes, return, cost, safe, iterations over the limit"
TRIALS = "task, seeds, settings, return, cost, safe, over the limit late"
LOOKS = {"SCPO": ("paper's settings", "#0072B2"), "fast": ("--fast", "#D55E00")}


def script_of(task):
    return importlib.import_module("scpo_discrete" if task == "CartSafe-v0" else "scpo_continuous")


def usual(task):
    """Returns the settings that SCPO has for a task without further flags, as a dict."""
    script = script_of(task)
    settings = script.TASK_SETTINGS
    return asdict(script.Args(**settings.get(task, settings["any other task"])))


def told(trial, left_out=()):
    """Returns as text which settings of a trial, a row of search.csv, aren't the usual ones of its task."""
    differing = []
    for name, x in usual(trial["task"]).items():
        x = " ".join(f"{part:g}" for part in x) if isinstance(x, tuple) else str(x)
        tried = trial.get(name) or x
        if name not in ("seed", *left_out) and curves.plain(tried) != curves.plain(x):
            differing.append(f"{name} {tried}")
    if trial.get("schedule", "none") not in ("none", ""):
        differing.append(f"a schedule of {trial['schedule']}")
    if trial.get("ent_coef_end"):
        differing.append(f"ent_coef moves to {float(trial['ent_coef_end']):g}")
    return ", ".join(differing)


def load(results):
    """Returns {task: {label: runs}} of what there is: SCPO with the paper's settings, --fast, TRPO-L and CPO."""
    groups = {}
    for task, (quick, _) in FAST.items():
        length = TASKS[task].iterations
        lengths = {"SCPO": length, "fast": quick, "TRPO-L": length, "CPO": length}
        groups[task] = {label: curves.load(results, task, label, n)[0] for label, n in lengths.items()}
        groups[task] = {label: runs for label, runs in groups[task].items() if runs}
    return groups


def finals(groups, published):
    """Returns a dict for each task and table of settings: the last tenth of its runs beside the published one."""
    rows = []
    for task, labels in groups.items():
        limit, length = TASKS[task]
        for label in [label for label in LOOKS if label in labels]:
            runs = labels[label]
            costs = runs["episodic_cost"]
            late = costs[:, costs.shape[1] // 2 :] > limit
            row = {"task": task, "settings": LOOKS[label][0], "seeds": len(runs["seed"]), "limit": limit}
            row["million steps"] = 1e-6 * runs["global_step"][0, -1]
            for column, name in METRICS.items():
                row[name] = with_range(last_tenth(runs[column]))
                row[f"published {name}"] = plot.published_mean(published, task, "SCPO", name, length)
            row["over the limit late"] = f"{late.sum()} of {late.size} iterations"
            rows.append(row)
    return rows


def paid(groups, published, speeds):
    """Returns a dict for each algorithm of a task: steps and cost until it has reached the common target and stays.

    "All of it" is the published return itself. The target is SHARE, nine tenths, of it.

    speeds: {(task, script): steps a second}, which gives minutes. For Stable-Baselines3 it is all published steps.
    """
    rows = []
    for task, labels in groups.items():
        length = TASKS[task].iterations
        whole = plot.published_mean(published, task, "SCPO", "return", length)
        for label, runs in labels.items():
            costs = np.nan_to_num(runs["episodic_cost"]) * runs["episodes"]
            row = {"task": task, "algorithm": LOOKS[label][0] if label in LOOKS else label}
            row["target"] = plot.SHARE * whole
            for target, seeds, name in (
                (whole, "seeds there", "million steps to all of it"),
                (row["target"], "seeds", "million steps"),
            ):
                hits = reached(runs["episodic_return"], runs["episodic_cost"], target, TASKS[task].cost_limit)
                there = np.flatnonzero(np.isfinite(hits))
                row[seeds] = f"{len(there)} of {len(hits)}"
                if len(there):
                    steps = np.array([runs["global_step"][seed, int(hits[seed]) - 1] for seed in there])
                    row[name] = with_range(1e-6 * steps)
            if len(there):
                row["cost paid"] = with_range(np.array([costs[seed, : int(hits[seed])].sum() for seed in there]))
                scpo = f"{script_of(task).__name__}.py"
                script = {"SCPO": scpo, "fast": f"{scpo} --fast"}.get(label) or ALGOS[label]
                speed = speeds.get((task, script))
                row["minutes"] = steps.mean() / speed / 60 if speed else None
            rows.append(row)
        if (task, SB3) in speeds:
            row = {"task": task, "algorithm": SB3, "million steps": 0.032768 * length}
            rows.append({**row, "minutes": 32768 * length / speeds[task, SB3] / 60})
    return rows


def trials(rows, results):
    """Returns a dict for each task with the paper's settings after a fifth of the steps, then for each trial that long.

    rows: of results/search.csv. Only complete trials count.
    """
    found = []
    for task, (_, length) in TASKS.items():
        runs, fifth = curves.load(results, task, "SCPO", length)[0], length // 5
        if runs:
            row = {"task": task, "seeds": " ".join(f"{seed:.0f}" for seed in runs["seed"])}
            row["settings"] = "the paper's"
            for column, name in METRICS.items():
                row[name] = with_range(last_tenth(runs[column][:, :fifth]))
            late = runs["episodic_cost"][:, fifth // 2 : fifth] > TASKS[task].cost_limit
            found.append({**row, "over the limit late": f"{late.sum()} of {late.size} iterations"})
        for trial in rows:
            if (trial["task"], trial["state"]) != (task, "complete") or int(trial["steps"]) != fifth * 32768:
                continue
            row = {"task": task, "seeds": trial["seed"], "settings": f"annealed, {told(trial)}"}
            for name in METRICS.values():
                row[name] = with_range(np.array(trial[name].split(), float)) if trial.get(name) else None
            if trial.get("late"):  # the first trials didn't count them
                counts = np.array(trial["late"].split(), float)
                half = int(trial["steps"]) / int(trial["num_steps"]) / int(trial["num_envs"]) / 2
                row["over the limit late"] = f"{counts.sum():.0f} of {half * len(counts):.0f} iterations"
            found.append(row)
    return found


def draw(path, groups, published):
    """Return and cost against steps, on a log axis: the paper's settings, --fast, and the published curve dashed."""
    tasks = [task for task, labels in groups.items() if "fast" in labels]
    figure, axes = plot.plt.subplots(
        2, len(tasks), figsize=(3.7 * len(tasks), 5.9), layout="constrained", squeeze=False
    )
    for column, task in enumerate(tasks):
        for axis, metric in zip(axes[:, column], ("episodic_return", "episodic_cost")):
            name = plot.METRICS[metric][0]
            for label in [label for label in LOOKS if label in groups[task]]:
                runs, (said, colour) = groups[task][label], LOOKS[label]
                plot.band(axis, runs["global_step"][0], runs[metric], said, color=colour)
            at, curve = published[task, "SCPO", name]
            axis.plot(32768 * at, curve, "--", color="black", linewidth=1, label="published")
            axis.set(xscale="log", xlim=(32768, None))
            plot.frame(axis, f"{task[:-3]}: {name}", TASKS[task].cost_limit if name == "cost" else None)
        axes[0, column].legend(fontsize=6)
    figure.supxlabel(
        "environment steps (mean, range of the seeds shaded; published dashed; limit dash-dotted)", fontsize=9
    )
    plot.save(figure, path)


def make(results, published):
    """Draws results/fast.png and returns the tables' lines by name."""
    groups = load(results)
    fast = {task: labels for task, labels in groups.items() if "fast" in labels}
    if not fast:
        return {}
    draw(results / "fast", fast, published)
    speeds = {(row["task"], row["script"]): float(row["steps_per_second"]) for row in rows_of(results / "speed.csv")}
    changes = [
        {name: x if name in ("task", "seed", "changes") else float(x) for name, x in row.items()}
        for row in rows_of(results / "fast_changes.csv")
    ]
    return {
        "fast: one by one": table(CHANGES, changes),
        "fast: the last tenth": table(FINALS, finals(fast, published)),
        "fast: the way there": table(PAID, paid(fast, published, speeds)),
        "fast: trials": table(TRIALS, trials(rows_of(results / "search.csv"), results)),
    }
