"""The paper's studies, one command each: trains what is missing, then writes CSV and figures to results/.

    python studies.py cartsafe       SCPO and PPO on CartSafe, the published curves beside them
    python studies.py augmentation   the cost spent as part of the state, or not, on SafetyBallRun
    python studies.py targets        V^c_gamma along an episode, and the ratios of both surrogates (no training)
    python studies.py summary        the README's table and figure, from results/ (no training)
    python studies.py estimators     L1 against L2 and the estimates of Q^c against each other on SafetyBallCircle
    python studies.py box            SafetyBallReach with its box in simulated time, and as slow as in the published runs

--jobs: runs at a time (default 1), one thread each; --seeds; --figures-only: draw what is in results/. A run whose progress.csv
has all its iterations is not made again. Needs matplotlib (requirements-dev.txt).
"""

import argparse
import csv
import gzip
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium as gym
import matplotlib
import numpy as np

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "scpo"  # the same drawing gives the same file
import matplotlib.pyplot as plt  # noqa: E402

import scpo_continuous as scpo  # noqa: E402
import scpo_discrete as discrete  # noqa: E402

ROOT = Path(__file__).parent
RUNS, RESULTS = ROOT / "runs" / "studies", ROOT / "results"
COLUMNS = (
    "iteration global_step episodic_return episodic_cost episodic_cost_std episodic_length safe_episode_rate episodes "
    "seconds".split()
)
# Okabe and Ito's colours, told apart by the colour-blind, and line styles, told apart in grey print
STYLES = [("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"), ("#E69F00", (0, (3, 1, 1, 1)))]

REACH = {name: value for name, value in scpo.PAPER_SETTINGS["SafetyBallReach-v0"].items() if name != "iterations"}

# study: (task, script, iterations, seeds, {label: flags})
STUDIES = {
    "cartsafe": ("CartSafe-v0", "scpo_discrete.py", 150, 4, {"SCPO": "", "PPO": "--k 0 --beta 0"}),
    "augmentation": (
        "SafetyBallRun-v0", "scpo_continuous.py", 100, 4, {"SCPO": "", "not augmented": "--no-augment-state"},
    ),
    "estimators": (
        "SafetyBallCircle-v0", "scpo_continuous.py", 100, 3,
        {"default": "", "L2": "--surrogate l2", "Monte Carlo": "--safety-estimator mc",
         "one step": "--safety-estimator one-step", "lambda 0.95": "--safety-estimator 0.95"},
    ),
    "box": (
        "SafetyBallReach-v0", "scpo_continuous.py", 60, 2,
        {"default": "", "slow box": "--env-id SafetyBallReachSlowBox-v0 "
         + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in REACH.items())},
    ),
}  # fmt: skip


TASKS = ["SafetyBallRun-v0", "SafetyBallCircle-v0", "SafetyBallGather-v0", "SafetyBallReach-v0", "CartSafe-v0"]


def run_name(env_id, label, seed):
    return f"{env_id}__{label.replace(' ', '_')}__{seed}"


def read(path):
    """Returns {column: array} of a CSV file of numbers."""
    with open(path) as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def train(env_id, script, iterations, label, flags, seed):
    """Makes the run unless it is finished, and copies what results/ keeps of it."""
    folder = RUNS / run_name(env_id, label, seed)
    done = [path.parent for path in folder.glob("*/progress.csv") if len(read(path)["iteration"]) >= iterations]
    if not done:
        command = [sys.executable, script, "--seed", str(seed), "--runs-dir", str(folder), *flags.split()]
        command += [] if "--env-id" in flags else ["--env-id", env_id]
        command += ["--total-timesteps", str(iterations * 32768)]
        print(" ".join(command[1:]), flush=True)
        env = dict(os.environ, OMP_NUM_THREADS="1")
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "log.txt", "w") as log:
            subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, check=True)
        done = [max(folder.glob("*/progress.csv")).parent]
    keep(done[0], run_name(env_id, label, seed))


def keep(run_dir, name, results=RESULTS):
    """results/runs/NAME.csv and .json: the columns that figures and tables are made of, and the run's settings."""
    (results / "runs").mkdir(parents=True, exist_ok=True)
    progress = read(run_dir / "progress.csv")
    with open(results / "runs" / f"{name}.csv", "w") as file:
        file.write(",".join(COLUMNS) + "\n")
        for row in zip(*(progress[column] for column in COLUMNS)):
            file.write(",".join(f"{value:.5g}" if value < 1e5 else f"{value:.0f}" for value in row) + "\n")
    (results / "runs" / f"{name}.json").write_text((run_dir / "config.json").read_text())


def curves(env_id, label, metric):
    """Returns (seeds, iterations): the metric of every committed run of that label, cut to the shortest."""
    paths = sorted((RESULTS / "runs").glob(run_name(env_id, label, "*") + ".csv"))
    values = [read(path)[metric] for path in paths]
    return np.array([value[: min(map(len, values))] for value in values])


def published(env_id, algo, metric):
    """Returns (iterations, values) of a curve read off the paper's figures."""
    with gzip.open(RESULTS / "published_curves.csv.gz", "rt") as file:
        rows = [row for row in csv.DictReader(file) if (row["env_id"], row["algo"], row["metric"]) == (env_id, algo, metric)]
    return [float(row["iteration"]) for row in rows], [float(row["value"]) for row in rows]


def draw_curves(study, metrics, with_published):
    """One panel a metric: mean over seeds, the range of the seeds shaded, published curves grey."""
    env_id, _, _, _, labels = STUDIES[study]
    titles = {"episodic_return": "return", "episodic_cost": "cost", "episodic_cost_std": "cost, std over episodes"}
    names = {"episodic_return": "return", "episodic_cost": "cost", "episodic_cost_std": "cost_std"}
    figure, axes = plt.subplots(1, len(metrics), figsize=(4 * len(metrics), 3.4), layout="constrained")
    for axis, metric in zip(axes, metrics):
        for (label, _), (colour, line) in zip(labels.items(), STYLES):
            runs = curves(env_id, label, metric)
            if not len(runs):
                continue
            steps = 32768e-6 * np.arange(1, runs.shape[1] + 1)
            axis.plot(steps, runs.mean(0), linestyle=line, color=colour, label=f"{label} ({len(runs)} seeds)")
            axis.fill_between(steps, runs.min(0), runs.max(0), color=colour, alpha=0.15, linewidth=0)
            if label in with_published and metric in names:
                iterations, values = map(np.array, published(env_id, with_published[label], names[metric]))
                shown = iterations <= STUDIES[study][2]
                axis.plot(
                    32768e-6 * iterations[shown], values[shown], "--", color=colour, alpha=0.6, label=f"{label}, published"
                )
        if metric == "episodic_cost":
            axis.axhline(scpo_limit(env_id), color="black", linestyle="-.", linewidth=0.8, label="cost limit")
            axis.set_yscale("symlog", linthresh=1)
            axis.set_ylim(bottom=0)
        axis.set(title=titles.get(metric, "share of safe episodes"), xlabel="million environment steps")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    save(figure, study)


def summary():
    """Returns the lines of a Markdown table: SCPO's runs in results/ beside the published curves at the same iterations."""
    lines = ["| task | iterations | seeds | return | published | cost | published | limit | safe episodes | worst seed |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for env_id in TASKS:
        if not len(curves(env_id, "SCPO", "iteration")):
            continue
        metrics = ("episodic_return", "episodic_cost", "safe_episode_rate")
        runs = {metric: curves(env_id, "SCPO", metric) for metric in metrics}
        seeds, iterations = runs["episodic_return"].shape
        window = max(1, iterations // 10)
        ours = {metric: values[:, -window:].mean(1) for metric, values in runs.items()}
        theirs = {}
        for metric in ("return", "cost"):
            at, values = map(np.array, published(env_id, "SCPO", metric))
            theirs[metric] = values[(at > iterations - window) & (at <= iterations)].mean()
        cells = [env_id, iterations, seeds, f"{ours['episodic_return'].mean():.1f}", f"{theirs['return']:.1f}"]
        cells += [f"{ours['episodic_cost'].mean():.2f}", f"{theirs['cost']:.2f}", f"{scpo_limit(env_id):g}"]
        cells += [f"{ours['safe_episode_rate'].mean():.3f}", f"{ours['safe_episode_rate'].min():.3f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def draw_summary():
    """results/scpo.png: return and cost of SCPO's runs in results/, a column a task, the published curves dashed."""
    tasks = [env_id for env_id in TASKS if len(curves(env_id, "SCPO", "iteration"))]
    figure, axes = plt.subplots(
        2, len(tasks), figsize=(2.9 * len(tasks), 4.2), layout="constrained", sharex="col", squeeze=False
    )
    for column, env_id in zip(axes.T, tasks):
        for axis, metric, name in zip(column, ("episodic_return", "episodic_cost"), ("return", "cost")):
            runs = curves(env_id, "SCPO", metric)
            iterations, values = map(np.array, published(env_id, "SCPO", name))
            shown = iterations <= runs.shape[1]
            axis.plot(32768e-6 * np.arange(1, runs.shape[1] + 1), runs.mean(0), color=STYLES[0][0], label="ours")
            axis.fill_between(
                32768e-6 * np.arange(1, runs.shape[1] + 1), runs.min(0), runs.max(0), color=STYLES[0][0], alpha=0.2
            )
            axis.plot(32768e-6 * iterations[shown], values[shown], "--", color=STYLES[1][0], label="published")
            axis.grid(alpha=0.3)
        column[0].set_title(f"{env_id[:-3]}, {len(runs)} seed{'s'[: len(runs) - 1]}", fontsize=10)
        column[1].axhline(scpo_limit(env_id), color="black", linestyle="-.", linewidth=0.8, label="limit")
        column[1].set_xlabel("million steps")
    axes[0, 0].set_ylabel("return")
    axes[1, 0].set_ylabel("cost")
    axes[1, 0].legend(fontsize=8)
    save(figure, "scpo", title=False)


def scpo_limit(env_id):
    return {**scpo.PAPER_SETTINGS, **discrete.PAPER_SETTINGS}[env_id]["cost_limit"]


def save(figure, name, title=True):
    figure.suptitle(name if title else None)
    for ending in ("png", "svg"):
        figure.savefig(RESULTS / f"{name}.{ending}", dpi=110, metadata={"Date": None} if ending == "svg" else None)
    plt.close(figure)


def table(study):
    """Returns the lines of results/STUDY.md: means over the last 10 % of the iterations, by label, and the worst seeds."""
    env_id, _, _, _, labels = STUDIES[study]
    lines = [f"# {study}: {env_id}", "", "`python studies.py " + study + "`; mean of the last 10 % of the iterations.", ""]
    lines += [
        "| | seeds | return | worst seed | cost | worst seed | safe episodes | worst seed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label in labels:
        cells = []
        for metric, worst, form in (
            ("episodic_return", np.min, "{:.1f}"), ("episodic_cost", np.max, "{:.2f}"), ("safe_episode_rate", np.min, "{:.3f}"),
        ):  # fmt: skip
            runs = curves(env_id, label, metric)
            if len(runs):
                last = runs[:, -max(1, runs.shape[1] // 10) :].mean(1)
                cells += [form.format(last.mean()), form.format(worst(last))]
        if cells:
            lines.append(f"| {label} | {len(runs)} | " + " | ".join(cells) + " |")
    return lines


def draw_velocity():
    """results/velocity.csv and .png: the speed over one episode of each trained policy of the study "augmentation"."""
    env_id, _, _, _, labels = STUDIES["augmentation"]
    columns = {}
    for label, seed in [(label, seed) for label in labels for seed in range(1, 5)]:
        saved = sorted((RUNS / run_name(env_id, label, seed)).glob("*/last.pt"))
        if saved:
            columns[f"{label}, seed {seed}"] = speeds(env_id, saved[-1])
    if columns:
        with open(RESULTS / "velocity.csv", "w") as file:
            file.write("step," + ",".join(f'"{name}"' for name in columns) + "\n")
            for t, row in enumerate(zip(*columns.values()), 1):
                file.write(f"{t}," + ",".join(f"{speed:.5f}" for speed in row) + "\n")
    data = read(RESULTS / "velocity.csv")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    for axis, label in zip(axes, labels):
        names = [name for name in data if name.startswith(label + ",")]
        for name, (colour, line) in zip(names, STYLES):
            axis.plot(data["step"] / 60, data[name], linestyle=line, color=colour, label=name.split(", ")[1])
        axis.axhline(2.5, color="black", linestyle="-.", linewidth=0.8, label="costs above")
        axis.set(title=label, xlabel="s", ylabel="m/s")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    save(figure, "velocity")


def speeds(env_id, path):
    """Speed in m/s, (250,), over one episode of a saved policy without its noise."""
    import torch

    saved = torch.load(path, weights_only=True)
    env = scpo.make_env(env_id, saved["args"]["cost_limit"], saved["args"]["augment_state"])
    agent = scpo.Agent(env.observation_space.shape[0], 2)
    agent.load_state_dict(saved["agent"])
    policy, no_noise = scpo.sampler(agent.requires_grad_(False)), np.zeros((1, 2), dtype=np.float32)
    obs, _ = env.reset(seed=1)
    over, speed = False, []
    while not over:
        obs, _, _, over, _ = env.step(np.clip(policy(obs[None], no_noise)[0], -1, 1))
        speed.append(np.hypot(*env.unwrapped.velocity[:2]))
    return np.array(speed)


def draw_targets():
    """results/targets.csv and .png: V^c_gamma along an episode of SafetyBallRun at full throttle; the surrogates' ratios."""
    env = scpo.SafetyState(gym.make("SafetyBallRun-v0", disable_env_checker=True), cost_limit=25)
    env.reset(seed=1)
    safe, over = [True], False
    while not over:
        _, _, _, over, info = env.step(np.array([1.0, 0.0]))
        safe.append(info["safe"])
    f = np.array(safe, dtype=float)[:, None]  # (251, 1), of s_0 .. s_250
    dones = np.zeros_like(f[1:])
    dones[-1] = 1
    gammas = [0.9, 0.97, 0.99, 0.995, 1.0]
    # where the episode isn't over the critic isn't asked: Monte Carlo
    values = {gamma: scpo.safety_targets(f[:-1], f[1:], dones, gamma)[:, 0] for gamma in gammas}
    with open(RESULTS / "targets.csv", "w") as file:
        file.write("step,f," + ",".join(f"gamma_{gamma}" for gamma in gammas) + "\n")
        for t in range(len(dones)):
            file.write(f"{t},{f[t, 0]:.0f}," + ",".join(f"{values[gamma][t]:.6f}" for gamma in gammas) + "\n")
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    axes[0].step(np.arange(len(f)), f[:, 0], where="post", color="black")
    axes[0].set(title="f(s_t), full throttle on SafetyBallRun", xlabel="t")
    for gamma, (colour, line) in zip(gammas, [*STYLES[:4], ("black", "-")]):
        axes[1].plot(values[gamma], line, color=colour, label=f"gamma = {gamma}")
    axes[1].set(title="V^c_gamma(s_t)", xlabel="t")
    probability = np.linspace(0.05, 1, 200)
    for start, (colour, _) in zip((0.2, 0.5, 0.8), STYLES):
        axes[2].axhline(1 / start, color=colour, linestyle="--", label=f"L1, pi_0 = {start}")
        axes[2].plot(probability, start / probability**2, color=colour, label=f"L2, pi_0 = {start}")
    axes[2].set(title="weight of grad pi: 1/pi_0 and pi_0/pi^2", xlabel="pi", yscale="log")
    for axis in axes[1:]:
        axis.legend(fontsize=8)
    save(figure, "targets")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=[*STUDIES, "targets", "summary"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--figures-only", action="store_true")
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if args.study == "targets":
        return draw_targets()
    if args.study == "summary":
        draw_summary()
        return print("\n".join(summary()))
    env_id, script, iterations, seeds, labels = STUDIES[args.study]
    if not args.figures_only:
        with ThreadPoolExecutor(args.jobs) as pool:
            runs = [(label, flags, seed) for seed in args.seeds or range(1, seeds + 1) for label, flags in labels.items()]
            list(pool.map(lambda run: train(env_id, script, iterations, *run), runs))
    metrics = ["episodic_return", "episodic_cost", "episodic_cost_std", "safe_episode_rate"]
    with_published = {label: {"default": "SCPO"}.get(label, label) for label in labels if label in ("SCPO", "PPO", "default")}
    draw_curves(args.study, metrics if args.study == "cartsafe" else ["episodic_return", "episodic_cost"], with_published)
    (RESULTS / f"{args.study}.md").write_text("\n".join(table(args.study)) + "\n")
    if args.study == "augmentation":
        draw_velocity()


if __name__ == "__main__":
    main()
