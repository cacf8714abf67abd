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
import csv
import importlib
import itertools
import sys
import time

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from reproduce import curves
from reproduce.curves import RESULTS, TASKS

FOLDER = RESULTS / "search"
T = 32768
LENGTHS = {task: TASKS[task].iterations * T // 10 for task in TASKS}  # steps: a tenth of the published runs
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


def flags(task, values, seed, steps):
    """Returns the script's Args for a trial's values."""
    script = script_of(task)
    values = dict(values, safety_lambdas=tuple(float(x) for x in values["safety_lambdas"].split()))
    settings = dict(script.TASK_SETTINGS[task], env_id=task, seed=seed, anneal_lr=True, **values)
    return script.Args(**dict(settings, total_timesteps=steps))


def suggest(trial, task):
    """Returns a trial's values: what SPACE and EXPECTED name."""
    space = dict(SPACE)
    if task == "CartSafe-v0":
        del space["log_std_init"]  # its actions are choices
    values = {name: trial.suggest_categorical(name, choices) for name, choices in space.items()}
    values["learning_rate"] = trial.suggest_float("learning_rate", 2e-4, 4e-3, log=True)
    values["reward_scale"] = trial.suggest_float("reward_scale", 0.003, 1, log=True)
    values["ent_coef"] = trial.suggest_categorical("ent_coef", [script_of(task).TASK_SETTINGS[task]["ent_coef"], 0.0])
    return values


def score(returns, costs, target, allowed, limit, at_the_end):
    """What a trial is worth by the mean return and cost of its iterations so far: see the module's docstring."""
    result = curves.last_tenth(returns) / target - 0.5 * min(max(curves.last_tenth(costs) / allowed - 1, 0), 1)
    if at_the_end:
        result -= 2 * min((costs[len(costs) // 2 :] > limit).mean(), 0.5)
    return float(result)


def objective(trial, task, seeds, steps):
    script, limit = script_of(task), TASKS[task].cost_limit
    published = curves.load_published()
    target, cost = (curves.last_tenth(published[task, "SCPO", name][1]) for name in ("return", "cost"))
    values, scores = suggest(trial, task), []
    start = time.monotonic()
    for seed in seeds:
        args = flags(task, values, seed, steps)
        num_iterations = args.total_timesteps // (args.num_envs * args.num_steps)
        returns, costs = [], []
        for progress in itertools.islice(script.train(args), 1, None):
            episodes = progress["episodes"] or [{"return": np.nan, "cost": np.nan}]
            returns.append(np.mean([episode["return"] for episode in episodes]))
            costs.append(np.mean([episode["cost"] for episode in episodes]))
            quarter, rest = divmod(4 * len(returns), num_iterations)
            if rest < 4 or len(returns) == num_iterations:
                at_the_end = len(returns) == num_iterations
                so_far = score(np.array(returns), np.array(costs), target, max(cost, limit / 3), limit, at_the_end)
                if seed == seeds[0] and not at_the_end:
                    trial.report(so_far, quarter)
                    if trial.should_prune():
                        raise optuna.TrialPruned()
        scores.append(so_far)
        for name, x in dict(returned=returns, cost=costs).items():
            trial.set_user_attr(f"{name}_{seed}", round(float(curves.last_tenth(np.array(x))), 3))
    trial.set_user_attr("seconds", round(time.monotonic() - start))
    return float(np.mean(scores))


def study_of(task):
    FOLDER.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(FOLDER / f"{task}.journal")))
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    sampler = optuna.samplers.TPESampler(multivariate=True, n_startup_trials=8)
    options = dict(storage=storage, sampler=sampler, pruner=pruner, direction="maximize")
    return optuna.create_study(study_name=task, load_if_exists=True, **options)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="reproduce.search", description=__doc__.split("\n\n")[0])
    parser.add_argument("task", choices=[*TASKS, "--csv"])
    parser.add_argument("--trials", type=int, default=40, help="that the journal holds in the end")
    parser.add_argument("--seeds", type=int, nargs="+", default=[101], help="101 and up")
    parser.add_argument("--steps", type=int, help="of a trial (default: a fifth of the published runs)")
    args = parser.parse_args(argv)
    if min(args.seeds) < 101:
        curves.fail("reproduce.search", f"--seeds {min(args.seeds)}: seeds below 101 are for the figures")
    study = study_of(args.task)
    if not study.trials:
        for values in EXPECTED[args.task]:
            study.enqueue_trial({**{name: choices[0] for name, choices in SPACE.items()}, **values})
    while len(study.get_trials(deepcopy=False)) < args.trials:
        study.optimize(
            lambda trial: objective(trial, args.task, args.seeds, args.steps or LENGTHS[args.task]),
            n_trials=1,
            catch=(FloatingPointError,),
        )
        best = study.best_trial if any(t.state.is_finished() and t.value is not None for t in study.trials) else None
        if best:
            print(f"best: {best.value:.3f} {best.params} {best.user_attrs}", file=sys.stderr)


if __name__ == "__main__":
    main()
