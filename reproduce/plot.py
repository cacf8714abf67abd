"""Every figure and table in results/, from the runs kept there: python -m reproduce.plot [--results results].

No row and no panel compares unequal lengths: a run that is shorter than the paper's (or than --iterations) is left out
and listed as missing. Tables go between their marks in results/README.md, the campaign's numbers into campaign.csv.
--measure velocity or targets first makes velocity.csv, from the checkpoints in --runs-dir, or targets.csv.

python -m reproduce.plot RUN RUN ... draws any runs beside each other instead, into --figure, and prints their table.
"""

import io
import re
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image
from scipy import stats

from reproduce import curves
from reproduce.curves import ALGOS, RESULTS, ROOT, TASKS, UNCONSTRAINED, algos_of, last_tenth, say
from reproduce.studies import STUDIES

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "scpo"  # the same drawing gives the same file
matplotlib.rcParams["svg.fonttype"] = "none"  # text as text, which is smaller than its outlines
import matplotlib.pyplot as plt  # noqa: E402

METRICS = {  # column: (its name among the published curves, title)
    "episodic_return": ("return", "return"),
    "episodic_cost": ("cost", "cost"),
    "episodic_cost_std": ("cost_std", "cost, std over episodes"),
    "safe_episode_rate": ("safe", "share of safe episodes"),
}
# Okabe and Ito's colours, which the colour-blind can tell apart, and line styles for print in grey
COLOURS = ("#0072B2", "#000000", "#E69F00", "#D55E00", "#CC79A7", "#009E73", "#56B4E9")
STYLES = {algo: (colour, "-") for algo, colour in zip(ALGOS, COLOURS)}
DASHES = (":", (0, (3, 1, 1, 1)), (0, (1, 3)), (0, (3, 1, 1, 1, 1, 1)))  # not the published "--" nor the limit's "-."
for study in STUDIES.values():
    others = [label for label in study.labels if label not in ALGOS]
    STYLES.update({label: look for label, *look in zip(others, COLOURS[2:], DASHES)})
SHARE = 0.9  # the target return of all algorithms of a task, as a share of SCPO's published final return
SMOOTH = 10  # iterations to smooth a curve over before it is timed; then it must stay at the target for as many
SEEDS = (1, 2, 3, 4)


# What the tables hold -----------------------------------------------------------------------------------------------


def load_campaign(results, cap=None):
    """Returns {task: {algorithm: runs}} of full length, or of `cap` iterations, and lines on what is missing."""
    groups, missing = {}, []
    for task, (_, length) in TASKS.items():
        iterations = min(cap or length, length)
        for algo in algos_of(task):
            group, short = curves.load(results, task, algo, iterations)
            if group:
                groups.setdefault(task, {})[algo] = group
            unmade = [seed for seed in SEEDS if seed not in short and seed not in group.get("seed", ())]
            said = [f"seed {seed} has {have} of {iterations} iterations" for seed, have in short.items()]
            said += [f"not made: seed {', '.join(map(str, unmade))}"] if unmade else []
            missing += [f"{task} {algo}: {'; '.join(said)}"] if said else []
    return groups, missing


def published_mean(published, task, algo, metric, iterations):
    """Mean of a published curve over the last tenth of so many iterations; NaN where there is none."""
    at, values = published.get((task, algo, metric), (np.array([]), np.array([])))
    inside = values[(at > iterations - max(1, iterations // 10)) & (at <= iterations)]
    return inside.mean() if len(inside) else np.nan


def verdict(returns, theirs, costs, limit):
    """Final returns and costs, one a seed, beside the published return and the limit, in words.

    ahead, equal, behind: Student's t interval (95 %) of the mean return lies above, within or below 5 % around the
    published one; unclear: it lies across. Costs that exceed the limit on average are over it, by however little.
    """
    returns, costs = np.atleast_1d(returns), np.atleast_1d(costs)
    if not np.isfinite([returns, costs]).all():
        return "no verdict"
    if costs.mean() > limit:
        return "over the limit"
    if np.isnan(theirs) or len(returns) < 2:
        return "one seed" if len(returns) < 2 else "not published"
    half, margin = stats.t.ppf(0.975, len(returns) - 1) * stats.sem(returns), 0.05 * abs(theirs)
    low, high = returns.mean() - theirs - half, returns.mean() - theirs + half
    inside = -margin <= low and high <= margin
    return "ahead" if low > margin else "behind" if high < -margin else "equal" if inside else "unclear"


def reached(returns, costs, target, limit):
    """The iteration at which each seed has reached the target within the limit, and stays there; NaN where none is.

    returns, costs: (seeds, iterations). Both are smoothed over the SMOOTH latest iterations. They must meet
    target and limit at that iteration and at the SMOOTH - 1 iterations after it.
    """
    if returns.shape[1] < 2 * SMOOTH:
        return np.full(len(returns), np.nan)
    window = np.lib.stride_tricks.sliding_window_view
    met = (window(returns, SMOOTH, 1).mean(-1) >= target) & (window(costs, SMOOTH, 1).mean(-1) <= limit)
    stays = window(met, SMOOTH, 1).all(-1)
    return np.where(stays.any(1), stays.argmax(1) + float(SMOOTH), np.nan)


def at_equal_steps(groups):
    """Returns the algorithms' runs of a task, cut to the steps that all of them have."""
    steps = min(runs["global_step"][0, -1] for runs in groups.values())
    return {
        algo: {name: x[:, runs["global_step"][0] <= steps] if x.ndim == 2 else x for name, x in runs.items()}
        for algo, runs in groups.items()
    }


def with_range(values):
    return values.mean(), values.min(), values.max()


def campaign(groups, published):
    """Returns a dict for each (task, algorithm): its final numbers beside the published ones, and those at equal steps.

    A tuple is a value with its range over the seeds, or with an interval where the name says so.
    """
    rows = []
    for task, algos in groups.items():
        limit, full = TASKS[task]
        target, equal = SHARE * published_mean(published, task, "SCPO", "return", full), at_equal_steps(algos)
        for algo, runs in algos.items():
            seeds, iterations = runs["iteration"].shape
            finals = {name: last_tenth(runs[column]) for column, (name, _) in METRICS.items()}
            row = dict(task=task, algorithm=algo, iterations=iterations, seeds=seeds)
            for name, values in finals.items():
                row[name] = with_range(values)
                row[f"published {name}"] = published_mean(published, task, algo, name, iterations)
            row["verdict"] = verdict(
                finals["return"], row["published return"], finals["cost"], np.inf if algo in UNCONSTRAINED else limit
            )
            row.update({"limit": limit, "seeds within it": f"{(finals['cost'] <= limit).sum()} of {seeds}"})
            row["revision"] = re.sub(r"-dirty(-\w+)?", "*", " ".join(dict.fromkeys(runs["revision"])))

            runs = equal[algo]
            returns, costs, batch = runs["episodic_return"], runs["episodic_cost"], runs["global_step"][0, 0]
            row.update(steps=runs["global_step"][0, -1], target=target)
            row.update({"return then": with_range(last_tenth(returns)), "cost then": with_range(last_tenth(costs))})
            row["cost paid"] = np.nansum(costs * runs["episodes"], axis=1).mean()
            ours = last_tenth(equal["SCPO"]["episodic_return"]) if "SCPO" in equal else []
            if algo != "SCPO" and min(len(ours), seeds) > 1:
                interval = stats.ttest_ind(ours, last_tenth(returns), equal_var=False).confidence_interval()
                row["SCPO's more (95 %)"] = (ours.mean() - last_tenth(returns).mean(), interval.low, interval.high)
            for name, allowed in (("at any cost", np.inf), ("within the limit", limit)):
                hits = batch * reached(returns, costs, target, allowed)
                hits = hits[np.isfinite(hits)]
                row[f"steps {name}"] = (
                    f"{hits.mean():,.0f} ({len(hits)} of {seeds} seeds)" if len(hits) else "not reached"
                )
            rows.append(row)
    return rows


def over_tasks(groups, published):
    """Returns a dict for each algorithm that has four seeds on each of the figure's four tasks.

    Interquartile means over tasks and seeds, and how probably a run of SCPO is the better one, averaged over the tasks;
    each a tuple with its stratified bootstrap interval (95 %). Returns are in percent of SCPO's published ones, costs
    in percent of the limit.
    """
    tasks = [task for task in TASKS if task != "CartSafe-v0"]
    scores = {}  # algorithm: (returns, costs) a task
    for task in tasks:
        unit = published_mean(published, task, "SCPO", "return", TASKS[task].iterations) / 100
        for algo, runs in at_equal_steps(groups.get(task, {})).items() if task in groups else ():
            if len(runs["seed"]) >= len(SEEDS):
                costs = 100 * last_tenth(runs["episodic_cost"]) / TASKS[task].cost_limit
                scores.setdefault(algo, []).append((last_tenth(runs["episodic_return"]) / unit, costs))
    scores = {algo: [*zip(*per_task)] for algo, per_task in scores.items() if len(per_task) == len(tasks)}

    def interquartile_mean(*samples):
        return stats.trim_mean(np.concatenate(samples), 0.25)

    def improvement(*samples):
        pairs = zip(samples[: len(tasks)], samples[len(tasks) :])
        return np.mean([(np.sign(ours[:, None] - theirs) / 2 + 0.5).mean() for ours, theirs in pairs])

    def interval(statistic, *samples):
        options = dict(vectorized=False, method="percentile", n_resamples=2000, random_state=0)
        return (statistic(*samples), *stats.bootstrap(samples, statistic, **options).confidence_interval)

    rows = []
    for algo, (returns, costs) in scores.items():
        row = {"algorithm": algo, "return (%)": interval(interquartile_mean, *returns)}
        row["cost (%)"] = interval(interquartile_mean, *costs)
        if algo != "SCPO" and "SCPO" in scores:
            row["SCPO earns more"] = interval(improvement, *scores["SCPO"][0], *returns)
            row["SCPO costs less"] = interval(improvement, *costs, *scores["SCPO"][1])
        rows.append(row)
    return rows


# Tables as Markdown -------------------------------------------------------------------------------------------------

SUMMARY = "task, iterations, seeds, return, published return, cost, published cost, limit, safe"
BESIDE = "task, algorithm, seeds, return, published return, verdict, cost, published cost, limit, seeds within it, "
BESIDE += "cost_std, published cost_std, safe, revision"
EQUAL = "task, algorithm, seeds, steps, return then, SCPO's more (95 %), cost then, cost paid, target, "
EQUAL += "steps at any cost, steps within the limit"
POOLED = "algorithm, return (%), cost (%), SCPO earns more, SCPO costs less"


def show(x):
    """A number, or a value with its range, in as many digits as can be read."""
    if isinstance(x, tuple):
        return show(x[0]) + (f" ({show(x[1])} to {show(x[2])})" if x[1] < x[2] else "")
    if isinstance(x, (str, int)) or x is None:
        return str(x or "")
    return "" if x != x else f"{x:.3g}" if abs(x) < 1 else f"{x:,.1f}" if abs(x) < 1e4 else f"{x:,.0f}"


def table(names, rows):
    """Lines of a Markdown table of what dicts hold under these names."""
    names = names.split(", ")
    cells = [names, ["---"] * len(names), *([show(row.get(name)) for name in names] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in cells]


def write_blocks(path, blocks):
    """Puts each block {name: lines} between its marks in a Markdown file; one that has no marks yet goes to the end."""
    text = path.read_text() if path.exists() else "# Results\n"
    for name, lines in blocks.items():
        begin, end = f"<!-- {name}: made by python -m reproduce.plot -->", f"<!-- end of {name} -->"
        if begin not in text:
            text += f"\n{begin}\n{end}\n"
        before, after = text.split(begin)[0], text.partition(end)[2]
        if end not in text:
            raise curves.BadFile(f"{path} has no {end}")
        text = "\n".join([before + begin, "", *lines, "", end + after])
    curves.write(path, text)


# Figures ------------------------------------------------------------------------------------------------------------


def thinned(x, blocks=100):
    """Means of blocks of the last axis, about a hundred blocks: no more can be seen, and the file stays small."""
    size = max(1, x.shape[-1] // blocks)
    return x[..., : x.shape[-1] // size * size].reshape(*x.shape[:-1], -1, size).mean(-1)


def frame(axis, title, limit=None):
    """Title and grid of a panel. A panel of costs also gets its limit, dash-dotted, and an axis that starts at 0."""
    axis.set_title(title, fontsize=9)
    axis.grid(alpha=0.3)
    if limit is not None:
        axis.axhline(limit, color="black", linestyle="-.", linewidth=0.8)
        axis.set_yscale("symlog", linthresh=max(limit, 1e-3))
        axis.set_ylim(bottom=0 if limit else -1e-4)  # a limit of 0 is seen above the edge
        ticks = [x for x in limit * np.array([0, 0.5, 1, 2, 4, 16]) if x <= axis.get_ylim()[1]]
        axis.set_yticks(ticks, [f"{x:g}" for x in ticks])  # the scale's own are powers of ten


def band(axis, steps, values, label, **look):
    """Mean over the seeds, values (seeds, iterations), with their range shaded."""
    steps, values, seeds = thinned(steps), thinned(values), "1 seed" if len(values) == 1 else f"{len(values)} seeds"
    axis.plot(steps, values.mean(0), label=f"{label} ({seeds})", **look)
    axis.fill_between(steps, values.min(0), values.max(0), color=look["color"], alpha=0.15, linewidth=0)


def panel(axis, task, groups, metric, published):
    """Mean over the seeds with their range shaded, the published curve dashed, the cost limit dash-dotted."""
    name, title = METRICS[metric]
    for label, runs in groups.items():
        colour, line = STYLES[label]
        look = dict(color=colour, linestyle=line, linewidth=2 if label == "SCPO" else 1.1)
        band(axis, 1e-6 * runs["global_step"][0], runs[metric], label.replace("_", " "), **look)
        if (task, label, name) in published:
            at, curve = published[task, label, name]
            shown = at <= runs["iteration"].shape[1]
            steps = 1e-6 * runs["global_step"][0, 0] * at[shown]
            axis.plot(thinned(steps), thinned(curve[shown]), "--", color=colour, linewidth=1, alpha=0.8)
    frame(axis, f"{task[:-3]}: {title}", TASKS[task].cost_limit if name == "cost" else None)
    if name == "return":
        axis.legend(fontsize=6)


def draw(path, rows, published):
    """A figure of panels, (task, groups, metric) each, in rows."""
    size = (3.7 * len(rows[0]), 2.8 * len(rows) + 0.3)
    figure, axes = plt.subplots(len(rows), len(rows[0]), figsize=size, layout="constrained", squeeze=False)
    for axis, (task, groups, metric) in zip(axes.flat, sum(rows, [])):
        panel(axis, task, groups, metric, published)
    figure.supxlabel(
        "million environment steps (mean, range of the seeds shaded; published dashed; limit dash-dotted)", fontsize=9
    )
    save(figure, path)


def shorter(line):
    """Returns a line of an SVG file, "M x y" and "L x y" for each next point, as "M x y" and steps to the next points.

    All are in tenths of a point, which nobody sees.
    """
    tenths = np.rint(10 * np.array(re.findall(r"[-.\d]+", line[0]), float)).reshape(-1, 2)
    steps = " ".join(f"{step:g}" for step in np.diff(tenths, axis=0).ravel() / 10)
    return "M {:g} {:g}l".format(*tenths[0] / 10) + re.sub(r"\b0\.", ".", steps.replace(" -", "-"))


def save(figure, path):
    """Writes PATH.png in 256 colours and PATH.svg with short lines, which is half of the size."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=80)
    Image.open(drawn).convert("RGB").quantize(dither=Image.Dither.NONE).save(small, "png", optimize=True)
    curves.write(Path(f"{path}.png"), small.getvalue())
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    curves.write(Path(f"{path}.svg"), re.sub(r"M [-.\d]+ [-.\d]+ (\nL [-.\d]+ [-.\d]+ )+", shorter, svg.getvalue()))
    plt.close(figure)


def measure_velocity(results, runs_dir):
    """velocity.csv: m/s over one episode of each policy of the study "augmentation", without its noise."""
    import evaluate

    path = results / "velocity.csv"
    kept, columns = curves.read(path) if path.exists() else {}, {}  # a policy that isn't here keeps its column
    for label in STUDIES["augmentation"].labels:
        for last in sorted(runs_dir.glob(f"SafetyBallRun-v0__{label}__*/*/last.pt")):
            try:
                env, policy, checkpoint = evaluate.load(last)
            except ValueError as error:
                raise curves.BadFile(error) from error
            args = checkpoint["args"]
            if checkpoint["iteration"] < args["total_timesteps"] // (args["num_envs"] * args["num_steps"]):
                continue
            obs, _ = env.reset(seed=1)
            over, speeds = False, []
            while not over:
                obs, _, _, over, _ = env.step(policy(obs))
                speeds.append(np.hypot(*env.unwrapped.velocity[:2]))
            columns[f"{label.replace('_', ' ')}, seed {args['seed']}"] = speeds
    if not columns:
        curves.fail("plot.py", f"--runs-dir {runs_dir} has no complete run of benchmark.sh --study augmentation")
    write_columns(path, {**kept, "step": range(1, 251), **columns})


def measure_targets(results):
    """targets.csv: V^c_gamma along an episode of SafetyBallRun at full throttle, by Monte Carlo."""
    import gymnasium as gym

    import scpo_continuous as scpo

    env = scpo.SafetyState(gym.make("SafetyBallRun-v0", disable_env_checker=True), cost_limit=25)
    env.reset(seed=1)
    safe, over = [True], False
    while not over:
        _, _, _, over, info = env.step(np.array([1.0, 0.0]))
        safe.append(info["safe"])
    f = np.array(safe, dtype=float)[:, None]  # (251, 1), of s_0 .. s_250
    dones = np.zeros_like(f[1:])
    dones[-1] = 1
    columns = dict(step=range(len(dones)), f=f[:-1, 0])
    for gamma in (0.9, 0.97, 0.99, 0.995, 1.0):
        columns[f"gamma_{gamma}"] = scpo.safety_target(f[:-1], f[1:], dones, gamma)[:, 0]
    write_columns(results / "targets.csv", columns)


def write_columns(path, columns):
    curves.write_rows(path, [dict(zip(columns, map(float, row))) for row in zip(*columns.values())])


def draw_velocity(results):
    data = curves.read(results / "velocity.csv")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    for axis, label in zip(axes, ("SCPO", "not augmented")):
        names = [name for name in data if name.startswith(f"{label}, ")]
        for name, colour, line in zip(names, COLOURS, ("-", "--", "-.", ":")):
            axis.plot(data["step"] / 60, data[name], linestyle=line, color=colour, label=name.split(", ")[1])
        axis.axhline(2.5, color="black", linestyle="-.", linewidth=0.8, label="costs above")
        axis.set(title=label, xlabel="s", ylabel="m/s")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    save(figure, results / "velocity")


def draw_targets(results):
    """f and V^c_gamma along the episode, and the weights that both surrogates give to the policy's gradient."""
    data = curves.read(results / "targets.csv")
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    axes[0].step(data["step"], data["f"], where="post", color="black")
    axes[0].set(title="f(s_t), full throttle on SafetyBallRun", xlabel="t")
    for name, colour, line in zip(list(data)[2:], COLOURS, ("-", "--", "-.", ":", (0, (3, 1, 1, 1)))):
        axes[1].plot(data["step"], data[name], linestyle=line, color=colour, label=name.replace("_", " = "))
    axes[1].set(title="V^c_gamma(s_t)", xlabel="t")
    probability = np.linspace(0.05, 1, 200)
    for start, colour in zip((0.2, 0.5, 0.8), COLOURS):
        axes[2].axhline(1 / start, color=colour, linestyle="--", label=f"L1, pi_0 = {start}")
        axes[2].plot(probability, start / probability**2, color=colour, label=f"L2, pi_0 = {start}")
    axes[2].set(title="weight of grad pi: 1/pi_0 and pi_0/pi^2", xlabel="pi", yscale="log")
    for axis in axes[1:]:
        axis.legend(fontsize=8)
    save(figure, results / "targets")


# All of it ----------------------------------------------------------------------------------------------------------


def load_study(results, study, iterations):
    """Returns {label: runs} of the seeds that all labels have (the campaign's SCPO can have more), {} without one."""
    labels = {label: curves.load(results, study.task, label, iterations)[0] for label in study.labels}
    seeds = [*set.intersection(*(set(runs.get("seed", ())) for runs in labels.values()))]
    kept = {
        label: {name: x[np.isin(runs["seed"], seeds)] for name, x in runs.items()} for label, runs in labels.items()
    }
    return kept if seeds else {}


def make(results, cap):
    """Draws the figures, writes campaign.csv and the tables, and returns the tables' lines by name."""
    published = curves.load_published()
    groups, missing = load_campaign(results, cap)
    rows = campaign(groups, published)
    pooled = over_tasks(groups, published)
    there = sum(np.isin(SEEDS, runs["seed"]).sum() for algos in groups.values() for runs in algos.values())
    wanted = len(SEEDS) * sum(len(algos_of(task)) for task in TASKS)
    length = f"with {cap} iterations, or with all" if cap else "at full length"
    blocks = {
        "beside the published curves": table(BESIDE, rows),
        "at equal steps": table(EQUAL, rows),
        "over the tasks": table(POOLED, pooled)
        if pooled
        else ["No algorithm has four full-length seeds on each task yet."],
        "missing": [
            f"{there} of {wanted} runs are there {length}.",
            *([""] if missing else ()),
            *(f"- {m}" for m in missing),
        ],
    }
    if rows:
        curves.write_rows(results / "campaign.csv", rows)
        draw(results / "campaign", [[(task, algos, m) for m in METRICS] for task, algos in groups.items()], published)
        ours = {task: {"SCPO": algos["SCPO"]} for task, algos in groups.items() if "SCPO" in algos}
        if ours:
            metrics = ("episodic_return", "episodic_cost")
            draw(results / "scpo", [[(task, algos, m) for task, algos in ours.items()] for m in metrics], published)
    for name, study in STUDIES.items():
        iterations = min(cap or study.iterations, study.iterations)
        labels = load_study(results, study, iterations)
        if labels:
            draw(results / name, [[(study.task, labels, metric) for metric in METRICS]], published)
            finals = {name: column for column, (name, _) in METRICS.items() if name != "cost_std"}
            study_rows = [
                dict(
                    {n: with_range(last_tenth(runs[c])) for n, c in finals.items()}, run=label, seeds=len(runs["seed"])
                )
                for label, runs in labels.items()
            ]
            blocks[name] = table("run, seeds, return, cost, safe", study_rows)
    for name, figure in (("velocity", draw_velocity), ("targets", draw_targets)):
        if (results / f"{name}.csv").exists():
            figure(results)
    if (results / "speed.csv").exists():
        blocks["speed"] = table("task, script, steps_per_second, ratio", curves.rows_of(results / "speed.csv"))
    write_blocks(results / "README.md", blocks)
    from reproduce import fast, field  # they draw with what is above

    fast_blocks = fast.make(results, published)
    if results.resolve() == RESULTS and cap is None:
        write_blocks(fast.PAGE, fast_blocks)
        write_blocks(
            ROOT / "README.md", {"summary": table(SUMMARY, [row for row in rows if row["algorithm"] == "SCPO"])}
        )
    return {**blocks, **fast_blocks, **field.make(results / "field")}


def folder(text):
    """Returns a folder's path. Path would take "" for the folder that we are in."""
    if not text:
        raise ValueError
    return Path(text)


@curves.interruptible("plot.py")
def main(argv=None):
    parser = curves.parser("plot.py", __doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folders of runs, or kept curves (NAME.csv)")
    parser.add_argument("--figure", type=Path, default=Path("beside"), help="of RUN RUN ...: where, without an ending")
    parser.add_argument("--results", type=folder, default=RESULTS, help="folder that has runs/TASK__ALGO__SEED.csv")
    parser.add_argument("--iterations", type=int, help="compare so many first iterations instead of full-length runs")
    parser.add_argument("--measure", choices=("velocity", "targets"), help="make this CSV anew first")
    parser.add_argument("--runs-dir", type=folder, default=ROOT / "runs/benchmark", help="for --measure velocity")
    args = parser.parse_args(argv)
    for flag in ("iterations", "measure", "results") if args.runs else ["figure"]:
        if getattr(args, flag) != parser.get_default(flag):
            curves.fail("plot.py", f"--{flag} is for a call {'without' if args.runs else 'with'} RUN")
    if args.runs_dir != parser.get_default("runs_dir") and args.measure != "velocity":
        curves.fail("plot.py", "--runs-dir is for a call with --measure velocity")
    if args.figure.name in ("", ".."):
        curves.fail("plot.py", f"--figure is {args.figure}, but must be a file's name without an ending")
    if args.iterations is not None and args.iterations < 1:
        curves.fail("plot.py", f"--iterations is {args.iterations}, but must be at least 1")
    if not (args.runs or list(args.results.glob("runs/*__*__*.csv"))):
        curves.fail("plot.py", f"--results {args.results} has no runs/TASK__ALGO__SEED.csv")
    try:
        if args.runs:
            from reproduce import beside  # it draws with what is above

            return say(*beside.main(args.runs, args.figure))
        if args.measure == "targets":
            measure_targets(args.results)
        if args.measure == "velocity":
            measure_velocity(args.results, args.runs_dir)
        blocks = make(args.results, args.iterations)
    except (curves.BadFile, OSError) as error:
        curves.fail("plot.py", error)
    for name, lines in blocks.items():
        say(f"\n{name}", *lines)


if __name__ == "__main__":
    main()
