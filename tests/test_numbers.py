"""Each number in the pages' prose, made again from a committed file or from the code: a row of CHECKS for a sentence.

A failure names the page and the words around the number. If they were rewritten, adapt the pattern here. A new number
in prose needs a row or, if it is no result but a setting or a part of a definition, a place in EXCUSED. The numbers of
docs/field.md, docs/first-run.md and docs/theory.md have tests of their own.

What was measured by hand is in results/measured.csv and results/scpo_trials.csv, with the date and the command.
"""

import csv
import functools
import math
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import scpo_continuous
import scpo_discrete
import scpo_run
from baselines import cpo, pdo, trpo, trpo_lagrangian
from reproduce import benchmark, curves, field, plot
from reproduce.curves import FAST, TASKS, last_tenth
from reproduce.studies import STUDIES
from scpo_envs import ball_tasks, cart_safe

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
NUMBER = r"(\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)"
CIRCLE, RUN, GATHER, REACH, CART = TASKS
PEERS = ("SB3 PPO on the package's task", "SB3 PPO on our task")


def table(name):
    with open(RESULTS / name) as file:
        return list(csv.DictReader(file))


# Where the numbers come from ------------------------------------------------------------------------------------------


def over_limit():
    """{(script, target KL, normaliser): (returns, costs)} of the trials on Run, each (100,)."""
    trials = {}
    for row in table("over_limit.csv"):
        assert row["seed"] == "101"
        values = [float(row["episodic_return"]), float(row["episodic_cost"])]
        trials.setdefault((row["script"], row["target_kl"], row["normaliser"]), []).append(values)
    assert {len(rows) for rows in trials.values()} == {100}
    return {key: np.transpose(rows) for key, rows in trials.items()}


def where_pcpo_parts():
    """The last iteration in which the cost of both runs is within 0.2, and the cost of each in the next one."""
    updated, frozen = (over_limit()["pcpo.py", "0.001", normaliser][1] for normaliser in ("updated", "frozen"))
    last = np.flatnonzero(np.abs(updated - frozen) > 0.2)[0]
    return last, updated[last], frozen[last]


def gather_cost(algo):
    """Mean cost of the last tenth of its run with seed 1 on Gather."""
    columns = curves.read(RESULTS / "runs" / f"{GATHER}__{algo}__1.csv")
    assert len(columns["iteration"]) == TASKS[GATHER].iterations
    return last_tenth(columns["episodic_cost"])


def gather_episodes():
    return TRPO.num_envs * TRPO.num_steps / gym.spec(GATHER).max_episode_steps


def held_out(script, task=GATHER):
    """A baseline's rows of held_out.csv, which are of the last iteration, seed 1."""
    rows = [row for row in table("held_out.csv") if (row["task"], row["script"]) == (task, script)]
    assert {(row["task"], row["seed"], row["iteration"]) for row in rows} == {(task, "1", "500")}
    return rows


MEASURED = {row["name"]: float(row["value"]) for row in table("measured.csv")}
SLIP = curves.read(RESULTS / "slip.csv")  # columns of the progress.csv of SCPO on Run, seed 3
VELOCITY = curves.read(RESULTS / "velocity.csv")
PUBLISHED = curves.load_published()
TRIALS = table("scpo_trials.csv")
BASELINE_TRIALS = table("baseline_trials.csv")
SCPO, TRPO, CPO, KEEPER = scpo_continuous.Args(), trpo.Args(), cpo.Args(), scpo_run.RunArgs()
FAST_RATE = scpo_continuous.FAST_SETTINGS["learning_rate"]
UNKNOWN = {**vars(SCPO), **scpo_continuous.TASK_SETTINGS["any other task"]}
BOX_SPEED = gym.spec("SafetyBallReachSlowBox-v0").kwargs["box_speed"]


@functools.cache
def runs(task, label="SCPO", iterations=None):
    return curves.load(RESULTS, task, label, iterations or TASKS[task].iterations)[0]


def finals(task, label="SCPO", column="episodic_return", iterations=None):
    """The mean over the last tenth of each seed's iterations."""
    return last_tenth(runs(task, label, iterations)[column])


def study(column="episodic_return"):
    """{label: mean over the seeds} of the study of estimators."""
    labels = plot.load_study(RESULTS, STUDIES["estimators"], STUDIES["estimators"].iterations)
    return {label: last_tenth(runs[column]).mean() for label, runs in labels.items()}


def speed(column, task, script):
    (row,) = [row for row in table("speed.csv") if (row["task"], row["script"]) == (task, script)]
    return float(row[column])


def minutes(task):
    """Of training with SCPO for the paper's number of steps."""
    steps = TASKS[task].iterations * SCPO.num_envs * SCPO.num_steps
    return steps / speed("steps_per_second", task, "scpo_continuous.py") / 60


def on_run(seed):
    """Costs and shares of safe episodes of SCPO on Run."""
    run = runs(RUN)
    return run["episodic_cost"][seed - 1], run["safe_episode_rate"][seed - 1]


def slip(seed):
    """The iterations on Run whose mean cost exceeds the limit, after the tenth: first, last, how many, highest cost."""
    costs, _ = on_run(seed)
    over = 11 + np.flatnonzero(costs[10:] > TASKS[RUN].cost_limit)
    return over[0], over[-1], len(over), costs[over - 1].max()


def late(label, column="episodic_cost"):
    """The second half of the iterations on Run, (seeds, iterations)."""
    values = runs(RUN, label)[column]
    return values[:, values.shape[1] // 2 :]


def less_safe(seed):
    """The iterations on Run with less than 95 % safe episodes, after the tenth: how many, the lowest share in %."""
    _, shares = on_run(seed)
    return (shares[10:] < 0.95).sum(), 100 * shares[10:].min()


def short_of(task):
    """By how much of the published return, in %, each seed of --fast ends below it."""
    target = plot.published_mean(PUBLISHED, task, "SCPO", "return", TASKS[task].iterations)
    return 100 * (1 - finals(task, "fast", iterations=FAST[task][0]) / target)


def searched(task, number, name):
    """What the search says of a trial, of its first seed."""
    (row,) = [row for row in table("search.csv") if (row["task"], row["trial"]) == (task, str(number))]
    return float(row[name].split()[0])


def trial(seed, flags, task=RUN):
    """The row of a trial of SCPO: a dict of texts."""
    (row,) = [row for row in TRIALS if (row["task"], row["seed"], row["flags"]) == (task, str(seed), flags)]
    return row


def lambda_of_95():
    """A seed, its cost with lambda 0.95 and with the mean, the mean's highest. The returns are as high with 0.95."""
    ours, mean = ([trial(seed, f"--safety-lambdas {x}") for seed in (101, 102, 103)] for x in ("0.95", "0 1"))
    assert all(float(a["return"]) > 0.98 * float(b["return"]) for a, b in zip(ours, mean))
    assert mean[2] is max(mean, key=lambda row: float(row["cost"]))
    return 103, float(ours[2]["cost"]), float(mean[2]["cost"])


def cart_trial(vf_coef, seed=101):
    return trial(seed, f"--vf-coef {vf_coef} --safety-lambdas 0 1", CART)["return"]


def cart_safe_is_ahead_until():
    """The iteration up to which SCPO, the mean of its seeds, stays ahead of the published curve, after the tenth."""
    at, values = PUBLISHED[CART, "SCPO", "return"]
    behind = runs(CART)["episodic_return"].mean(0) <= np.interp(range(1, 151), at, values)
    return 10 + int(behind[10:].argmax())


def held_speeds():
    """m/s, the slowest and the fastest of SCPO's policies, each a mean from step 101 on."""
    speeds = [x[100:].mean() for name, x in VELOCITY.items() if name.startswith("SCPO")]
    return min(speeds), max(speeds)


def deviation(iteration):
    """Of the actions, from the entropy of a Gaussian of two dimensions."""
    return math.exp(SLIP["entropy"][iteration - 1] / 2 - math.log(2 * math.pi * math.e) / 2)


def world_size():
    """MB of a Ball task."""
    return (MEASURED["kB of 8 Ball tasks"] - MEASURED["kB of 4 Ball tasks"]) / 4 / 1000


def most_envs():
    """What check_args allows."""
    with pytest.raises(ValueError) as error:
        scpo_continuous.check_args(scpo_continuous.Args(num_envs=10**6))
    return int(re.findall(r"in \[1, (\d+)\]", str(error.value))[0])


def on_reach():
    """Of CPO and PCPO, seed 1: cost at the end, its excess in a batch, what a step saves on it and on others."""
    found = []
    for label, script in (("CPO", "cpo.py"), ("PCPO", "pcpo.py")):
        means = [
            np.mean([float(row[x]) for row in held_out(script, REACH)])
            for x in ("excess_cost", "own_cost", "other_cost")
        ]
        cost = last_tenth(curves.read(RESULTS / "runs" / f"{REACH}__{label}__1.csv")["episodic_cost"])
        found.append((cost, means[0], -means[1], -means[2]))
    return [x for pair in zip(*found) for x in pair]


def on_the_field():
    """SCPO's returns after ten million steps in % of the best published within the limit; its safe episodes in %."""
    _, published = field.load(RESULTS / "field")
    found = []
    for task in list(field.TASKS)[:2]:
        known = [x for x in published if x["task"] == task and x["algorithm"] not in field.UNCONSTRAINED]
        best = max(float(x["return_mean"]) for x in known if float(x["cost_mean"]) <= field.COST_LIMIT)
        returned, safe = field_ends(task, "SCPO")
        found += [100 * returned / best, 100 * safe]
    return found


def field_ends(task, label):
    """Return and share of safe episodes: means over the last tenth of the kept runs."""
    kept, _ = field.load(RESULTS / "field")
    columns = [x.columns for x in kept if (x.task, x.label) == (task, label)]
    return [np.mean([last_tenth(x[name]) for x in columns]) for name in ("episodic_return", "safe_episode_rate")]


def most_envs_of_a_worker():
    """What scpo_run.py allows."""
    argv = ["--num-envs", "1000", "--num-workers", "2"]
    with pytest.raises(ValueError) as error:
        scpo_run.read_flags(scpo_continuous.Args, scpo_continuous.TASK_SETTINGS, ROOT / "scpo_continuous.py", argv)
    return int(re.findall(r"at most (\d+) num-envs each", str(error.value))[0])


def clipped():
    """The largest normalised observation."""
    agent = scpo_continuous.Agent(1, gym.spaces.Box(-1, 1, (1,)))
    agent.obs_var.fill_(0)
    return agent.normalize(torch.ones(1)).item()


def fast_on_run():
    """--fast on Run: return, cost, late iterations over the limit. Each episode of the last tenth is safe."""
    columns = ("episodic_return", "episodic_cost", "safe_episode_rate")
    returns, costs, safe = (finals(RUN, "fast", x, FAST[RUN][0]) for x in columns)
    assert len(safe) == 4 and safe.min() == 1
    over = (runs(RUN, "fast", FAST[RUN][0])["episodic_cost"][:, FAST[RUN][0] // 2 :] > TASKS[RUN].cost_limit).sum(1)
    assert (over > 0).sum() == 1
    return returns.mean(), costs.mean(), over.sum()


def times_published(task, algo):
    """The return as a multiple of the published one."""
    published = plot.published_mean(PUBLISHED, task, algo, "return", TASKS[task].iterations)
    return finals(task, algo).mean() / published


def more_on_gather():
    factors = [times_published(GATHER, algo) for algo in curves.ALGOS if algo != "PPO"]
    assert len(factors) == 6
    return 100 * min(factors) - 100, 100 * max(factors) - 100


def more_than_published(task):
    """SCPO's cost as a multiple of the published one. It is within the limit."""
    cost = finals(task, "SCPO", "episodic_cost").mean()
    assert cost < TASKS[task].cost_limit
    return cost / plot.published_mean(PUBLISHED, task, "SCPO", "cost", TASKS[task].iterations)


def published_ends():
    """The last iterations of the published curves of Circle that end early: SCPO's return and CPO's cost."""
    ends = {key[1:]: int(at[-1]) for key, (at, _) in PUBLISHED.items() if key[0] == CIRCLE and at[-1] < 490}
    assert ends.keys() == {("SCPO", "return"), ("CPO", "cost")}
    return ends["SCPO", "return"], ends["CPO", "cost"]


def late_over(task):
    """How many iterations of the second halves of SCPO's runs exceed the limit, and how many iterations these have."""
    over = runs(task)["episodic_cost"][:, TASKS[task].iterations // 2 :] > TASKS[task].cost_limit
    return over.sum(), over.size


def safe_from_the_fourth():
    """The share of SCPO's episodes on CartSafe that are safe, from the fourth iteration on: in each one most are."""
    assert runs(CART)["safe_episode_rate"][:, 3:].min() > 0.5
    return ()


def on_the_cheetah():
    """Returns of TRPO-L and SCPO after ten million steps, and their safe episodes in %."""
    (theirs, their_share), (ours, our_share) = (field_ends(list(field.TASKS)[0], label) for label in ("TRPO-L", "SCPO"))
    return theirs, ours, 100 * their_share, 100 * our_share


def share_until_published(task):
    """The share of the steps, in %, after which the mean of SCPO's seeds over the last tenth so far is the published
    return; and this return."""
    target, returns = plot.published_mean(PUBLISHED, task, "SCPO", "return", 500), runs(task)["episodic_return"].mean(0)
    there = next(i for i in range(10, 501) if returns[i - round(i / 10) : i].mean() >= target)
    return there / 5, target


def costs_beside_published(task):
    """SCPO's and the published cost, which is lower, while ours is within the limit."""
    ours = finals(task, "SCPO", "episodic_cost").mean()
    published = plot.published_mean(PUBLISHED, task, "SCPO", "cost", 500)
    assert published < ours < TASKS[task].cost_limit
    return ours, published


def papers_trials(share):
    """The trials of the paper's tasks that have this share of the published steps."""
    rows = [row for row in table("search.csv") if row["task"] in TASKS]
    return [row for row in rows if float(row["steps"]) == share * TASKS[row["task"]].iterations * 32768]


def tenths():
    """Trials of a tenth by task, those that ran to the end, all; trials of a fifth; hours."""
    short, longer = papers_trials(0.1), papers_trials(0.2)
    assert len(short) + len(longer) == len([row for row in table("search.csv") if row["task"] in TASKS])
    counts = [sum(row["task"] == task for row in short) for task in (RUN, CART, GATHER, REACH, CIRCLE)]
    hours = sum(float(row["seconds"] or 0) for row in short + longer) / 3600
    return *counts, sum(row["state"] == "complete" for row in short), len(short), len(longer), hours


def also_tried():
    """On Gather and Reach: minibatches, epochs, gamma and lambda other than the paper's."""
    rows = [row for row in papers_trials(0.1) + papers_trials(0.2) if row["task"] in (GATHER, REACH)]
    assert {"True"} < {row["norm_obs"] for row in rows} and {"0", "0.95", "1"} < {row["safety_lambdas"] for row in rows}
    assert {"0"} < {row["ent_coef"] for row in rows} and {"-1", "-0.5"} < {row["log_std_init"] for row in rows}
    every = [row for share in (0.1, 0.2) for row in papers_trials(share)]
    assert {row["num_envs"] for row in every} <= {"", "16"} and {row["schedule"] for row in every} <= {"", "none"}
    names = {"minibatch_size": 64, "update_epochs": 5, "gamma": 0.99, "gae_lambda": 0.95}
    return [x for name, paper in names.items() for x in sorted({float(row[name]) for row in rows} - {paper})]


def older_trial(algo):
    """The cost of a trial on Run with a multiplier rate of 0.01."""
    asked = dict(algo=algo, task=RUN, target_kl="0.001", lagrangian_lr="0.01", std_end="0.1")
    (row,) = [row for row in BASELINE_TRIALS if {name: row[name] for name in asked} == asked]
    return float(row["cost"])


def by_the_dual():
    """Target KL, return and cost of the trial on Reach that CPO's built-in row has replaced."""
    target_kl = cpo.TASK_SETTINGS[REACH]["target_kl"]
    rows = [row for row in BASELINE_TRIALS if (row["algo"], row["task"]) == ("CPO", REACH) and "dual" in row["note"]]
    (row,) = [row for row in rows if float(row["target_kl"]) == target_kl]
    return target_kl, float(row["return"]), float(row["cost"])


def larger_batches():
    """Return and cost of the trial of CPO on Reach with four times as many steps in a batch."""
    last = BASELINE_TRIALS[-1]
    built_in = cpo.TASK_SETTINGS[REACH]
    assert (last["algo"], last["task"], float(last["target_kl"])) == ("CPO", REACH, built_in["target_kl"])
    assert last["iteration"] == last["of"] == str(built_in["total_timesteps"] // (CPO.num_envs * 8000))
    assert last["note"].startswith("num_steps 8000") and last["seed"] == "101" and 8000 == 4 * CPO.num_steps
    return float(last["return"]), float(last["cost"])


def trial_seeds():
    return [int(row["seed"]) for row in BASELINE_TRIALS if "benchmark seeds" not in row["note"]]


def corrected_rows():
    """How many rows of the page's table, counted from its end, were made with today's code."""
    old = {(row["return"], row["cost"]) for row in BASELINE_TRIALS if "7d96461" in row["note"]}
    section = (ROOT / "docs/baselines.md").read_text().split("## The trials")[1]
    shown = re.findall(r"^\| \S+ \| \w+ \|.*\| ([\d.]+) / ([\d.]+) \|", section, re.M)
    return len(shown) - max(i for i, pair in enumerate(shown, 1) if pair in old)


# The sentences, # for a number ----------------------------------------------------------------------------------------

CHECKS = {
    "README.md": [
        (
            "ends over the limit: a return of # at a cost of #, with # % of",
            lambda: [
                MEASURED[f"Run, seed 1, another CPU: {x}"] * n for x, n in (("return", 1), ("cost", 1), ("safe", 100))
            ],
        ),
        (
            "in iterations # to # with seed # and in iterations # to # with seed #. .*? "
            "Seed # still exceeds the limit in iterations # and #",
            lambda: (*slip(2)[:2], 2, *slip(3)[:2], 3, 3, 91, slip(3)[1]),
        ),
        ("The table averages iterations # to #", lambda: (0.9 * TASKS[RUN].iterations + 1, TASKS[RUN].iterations)),
        ("On Run it ends at # with a cost of # .*? half one seed exceeds the limit for # iterations", fast_on_run),
        ("on Circle and Run, by a factor of # and #", lambda: [more_than_published(task) for task in (CIRCLE, RUN)]),
        ("comes from one seed, with a cost of #", lambda: [finals(CIRCLE, "SCPO", "episodic_cost").max()]),
        ("On Gather and Reach the factor is # and #", lambda: [more_than_published(task) for task in (GATHER, REACH)]),
        (
            "in # of # iterations on CartSafe, in # of # on Gather, in # of # on Reach and in none on Circle",
            lambda: [x for task in (CART, GATHER, REACH) for x in late_over(task)],
        ),
        ("TRPO-L's return is # after .*? and SCPO's #. But # % .*? are safe and # % of SCPO's", on_the_cheetah),
        (
            "On Run # % of SCPO's episodes are safe at the end, # % with TRPO-L and # % with CPO",
            lambda: [100 * finals(RUN, x, "safe_episode_rate").mean() for x in ("SCPO", "TRPO-L", "CPO")],
        ),
        (
            "makes # steps a second on one core on Circle and # on Run",
            lambda: [speed("steps_per_second", task, "scpo_continuous.py") for task in (CIRCLE, RUN)],
        ),
        (
            "That is # and # times .*? and # and # times",
            lambda: [speed("ratio", task, peer) for peer in PEERS[::-1] for task in (CIRCLE, RUN)],
        ),
        ("takes # minutes on Circle and # on Run", lambda: [minutes(task) for task in (CIRCLE, RUN)]),
        (
            "SCPO reaches # % of .*? for the cheetah, with # % .*? On the hopper .*? it reaches # %, with # %",
            on_the_field,
        ),
    ],
    "results/README.md": [
        ("slip over it for # and # iterations", lambda: (slip(2)[2], slip(3)[2])),
        ("On Gather all six algorithms earn more, by # to # %", more_on_gather),
        ("published up to iteration # and CPO's cost up to #", published_ends),
        ("CartSafe # iterations", lambda: [STUDIES["cartsafe"].iterations]),
        ("Run, # iterations", lambda: [STUDIES["augmentation"].iterations]),
        (
            "runs there are cut at iteration #. So the last tenth holds more of seed #'s slip",
            lambda: [100 * trpo.T // scpo_continuous.T, 3],
        ),
        ("Most of SCPO's episodes are safe from the fourth", safe_from_the_fourth),
        ("four runs # of # iterations exceed the limit of #", lambda: (*late_over(CART), TASKS[CART].cost_limit)),
        ("Circle, # iterations", lambda: [STUDIES["estimators"].iterations]),
        ("Reach, # iterations", lambda: [STUDIES["box"].iterations]),
    ],
    "docs/reproduction.md": [
        ("the comparison with the paper, # runs", lambda: [len(benchmark.parse([])[1])]),
        ("at about #/# rad/s", lambda: (1, 1 / BOX_SPEED)),
        ("Here it circles at # rad/s", lambda: [gym.make(REACH).unwrapped.box_speed]),
    ],
    "docs/tasks.md": [
        (
            "radius # m. It costs to be outside the two lines x = -# and x = #",
            lambda: (ball_tasks.BallCircle.track_radius, *[ball_tasks.BallCircle.x_limit] * 2),
        ),
        ("An episode has # steps of #/# s", lambda: (gym.spec(RUN).max_episode_steps, 1, 1 / ball_tasks.DT)),
        ("in units of # N along", lambda: [ball_tasks.MAX_FORCE]),
        ("takes # MB of memory", lambda: [world_size()]),
        ("the # of the largest `--num-envs` take # GB", lambda: (most_envs(), most_envs() * world_size() / 1000)),
        ("the # features above", lambda: [ball_tasks.BallTask.num_features]),
        (r"\(cost limit #, \[`scpo_envs/cart_safe", lambda: [TASKS[CART].cost_limit]),
        (
            "Gravity is # m/s.2. The cart weighs # kg. The pole weighs # kg and is # m long. The force is # N",
            lambda: (
                *(cart_safe.GRAVITY, cart_safe.CART_MASS, cart_safe.POLE_MASS),
                *(2 * cart_safe.HALF_LENGTH, cart_safe.FORCE),
            ),
        ),
        ("A step is # s, by", lambda: [cart_safe.DT]),
        (
            r"where abs\(x\) > #\. An episode ends where abs\(x\) > # or after # steps",
            lambda: (cart_safe.X_COST, cart_safe.X_END, gym.spec(CART).max_episode_steps),
        ),
        ("a machine that made # steps a second", lambda: [1 / ball_tasks.DT / BOX_SPEED]),
    ],
    "docs/your-own-env.md": [
        (
            "With seed # the cart ends at a return of #. With observations # times as large plus # it ends at #, with "
            r"actions in \[#, #\] at #",
            lambda: (
                *(1, MEASURED["cart: return"], 100, 500, MEASURED["cart, observations x 100 + 500: return"]),
                *(100, 200, MEASURED["cart, actions in [100, 200]: return"]),
            ),
        ),
        (
            "numbers with a standard deviation of # .*?, a baseline's with # ",
            lambda: (math.exp(UNKNOWN["log_std_init"]), TRPO.std_start),
        ),
        ("clip the result to \\+-#", lambda: [clipped()]),
        ("A worker takes up to # environments", lambda: [most_envs_of_a_worker()]),
        (r"a standard deviation of # \(`scpo_continuous", lambda: [math.exp(UNKNOWN["log_std_init"])]),
        ("`--reward-scale`, # for unknown tasks", lambda: [UNKNOWN["reward_scale"]]),
        (
            "With `--reward-scale #` instead, .* since 100 x # is #",
            lambda: [UNKNOWN["reward_scale"] / 100] * 2 + [UNKNOWN["reward_scale"]],
        ),
        (r"it ends at # \(\[results/measured", lambda: [MEASURED["unconstrained cart: cost"]]),
        ("The default for unknown tasks is #", lambda: [UNKNOWN["beta"]]),
        (r"the power of Q\^c, # for unknown tasks", lambda: [UNKNOWN["k"]]),
        ("`--max-grad-norm` #", lambda: [SCPO.max_grad_norm]),
        ("On CartSafe discounted returns are near #", lambda: [2 / (1 - SCPO.gamma)]),  # a standing pole earns 2 a step
        (
            "There a `--vf-coef` of # ended at #, the usual # at #",
            lambda: (0.005, cart_trial(0.005), SCPO.vf_coef, cart_trial(SCPO.vf_coef)),
        ),
        (
            "two processes on two cores sampled # steps a second, one process #. "
            "On a task .* makes # steps .* two made #,",
            lambda: [
                MEASURED[f"workers, {task}: {n}"]
                for task, n in (("4 ms a step", 2), ("4 ms a step", 1), ("PointGoal1", 1), ("PointGoal1", 2))
            ],
        ),
        (r"at least `--min-safe-rate` \(#\)", lambda: [KEEPER.min_safe_rate]),
        (r"min\(cost so far / limit, #\)", lambda: [1 + scpo_continuous.DELTA]),
    ],
    "docs/fast-settings.md": [
        ("other seeds than the figure's #", lambda: [finals(CART, "fast", iterations=FAST[CART][0]).mean()]),
        (
            "Seed 101 ran twice .*? It ended at # and at #",
            lambda: [searched(CART, number, "return") for number in (28, 34)],
        ),
        (
            "Ten iterations are # million steps with `--fast`, # with the paper's settings and # with a baseline",
            lambda: [1e-5 * size for size in (FAST[RUN][1], *(x.num_envs * x.num_steps for x in (SCPO, TRPO)))],
        ),
        ("share one gradient norm, #. Discounted returns", lambda: [SCPO.max_grad_norm]),
        (
            "a learning rate of # reached # in a tenth of the published steps, # only #",
            lambda: [
                x for row in (1, 0) for x in (searched(CIRCLE, row, "learning_rate"), searched(CIRCLE, row, "return"))
            ],
        ),
        (
            "With # seeds # and # ended at # and # after a fifth. So # is built in",
            lambda: (
                *(FAST_RATE, 102, 103),
                *[MEASURED[f"Circle at 1e-3: seed {seed}"] for seed in (102, 103)],
                FAST_RATE,
            ),
        ),
        ("has the published return, within # %, after", lambda: [math.ceil(short_of(RUN).mean())]),
        (
            "return with # of # seeds and comes within # % on a third. Seed # stays at #",
            lambda: (
                *((short_of(CIRCLE) <= 0).sum(), 4, math.ceil(np.sort(short_of(CIRCLE))[2])),
                1 + np.argmax(short_of(CIRCLE)),
                finals(CIRCLE, "fast", iterations=FAST[CIRCLE][0]).min(),
            ),
        ),
        (
            "falls short: # of #. After as many steps the paper's settings have #. The limit is # there",
            lambda: (
                finals(CART, "fast", iterations=FAST[CART][0]).mean(),
                plot.published_mean(PUBLISHED, CART, "SCPO", "return", 150),
                finals(CART, "SCPO", iterations=30).mean(),
                TASKS[CART].cost_limit,
            ),
        ),
        (
            r"after # % of the steps on Gather \(#\) and after # % on Reach \(#\)",
            lambda: [x for task in (GATHER, REACH) for x in share_until_published(task)],
        ),
        (
            "even at the end: # against # on Gather and # against # on Reach",
            lambda: [x for task in (GATHER, REACH) for x in costs_beside_published(task)],
        ),
        ("# on Run, # on CartSafe, # on Gather, # on Reach and # on Circle. # of these # ran to", lambda: tenths()[:7]),
        ("Another # have a fifth. Together they took # hours", lambda: tenths()[7:]),
        ("minibatches of # and #, # and # epochs, no entropy bonus, gamma # and #, lambda # and #, a", also_tried),
    ],
    "docs/scpo.md": [
        ("return ends at iteration # and CPO's cost at #", published_ends),
        (
            "the gradient is up to # times the usual one",
            lambda: [SLIP["grad_norm"][80:].max() / np.median(SLIP["grad_norm"][60:80])],
        ),
        (
            "of its # iterations in the second halves, # have a mean cost over the limit. Without it there are #",
            lambda: (late("annealed").size, *[(late(x) > TASKS[RUN].cost_limit).sum() for x in ("annealed", "SCPO")]),
        ),
        (
            "at a higher return, # against #, at a lower cost, # against #",
            lambda: [
                finals(RUN, label, column).mean()
                for column in ("episodic_return", "episodic_cost")
                for label in ("annealed", "SCPO")
            ],
        ),
        ("At least # % of the episodes of each", lambda: [100 * late("annealed", "safe_episode_rate").min()]),
        ("Seed # ends at a cost of #", lambda: (4, finals(RUN, "annealed", "episodic_cost")[3])),
        (
            "seed # slipped in the second half, for # of its # iterations",
            lambda: (2, (runs(RUN, "fast", 80)["episodic_cost"][1, 40:] > TASKS[RUN].cost_limit).sum(), 80 - 40),
        ),
        (
            "an iteration of # steps .*?, # epochs, minibatches of # and a learning rate of #",
            lambda: (SCPO.num_envs * SCPO.num_steps, SCPO.update_epochs, SCPO.minibatch_size, SCPO.learning_rate),
        ),
        ("seed # costs #. With the default, the mean, it costs #, the most", lambda_of_95),
        ("One gradient norm of # holds", lambda: [SCPO.max_grad_norm]),
        ("only calls about 0, is #", lambda: [scpo_continuous.DELTA]),
        ("Seeds # to #. Each cell has .*? means over the last # of # iterations", lambda: (101, 103, 100 / 10, 100)),
        ("means over the last .*? iterations. The cost limit is #", lambda: [TASKS[RUN].cost_limit]),
        ("A lambda of # was stopped at iteration #", lambda: (0.9, trial(101, "--safety-lambdas 0.9")["iteration"])),
        (
            r"\(Run, seed #: # / #, seed #: # / #\)",
            lambda: [
                x
                for seed in (101, 103)
                for x in (seed, *(trial(seed, "--safety-lambdas 0.9")[name] for name in ("return", "cost")))
            ],
        ),
        ("On seed # it did so at iteration # and never", lambda: (101, trial(101, "--safety-lambdas 1")["slipped_at"])),
        (
            "With # it slipped at iteration # and was back at #",
            lambda: (0.99, *(trial(101, "--safety-lambdas 0.99")[name] for name in ("slipped_at", "back_at"))),
        ),
        (
            "seeds 1 to 3 reached # on Circle, on average after # iterations",
            lambda: (study()["SCPO"], STUDIES["estimators"].iterations),
        ),
        (
            r"With a weight of # and the mean estimate CartSafe ended at # \(seeds # to #\)",
            lambda: (SCPO.vf_coef, cart_trial(SCPO.vf_coef, "1 to 3"), 1, 3),
        ),
        ("Discounted returns are near # there", lambda: [2 / (1 - SCPO.gamma)]),
        (
            "return / cost over the last # of # iterations",
            lambda: (TASKS[CART].iterations / 10, TASKS[CART].iterations),
        ),
        ("`--min-safe-rate`, # by default", lambda: [KEEPER.min_safe_rate]),
        ("policies are safe in # % of theirs", lambda: [100 * finals(GATHER, "SCPO", "safe_episode_rate").mean()]),
        ("From step # on the four trained policies roll at # to # m/s", lambda: (101, *held_speeds())),
        ("At iteration # of seed # the standard deviation of its actions is #,", lambda: (60, 3, deviation(60))),
        (
            "the returns of a batch differ by # in #",
            lambda: (SLIP["episodic_return_std"][59], SLIP["episodic_return"][59]),
        ),
        (
            "The cost jumps from 0 to 1 at # m/s: a policy that is # to # % faster",
            lambda: (2.5, *(100 * (2.5 / held - 1) for held in reversed(held_speeds()))),
        ),
        (
            "a KL divergence of #, and single ones by # and #",
            lambda: (np.median(SLIP["approx_kl"][10:]), *sorted(SLIP["approx_kl"][10:])[-2:]),
        ),
        (
            r"seed 2 did so in iterations # to # \(cost up to #\) and seed 3 in # to # \(cost up to #\)",
            lambda: (*slip(2)[:2], slip(2)[3], *slip(3)[:2], slip(3)[3]),
        ),
        (
            "Seeds 1 and 4 had # iterations and # with less than # % safe .*?, # % and # % at the lowest",
            lambda: (less_safe(1)[0], less_safe(4)[0], 95, less_safe(1)[1], less_safe(4)[1]),
        ),
        (
            "The slip of seed # followed the iteration with a KL divergence of #",
            lambda: (3, SLIP["approx_kl"][slip(3)[0] - 2]),
        ),
        ("With a deviation of # every step beyond # m/s costs #", lambda: (deviation(60), 2.5, 1)),
        ("of iterations x #", lambda: [SCPO.num_envs * SCPO.num_steps]),
        ("do not meet: # against # at the end", lambda: [finals(RUN, x).mean() for x in ("SCPO", "not_augmented")]),
        (r"\(worst seed # % safe\)", lambda: [100 * finals(RUN, "not_augmented", "safe_episode_rate").min()]),
        (
            "no policy of either kind costs more than # an episode .*? above # m/s",
            lambda: (max((x > 2.5).sum() for name, x in VELOCITY.items() if name != "step"), 2.5),
        ),
        ("the published curve up to iteration #, then", lambda: [cart_safe_is_ahead_until()]),
        (
            "about # against # at the end",
            lambda: (finals(CART).mean(), plot.published_mean(PUBLISHED, CART, "SCPO", "return", 150)),
        ),
        (
            "SafetyBallCircle, # iterations, .*? All keep the limit of # by far",
            lambda: (STUDIES["estimators"].iterations, TASKS[CIRCLE].cost_limit),
        ),
        (r"at costs of # to #\.", lambda: (min(study("episodic_cost").values()), max(study("episodic_cost").values()))),
        (
            "which reaches #, and one step alone, which reaches #. Lambda # reaches #, Monte Carlo #",
            lambda: (*(study()["SCPO"], study()["one_step"], 0.95), *(study()["lambda_0.95"], study()["Monte_Carlo"])),
        ),
        (
            "With L2 two seeds reach # and #, the third stays at #",
            lambda: sorted(finals(CIRCLE, "L2", iterations=100), reverse=True),
        ),
        (
            "sampling loop makes # to # steps a second, # on average",
            lambda: [MEASURED[f"CartSafe-v0 sampling: {what}"] for what in ("least", "most", "mean")],
        ),
        (
            "Compiled # and with `--no-compile` # steps a second",
            lambda: (MEASURED["training, compiled"], MEASURED["training, not compiled"]),
        ),
    ],
    "docs/baselines.md": [
        (
            "Seed # ends at a cost of # with CPO and of # with PCPO. The limit is #. A batch is over it by # and # on "
            "average. A step .*? by # and # on its own batch, and by # and # on the others",
            lambda: (1, *on_reach()[:2], TASKS[REACH].cost_limit, *on_reach()[2:]),
        ),
        (r"last tenth of the iterations, limit #\. \(The", lambda: [TASKS[RUN].cost_limit]),
        (
            r"cost up to iteration #\. That .*? it is # where they are updated and # where they are frozen",
            where_pcpo_parts,
        ),
        (
            "At the limit an episode has #, so a batch of # episodes has # costs",
            lambda: (TASKS[GATHER].cost_limit, gather_episodes(), TASKS[GATHER].cost_limit * gather_episodes()),
        ),
        ("Seed 1 ends at # with CPO and at # with PCPO", lambda: [gather_cost("CPO"), gather_cost("PCPO")]),
        ("sampled # batches with it", lambda: [len(held_out("cpo.py"))]),
        ("on the other eleven. The table has means over the # batches", lambda: [len(held_out("pcpo.py"))]),
        ("# costs don't tell in which direction", lambda: [TASKS[GATHER].cost_limit * gather_episodes()]),
        ("ends nearer to the limit, at #", lambda: [gather_cost("TRPO-L")]),
        (r"\| # environments x # steps", lambda: (TRPO.num_envs, TRPO.num_steps)),
        (r"GAE\(#, #\)", lambda: (TRPO.gamma, TRPO.gae_lambda)),
        ("plus # on the diagonal", lambda: [TRPO.cg_damping]),
        (r"\| # iterations\. The right-hand side", lambda: [TRPO.cg_iters]),
        (
            r"the step times #\^j, # lengths for TRPO and # for the others",
            lambda: (TRPO.backtrack, TRPO.line_search_steps, CPO.line_search_steps),
        ),
        ("a KL divergence of at most # x target", lambda: [TRPO.kl_margin]),
        (
            "Adam at #, # epochs of # minibatches",
            lambda: (TRPO.critic_learning_rate, TRPO.critic_epochs, TRPO.critic_minibatches),
        ),
        ("linearly from # to #", lambda: (TRPO.std_start, TRPO.std_end)),
        ("Fisher matrix with the # added", lambda: [TRPO.cg_damping]),
        ("deviation of the actions ends at #, not at #", lambda: (TRPO.std_end, 0.01)),
        (
            "A batch is # environments x # steps, not # x #. That is the same number",
            lambda: (TRPO.num_envs, TRPO.num_steps, 64, TRPO.num_envs * TRPO.num_steps / 64),
        ),
        ("They use seeds # to #", lambda: (min(trial_seeds()), max(trial_seeds()))),
        ("The last # rows were made", lambda: [corrected_rows()]),
        ("With that one the target KL of # ended at # / # on Reach", by_the_dual),
        ("seed #, means of iterations # to # of a run of #", lambda: (101, 37, 40, TASKS[CIRCLE].iterations)),
        (
            "ended at a return of # and a cost of #. Seed 1 with the usual batches ended at # and #",
            lambda: (*larger_batches(), *(finals(REACH, "CPO", x)[0] for x in ("episodic_return", "episodic_cost"))),
        ),
        (
            "With the same rate, #, a trial of PDO ended at a cost of #, one of TRPO-L at #",
            lambda: [0.01, *(older_trial(algo) for algo in ("PDO", "TRPO-L"))],
        ),
        (
            "On Run their multiplier rates differ, # and #",
            lambda: [x.TASK_SETTINGS[RUN]["lagrangian_lr"] for x in (trpo_lagrangian, pdo)],
        ),
        ("# x `cost_surrogate_change`", lambda: [gym.spec(REACH).max_episode_steps]),
    ],
}

# What needs no source: settings, parts of definitions, seeds, versions, dates, status codes; and 0, 1 and 2 everywhere
EXCUSED = {
    "README.md": "2023 2021 3.9 3.11 3.13",
    "results/README.md": "2.13 3.11 95 5",
    "docs/reproduction.md": "3 4",
    "docs/fast-settings.md": "3 4 101 1e-3 6e-4 0.97 64 200 256 500",
    "docs/tasks.md": "2021 0.1 0.2 1e-6 1e-9 1e-12 3 7 1.4 3.11",
    "docs/your-own-env.md": "100 0.5 4 8 25 26 50 80 200 1,000",
    "docs/scpo.md": "0.01 1e-5 1e-8 3 4 10 0.5 0.95 101 103 130 143 28 2026 2.13 2.0 1.4",
    "docs/baselines.md": "2019 25 101 250 0.0003 0.003 0.01 64 10 0.05 0.1 0.001 2.5",
}


def one_line(page):
    """The page in a line, rows of tables between <|>, without the numbers of lists and what plot.py makes."""
    text = (ROOT / page).read_text()
    text = re.sub(r"<!-- ([\w ]+): made by .*?<!-- end of \1 -->", "", text, flags=re.S)
    text = re.sub(r"^( *)\d+\. ", r"\1- ", text, flags=re.M)
    text = re.sub(r"^\|.*\|$", r"<|>\g<0><|>", text, flags=re.M)
    return " ".join(text.split())


def sentences(page, pattern):
    return list(re.finditer(pattern.replace("#", NUMBER), one_line(page)))


ROWS = [(page, pattern, again) for page, rows in CHECKS.items() for pattern, again in rows]


@pytest.mark.parametrize("page, pattern, again", ROWS, ids=[f"{page}: {pattern}" for page, pattern, _ in ROWS])
def test_a_number_in_prose_is_what_its_source_gives(page, pattern, again):
    found = sentences(page, pattern)
    assert len(found) == 1, f"{page} has {len(found)} sentences like: {pattern}"
    made = [float(x) for x in again()]
    assert len(made) == len(found[0].groups()), (pattern, made)
    for shown, value in zip(found[0].groups(), made):
        unit = value * 1e-9 if "e" in shown else 10.0 ** -len(shown.partition(".")[2])
        assert abs(float(shown.replace(",", "")) - value) <= 0.5001 * unit, f"{page}: {shown} is {value} in: {pattern}"


@pytest.mark.parametrize("page", CHECKS)
def test_each_number_in_prose_has_a_source_or_an_excuse(page):
    """Code, links and tables aside: commands and tables have tests of their own."""
    text, covered = one_line(page), set()
    for pattern, _ in CHECKS[page]:
        for found in sentences(page, pattern):
            covered.update(found.start(i) for i in range(1, len(found.groups()) + 1))
    for aside in (r"```.*?```", r"`[^`]*`", r"\]\([^)]*\)", r"<\|>.*?<\|>"):
        text = re.sub(aside, lambda found: " " * len(found[0]), text)
    numbers = re.finditer(r"(?<![\w.,^])" + NUMBER + r"(?!\w)", text)
    excused = {"0", "1", "2", *EXCUSED[page].split()}
    new = [x for x in numbers if x.start() not in covered and x[0].rstrip(",") not in excused]
    assert not new, [f"{x[0]} in: {text[max(0, x.start() - 40) : x.end() + 20]}" for x in new]


# Tables that are made by hand -----------------------------------------------------------------------------------------


def rows_of(page, first_heading):
    """The rows of a table, its head included, as lists of cells."""
    text = (ROOT / page).read_text()
    lines = text[text.index(first_heading) :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def test_the_commands_of_the_trials_are_their_settings():
    for row in TRIALS:
        script = "scpo_discrete.py" if row["task"] == CART else f"scpo_continuous.py --env-id {row['task']}"
        length = "" if row["task"] == CART else f" --total-timesteps {100 * 32768}"
        seed = row["seed"].split(" to ")[0]
        assert row["command"] == f"python {script} --seed {seed} {row['flags']}{length}"


def test_the_papers_settings():
    (_, _, *flags), *rows = rows_of("docs/scpo.md", "| task | iterations | `--cost-limit` |")
    names = [flag.strip("`-").replace("-", "_") for flag in flags]
    both = {**scpo_discrete.TASK_SETTINGS, **scpo_continuous.TASK_SETTINGS}
    made = [
        [task, str(both[task]["total_timesteps"] // scpo_continuous.T), *(f"{both[task][name]:g}" for name in names)]
        for task in TASKS
    ]
    assert rows == made
    assert "CartSafe also has `--vf-coef 0.005 --safety-lambdas 1`" in one_line("docs/scpo.md")
    assert scpo_discrete.OURS == dict(vf_coef=0.005, safety_lambdas=(1.0,))


def test_the_trials_of_the_estimate_of_q():
    (_, *columns), *rows = rows_of("docs/scpo.md", "| `--safety-lambdas` |")
    shown = {}
    for label, *cells in rows:
        lambdas = re.match(r"[\d.]+( [\d.]+)?", label)[0]
        for column, cell in zip(columns, cells):
            task, seed = column.split()
            if cell:
                shown[f"SafetyBall{task}-v0", seed, f"--safety-lambdas {lambdas}"] = cell
    expected = {}
    for row in TRIALS:
        stopped = f"stopped at {row['iteration']}: " if row["iteration"] != "100" else ""
        if row["task"] != CART and "0.9" != row["flags"].split()[-1] and row["flags"].count("--") == 1:
            cell = f"{stopped}{row['return']} / {row['cost']} / {row['safe']}"
            expected[row["task"], row["seed"], row["flags"]] = cell
    assert shown == expected


def test_the_trials_on_cart_safe():
    (_, *seeds), *rows = rows_of("docs/scpo.md", "| `--vf-coef`, `--safety-lambdas` |")
    shown = {}
    for label, *cells in rows:
        vf_coef, lambdas, *more = label.replace(" (built in)", "").split(", ")
        flags = " ".join(["--vf-coef", vf_coef, "--safety-lambdas", lambdas, *more]).replace("`", "")
        shown.update({(seed, flags): cell for seed, cell in zip(seeds, cells) if cell})
    trials = [row for row in TRIALS if row["task"] == CART and row["seed"] in seeds]
    assert shown == {(row["seed"], row["flags"]): f"{row['return']} / {row['cost']}" for row in trials}


def test_the_trials_of_what_prevents_a_slip():
    head, *rows = rows_of("docs/scpo.md", "| Run, seed 101, `--safety-lambdas 1` |")
    assert len(rows) == 3 and len(head) == 3
    for label, result, under_95 in rows:
        row = trial(101, " ".join(["--safety-lambdas 1", *re.findall(r"`(--.*?)`", label)]))
        assert (result, under_95) == (f"{row['return']} / {row['cost']} / {row['safe']}", row["under_95"])
        assert re.findall(r"at (\d+)", label) == [row["slipped_at"]] * bool(row["slipped_at"])


def test_the_speeds_of_the_tasks():
    _, *rows = rows_of("docs/tasks.md", "| task | ours | package |")
    assert len(rows) == 4
    for task, *shown in rows:
        ours, package = MEASURED[f"{task}: ours"], MEASURED[f"{task}: package"]
        assert shown == [f"{ours:,.0f}", f"{package:,.0f}", f"{ours / package:.1f}"]


def test_limits_and_features_of_the_tasks():
    _, *rows = rows_of("docs/tasks.md", "| task | cost limit |")
    shown = {task: (float(limit), features) for task, limit, features, *_ in rows}
    assert {task: limit for task, (limit, _) in shown.items()} == {
        task: TASKS[task].cost_limit for task in (CIRCLE, RUN, GATHER, REACH)
    }
    more = {task: gym.make(task).observation_space.shape[0] - ball_tasks.BallTask.num_features for task in shown}
    counted = {
        task: sum(map(int, re.findall(r"(\d+) (?:sectors|rays|to the bombs)", features)))
        for task, (_, features) in shown.items()
    }
    assert counted == {CIRCLE: 0, RUN: 0, GATHER: 32, REACH: 48}
    assert more == {CIRCLE: 1, RUN: 0, GATHER: 32, REACH: 48 + 2}  # a distance to the circle, a goal's x and y


def test_the_runs_of_the_cart():
    _, *rows = rows_of("docs/your-own-env.md", "| flags after")
    assert len(rows) == 3
    for (_, *shown), (name, unit) in zip(rows, (("cart", 1), ("cart x 100", 100), ("cart x 100, unscaled", 100))):
        returned, cost, safe, norm = (MEASURED[f"{name}: {what}"] for what in ("return", "cost", "safe", "grad_norm"))
        norm = f"{float(f'{norm:.2g}'):,.0f}"
        assert shown == [f"{returned / unit:.1f}", f"{cost:.1f}", f"{safe:.2f}", norm]


def test_the_longer_trials_on_gather_and_reach():
    _, *rows = rows_of("docs/fast-settings.md", "| task | best of the search")
    assert len(rows) == 2
    for task, best, papers in rows:
        name = task[len("SafetyBall") : -len("-v0")]
        returned, cost = (MEASURED[f"{name}, two fifths: {what}"] for what in ("return", "cost"))
        digits = 2 if task == GATHER else 1
        assert best == f"{returned:.1f} / {cost:.{digits}f}"
        returned, cost = (finals(task, "SCPO", column, 200).mean() for column in ("episodic_return", "episodic_cost"))
        assert papers == f"{returned:.1f} / {cost:.{digits}f}"


def test_what_the_normaliser_does_to_cpo_and_pcpo_on_run():
    """The table of docs/baselines.md, from results/over_limit.csv."""
    _, *shown = rows_of("docs/baselines.md", "| trial | normaliser | return / cost | over")
    made = []
    for (script, target_kl, normaliser), (returns, costs) in over_limit().items():
        end = f"{returns[-10:].mean():.0f} / {costs[-10:].mean():.1f}"
        command, over = f"`baselines/{script} --target-kl {target_kl}`", (costs[50:] > TASKS[RUN].cost_limit).sum()
        made.append([command, normaliser, end, f"{over} of 50"])
    assert shown == made


def test_what_a_step_does_to_other_batches_on_gather():
    shown = rows_of("docs/baselines.md", "| script | batch over the limit by |")
    names = ("excess_cost", "own_cost", "other_cost", "own_return", "other_return")
    made = []
    for script in ("cpo.py", "pcpo.py", "trpo.py", "trpo_lagrangian.py"):
        means = [np.mean([float(row[name]) for row in held_out(script)]) for name in names]
        made.append([f"`{script}`", *(f"{round(mean, 3) + 0:.3f}" for mean in means)])
    assert shown[1:] == made
    for _, over, own, other, *_ in made[:2]:  # "undoes what the batch is over", "next to nothing", "the cost stays"
        assert -float(own) >= float(over) and abs(float(other)) < 0.05 * -float(own)
    for script in ("CPO", "PCPO", "TRPO-L"):
        assert gather_cost(script) > TASKS[GATHER].cost_limit
    assert gather_cost("TRPO-L") < min(gather_cost("CPO"), gather_cost("PCPO"))


def test_which_returns_reproduce():
    balls = (CIRCLE, RUN, GATHER, REACH)
    assert times_published(CART, "SCPO") > 0.95
    assert all(times_published(task, algo) > 0.95 for task in balls for algo in ("SCPO", "TRPO", "TRPO-L"))
    assert all(times_published(task, algo) > 1.02 for task in balls for algo in ("CPO", "PCPO", "PDO"))
    assert 3.5 < times_published(REACH, "PCPO") < 4.5


def test_what_the_page_says_over_the_tasks():
    _, *rows = rows_of("results/README.md", "| algorithm | return (%) | cost (%)")
    values = {row[0]: [float(x.split()[0]) if x else None for x in row[1:]] for row in rows}
    lows = {row[0]: float(row[3].split("(")[1].split()[0]) for row in rows if row[0] in CONSTRAINED}
    (earned, cost, *_), (of_trpo, cost_of_trpo, *_) = values.pop("SCPO"), values.pop("TRPO")
    assert 95 < earned < 105 and 45 < cost < 55 and of_trpo > earned and 290 < cost_of_trpo < 330
    assert set(values) == set(CONSTRAINED)
    assert 0.63 < lows["PDO"] < lows["TRPO-L"] < 0.7 < min(lows["CPO"], lows["PCPO"])
    for of_other, cost_of_other, earns_more, costs_less in values.values():
        assert of_other < earned and 85 < cost_of_other < 115 and earns_more > 0.8 and costs_less > 0.9


def test_what_the_page_says_of_reach():
    ours, published = {}, {}
    for algo in ("SCPO", "TRPO", "TRPO-L", "PDO", "CPO", "PCPO"):
        for metric, name in (("episodic_return", "return"), ("episodic_cost", "cost")):
            ours[algo, name] = finals(REACH, algo, metric).mean()
            published[algo, name] = last_tenth(PUBLISHED[REACH, algo, name][1])
    for algo in ("TRPO-L", "PDO"):
        assert abs(ours["SCPO", "return"] / ours[algo, "return"] - 1) < 0.05
        assert ours["SCPO", "cost"] < 0.7 * ours[algo, "cost"]
    for algo in ("TRPO", "TRPO-L", "PDO"):
        for name in ("return", "cost"):
            assert abs(ours[algo, name] / published[algo, name] - 1) < 0.1
    limit = TASKS[REACH].cost_limit
    assert ours["PDO", "cost"] < limit < ours["TRPO-L", "cost"] < 1.03 * limit
    assert limit < min(ours["CPO", "cost"], ours["PCPO", "cost"])
    assert all(ours[algo, "return"] > 1.1 * published[algo, "return"] for algo in ("CPO", "PCPO"))
    leads = {"TRPO": False, "TRPO-L": False, "CPO": True, "PCPO": True, "PDO": False}
    assert leads_for_certain(REACH) == leads and ours["SCPO", "cost"] < min(ours[algo, "cost"] for algo in CONSTRAINED)


def leads_for_certain(task):
    """{algorithm: whether the interval of SCPO's lead over it lies above 0}."""
    rows = rows_of("results/README.md", "| task | algorithm | seeds | steps | return then")
    more = {row[1]: row[5] for row in rows if row[0] == task and row[5]}
    return {algo: float(interval.split("(")[1].split()[0]) > 0 for algo, interval in more.items()}


CONSTRAINED = ("TRPO-L", "CPO", "PCPO", "PDO")


def test_who_leads_on_circle():
    assert leads_for_certain(CIRCLE) == {"TRPO": False, **dict.fromkeys(CONSTRAINED, True)}
    costs = [finals(CIRCLE, algo, "episodic_cost").mean() for algo in CONSTRAINED]
    assert finals(CIRCLE, column="episodic_cost").mean() < min(costs) / 5


def test_who_leads_on_gather():
    algos = [algo for algo in curves.ALGOS if algo != "PPO"]
    published = curves.load_published()
    for metric, name, best in (("episodic_return", "return", max), ("episodic_cost", "cost", min)):
        means = {algo: finals(GATHER, algo, metric).mean() for algo in algos}
        assert best(means, key=means.get) == "SCPO"
        ends = {algo: last_tenth(published[GATHER, algo, name][1]) for algo in algos}
        assert best(ends, key=ends.get) == "SCPO"
    limit = TASKS[GATHER].cost_limit
    assert min(means[algo] for algo in ("TRPO", "TRPO-L", "CPO", "PCPO")) > limit + 0.005
    assert abs(limit - means["PDO"]) < 0.005
    assert leads_for_certain(GATHER) == dict.fromkeys(("TRPO", *CONSTRAINED), True)
