"""Any runs beside each other, of any tasks and lengths: python -m reproduce.plot RUN RUN ...

A RUN is a run's folder, or a kept curve, results/runs/NAME.csv. A task is a row of panels, a run a line. Runs of the
same script or --exp-name and the same settings share a colour, as seeds of one thing. Where settings differ, the label
says which.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from reproduce import curves
from reproduce.curves import last_tenth
from reproduce.plot import COLOURS, frame, plt, save, table, thinned, with_range

METRICS = {"episodic_return": "return", "episodic_cost": "cost", "safe_episode_rate": "safe"}
TABLE = "task, run, seeds, million steps, return, cost, limit, safe, steps/s, minutes"
NOT_SETTINGS = (*curves.NOT_SETTINGS, "seed", "env_id")


def load(path, label=None):
    """Returns a run: task, label, limit, settings, and its columns without the iterations in which no episode ended."""
    path = Path(path)
    files = (path / "progress.csv", path / "config.json") if path.is_dir() else (path, path.with_suffix(".json"))
    columns, settings = curves.read(files[0]), curves.config(files[1])
    missing = [x for x in (*METRICS, "global_step", "episodes") if x not in columns]
    missing += [x for x in ("env_id", "cost_limit", "script", "seed") if x not in settings]
    if missing:
        raise curves.BadFile(f"{path} has no {missing[0]}")
    columns.setdefault("seconds", np.full_like(columns["global_step"], np.nan))  # the first kept curves have none
    ended = columns["episodes"] > 0
    if not ended.any():
        raise curves.BadFile(f"{path} has no episode that ended")
    return SimpleNamespace(
        task=settings["env_id"].split(":")[-1],
        label=label or settings.get("exp_name") or Path(settings["script"]).stem,
        limit=settings["cost_limit"],
        settings=settings,
        columns={name: values[ended] for name, values in columns.items()},
    )


def tell_apart(runs):
    """Adds to a label the settings that differ among the runs of a task that have it."""
    groups = {}
    for run in runs:
        groups.setdefault((run.task, run.label), []).append(run)
    for group in groups.values():
        names = [x for x in dict.fromkeys(x for run in group for x in run.settings) if x not in NOT_SETTINGS]
        whole = [{**curves.defaults(run.settings["script"]), **run.settings} for run in group]
        differing = [x for x in names if len({str(curves.plain(settings.get(x))) for settings in whole}) > 1]
        for run, settings in zip(group, whole):
            run.label += "".join(f", {x} {settings.get(x, 'not recorded')}" for x in differing)


def rows(runs):
    """Returns a dict for each task, label and length: means of the last tenth, each with its range over the seeds."""
    found, groups = [], {}
    for run in runs:
        groups.setdefault((run.task, run.label, f"{run.columns['global_step'][-1]:.2g}"), []).append(run)
    for (task, label, _), group in groups.items():
        ends = [{name: x[-1] for name, x in run.columns.items()} for run in group]
        row = dict(task=task, run=label, seeds=len({run.settings["seed"] for run in group}), limit=group[0].limit)
        row["million steps"] = with_range(np.array([end["global_step"] / 1e6 for end in ends]))
        for column, name in METRICS.items():
            row[name] = with_range(np.array([last_tenth(run.columns[column]) for run in group]))
        row["steps/s"] = with_range(np.array([end["global_step"] / end["seconds"] for end in ends]))
        row["minutes"] = with_range(np.array([end["seconds"] / 60 for end in ends]))
        found.append(row)
    return found


def draw(path, runs, published=()):
    """Return, cost and share of safe episodes against steps. published: dicts of task, algorithm and final numbers."""
    tasks, labels = (list(dict.fromkeys(x)) for x in zip(*((run.task, run.label) for run in runs)))
    look = dict(figsize=(11.1, 2.8 * len(tasks) + 0.3), layout="constrained", squeeze=False, sharex="row")
    figure, axes = plt.subplots(len(tasks), len(METRICS), **look)
    for task, panels in zip(tasks, axes):
        group = [run for run in runs if run.task == task]
        for axis, (column, name) in zip(panels, METRICS.items()):
            for run in group:
                steps, values = thinned(1e-6 * run.columns["global_step"], 40), thinned(run.columns[column], 40)
                number = labels.index(run.label)
                first = run is next(other for other in group if other.label == run.label)
                look = dict(color=COLOURS[number % len(COLOURS)], linestyle=("-", "--", ":")[number // 7 % 3])
                axis.plot(steps, values, linewidth=1.2, alpha=0.8, label=run.label if first else None, **look)
            for final in [final for final in published if final["task"] == task and f"{name}_mean" in final]:
                colour = COLOURS[labels.index(final["label"]) % len(COLOURS)] if final["label"] in labels else "grey"
                axis.plot(10, float(final[f"{name}_mean"]), "o", markersize=4, fillstyle="none", color=colour)
            for limit in sorted({run.limit for run in group}) if name == "cost" else [None]:
                frame(axis, f"{task}: {name.replace('safe', 'safe episodes')}", limit)
        panels[0].legend(fontsize=6)
        panels[2].set_ylim(-0.03, 1.03)
    said = "a line a run, means of some iterations; cost limit dash-dotted"
    said += "; circles: published finals at 10 million" if published else ""
    figure.supxlabel(f"million environment steps ({said})", fontsize=9)
    save(figure, path)


def main(paths, path):
    """Draws the runs into PATH.png and PATH.svg. Returns the lines of their table."""
    runs = [load(run) for run in dict.fromkeys(map(os.path.realpath, paths))]  # a run given twice counts once
    tell_apart(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(path, runs)
    return [*table(TABLE, rows(runs)), f"{path}.png"]
