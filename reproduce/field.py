"""SCPO, TRPO-L and CPO on Safety-Gymnasium, beside OmniSafe's published results: python -m reproduce.field.

Makes the runs, one after the other or --jobs at a time, keeps their curves in results/field/runs/ and draws figure and
tables from what is kept there. A complete run is skipped, an interrupted one resumed, so the same command goes on after
Ctrl-C (which lets each run finish its iteration and save) or a reboot. docs/field.md says how to install the tasks.
"""

import shlex
from importlib.util import find_spec

import numpy as np

from reproduce import benchmark, beside, curves, fast
from reproduce.curves import ALGOS, RESULTS, ROOT, say
from reproduce.plot import table, with_range, write_blocks

PAGE = ROOT / "docs" / "field.md"
COST_LIMIT = 25
TASKS = {  # the field's name: the id whose step returns Gymnasium's five values
    "SafetyHalfCheetahVelocity-v1": "scpo_envs.safety_gymnasium:SafetyHalfCheetahVelocityGymnasium-v1",
    "SafetyHopperVelocity-v1": "scpo_envs.safety_gymnasium:SafetyHopperVelocityGymnasium-v1",
    "SafetyPointGoal1-v0": "scpo_envs.safety_gymnasium:SafetyPointGoal1Gymnasium-v0",
}
SETTINGS = {  # what differs from the scripts' defaults
    "SCPO": dict(num_envs=8, num_steps=1024),
    "TRPO-L": dict(num_envs=8, num_steps=1000),
    "CPO": dict(num_envs=8, num_steps=1000),
}
BY_TASK = {  # and by task, after the trials in docs/field.md
    ("SafetyHalfCheetahVelocity-v1", "SCPO"): dict(ent_coef=0, beta=0),
    ("SafetyHopperVelocity-v1", "SCPO"): dict(ent_coef=0, termination_cost=26),
    ("SafetyPointGoal1-v0", "SCPO"): dict(beta=0.2, reward_bias=0.05, limit_factor=8, learning_rate=6e-4),
}
THEIRS = {"TRPOLag": "TRPO-L", "CPO": "CPO"}  # OmniSafe's names of these
COLUMNS = ("k", "beta", "safety_gamma", "termination_cost")
TRIALS = f"task, seed, million steps, settings, {', '.join(COLUMNS)}, limit, return, cost, safe"
UNCONSTRAINED = ("Policy Gradient", "Natural PG", "TRPO", "PPO")


class Run(benchmark.Run):
    """One (task, algorithm, seed), made and resumed as benchmark.sh does it."""

    def __init__(self, task, algo, seed, args):
        self.name, self.seed, self.task, self.script = f"{task}__{algo}__{seed}", seed, task, ALGOS[algo]
        self.group, self.folder, self.num_workers = f"{task}__{algo}", args.runs_dir / self.name, args.num_workers
        self.settings = dict(env_id=TASKS[task], cost_limit=COST_LIMIT, seed=seed, **SETTINGS[algo])
        self.settings.update(BY_TASK.get((task, algo), {}))
        self.batch = self.settings["num_envs"] * self.settings["num_steps"]
        self.length = self.iterations = args.total_timesteps // self.batch
        self.settings["total_timesteps"] = self.length * self.batch

    def command(self):
        return [*super().command(), "--num-workers", str(self.num_workers)]


def load(results):
    """Returns the kept runs, each labelled by what differs from our settings now, and the published finals as dicts."""
    paths = [
        path for task in TASKS for algo in SETTINGS for path in sorted(results.glob(f"runs/{task}__{algo}__*.csv"))
    ]
    runs = [beside.load(path, path.stem.split("__")[1]) for path in paths]
    for run, path in zip(runs, paths):
        run.task = path.stem.split("__")[0]
        usual = fast.usual(TASKS[run.task]) if run.label == "SCPO" else curves.defaults(run.settings["script"])
        now = {**usual, "cost_limit": COST_LIMIT, **SETTINGS[run.label], **BY_TASK.get((run.task, run.label), {})}
        had = {**now, **run.settings}
        for name in [name for name in now if name not in (*beside.NOT_SETTINGS, "script", "total_timesteps")]:
            if curves.plain(had[name]) != curves.plain(now[name]):
                run.label += f", {name} {had[name]:g}" if isinstance(had[name], float) else f", {name} {had[name]}"
    published = curves.rows_of(results / "published.csv")
    return runs, [{**final, "label": THEIRS.get(final["algorithm"])} for final in published]


def published_table(published):
    """Return and cost of each algorithm on each task."""
    cells = {}
    for final in published:
        row = cells.setdefault(final["algorithm"], {"algorithm": final["algorithm"]})
        row[final["task"]] = "{:,.4g} / {:.3g}".format(float(final["return_mean"]), float(final["cost_mean"]))
    return table(", ".join(["algorithm", *TASKS]), cells.values())


def trials(rows):
    """Returns a dict for each complete trial on the field's tasks. rows: of results/search.csv."""
    found = []
    for row in rows:
        if row["task"] in TASKS and row["state"] == "complete":
            own = {name: float(row.get(name) or fast.usual(row["task"])[name]) for name in COLUMNS}
            outcome = {name: with_range(np.array(row[name].split(), float)) for name in ("return", "cost", "safe")}
            factor = 40 if row["schedule"] == "limit" else float(row.get("limit_factor") or 1)
            limit = f"{25 * factor:,.0f}, falls to 25 over half of the run" if factor > 1 else "25"
            if row.get("hold"):
                limit = f"1,000 for {float(row['hold']):.0%} of the run, then just below the mean cost, down to 25"
            said = {
                "settings": fast.told({**row, "schedule": "none"}, (*COLUMNS, "limit_factor")) or "the defaults",
                "limit": limit,
            }
            steps = float(row["steps"]) / 1e6
            found.append({"task": row["task"], "seed": row["seed"], "million steps": steps, **said, **own, **outcome})
    return found


def make(results):
    """Draws results/field/field.png and returns the tables' lines by name."""
    runs, published = load(results)
    blocks = {"published on Safety-Gymnasium": published_table(published)} if published else {}
    if results.resolve() == RESULTS / "field":
        blocks["trials on Safety-Gymnasium"] = table(TRIALS, trials(curves.rows_of(RESULTS / "search.csv")))
    if runs:
        beside.draw(results / "field", runs, [x for x in published if x["algorithm"] not in UNCONSTRAINED])
        figure = "![Return, cost and share of safe episodes](../results/field/field.png)"
        blocks["ours on Safety-Gymnasium"] = [figure, "", *table(beside.TABLE, beside.rows(runs))]
    if results.resolve() == RESULTS / "field":
        write_blocks(PAGE, blocks)
    return blocks


def parse(argv):
    parser = curves.parser("field.py", __doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    add("--algos", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="ALGO", help=", ".join(SETTINGS))
    add("--seeds", nargs="+", type=int, default=[1, 2, 3], help="default: 1 2 3")
    add("--total-timesteps", type=int, default=10**7, help="of each run; the published ones have 10^7")
    add("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    add("--num-workers", type=int, default=1, help="processes that step the environments of a run (default: 1)")
    add("--dry-run", action="store_true", help="print the commands and do nothing")
    add("--draw", action="store_true", help="only draw what is kept")
    add("--runs-dir", default=ROOT / "runs" / "field", help="default: runs/field")
    add("--results", default=RESULTS / "field", help="default: results/field")
    add("--replace", action="store_true", help="keep runs in place of those of other settings or lengths")
    add("--any-revision", action="store_true", help="count and resume runs that another revision's code has made")
    args = parser.parse_args(argv)
    num_envs = min(settings["num_envs"] for settings in SETTINGS.values())
    for name, least, most in (("jobs", 1, 10**4), ("num_workers", 1, num_envs), ("total_timesteps", 10**4, 10**15)):
        if not least <= getattr(args, name) <= most:
            flag = name.replace("_", "-")
            benchmark.fail(f"--{flag} is {getattr(args, name)}, but must be in [{least}, {most}]")
    benchmark.check_seeds(args.seeds)
    args.seeds, args.tasks, args.algos = (list(dict.fromkeys(x)) for x in (args.seeds, args.tasks, args.algos))
    args.runs_dir = benchmark.folder("--runs-dir", args.runs_dir, None)
    args.results = benchmark.folder("--results", args.results, None)
    return args


@curves.interruptible("field.py")
def main(argv=None):
    benchmark.PROGRAM = "field.py"
    args = parse(argv)
    if args.draw and not any(list(args.results.glob(f"runs/{task}__*__*.csv")) for task in TASKS):
        benchmark.fail(f"--results {args.results} has no runs/TASK__ALGO__SEED.csv of these tasks")
    if not (args.dry_run or args.draw):
        benchmark.make_folders(args)
    runs = [Run(task, algo, seed, args) for seed in args.seeds for task in args.tasks for algo in args.algos]
    todo = [] if args.draw else [run for run in runs if run.done() < run.iterations]
    if not args.draw:
        benchmark.refuse_mixtures(runs, args)
    if args.dry_run:
        return say(*(shlex.join(run.command()) for run in todo))
    if todo and not find_spec("safety_gymnasium"):
        benchmark.fail("Safety-Gymnasium isn't installed; docs/field.md says how")
    failed = []
    if not args.draw:
        failed = benchmark.make_all(runs, benchmark.execute, args.jobs, benchmark.signals(), args)
    try:
        for name, lines in make(args.results).items():
            say(f"\n{name}", *lines)
    except (curves.BadFile, OSError) as error:
        benchmark.fail(error)
    if failed:
        raise SystemExit(f"{len(failed)} runs failed: {', '.join(run.name for run in failed)}")


if __name__ == "__main__":
    main()
