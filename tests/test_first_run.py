"""docs/first-run.md: its numbers are those of the real functions, its output is that of a real run, its lines work."""

import csv
import importlib
import os
import re
import shlex
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import evaluate
import scpo_continuous as scpo
import scpo_run

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "first-run.md").read_text()
PROSE = " ".join(PAGE.split())  # wherever its lines break
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.S)
(_, START), (_, OUTPUT), _, (_, RECURSION), (_, LOAD), (_, JUDGE) = BLOCKS
TABLE = {}  # {first cell: the numbers behind it} of all tables
DIGITS = {}  # {first cell: digits behind the point, the most in the row}
for line in re.findall(r"^\| (.*) \|$", PAGE, re.M):
    label, *cells = re.split(r" *\| *", line)
    if all(re.fullmatch(r"-?[\d.]+|", cell) for cell in cells):
        TABLE[label] = np.array([float(cell) for cell in cells if cell])
        DIGITS[label] = max(len(cell.partition(".")[2]) for cell in cells)


def label_of(beginning):
    (found,) = [label for label in TABLE if label.startswith(beginning)]
    return found


def row(beginning):
    return TABLE[label_of(beginning)]


def agree(beginning, numbers):
    """The row is these numbers, rounded to its digits."""
    numbers = np.ravel(np.asarray(numbers, dtype=float))
    assert len(row(beginning)) == len(numbers)
    np.testing.assert_allclose(row(beginning), numbers, rtol=0, atol=0.5001 * 10.0 ** -DIGITS[label_of(beginning)])


class FourSteps(gym.Env):
    """The page's episode; observes t."""

    observation_space, action_space = gym.spaces.Box(0, 4, (1,)), gym.spaces.Box(-1, 1, (1,))

    def reset(self, seed=None, options=None):
        self.t = 0
        return np.array([0.0], dtype=np.float32), {}

    def step(self, action):
        reward, cost = row("reward r_t")[self.t], row("cost c_t")[self.t]
        self.t += 1
        return np.array([self.t], dtype=np.float32), reward, False, False, {"cost": cost}


gym.register("FourSteps-v0", FourSteps, max_episode_steps=4)


class Enough(Exception):
    """Ends a run before its first gradient step."""


@pytest.fixture
def episode(monkeypatch):
    """What the functions of scpo_continuous.py get and give while `train` runs the page's episode with its flags.

    {function: [(args, result) of each call]}; "states": (cost spent, last number of the state, f) of s_0 to s_4.
    """
    (flags,) = re.findall(r"The flags are `([^`]*)`", PROSE)
    flags = dict(zip(*[iter(flags.split())] * 2))
    settings = {name[2:].replace("-", "_"): float(value) for name, value in flags.items()}
    seen = {"states": [(0.0, 0.0, 1)]}

    def watch(name):
        function = getattr(scpo, name)

        def watched(*args, **kwargs):
            result = function(*args, **kwargs)
            seen.setdefault(name, []).append((args, result))
            return result

        monkeypatch.setattr(scpo, name, watched)

    for name in ("safety_q", "safety_target", "nullify", "gae", "clipped_surrogate"):
        watch(name)
    step = scpo.SafetyState.step

    def watched_step(self, action):
        told = step(self, action)
        seen["states"].append((self.spent, told[0][-1], told[4]["safe"]))
        return told

    def stop(weights, adam, learning_rate, agent, minibatch, args):
        seen["update"] = weights, agent, minibatch, args
        raise Enough

    values = [float(x) for x in re.search(r"Suppose V of s_0 to s_4 is ([\d., ]*)\.", PROSE)[1].split(", ")]
    assert values[:4] == list(row("value V(s_t)"))
    said = [0.3, *row("the network says")]  # of s_0 nothing depends

    def critic(answers):
        return lambda self, obs: torch.tensor(answers)[obs[..., 0].long()]

    monkeypatch.setattr(scpo.Agent, "get_safety_value", critic(said))
    monkeypatch.setattr(scpo.Agent, "get_value", critic(values))
    monkeypatch.setattr(scpo.SafetyState, "step", watched_step)
    monkeypatch.setattr(scpo, "update", stop)
    size = dict(num_envs=1, num_steps=4, minibatch_size=4, total_timesteps=4, compile=False)
    with pytest.raises(Enough):
        args = scpo.Args(env_id="FourSteps-v0", **size, **settings)
        # scpo's own make_env tries a step, which would be seen here too
        list(scpo.train(args, make_env=lambda env_id, *rest: scpo.SafetyState(gym.make(env_id), *rest)))
    return seen


def test_the_episode_by_hand(episode):
    spent, share, safe = np.array(episode["states"]).T
    agree("cost spent", spent)
    agree("share in the state", share)
    agree("safe f(s_t)", safe)

    ((_, next_safety_values, *_), one_step), (_, monte_carlo) = episode["safety_q"][:2]
    agree("used: V^c(s_{t+1})", next_safety_values)
    agree("one-step", one_step)
    agree("Monte Carlo", monte_carlo)
    (((_, _, q, k, *_), nullified),) = episode["nullify"]
    agree("mean Q^c", q)
    agree("Q^k", q**k)
    agree("nullified reward", nullified)

    (((_, values, next_values, *_), advantages),) = episode["gae"]
    agree("TD error", nullified + 0.5 * next_values - values)
    agree("advantage A_t", advantages)
    weights, agent, minibatch, args = episode["update"]
    obs, actions, logprobs, b_advantages, returns, safety_targets = (x[minibatch[0][:, 0].argsort()] for x in minibatch)
    agree("advantage A_t", b_advantages)
    agree("reward critic learns", returns)
    agree("safety critic learns", safety_targets)

    old_logprobs = logprobs - torch.tensor(row("ratio")).log()
    _, logged = scpo.loss(weights, agent, (obs, actions, old_logprobs, b_advantages, returns, safety_targets), args)
    ((logratio, standardised, clip_coef, _), _) = episode["clipped_surrogate"][-1]
    agree("standardised advantage", standardised)
    standardised, change = standardised.numpy(), np.expm1(logratio.numpy())
    clipped = change.clip(-clip_coef, clip_coef)
    agree("clipped ratio", clipped)
    agree("objective", np.minimum(change * standardised, clipped * standardised))
    logged = dict(zip(scpo.LOGGED, logged.tolist()))
    mean, share = re.search(r"The mean, ([\d.]*), is.*`clipfrac` ([\d.]*)\.", PROSE).groups()
    assert -logged["policy_loss"] == pytest.approx(float(mean), abs=5e-4)
    assert logged["clipfrac"] == float(share)


def test_the_arithmetic():
    """Each line of sums ends in the number of the table, and each part of the line gives that number."""
    lines = [line.split(" = ") for line in RECURSION.splitlines()]
    for t, (_, *parts) in zip((3, 2, 1, 0), lines):
        assert [eval(part) for part in parts if "_" not in part] == [row("Monte Carlo")[t]] * (len(parts) - 1 or 1)
    assert 1 - 0.5**3 == row("Monte Carlo")[0] and "1 - 0.5^3 = 0.875" in PROSE
    sum_, result = re.search(r"r'_1 = ([^=]*) = ([\d.]*)\.", PROSE).groups()
    assert eval(sum_) == float(result) == row("nullified reward")[1]


def test_a_violation_in_the_last_of_250_steps(monkeypatch):
    (left,) = re.findall(r"lowers it to ([\d.]*) at the first", PROSE)
    next_safety_values = np.zeros((250, 1))
    q = scpo.safety_q(np.ones((250, 1)), next_safety_values, np.arange(250)[:, None] == 249, 0.995, 1.0)
    assert q[0, 0] == pytest.approx(float(left), abs=5e-4)


def test_at_k_0_rewards_count_in_full(episode):
    (((rewards, costs, q, *_), _),) = episode["nullify"]
    np.testing.assert_array_equal(scpo.nullify(rewards, costs, q, 0, 0.5, 1), rewards + 1)


def test_the_output_is_that_of_the_kept_run():
    """results/first_run.csv is the progress.csv of the run on the page."""
    with open(ROOT / "results" / "first_run.csv") as file:
        rows = [{name: float(x) for name, x in line.items()} for line in csv.DictReader(file)]
    lines = re.findall(r"^\d/5 .*$", OUTPUT, re.M)
    assert len(lines) == len(rows) == 5
    for line, kept in zip(lines, rows):
        shown = (
            "{iteration:.0f}/5 return {episodic_return:.1f}, cost {episodic_cost:.2f}, safe {safe_episode_rate:.0%}, "
        )
        assert line.startswith(shown.format(**kept) + f"{kept['sps']:.0f} steps/s, ")
    (names,) = re.findall(r"^\| (iteration \| episodic.*) \|$", PAGE, re.M)
    for kept in rows:
        table = [kept["iteration"], *TABLE[f"{kept['iteration']:.0f}"]]
        for name, shown in zip(names.split(" | "), table):
            assert shown == pytest.approx(kept[name], abs=0.0501 if name == "episodic_return" else 0.00501)


def test_the_first_iteration_is_that_of_the_page(monkeypatch):
    """Its episodes are played by the untrained policy, so they don't depend on how a processor rounds."""
    monkeypatch.setattr(scpo, "update", lambda weights, adam, *_: (weights, adam, torch.zeros(len(scpo.LOGGED))))
    words = shlex.split(next(line for line in START.splitlines() if line.startswith("python")))[2:]
    flags = dict(zip(words[::2], words[1::2]))
    assert int(flags["--total-timesteps"]) == 5 * scpo.T
    settings = dict(scpo.TASK_SETTINGS[flags["--env-id"]], total_timesteps=scpo.T, compile=False)
    _, progress = scpo.train(scpo.Args(env_id=flags["--env-id"], **settings))
    means = [np.mean([episode[name] for episode in progress["episodes"]]) for name in ("return", "cost", "safe")]
    assert means == pytest.approx([-136.427, 31.75, 0.671875], rel=0.02)
    returned, cost, safe = re.search(r"1/5 return (\S+), cost (\S+), safe (\S+)%", OUTPUT).groups()
    assert means == pytest.approx([float(returned), float(cost), float(safe) / 100], rel=0.02)


def test_a_run_holds_the_files_and_its_policy_acts(tmp_path, monkeypatch, capsys):
    """A run of the page's task, shorter; then what "Use the policy" says."""
    monkeypatch.chdir(tmp_path)
    flags = "--env-id SafetyBallRun-v0 --total-timesteps 1024 --num-envs 2 --num-steps 256 --no-compile".split()
    module = importlib.import_module("scpo_continuous")
    scpo_run.run(
        module.train, module.Args, module.TASK_SETTINGS, [*flags, "--min-safe-rate", "0", "--cost-limit", "1e3"]
    )
    (folder,) = Path("runs").iterdir()
    named = re.findall(r"^\| `([\w.]+)` \|", PAGE, re.M)
    assert len(named) == 6
    assert {re.sub(r"(tfevents).*", r"\1...", path.name) for path in folder.iterdir()} == set(named)
    (columns,) = re.findall(r"`episodes.csv` \| a row an episode: (.*) \|", PAGE)
    assert (folder / "episodes.csv").read_text().splitlines()[0] == columns.replace(", ", ",")
    header = (folder / "progress.csv").read_text().splitlines()[0].split(",")
    assert set(re.findall(r"^- `(\w+)` is", PAGE, re.M)) <= set(header)
    capsys.readouterr()

    names = {}
    exec(LOAD.replace("runs/NAME", str(folder)), names)
    assert len([line for line in LOAD.splitlines() if line]) == 4
    assert names["env"].length == 1 and names["checkpoint"]["iteration"] == 2
    evaluate.main([*shlex.split(JUDGE.replace("runs/NAME", str(folder)))[2:4], "2"])
    assert "SafetyBallRun-v0, scpo_continuous.py, seed 1, after iteration 2" in capsys.readouterr().out
    assert "--episodes 100" in JUDGE and os.path.exists(ROOT / "evaluate.py")
