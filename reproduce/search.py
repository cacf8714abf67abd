"""Searches the settings of `--fast` for a task with Optuna: TPE proposes, successive halving ends poor trials early.

`python -m reproduce.search TASK --trials N` goes on with the task's journal in results/search/ until it holds N trials,
also after an interruption. Several processes may work on one journal. Each trial is one training run, by default with
seed 101 and a tenth of the published steps. Seeds 1 to 4 are for the figures and refused. At its end it writes the
trials of all journals to results/search.csv.

A trial's score is the share of the published return that the last tenth of its iterations reaches, less two terms, each
at most 1. The first is half the share by which the mean cost of these iterations exceeds what is allowed: the published
cost or a third of the limit, whichever is larger. The second is twice the share of iterations in the second half whose
mean cost is over the limit.
"""

import argparse
import importlib
import itertools
import time
from functools import partial

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from reproduce import curves
from reproduce.curves import RESULTS, TASKS, last_tenth

FOLDER = RESULTS / "search"
T = 32768  # steps of the paper's iterations
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
SPACE = dict(  # the first value of each is the paper's
    num_steps=[2048, 256, 512, 1024],
    minibatch_size=[64, 128, 256],
    update_epochs=[5, 3, 10],
    gamma=[0.99, 0.97, 0.98],
    gae_lambda=[0.95, 0.9, 0.97],
    safety_lambdas=["0 1", "1", "0.95", "0"],
    log_std_init=[0.0, -0.5, -1.0],
    norm_obs=[False, True],
)
EXPECTED = {  # by hand, from earlier trials: where the search begins
    "SafetyBallCircle-v0": [dict(num_steps=512, learning_rate=6e-4, reward_scale=0.02, log_std_init=0.0)],
    "SafetyBallRun-v0": [dict(num_steps=512, learning_rate=1e-3, reward_scale=0.02, log_std_init=0.0)],
    "SafetyBallGather-v0": [dict(learning_rate=1e-3, minibatch_size=256, reward_scale=0.1, log_std_init=0.0)],
    "SafetyBallReach-v0": [dict(learning_rate=1e-3, minibatch_size=256, reward_scale=0.1, log_std_init=-0.5)],
    "CartSafe-v0": [dict(num_steps=512, learning_rate=1e-3, reward_scale=0.02, safety_lambdas="1")],
}


def script_of(task):
    return importlib.import_module("scpo_discrete" if task == "CartSafe-v0" else "scpo_continuous")


def iterations(args):
    """Trains in this process; yields mean return, mean cost and share of safe episodes of each iteration."""
    for progress in itertools.islice(script_of(args.env_id).train(args), 1, None):
        episodes = progress["episodes"] or [{"return": np.nan, "cost": np.nan, "safe": np.nan}]
        yield [np.mean([episode[name] for episode in episodes]) for name in ("return", "cost", "safe")]


def suggest(trial, task):
    """Returns a trial's values: what SPACE and EXPECTED name."""
    space = dict(SPACE)
    if task == "CartSafe-v0":
        del space["log_std_init"]  # its actions are choices
    values = {name: trial.suggest_categorical(name, choices) for name, choices in space.items()}
    values["learning_rate"] = trial.suggest_float("learning_rate", 2e-4, 4e-3, log=True)
    values["reward_scale"] = trial.suggest_float("reward_scale", 0.003, 1, log=True)
    values["ent_coef"] = trial.suggest_categorical("ent_coef", [script_of(task).TASK_SETTINGS[task]["ent_coef"], 0.0])
    return dict(values, safety_lambdas=tuple(map(float, values["safety_lambdas"].split())))


def score(returns, costs, target, allowed, limit, at_the_end):
    """What a trial is worth by the mean return and cost of its iterations so far: see the module's docstring."""
    result = last_tenth(returns) / target - 0.5 * min(max(last_tenth(costs) / allowed - 1, 0), 2)
    if at_the_end:
        result -= 2 * min((costs[len(costs) // 2 :] > limit).mean(), 0.5)
    return float(result)


def objective(trial, task, seed, steps):
    published, limit = curves.load_published(), TASKS[task].cost_limit
    target, cost = (last_tenth(published[task, "SCPO", name][1]) for name in ("return", "cost"))
    script, start = script_of(task), time.monotonic()
    settings = dict(script.TASK_SETTINGS[task], anneal_lr=True, **suggest(trial, task))
    args = script.Args(**dict(settings, env_id=task, seed=seed, total_timesteps=steps))
    num_iterations = args.total_timesteps // (args.num_envs * args.num_steps)
    trial.set_user_attr("steps", steps)
    trial.set_user_attr("seed", seed)
    rows = []
    for row in iterations(args):
        rows.append(row)
        returns, costs, _ = np.array(rows).T
        at_the_end = len(rows) == num_iterations
        quarter, rest = divmod(4 * len(rows), num_iterations)
        if rest >= 4 and not at_the_end:
            continue
        so_far = score(returns, costs, target, max(cost, limit / 3), limit, at_the_end)
        told = {"return": round(last_tenth(returns), 3), "cost": round(last_tenth(costs), 3)}
        told["seconds"] = round(time.monotonic() - start)
        for name, value in told.items():
            trial.set_user_attr(name, value)
        if not at_the_end:
            trial.report(so_far, quarter)
            if trial.should_prune():
                raise optuna.TrialPruned()
    return so_far


def study_of(task):
    FOLDER.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(FOLDER / f"{task}.journal")))
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    sampler = optuna.samplers.TPESampler(n_startup_trials=8, constant_liar=True)
    options = dict(storage=storage, sampler=sampler, pruner=pruner, direction="maximize")
    return optuna.create_study(study_name=task, load_if_exists=True, **options)


def write_trials():
    """Writes the trials of all journals to search.csv beside their folder, a row a trial."""
    rows = []
    for path in sorted(FOLDER.glob("*.journal")):
        for trial in study_of(path.stem).get_trials(states=FINISHED):
            scores = [*trial.intermediate_values.values(), trial.value]
            value = next((score for score in reversed(scores) if score is not None), None)
            told = {"task": path.stem, "trial": trial.number, "state": trial.state.name.lower(), "score": value}
            rows.append({**told, **trial.user_attrs, **trial.params})
    curves.write_rows(FOLDER.parent / "search.csv", rows)


def changes_one_by_one(task, seed):
    """Trains with the paper's settings, each change of --fast alone, all but each, and all; writes fast_changes.csv."""
    script, path = script_of(task), RESULTS / "fast_changes.csv"
    paper, fast = script.TASK_SETTINGS[task], script.TASK_SETTINGS[f"{task} --fast"]
    changed = [name for name in fast if name != "total_timesteps" and fast[name] != paper.get(name)]
    sets = {"none": [], **{f"{name} alone": [name] for name in changed}}
    sets.update({f"all but {name}": [other for other in changed if other != name] for name in changed}, all=changed)
    done = {(row["task"], row["seed"], row["changes"]) for row in curves.rows_of(path)}
    for said, names in sets.items():
        if (task, str(seed), said) in done:
            continue
        settings = dict(paper, env_id=task, seed=seed, total_timesteps=fast["total_timesteps"])
        rows = np.array(list(iterations(script.Args(**settings, **{name: fast[name] for name in names}))))
        returns, costs, safe = rows.T
        row = {"task": task, "seed": seed, "changes": said, "steps": fast["total_timesteps"]}
        row.update({"return": last_tenth(returns), "cost": last_tenth(costs), "safe": last_tenth(safe)})
        row["iterations over the limit"] = int((costs[len(costs) // 2 :] > TASKS[task].cost_limit).sum())
        curves.write_rows(path, [*curves.rows_of(path), row])


def main(argv=None):
    parser = argparse.ArgumentParser(prog="reproduce.search", description=__doc__.split("\n\n")[0])
    parser.error = lambda message: curves.fail("reproduce.search", message.replace("argument ", ""))
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--trials", type=int, default=40, help="that the task's journal holds in the end")
    parser.add_argument("--seed", type=int, default=101, help="of the runs, 101 or more")
    parser.add_argument("--steps", type=int, help="of a trial (default: a tenth of the published runs)")
    parser.add_argument("--changes", action="store_true", help="instead: what each change of --fast does alone")
    args = parser.parse_args(argv)
    if args.seed < 101:
        curves.fail("reproduce.search", f"--seed is {args.seed}, but must be 101 or more; lower ones make the figures")
    if args.changes:
        return changes_one_by_one(args.task, args.seed)
    study = study_of(args.task)
    if not study.trials:
        for values in EXPECTED[args.task]:
            study.enqueue_trial({**{name: choices[0] for name, choices in SPACE.items()}, **values})
    steps = args.steps or TASKS[args.task].iterations * T // 10
    while len(study.get_trials(states=FINISHED)) < args.trials:
        study.optimize(partial(objective, task=args.task, seed=args.seed, steps=steps), 1, catch=FloatingPointError)
    write_trials()


if __name__ == "__main__":
    main()
