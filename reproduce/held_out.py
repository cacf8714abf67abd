"""What a baseline's step does to batches that it wasn't made from: python -m reproduce.held_out RUN RUN ...

RUN is a baseline's folder. From its last checkpoint, --batches batches are sampled with the same policy. From each a
step is made, as in training. Its surrogates, the estimated changes of return and cost, are then taken on that batch
(own_return, own_cost) and on each of the others (other_return, other_cost: the mean). Where the two differ, the step
fits the noise of its batch. Writes a row a batch to results/held_out.csv, and prints the means. Costs are those of an
episode that lasts to the time limit: the change of a step times its length. Returns are in standard deviations of the
advantage.
"""

import copy
from importlib import import_module
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import evaluate
from reproduce import curves
from reproduce.curves import ALGOS, RESULTS, say

KEYS = ("task", "script", "target_kl", "seed", "iteration", "batch")  # of a row
VALUES = ("excess_cost", "own_return", "other_return", "own_cost", "other_cost")


def sample(script, args, checkpoint, count):
    """Returns `count` batches as update_policy takes them, and of each the agent: its excess cost, its multiplier."""
    agents, batches = [], []

    def keep(agent, *batch):
        agents.append(copy.deepcopy(agent))
        batches.append([x.clone() for x in batch[:-1]])  # train uses the same memory for the next one
        return {}

    args.total_timesteps = (checkpoint["iteration"] + count) * args.num_envs * args.num_steps
    args.std_start = args.std_end = checkpoint["agent"]["std"].item()
    with mock.patch.multiple(script, update_policy=keep, update_critics=lambda *_: (0.0, 0.0)):
        list(script.train(args, checkpoint))
    return agents, batches


def surrogates(agent, old, batch):
    """The estimated changes of a step's return and cost from `old` to `agent` on a batch."""
    obs, actions, *advantages = batch
    with torch.no_grad():
        logprobs, old_logprobs = (x.get_logprobs(x.actor(obs), actions) for x in (agent, old))
        return [(torch.expm1(logprobs - old_logprobs) * x).mean().item() for x in advantages]


def held_out(run, count):
    """Returns a dict of KEYS and VALUES for each batch."""
    env, _, checkpoint = evaluate.load(run)
    if f"baselines/{checkpoint['script']}" not in ALGOS.values():
        raise ValueError(f"RUN must be a baseline's; {run} is one of {checkpoint['script']}")
    script, length = import_module(f"baselines.{Path(checkpoint['script']).stem}"), env.spec.max_episode_steps
    if not length:
        raise ValueError(f"RUN: {env.spec.id} has no time limit, so its episodes have no common length")
    missing = [x for x in script.Args.__dataclass_fields__ if x not in checkpoint["args"]]
    if missing:
        raise ValueError(f"RUN: {run} is older than the script and has no {missing[0]}")
    missing = [x for x in ("optimizer", "torch_rng", "numpy_rng") if x not in checkpoint]
    if missing:
        raise ValueError(
            f"RUN: {run} has no {missing[0]}, so nothing goes on from it; take the last.pt of a run's folder"
        )
    args = script.Args(**{x: checkpoint["args"][x] for x in script.Args.__dataclass_fields__})
    agents, batches = sample(script, args, checkpoint, count)
    rows = []
    for i, (agent, batch) in enumerate(zip(agents, batches)):
        new = copy.deepcopy(agent)
        script.update_policy(new, *batch, args)
        changes = np.array([surrogates(new, agent, x) for x in batches])
        own, other = changes[i], np.delete(changes, i, axis=0).mean(0)
        keys = (args.env_id, checkpoint["script"], args.target_kl, args.seed, checkpoint["iteration"], i)
        values = (length * agent.excess_cost.item(), own[0], other[0], length * own[1], length * other[1])
        rows.append(dict(zip(KEYS, keys)) | {name: f"{value:.6g}" for name, value in zip(VALUES, values)})
    return rows


@curves.interruptible("reproduce.held_out")
def main(argv=None):
    parser = curves.parser("reproduce.held_out", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--batches", type=int, default=12, help="2 or more; default: 12")
    args = parser.parse_args(argv)
    if args.batches < 2:
        parser.error(f"--batches is {args.batches}, but must be 2 or more")
    path = RESULTS / "held_out.csv"
    for run in args.runs:
        try:
            rows = held_out(run, args.batches)
            kept = [row for row in curves.rows_of(path) if any(row[key] != str(rows[0][key]) for key in KEYS[:-1])]
            curves.write_rows(path, [*kept, *rows])
        except (ValueError, OSError) as error:
            parser.error(str(error))
        say(f"{run}: " + ", ".join(f"{x} {np.mean([float(row[x]) for row in rows]):.4g}" for x in VALUES))


if __name__ == "__main__":
    main()
