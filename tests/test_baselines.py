"""baselines/: their mathematics against dense algebra, SciPy's solver and hand calculations, and each known mistake."""

import csv
import difflib
import importlib
import inspect
import math
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.nn.utils import parameters_to_vector

import scpo_continuous

ROOT = Path(__file__).parent.parent
NAMES = ("trpo", "trpo_lagrangian", "cpo", "pcpo", "pdo")
SCRIPTS = {name: importlib.import_module(f"baselines.{name}") for name in NAMES}
cpo, pcpo, trpo = SCRIPTS["cpo"], SCRIPTS["pcpo"], SCRIPTS["trpo"]
SMALL = "--env-id toy_env:Toy-v0 --num-envs 4 --num-steps 64 --cost-limit 3 --total-timesteps 768".split()
SPACES = {"gaussian": gym.spaces.Box(-1, 1, (2,)), "categorical": gym.spaces.MultiDiscrete([3, 2])}


def run(name, runs_dir, *flags):
    """Trains in this process and returns the run's folder."""
    script = SCRIPTS[name]
    script.main(script.parse_args([*SMALL, "--runs-dir", str(runs_dir), *map(str, flags)]))
    return max(Path(runs_dir).iterdir(), key=lambda path: path.stat().st_mtime)


def rows(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def small_agent(kind="gaussian", seed=0, script=trpo):
    torch.manual_seed(seed)
    agent = script.Agent(3, SPACES[kind])
    agent.actor = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, agent.actor[-1].out_features))
    agent.std.fill_(0.3)
    return agent


def batch(agent, size=200, seed=1):
    """Normalised obs, actions of the policy, both advantages."""
    torch.manual_seed(seed)
    obs = torch.randn(size, 3)
    outputs = agent.actor(obs).detach()
    if agent.is_continuous:
        actions = outputs + agent.std * torch.randn_like(outputs)
    else:
        actions = torch.stack(
            [torch.distributions.Categorical(logits=x).sample() for x in outputs.split([3, 2], -1)], -1
        ).float()
    advantages = torch.randn(size)
    return obs, actions, advantages, torch.randn(size)


def random_problem(rng, n=6, scale=1.0):
    """g, b, H, c, delta of a random step, of all cases."""
    root = rng.normal(size=(n, n))
    H = root @ root.T + 0.1 * np.eye(n)
    g, b = rng.normal(size=n), rng.normal(size=n) * scale
    delta = 10 ** rng.uniform(-3, -1)
    reach = math.sqrt(2 * delta * b @ np.linalg.solve(H, b))  # how far the trust region moves b'x
    return g, b, H, rng.uniform(-1.6, 1.6) * reach, delta


def tensors(*arrays):
    return [torch.as_tensor(x, dtype=torch.float64) for x in arrays]


def solve(g, b, H, c, delta):
    """CPO's problem by SciPy, in coordinates where the trust region is the unit ball: the best g'x, None if there is none."""
    root = np.linalg.cholesky(2 * delta * np.linalg.inv(H))  # x = root y, |y| <= 1
    g, b = root.T @ g, root.T @ b
    if c > np.linalg.norm(b):
        return None
    scale_g, scale_b = np.linalg.norm(g), np.linalg.norm(b)
    start = -b / scale_b * min(1.0, max(c / scale_b, 0) + 1e-3)
    constraints = [
        dict(type="ineq", fun=lambda y: (-c - b @ y) / scale_b, jac=lambda y: -b / scale_b),
        dict(type="ineq", fun=lambda y: 1 - y @ y, jac=lambda y: -2 * y),
    ]
    best = minimize(
        lambda y: -g @ y / scale_g, start, jac=lambda y: -g / scale_g, constraints=constraints, method="SLSQP",
        options=dict(ftol=1e-15, maxiter=500),
    )  # fmt: skip
    return -best.fun * scale_g


# Conjugate gradient and the Fisher matrix -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-8])
def test_conjugate_gradient_is_a_dense_solve(scale):
    rng = np.random.default_rng(0)
    for _ in range(20):
        _, b, H, _, _ = random_problem(rng, 8, scale)
        x = trpo.conjugate_gradient(torch.as_tensor(H).matmul, torch.as_tensor(b), 30)
        np.testing.assert_allclose(x.numpy(), np.linalg.solve(H, b), rtol=1e-3, atol=1e-4 * scale)


def test_conjugate_gradient_of_nothing_is_nothing():
    assert trpo.conjugate_gradient(lambda v: 2 * v, torch.zeros(3), 10).tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", SPACES)
def test_fisher_vector_product_is_the_explicit_fisher_matrix(kind):
    """J' M J, with M the Fisher matrix of the distribution's parameters: 1 / std^2, or diag(p) - p p'."""
    agent = small_agent(kind)
    obs = torch.randn(50, 3)
    names, shapes = zip(*((name, x.shape) for name, x in agent.actor.named_parameters()))
    weights = parameters_to_vector(agent.actor.parameters()).detach()

    def outputs(weights):
        parts = weights.split([shape.numel() for shape in shapes])
        parameters = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes)}
        return torch.func.functional_call(agent.actor, parameters, (obs,))

    jacobian = torch.func.jacrev(outputs)(weights)  # (batch, outputs, weights)
    if kind == "gaussian":
        metric = torch.eye(2).expand(50, 2, 2) / 0.3**2
    else:
        blocks = [logits.softmax(-1) for logits in agent.actor(obs).detach().split([3, 2], -1)]
        metric = torch.stack(
            [torch.block_diag(*(torch.diag(p[i]) - torch.outer(p[i], p[i]) for p in blocks)) for i in range(50)]
        )
    fisher = torch.einsum("bow,bop,bpv->wv", jacobian, metric, jacobian) / 50
    product = trpo.fisher_vector_product(agent, obs, 0.1)
    for seed in range(5):
        v = torch.randn(len(weights), generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(product(v), fisher @ v + 0.1 * v, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", SPACES)
def test_logprobs_and_kl_are_those_of_torch(kind):
    agent = small_agent(kind)
    obs, actions, _, _ = batch(agent)
    old, new = agent.actor(obs), agent.actor(obs + 0.3)
    if kind == "gaussian":
        pairs = [tuple(torch.distributions.Normal(x, agent.std) for x in (old, new))]
        expected = pairs[0][1].log_prob(actions).sum(-1)
    else:
        pairs = [
            tuple(torch.distributions.Categorical(logits=x) for x in pair)
            for pair in zip(old.split([3, 2], -1), new.split([3, 2], -1))
        ]
        expected = sum(pair[1].log_prob(actions[:, i]) for i, pair in enumerate(pairs))
    torch.testing.assert_close(agent.get_logprobs(new, actions), expected)
    kl = sum(torch.distributions.kl_divergence(*pair).reshape(200, -1).sum(-1) for pair in pairs).mean()
    torch.testing.assert_close(agent.get_kl(old, new), kl)


# The steps --------------------------------------------------------------------------------------------------------------------


def test_cpo_step_is_the_convex_solvers_in_every_case():
    """A mistake in a sign of the dual breaks the constraints in a third of these."""
    rng = np.random.default_rng(1)
    seen = dict.fromkeys(range(5), 0)
    for problem in range(600):
        g, b, H, c, delta = random_problem(rng, scale=(1.0, 1e-2)[problem % 2])
        x, case = cpo.cpo_step(*tensors(g, b, np.linalg.solve(H, g), np.linalg.solve(H, b)), c, delta)
        x = x.numpy()
        seen[case] += 1
        best = solve(g, b, H, c, delta)
        assert x @ H @ x / 2 <= delta * (1 + 1e-6)
        if best is None:  # then the cost is lowered as far as the trust region goes
            assert cpo.CASES[case] == "recovery"
            assert b @ x == pytest.approx(-math.sqrt(2 * delta * b @ np.linalg.solve(H, b)))
            continue
        assert c + b @ x <= 1e-6 * abs(c)
        assert g @ x == pytest.approx(best, rel=1e-6, abs=1e-6 * math.sqrt(2 * delta * g @ np.linalg.solve(H, g))), (
            problem,
            case,
        )
    assert min(seen[case] for case in range(4)) > 50, seen


def test_cpo_step_on_the_limit_and_along_it():
    g, b = np.array([1.0, 0.5]), np.array([1.0, 0.0])  # H is the identity
    for c in (0.0, 1e-12, -1e-12):
        x, _ = cpo.cpo_step(*tensors(g, b, g, b), c, 0.5)
        np.testing.assert_allclose(x.numpy(), [0, 1], atol=1e-6)  # only what is free of cost
    for c in (-0.4, 0.0, 0.4):  # return and cost go the same way
        x, _ = cpo.cpo_step(*tensors(b, b, b, b), c, 0.5)
        assert x[0].item() == pytest.approx(-c, abs=1e-6) and x @ x <= 1 + 1e-6


@pytest.mark.parametrize("norm, kept", [(5e-4, True), (5e-5, False)])
def test_a_small_cost_gradient_is_still_a_constraint(norm, kept):
    g, b = np.array([1.0, 0.5]), np.array([norm, 0.0])
    for step in (cpo.cpo_step(*tensors(g, b, g, b), 0.0, 0.5)[0], pcpo.pcpo_step(*tensors(g, b, g, b), 0.0, 0.5)[0]):
        assert (step[0].item() == pytest.approx(0, abs=1e-6)) is kept


@pytest.mark.parametrize("projection", ["kl", "l2"])
def test_pcpo_step_is_the_nearest_point_that_keeps_the_limit(projection):
    rng = np.random.default_rng(2)
    projections = 0
    for _ in range(200):
        g, b, H, c, delta = random_problem(rng)
        natural_g, natural_b = np.linalg.solve(H, g), np.linalg.solve(H, b)
        x, projected = pcpo.pcpo_step(*tensors(g, b, natural_g, natural_b if projection == "kl" else b), c, delta)
        x = x.numpy()
        first = math.sqrt(2 * delta / (g @ natural_g)) * natural_g
        projections += projected
        if not projected:
            np.testing.assert_allclose(x, first)
            assert c + b @ x <= 0
            continue
        assert c + b @ first > 0
        assert c + b @ x == pytest.approx(0, abs=1e-9)  # on the constraint
        metric = H if projection == "kl" else np.eye(6)
        normal = metric @ (x - first)  # nearest: all of the way is along b, seen in the metric
        np.testing.assert_allclose(normal, (normal @ b) / (b @ b) * b, atol=1e-8)
    assert 50 < projections < 190


def test_the_natural_step_spends_the_trust_region_exactly():
    """Along H H^-1 g, as in a public PCPO, the KL divergence is up to 166 times the target."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        g, b, H, _, delta = random_problem(rng)
        natural_g, natural_b = np.linalg.solve(H, g), np.linalg.solve(H, b)
        for x in (
            trpo.trpo_step(*tensors(g, natural_g), delta),
            pcpo.pcpo_step(*tensors(g, b, natural_g, natural_b), -1e9, delta)[0],
            cpo.cpo_step(*tensors(g, b, natural_g, natural_b), -1e9, delta)[0],
        ):
            assert x.numpy() @ H @ x.numpy() / 2 == pytest.approx(delta)


def test_multiplier_direction_clamp_and_no_episode():
    for name in ("trpo_lagrangian", "pdo"):
        update = SCRIPTS[name].update_multiplier
        assert update(1.0, np.array([30.0, 40.0]), 25, 0.1) == pytest.approx(2.0)  # 10 too much
        assert update(1.0, np.array([20.0]), 25, 0.1) == pytest.approx(0.5)
        assert update(1.0, np.array([21.0]), 25, 0.1) == pytest.approx(0.6)  # by the violation, where Adam moves by its lr
        assert update(0.1, np.array([0.0]), 25, 0.1) == 0
        assert update(0.7, np.array([]), 25, 0.1) == 0.7


def test_lagrangian_advantages_by_hand():
    advantages, cost_advantages = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    assert SCRIPTS["pdo"].lagrangian_advantages(advantages, cost_advantages, 3.0).tolist() == [-8, 5]
    assert SCRIPTS["trpo_lagrangian"].lagrangian_advantages(advantages, cost_advantages, 3.0).tolist() == [-2, 1.25]


# The line search and what uses it ---------------------------------------------------------------------------------------------


def search(changes, max_kl=0.015, max_cost_change=math.inf, may_fall=False):
    """Starts at 0 with a step of 1, tries 3 lengths; changes: of each of them."""
    changes = iter(changes)
    zero = torch.zeros(1)
    weights, exponent, _ = trpo.line_search(
        lambda _: next(changes), zero, torch.ones(1), max_kl, max_cost_change, may_fall, 0.5, 3
    )
    assert weights.item() == pytest.approx(0.5**exponent if exponent < 3 else 0)
    return exponent


def test_line_search_accepts_by_the_rules():
    fine = (0.1, 0.0, 0.01)
    assert search([fine]) == 0
    assert search([(0.1, 0.0, 0.016), fine]) == 1  # too far
    assert search([(-0.1, 0.0, 0.01), fine]) == 1  # lowers the objective
    assert search([(-0.1, 0.0, 0.01)], may_fall=True) == 0
    assert search([(0.1, 0.3, 0.01), (0.1, 0.2, 0.01)], max_cost_change=0.2) == 1  # costs more than there is left
    assert search([(-0.1, 0.0, 0.01)] * 3) == 3


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_rejects_a_step(which, bad):
    broken = [0.1, -0.1, 0.01]
    broken[which] = bad
    assert search([broken, broken, (0.1, 0.0, 0.01)], may_fall=True) == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_rejected_step_leaves_the_policy_bit_identical(name, monkeypatch):
    """Once every length goes too far, once a NaN is among the advantages."""
    script = SCRIPTS[name]
    for spoil in (False, True):
        agent = policy(script)
        args = script.check_args(script.parse_args(["--env-id", "SafetyBallRun-v0"]))
        before = parameters_to_vector(agent.actor.parameters()).detach().clone()
        obs, actions, advantages, cost_advantages = batch(agent)
        if spoil:
            advantages[3] = math.nan
        else:
            args.target_kl, args.backtrack = 1e-2, 1.0
            monkeypatch.setattr(
                agent, "get_kl", lambda old, new, kl=agent.get_kl: kl(old, new) * (1 if new.requires_grad else 1e9)
            )
        log = script.update_policy(agent, obs, actions, advantages, cost_advantages, args)
        assert log["step_accepted"] == 0 and log["line_search_exponent"] == args.line_search_steps
        assert torch.equal(parameters_to_vector(agent.actor.parameters()), before)


def policy(script, kind="gaussian", multiplier=2.0):
    agent = small_agent(kind, script=script)
    agent.register_buffer("lagrangian_multiplier", torch.tensor(multiplier, dtype=torch.float64))
    agent.excess_cost.fill_(-0.05)
    return agent


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("name", NAMES)
def test_the_step_and_its_log(name, kind):
    """The logged changes and KL are those of the new policy, computed anew; the step raises what it is to raise."""
    script = SCRIPTS[name]
    agent, args = policy(script, kind), script.check_args(script.parse_args(["--env-id", "SafetyBallRun-v0"]))
    args.fisher_stride = 1
    obs, actions, advantages, cost_advantages = batch(agent)
    old_outputs = agent.actor(obs).detach()
    old = agent.get_logprobs(old_outputs, actions)
    log = script.update_policy(agent, obs, actions, advantages, cost_advantages, args)
    growth = (agent.get_logprobs(agent.actor(obs), actions) - old).detach().exp() - 1
    objective = {"trpo_lagrangian": (advantages - 2 * cost_advantages) / 3, "pdo": advantages - 2 * cost_advantages}.get(
        name, advantages
    )
    assert log["step_accepted"] == 1
    assert (
        log["objective_change"] == pytest.approx((growth * objective).mean().item(), rel=1e-3, abs=1e-6)
        and log["objective_change"] > 0
    )
    assert log["cost_surrogate_change"] == pytest.approx((growth * cost_advantages).mean().item(), rel=1e-3, abs=1e-6)
    assert log["kl"] == pytest.approx(agent.get_kl(old_outputs, agent.actor(obs)).item(), rel=1e-3)
    assert 0.3 * args.target_kl < log["kl"] <= 1.5 * args.target_kl


@pytest.mark.parametrize("name", ["trpo_lagrangian", "pdo"])
def test_step_and_line_search_are_of_the_lagrangian(name, monkeypatch):
    """Reward and cost advantages are equal and the multiplier 3: the better for the reward, the worse for the Lagrangian."""
    script = SCRIPTS[name]
    agent, args = policy(script, multiplier=3.0), script.check_args(script.parse_args(["--env-id", "SafetyBallRun-v0"]))
    obs, actions, advantages, _ = batch(agent)
    seen = []
    search = script.line_search

    def spy(surrogates, weights, step, *rest):
        seen.extend(surrogates(weights + sign * step)[:2] for sign in (1, -1))
        return search(surrogates, weights, step, *rest)

    monkeypatch.setattr(script, "line_search", spy)
    log = script.update_policy(agent, obs, actions, advantages, advantages, args)
    factor = {"trpo_lagrangian": -2 / 4, "pdo": -2}[name]
    for objective_change, cost_change in seen:
        assert objective_change == pytest.approx(factor * cost_change, rel=1e-4)
    assert seen[0][0] > 0 > seen[1][0]
    assert log["step_accepted"] == 1 and log["cost_surrogate_change"] < 0


@pytest.mark.parametrize("name", ["cpo", "pcpo"])
def test_outside_the_limit_the_cost_goes_down_even_if_the_return_does(name):
    script = SCRIPTS[name]
    agent, args = policy(script), script.check_args(script.parse_args(["--env-id", "SafetyBallRun-v0"]))
    obs, actions, advantages, _ = batch(agent)
    agent.excess_cost.fill_(0.05)
    log = script.update_policy(agent, obs, actions, advantages, advantages, args)
    assert log["step_accepted"] == 1 and log["cost_surrogate_change"] < 0 and log["objective_change"] < 0
    assert log["constraint"] == pytest.approx(0.05)


def test_both_critics_learn():
    agent = trpo.Agent(3, SPACES["gaussian"])
    args = trpo.parse_args(["--critic-minibatches", "4"])
    obs = torch.randn(400, 3)
    optimizer = torch.optim.Adam([*agent.critic.parameters(), *agent.cost_critic.parameters()], lr=1e-3)
    first = trpo.update_critics(agent, optimizer, obs, obs.sum(-1), obs[:, 0], args)
    for _ in range(30):
        last = trpo.update_critics(agent, optimizer, obs, obs.sum(-1), obs[:, 0], args)
    assert last[0] < 0.2 * first[0] and last[1] < 0.2 * first[1]
    assert ((agent.cost_critic(obs).squeeze(-1) - obs[:, 0]) ** 2).mean() < 0.1


# What the loop does with them -------------------------------------------------------------------------------------------------


def test_moments_are_numpys():
    rng = np.random.default_rng(0)
    parts = [rng.normal(3, 2, size=(n, 4)) for n in (5, 1, 30)]
    moments = (torch.zeros(()), torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    for part in parts:
        moments = trpo.add_to_moments(*moments, torch.as_tensor(part))
    whole = np.concatenate(parts)
    assert moments[0] == 36
    np.testing.assert_allclose(moments[1], whole.mean(0))
    np.testing.assert_allclose(moments[2], whole.var(0))


def test_moments_use_all_rows_of_one():
    one = trpo.add_to_moments(torch.zeros(()), torch.zeros(2), torch.ones(2), torch.tensor([[1.0, 2.0]]))
    assert one[1].tolist() == [1, 2] and one[2].tolist() == [0, 0]


def test_discounted_sums_by_hand():
    rewards, dones = np.array([[1.0], [2.0], [3.0], [4.0]]), np.array([[0.0], [1.0], [0.0], [0.0]])
    sums, rest = trpo.discounted_sums(rewards, dones, np.array([10.0]), 0.5)
    assert sums[:, 0].tolist() == [6, 5, 3, 5.5] and rest.tolist() == [5.5]


@pytest.mark.parametrize("name", NAMES)
def test_the_log_of_a_run(name, tmp_path):
    """The constraint is that of the iteration's finished episodes, a step; the multiplier follows the same episodes."""
    flags = ["--lagrangian-lr", "0.5", "--lagrangian-init", "0.25"] if name in ("trpo_lagrangian", "pdo") else []
    folder = run(name, tmp_path, "--cost-limit", "0.5", "--std-start", "3", *flags)
    progress, episodes = rows(folder / "progress.csv"), rows(folder / "episodes.csv")
    multiplier = 0.25
    for row in progress:
        costs = [float(x["cost"]) for x in episodes if x["iteration"] == row["iteration"]]
        assert len(costs) == int(row["episodes"]) == 12
        assert float(row["constraint"]) == pytest.approx((np.mean(costs) - 0.5) / 20, rel=1e-4)
        if name == "pdo":
            assert float(row["lagrangian_multiplier"]) == pytest.approx(multiplier, rel=1e-4)
        multiplier = max(0, multiplier + 0.5 * (np.mean(costs) - 0.5))
        if name == "trpo_lagrangian":
            assert float(row["lagrangian_multiplier"]) == pytest.approx(multiplier, rel=1e-4)
        if name == "cpo":
            assert int(row["case"]) in range(5) and int(row["recovering"]) == (row["case"] == "0")
        assert int(row["step_accepted"]) == (int(row["line_search_exponent"]) < SCRIPTS[name].Args.line_search_steps)
    assert np.ptp([float(row["constraint"]) for row in progress]) > 0
    stds = [float(row["std"]) for row in progress]
    assert stds == pytest.approx([0.1 + 2.9 * (1 - i / 3) for i in (1, 2, 3)], rel=1e-4)


@pytest.mark.parametrize("name", ["trpo_lagrangian", "cpo"])
def test_where_no_episode_finished_the_last_cost_holds(name, tmp_path):
    """16 steps an iteration, 20 an episode."""
    folder = run(name, tmp_path, "--num-steps", 16, "--total-timesteps", 64 * 4, "--cost-limit", "0.0001")
    progress = rows(folder / "progress.csv")
    assert [row["episodes"] for row in progress] == ["0", "4", "4", "4"]
    assert float(progress[0]["constraint"]) == 0 and math.isnan(float(progress[0]["episodic_cost"]))
    if name == "trpo_lagrangian":
        assert float(progress[0]["lagrangian_multiplier"]) == pytest.approx(0.001)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_update_is_given(name, tmp_path, monkeypatch):
    """Reward advantages in units of their spread; cost advantages centred, not scaled; actions are actions."""
    script = SCRIPTS[name]
    seen = []
    update = script.update_policy

    def spy(agent, obs, actions, advantages, cost_advantages, args):
        seen.append((advantages, cost_advantages, actions))
        return update(agent, obs, actions, advantages, cost_advantages, args)

    monkeypatch.setattr(script, "update_policy", spy)
    made = []
    gae = script.gae
    monkeypatch.setattr(script, "gae", lambda *args: made.append((args[0], gae(*args))) or made[-1][1])
    run(name, tmp_path)
    for (advantages, cost_advantages, actions), (_, reward_gae), (costs, cost_gae) in zip(seen, made[::2], made[1::2]):
        assert set(np.unique(costs)) <= {0, 1}
        np.testing.assert_allclose(
            advantages, (reward_gae - reward_gae.mean()).ravel() / reward_gae.std(), rtol=1e-3, atol=1e-4
        )
        np.testing.assert_allclose(cost_advantages, (cost_gae - cost_gae.mean()).ravel(), rtol=1e-4, atol=1e-5)
        assert actions.shape == (256, 2)


@pytest.mark.parametrize(
    "env_id", ["toy_env:ToyDict-v0", "toy_env:ToyChoice-v0", "toy_env:ToyChoices-v0", "toy_env:ToyFrom5-v0"]
)
@pytest.mark.parametrize("name", NAMES)
def test_trains_on_all_kinds_of_actions(name, env_id, tmp_path):
    assert len(rows(run(name, tmp_path, "--env-id", env_id) / "progress.csv")) == 3


@pytest.mark.parametrize("kind", SPACES)
def test_the_numpy_policy_is_the_torch_policy(kind):
    torch.manual_seed(0)
    agent = trpo.Agent(3, SPACES[kind])
    agent.actor[-1].weight.data.mul_(100)
    agent.obs_mean.copy_(torch.tensor([1.0, -2, 0.5]))
    agent.obs_var.copy_(torch.tensor([4.0, 0.25, 1]))
    agent.std.fill_(0.2)
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(20, 3)).astype(np.float32)
    if kind == "gaussian":
        noise = rng.standard_normal((20, 2)).astype(np.float32)
        expected = (agent.actor(agent.normalize(torch.as_tensor(obs))) + 0.2 * torch.as_tensor(noise)).detach()
        np.testing.assert_allclose(trpo.sampler(agent)(obs, noise), expected, atol=1e-5)
        return
    obs = obs[:1].repeat(100_000, 0)
    actions = trpo.sampler(agent)(obs, rng.gumbel(size=(100_000, 5)).astype(np.float32))
    for i, logits in enumerate(agent.actor(agent.normalize(torch.as_tensor(obs[:1]))).split([3, 2], -1)):
        shares = np.bincount(actions[:, i], minlength=logits.shape[-1]) / len(actions)
        np.testing.assert_allclose(shares, logits[0].softmax(-1).detach(), atol=0.007)


# Siblings ---------------------------------------------------------------------------------------------------------------------


def test_shared_functions_are_equal_byte_for_byte():
    with_scpo = "fail SafetyState mlp git_revision start_run append_rows"
    all_five = (
        "parse_args make_env Agent sampler gae add_to_moments discounted_sums flat_gradient fisher_vector_product trpo_step"
    )
    all_five += " conjugate_gradient line_search update_critics explained_variance"
    for name, script in SCRIPTS.items():
        for function in [*with_scpo.split(), *all_five.split()]:
            reference = scpo_continuous if function in with_scpo.split() else trpo
            assert inspect.getsource(getattr(script, function)) == inspect.getsource(getattr(reference, function)), (
                name,
                function,
            )
    assert inspect.getsource(SCRIPTS["pdo"].update_multiplier) == inspect.getsource(
        SCRIPTS["trpo_lagrangian"].update_multiplier
    )


@pytest.mark.parametrize("one", NAMES)
@pytest.mark.parametrize("two", NAMES)
def test_the_diff_shows_the_algorithm(one, two):
    """Below the settings and outside the algorithm's banners nothing differs but the multiplier's lines in main."""
    texts = []
    for name in (one, two):
        lines = (ROOT / "baselines" / f"{name}.py").read_text().splitlines()
        lines = lines[lines.index("def fail(message):") :]
        keep, inside = [], False
        for line in lines:
            banner = line.strip().startswith("# ") and line.endswith("-" * 60)
            if banner and line.split("-")[0].strip("# ") in ("TRPO", "TRPO-L", "CPO", "PCPO", "PDO"):
                inside = True
            if not inside:
                keep.append(line)
            elif banner and not line.split("-")[0].strip("# "):
                inside = False
        assert not inside
        texts.append(keep)
    changed = [line for line in difflib.ndiff(*texts) if line[0] in "+-"]
    assert len(changed) <= 10, changed


# The command line -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "flags, says",
    [
        (["--target-kl", "0"], "--target-kl is 0.0, but must be above 0"),
        (["--cg-iters", "0"], "--cg-iters is 0, but must be at least 1"),
        (["--backtrack", "1"], "--backtrack is 1.0, but must be between 0 and 1"),
        (["--critic-minibatches", "7"], "--critic-minibatches is 7, but must be a divisor of num-envs x num-steps = 256"),
        (["--env-id", "toy_env:ToyNoCost-v0"], "reports no cost"),
        (["--env-id", "Nowhere-v0"], "--env-id Nowhere-v0"),
        (["--nonsense", "1"], "--nonsense"),
        (["--lagrangian-lr", "x"], "--lagrangian-lr"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(name, flags, says, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run(name, tmp_path / "runs", *flags)
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and said.startswith(f"{name}.py: ") and says in said and "\n" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_copied_script_works_without_the_project(name, tmp_path):
    for path in (ROOT / "baselines" / f"{name}.py", ROOT / "tests" / "toy_env.py"):
        (tmp_path / path.name).write_text(path.read_text())
    result = subprocess.run([sys.executable, f"{name}.py", *SMALL], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0 and "Mean of the last" in result.stdout, result.stderr


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_the_toy_task_within_its_limit(name, tmp_path):
    """Unconstrained, the 20 steps of an episode earn 15 and cost 15; the limit is 5. A multiplier swings around it."""
    lagrangian = name in ("trpo_lagrangian", "pdo")
    flags = "--num-steps 100 --num-envs 16 --total-timesteps 96000 --cost-limit 5 --target-kl 0.01 --std-end 0.3".split()
    flags += ["--lagrangian-lr", "0.02", "--lagrangian-init", "0.3"] if lagrangian else []
    progress = rows(run(name, tmp_path, *flags) / "progress.csv")
    returned, cost = (np.array([float(row[x]) for row in progress]) for x in ("episodic_return", "episodic_cost"))
    if name == "trpo":
        assert returned[-6:].mean() > 13 and cost[-6:].mean() > 10
    elif lagrangian:
        assert cost.max() > 10 and cost[cost.argmax() :].min() < 5 and returned.min() > -1
    else:
        assert returned[-6:].mean() > 7.5 and cost[-6:].mean() < 6
