"""Searches the settings of `--fast` for a task with Optuna: TPE proposes, successive halving ends poor trials early.

`python -m reproduce.search TASK --trials N` goes on with the task's journal in results/search/ until it holds N trials,
also after an interruption. Several processes may work on one journal. Each trial is one training run a seed, by default
with seed 101 alone and a tenth of the published steps. Seeds 1 to 4 are for the figures and refused. At its end it
writes the trials of all journals to results/search.csv. With --try it makes one trial of given values instead.

A trial's score is the share of the published return that the last tenth of its iterations reaches, less two terms, each
at most 1. The first is half the share by which the mean cost of these iterations exceeds what is allowed: the published
cost or a third of the limit, whichever is larger. The second is twice the share of iterations in the second half whose
mean cost is over the limit. With several seeds the score is the mean of theirs.
"""

import argparse
import time
from functools import partial
from importlib.util import find_spec

import numpy as np
import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from reproduce import curves, field
from reproduce.curves import RESULTS, TASKS, last_tenth
from reproduce.fast import script_of, usual
from reproduce.plot import published_mean

FOLDER = RESULTS / "search"
T = 32768  # steps of the paper's iterations
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
SPACE = dict(
    num_steps=[2048, 256, 512, 1024],
    minibatch_size=[64, 128, 256],
    update_epochs=[5, 3, 10],
    gamma=[0.99, 0.97, 0.98],
    gae_lambda=[0.95, 0.9, 0.97],
    safety_lambdas=["0 1", "1", "0.95", "0"],
    log_std_init=[0.0, -0.5, -1.0],
    norm_obs=[False, True],
    num_envs=[16, 8, 32, 64],
    schedule=["none", "k", "beta", "limit"],  # in the first half of a run k or beta rises from 0, or the limit falls
)
CHOICES = dict(penalty=["unsafe", "always"])  # flags that are words, for --try alone
EXPECTED = {  # by hand, from earlier trials: where the search begins
    "SafetyBallCircle-v0": [dict(num_steps=512, learning_rate=6e-4, reward_scale=0.02, log_std_init=0.0)],
    "SafetyBallRun-v0": [dict(num_steps=512, learning_rate=1e-3, reward_scale=0.02, log_std_init=0.0)],
    "SafetyBallGather-v0": [dict(learning_rate=1e-3, minibatch_size=256, reward_scale=0.1, log_std_init=0.0)],
    "SafetyBallReach-v0": [dict(learning_rate=1e-3, minibatch_size=256, reward_scale=0.1, log_std_init=-0.5)],
    "CartSafe-v0": [dict(num_steps=512, learning_rate=1e-3, reward_scale=0.02, safety_lambdas="1")],
}


def goal(task):
    """Returns return and cost of the best published algorithm within the limit, the limit, and the published steps."""
    if task in TASKS:
        published = curves.load_published()
        length = TASKS[task].iterations
        target, cost = (published_mean(published, task, "SCPO", name, length) for name in ("return", "cost"))
        return target, cost, TASKS[task].cost_limit, TASKS[task].iterations * T
    _, published = field.load(RESULTS / "field")
    within = [x for x in published if x["task"] == task and float(x["cost_mean"]) <= field.COST_LIMIT]
    best = max(within, key=lambda final: float(final["return_mean"]))
    return float(best["return_mean"]), float(best["cost_mean"]), field.COST_LIMIT, 10**7


def iterations(args, schedule="none", hold=None, ent_coef_end=None):
    """Trains in this process; yields mean return, mean cost and share of safe episodes of each iteration.

    An iteration in which no episode ends has the numbers of the one before.

    schedule: "k" or "beta" lets it rise from 0 to its value over the first half of the run. "limit" lets the cost limit
    fall to its value from an episode's length, a cost of 1 a step, by the same factor each time. With `hold` it stays
    there for that share of the run. Then it follows the cost down: each iteration it is 0.97 times the mean cost, if
    that is less than before.
    ent_coef_end: the weight of the entropy bonus moves to this value, linearly over the run.
    """
    script, envs, episodes = script_of(args.env_id), [], [{"return": np.nan, "cost": np.nan}]
    length = args.total_timesteps // (args.num_envs * args.num_steps)
    final, ent_coef, cost_limit = getattr(args, schedule, None), args.ent_coef, args.cost_limit

    def make_env(*task):
        envs.append(script.make_env(*task))
        return envs[-1]

    for iteration, progress in enumerate(script.train(args, make_env=make_env)):
        share = min(2 * (iteration + 1) / length, 1)  # for the iteration that comes next
        if final is not None:
            setattr(args, schedule, final * share)
        if ent_coef_end is not None:
            # a tensor, since for a new number the gradient step would be compiled anew
            args.ent_coef = torch.tensor(ent_coef + (ent_coef_end - ent_coef) * iteration / length)
        if schedule == "limit":
            lenient = envs[0].spec.max_episode_steps
            costs = [episode["cost"] for episode in progress.get("episodes", [])]
            if hold is None:
                args.limit_factor = lenient / cost_limit
            elif not iteration:
                args.cost_limit = lenient
            elif costs and iteration >= hold * length:
                args.cost_limit = max(cost_limit, min(args.cost_limit, 0.97 * np.mean(costs)))
        if not iteration:
            continue  # nothing has been trained yet
        episodes = progress["episodes"] or episodes  # of the iteration before, where none has ended
        safe = [episode["cost"] <= cost_limit * (1 + 1e-6) for episode in episodes]
        yield [*(np.mean([episode[name] for episode in episodes]) for name in ("return", "cost")), np.mean(safe)]


def defaults(task):
    """Returns the settings that a trial begins with: what the script has for the task."""
    env = dict(env_id=field.TASKS[task], cost_limit=field.COST_LIMIT) if task in field.TASKS else dict(env_id=task)
    return dict(usual(task), **env)


def starting_values(task):
    """Returns a value for each thing that is searched: what the script has for the task."""
    settings = defaults(task)
    values = {name: x for name, x in settings.items() if name in (*SPACE, "learning_rate", "reward_scale", "ent_coef")}
    return dict(values, safety_lambdas=" ".join(f"{x:g}" for x in settings["safety_lambdas"]), schedule="none")


def suggest(trial, task, given):
    """Returns a trial's values: what SPACE and EXPECTED name, and what else is given."""
    space = dict(SPACE)
    if task == "CartSafe-v0":
        del space["log_std_init"]  # its actions are choices
    values = {name: trial.suggest_categorical(name, choices) for name, choices in space.items()}
    values["learning_rate"] = trial.suggest_float("learning_rate", 2e-4, 4e-3, log=True)
    values["reward_scale"] = trial.suggest_float("reward_scale", 0.003, 1, log=True)
    entropies = [defaults(task)["ent_coef"], 0.0]
    if given.get("ent_coef", 0.0) in entropies:
        values["ent_coef"] = trial.suggest_categorical("ent_coef", entropies)
    else:  # Optuna refuses other choices than the study has
        values["ent_coef"] = given["ent_coef"]
        trial.set_user_attr("ent_coef", given["ent_coef"])
    others = {name: value for name, value in given.items() if name not in values}
    for name, value in others.items():
        trial.suggest_categorical(name, CHOICES[name]) if name in CHOICES else trial.suggest_float(name, value, value)
    return dict(values, **others, safety_lambdas=tuple(map(float, values["safety_lambdas"].split())))


def score(returns, costs, target, allowed, limit, at_the_end):
    """What a trial is worth by the mean return and cost of its iterations so far: see the module's docstring."""
    result = last_tenth(returns) / target - 0.5 * min(max(last_tenth(costs) / allowed - 1, 0), 2)
    if at_the_end:
        result -= 2 * min((costs[len(costs) // 2 :] > limit).mean(), 0.5)
    return float(result)


def objective(trial, task, seeds, steps, given):
    target, cost, limit, _ = goal(task)
    start, values = time.monotonic(), suggest(trial, task, given)
    course = {name: values.pop(name, None) for name in ("schedule", "hold", "ent_coef_end")}
    settings = {**defaults(task), "anneal_lr": True, **values}
    scores, told = [], {"return": [], "cost": [], "safe": [], "late": []}
    trial.set_user_attr("steps", steps)
    trial.set_user_attr("seed", " ".join(map(str, seeds)))
    for seed in seeds:
        args = script_of(task).Args(**dict(settings, seed=seed, total_timesteps=steps))
        num_iterations = args.total_timesteps // (args.num_envs * args.num_steps)
        rows = []
        for row in iterations(args, **course):
            rows.append(row)
            returns, costs, safe = np.array(rows).T
            at_the_end = len(rows) == num_iterations
            quarter, rest = divmod(4 * len(rows), num_iterations)
            if rest >= 4 and not at_the_end:  # it reports once a quarter of the run
                continue
            so_far = score(returns, costs, target, max(cost, limit / 3), limit, at_the_end)
            now = {"return": last_tenth(returns), "cost": last_tenth(costs), "safe": last_tenth(safe)}
            now["late"] = (costs[num_iterations // 2 :] > limit).sum()  # iterations of the second half over the limit
            now = {name: round(float(value), 3) for name, value in now.items()}
            for name, value in now.items():
                trial.set_user_attr(name, " ".join(map(str, [*told[name], value])))
            trial.set_user_attr("seconds", round(time.monotonic() - start))
            if not at_the_end:
                trial.report(np.mean([*scores, so_far]), 4 * len(scores) + quarter)
                if trial.should_prune():
                    raise optuna.TrialPruned()
        scores.append(so_far)
        for name, value in now.items():
            told[name].append(value)
    return float(np.mean(scores))


def storage_of(task):
    return JournalStorage(JournalFileBackend(str(FOLDER / f"{task}.journal")))


def study_of(task):
    FOLDER.mkdir(parents=True, exist_ok=True)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    sampler = optuna.samplers.TPESampler(n_startup_trials=8, constant_liar=True)
    options = dict(storage=storage_of(task), sampler=sampler, pruner=pruner, direction="maximize")
    return optuna.create_study(study_name=task, load_if_exists=True, **options)


def write_trials():
    """Writes the trials of all journals to search.csv beside their folder, a row a trial."""
    rows = []
    for path in sorted(FOLDER.glob("*.journal")):
        study = optuna.load_study(study_name=path.stem, storage=storage_of(path.stem))  # unlike study_of: only reads
        for trial in study.get_trials(states=FINISHED):
            if not trial.params:
                continue  # ended before it began
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


def value_of(text):
    """Returns ("num_steps", 512) for "num_steps=512"."""
    name, _, value = text.partition("=")
    choices = {**SPACE, **CHOICES}.get(name)
    kind = type(choices[-1]) if choices else float
    try:
        value = {"True": True, "False": False}.get(value) if kind is bool else kind(value)
    except ValueError:
        if not choices or "=" not in text:
            raise argparse.ArgumentTypeError(f"{text} must be a flag's name, = and a number") from None
    if choices and value not in choices:
        raise argparse.ArgumentTypeError(f"{text} must be one of {', '.join(map(str, choices))}")
    return name, value


def check_trial(task, given, steps):
    """Raises ValueError, which says what is wrong, if a trial of these values can't be made."""
    settings = defaults(task)
    for name, value in given.items():
        if name in ("seed", "total_timesteps"):
            raise ValueError(f"--try: {name} has a flag of its own, {'--seeds' if name == 'seed' else '--steps'}")
        kind, searched = type(settings.get(name, "")), name in SPACE and (name in settings or name == "schedule")
        if kind not in (int, float, type(None)) and not searched and name not in ("hold", "ent_coef_end", *CHOICES):
            raise ValueError(f"--try: {name} is no flag of SCPO's for {task} that takes a number")
        if kind is int and value % 1:
            raise ValueError(f"--try: {name} is {value}, but must be a whole number")
        if name == "hold" and given.get("schedule") != "limit":
            raise ValueError("--try: hold needs schedule=limit")
        if name == "limit_factor" and given.get("schedule") == "limit":
            raise ValueError("--try: limit_factor can't be set where schedule=limit sets it")
    for name, least, most in (("hold", 0, 1), ("ent_coef_end", -1e6, 1e6)):
        if not least <= given.get(name, 0) <= most:
            raise ValueError(f"--try: {name} is {given[name]}, but must be in [{least:g}, {most:g}]")
    flags = {name: value for name, value in given.items() if name in settings and name != "safety_lambdas"}
    script_of(task).check_args(script_of(task).Args(**{**settings, **flags, "total_timesteps": steps}))


@curves.interruptible("reproduce.search")
def main(argv=None):
    fail, parser = partial(curves.fail, "reproduce.search"), curves.parser("reproduce.search", __doc__)
    add = parser.add_argument
    add("task", choices=[*TASKS, *field.TASKS])
    add("--trials", type=int, default=40, help="that the task's journal holds in the end")
    add("--seeds", type=int, nargs="+", default=[101], help="of a trial's runs, 101 or more")
    add("--steps", type=int, help="of a run (default: a tenth of the published ones)")
    told = "instead: one trial with these values; others are what the script has, but the learning rate is annealed"
    add("--try", dest="given", type=value_of, nargs="+", metavar="NAME=VALUE", default=[], help=told)
    add("--changes", action="store_true", help="instead: what each change of --fast does alone")
    args = parser.parse_args(argv)
    args.seeds = list(dict.fromkeys(args.seeds))
    if not all(101 <= seed < 2**31 for seed in args.seeds):
        fail(f"--seeds is {args.seeds}, but each must be in [101, 2^31); lower ones make the figures")
    if args.trials < 1:
        fail(f"--trials is {args.trials}, but must be 1 or more")
    ignored = [flag for flag in ("trials", "steps", "given") if getattr(args, flag) != parser.get_default(flag)]
    if args.changes and ignored or args.given and "trials" in ignored:
        way = "--changes" if args.changes else "--try"
        fail(f"{way} is a call of its own, without --{ignored[0].replace('given', 'try')}")
    if args.changes and len(args.seeds) > 1:
        fail(f"--seeds has {len(args.seeds)} seeds, but --changes takes one")
    if args.changes and args.task not in curves.FAST:
        fail(f"--changes: {args.task} has no --fast; {', '.join(curves.FAST)} have")
    if args.task in field.TASKS and not find_spec("safety_gymnasium"):
        fail("Safety-Gymnasium isn't installed; docs/field.md says how")
    given, steps = dict(args.given), goal(args.task)[-1] // 10 if args.steps is None else args.steps
    first = {**starting_values(args.task), **given}
    batch = first["num_envs"] * first["num_steps"] if given else max(SPACE["num_envs"]) * max(SPACE["num_steps"])
    try:
        if steps < batch:
            raise ValueError(f"--steps is {steps}, but must be at least {batch}, an iteration of the largest trial")
        check_trial(args.task, given, steps)
    except ValueError as error:
        fail(error)
    if args.changes:
        return changes_one_by_one(args.task, args.seeds[0])
    study, start = study_of(args.task), starting_values(args.task)
    make = partial(objective, task=args.task, seeds=args.seeds, steps=steps, given=given)
    if given:
        study.sampler = optuna.samplers.PartialFixedSampler({**start, **given}, study.sampler)
        study.pruner = optuna.pruners.NopPruner()
        study.optimize(make, 1)
        return write_trials()
    if not study.trials:
        for values in EXPECTED.get(args.task, []):
            study.enqueue_trial({**start, **values})
    while len(study.get_trials(states=FINISHED)) < args.trials:
        study.optimize(make, 1, catch=FloatingPointError)
    write_trials()


if __name__ == "__main__":
    main()
