"""scpo_discrete.py: its policy against torch.distributions, and that it is otherwise scpo_continuous.py."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import scpo_continuous
import scpo_discrete
from test_scpo import rows, settings_of
from test_scpo import run as run_script

ROOT = Path(__file__).parent.parent
SMALL = (
    "--env-id toy_env:ToyChoice-v0 --num-envs 2 --num-steps 64 --minibatch-size 32 --no-compile --cost-limit 3".split()
)


def run(runs_dir, *flags):
    return run_script(runs_dir, *flags, script=scpo_discrete, small=SMALL)


def definitions(path):
    """{name: source} of what a file defines at its top, a class's methods one by one."""
    source = path.read_text()
    found = {}
    for node in ast.parse(source).body:
        name = node.name if hasattr(node, "name") else type(node).__name__ + " " + ast.unparse(node)[:12]
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                part_name = getattr(part, "name", None) or ast.unparse(part)[:20]
                found[f"{name}.{part_name}"] = ast.get_source_segment(source, part)
        else:
            found[name] = ast.get_source_segment(source, node)
    return found


def test_the_diff_shows_the_policy_and_nothing_else():
    one, two = (definitions(Path(script.__file__)) for script in (scpo_continuous, scpo_discrete))
    differing = {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)}
    agent = {f"Agent.{name}" for name in ("__init__", "get_logprob_and_entropy", "sample_noise", "to_env")}
    tables = ("Expr", "Assign OURS", "Assign TASK", "For for task", "Args.env_id")
    settings = {name for name in differing if name.startswith(tables)}
    deviation = {"check_args", "train", "Args.log_std_init: float "}  # Gaussian actions alone have a standard deviation
    for name in deviation:
        ours = [line for line in one[name].splitlines(True) if "log_std_init" not in line]
        assert "".join(ours) == two.get(name, ""), name
    assert differing - settings - deviation == {*agent, "make_env", "numpy_policy"}


@pytest.mark.parametrize("num_choices", [[2], [3, 2, 4]])
def test_logprobs_and_entropy_are_those_of_torch(num_choices):
    torch.manual_seed(0)
    agent = scpo_discrete.Agent(3, gym.spaces.MultiDiscrete(num_choices)).requires_grad_(False)
    agent.actor[-1].weight.mul_(100)
    obs = torch.randn(50, 3)
    actions = torch.stack([torch.randint(n, (50,)) for n in num_choices], -1)
    logprobs, entropies = agent.get_logprob_and_entropy(obs, actions.float())
    parts = [torch.distributions.Categorical(logits=logits) for logits in agent.actor(obs).split(num_choices, -1)]
    torch.testing.assert_close(logprobs, sum(part.log_prob(actions[:, i]) for i, part in enumerate(parts)))
    torch.testing.assert_close(entropies, sum(part.entropy() for part in parts))


def test_the_numpy_policy_samples_the_softmax():
    torch.manual_seed(0)
    agent = scpo_discrete.Agent(3, gym.spaces.MultiDiscrete([3, 2])).requires_grad_(False)
    agent.actor[-1].weight.mul_(100)
    obs = torch.randn(1, 3).expand(200_000, 3)
    actions = scpo_discrete.numpy_policy(agent)(obs.numpy(), agent.sample_noise(np.random.default_rng(0), 200_000))
    for i, logits in enumerate(agent.actor(obs[:1]).split([3, 2], -1)):
        shares = np.bincount(actions[:, i], minlength=logits.shape[-1]) / len(actions)
        np.testing.assert_allclose(shares, logits[0].softmax(-1).numpy(), atol=0.005)


@pytest.mark.parametrize("env_id", ["toy_env:ToyChoice-v0", "toy_env:ToyChoices-v0", "toy_env:ToyFrom5-v0"])
def test_trains_on_discrete_and_multidiscrete_tasks(tmp_path, env_id):
    assert len(rows(run(tmp_path, "--env-id", env_id) / "progress.csv")) == 3


def test_paper_settings_of_cart_safe():
    args = settings_of(scpo_discrete)
    assert (args.env_id, args.k, args.beta, args.ent_coef) == ("CartSafe-v0", 5, 3, 0.001)
    assert (args.reward_bias, args.cost_limit, args.total_timesteps) == (0, 1, 150 * 32768)
    assert gym.spec("CartSafe-v0").max_episode_steps == 300


def test_ppo_is_k_0_beta_0(tmp_path):
    """Return and episodes don't depend on anything of the safety critic."""
    plain = "--k 0 --beta 0 --no-augment-state --safety-vf-coef 0".split()
    one, two = run(tmp_path / "1", *plain), run(tmp_path / "2", *plain, "--safety-gamma", 0.5, "--cost-limit", 0)
    returns = [[row["return"] for row in rows(folder / "episodes.csv")] for folder in (one, two)]
    assert returns[0] == returns[1]


def test_continuous_actions_are_sent_to_the_sibling(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, "--env-id", "toy_env:Toy-v0")
    assert stop.value.code == 2 and re.search("scpo_continuous.py", capsys.readouterr().err)


def test_cart_safe_becomes_safe(tmp_path):
    """The real thing, compiled: from a wild cart to one within the limit in 7 iterations of 32,768 steps."""
    flags = "scpo_discrete.py --seed 101 --total-timesteps 229376 --runs-dir".split()
    out = subprocess.run([sys.executable, *flags, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0 and "Going on without" not in out.stderr, out.stderr
    (folder,) = tmp_path.iterdir()
    costs = [float(row["episodic_cost"]) for row in rows(folder / "progress.csv")]
    assert costs[0] > 20 and costs[-1] < 5
