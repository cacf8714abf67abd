"""baselines/: their mathematics against dense algebra, SciPy's solver and hand calculations, and each known mistake."""

import ast
import copy
import csv
import difflib
import functools
import importlib
import math
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.nn.utils import parameters_to_vector
from toy_env import Toy

from reproduce.curves import load_published

ROOT = Path(__file__).parent.parent
NAMES = ("trpo", "trpo_lagrangian", "cpo", "pcpo", "pdo")
LAGRANGIAN, CONSTRAINED = ("trpo_lagrangian", "pdo"), ("cpo", "pcpo")
SCRIPTS = {name: importlib.import_module(f"baselines.{name}") for name in NAMES}
cpo, pcpo, trpo = SCRIPTS["cpo"], SCRIPTS["pcpo"], SCRIPTS["trpo"]
SPACES = {"gaussian": gym.spaces.Box(-1, 1, (2,)), "categorical": gym.spaces.MultiDiscrete([3, 2])}


def policy(script, kind="gaussian", multiplier=2.0, seed=0):
    """A small agent, 0.05 a step below its cost limit."""
    torch.manual_seed(seed)
    agent = script.Agent(3, SPACES[kind])
    layers = [torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, agent.noise_dim)]
    agent.actor = torch.nn.Sequential(*layers)
    agent.std.fill_(0.3)
    agent.excess_cost.fill_(-0.05)
    agent.register_buffer("lagrangian_multiplier", torch.tensor(multiplier, dtype=torch.float64))
    return agent


def batch(agent, size=200):
    """Normalised obs, actions of the policy, both advantages."""
    torch.manual_seed(1)
    obs = torch.randn(size, 3)
    outputs = agent.actor(obs).detach()
    if agent.is_continuous:
        actions = outputs + agent.std * torch.randn_like(outputs)
    else:
        choices = [torch.distributions.Categorical(logits=x).sample() for x in outputs.split([3, 2], -1)]
        actions = torch.stack(choices, -1).float()
    return obs, actions, torch.randn(size), torch.randn(size)


def settings(script, **flags):
    return script.Args(**dict(dict(target_kl=0.01, fisher_subsampling=1), **flags))


def weights(agent):
    return parameters_to_vector(agent.actor.parameters()).detach().clone()


def spy(monkeypatch, script, function):
    """Returns a list that gets the arguments of each call of the script's function."""
    calls, original = [], getattr(script, function)
    monkeypatch.setattr(script, function, lambda *args: calls.append(args) or original(*args))
    return calls


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


def exact_cpo_step(g, b, H, c, delta):
    g, b, H = tensors(g, b, H)
    return cpo.cpo_step(g, b, torch.linalg.solve(H, g), torch.linalg.solve(H, b), H.matmul, c, delta)


# Conjugate gradient, the Fisher matrix and the distributions ----------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-8])
def test_conjugate_gradient_is_a_dense_solve(scale):
    rng = np.random.default_rng(0)
    for _ in range(20):
        _, b, H, _, _ = random_problem(rng, 8, scale)
        x = trpo.conjugate_gradient(torch.as_tensor(H).matmul, torch.as_tensor(b), 30)
        np.testing.assert_allclose(x.numpy(), np.linalg.solve(H, b), rtol=1e-3, atol=1e-4 * scale)
    assert trpo.conjugate_gradient(lambda v: 2 * v, torch.zeros(3), 10).tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", SPACES)
def test_fisher_vector_product_is_the_explicit_fisher_matrix(kind):
    """J' M J, with M the Fisher matrix of the distribution's parameters: 1 / std^2, or diag(p) - p p'."""
    agent = policy(trpo, kind)
    obs = torch.randn(50, 3)
    parameters = dict(agent.actor.named_parameters())
    call = functools.partial(torch.func.functional_call, agent.actor)
    jacobians = torch.func.jacrev(lambda x: call(x, (obs,)))(parameters)
    jacobian = torch.cat([x.flatten(2) for x in jacobians.values()], -1)  # (batch, outputs, weights)
    if kind == "gaussian":
        metric = torch.eye(2).expand(50, 2, 2) / 0.3**2
    else:
        choices = [logits.softmax(-1) for logits in agent.actor(obs).detach().split([3, 2], -1)]
        blocks = [[torch.diag(row) - torch.outer(row, row) for row in p] for p in choices]
        metric = torch.stack([torch.block_diag(*pair) for pair in zip(*blocks)])
    fisher = torch.einsum("bow,bop,bpv->wv", jacobian, metric, jacobian) / 50
    product = trpo.fisher_vector_product(agent, obs, 0.1)
    for v in torch.randn(5, fisher.shape[0]):
        torch.testing.assert_close(product(v), fisher @ v + 0.1 * v, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", SPACES)
def test_logprobs_and_kl_are_those_of_torch(kind):
    agent = policy(trpo, kind)
    obs, actions, _, _ = batch(agent)
    old, new = agent.actor(obs), agent.actor(obs + 0.3)
    if kind == "gaussian":
        pairs = [tuple(torch.distributions.Normal(x, agent.std) for x in (old, new))]
        expected = pairs[0][1].log_prob(actions).sum(-1)
    else:
        splits = zip(old.split([3, 2], -1), new.split([3, 2], -1))
        pairs = [tuple(torch.distributions.Categorical(logits=x) for x in pair) for pair in splits]
        expected = sum(pair[1].log_prob(actions[:, i]) for i, pair in enumerate(pairs))
    torch.testing.assert_close(agent.get_logprobs(new, actions), expected)
    kl = sum(torch.distributions.kl_divergence(*pair).reshape(200, -1).sum(-1) for pair in pairs).mean()
    torch.testing.assert_close(agent.get_kl(old, new), kl)


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
    act = trpo.numpy_policy(agent)
    if kind == "gaussian":
        noise = agent.sample_noise(rng, 20)
        expected = (agent.actor(agent.normalize(torch.as_tensor(obs))) + 0.2 * torch.as_tensor(noise)).detach()
        np.testing.assert_allclose(act(obs, noise), expected, atol=1e-5)
        return
    obs = obs[:1].repeat(50_000, 0)
    actions = act(obs, agent.sample_noise(rng, 50_000))
    for i, logits in enumerate(agent.actor(agent.normalize(torch.as_tensor(obs[:1]))).split([3, 2], -1)):
        shares = np.bincount(actions[:, i], minlength=logits.shape[-1]) / len(actions)
        np.testing.assert_allclose(shares, logits[0].softmax(-1).detach(), atol=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_the_fisher_matrix_is_of_one_observation_in_so_many(name, monkeypatch):
    """As many as --fisher-subsampling says: of 200 rows 50, rounded up."""
    script = SCRIPTS[name]
    products = spy(monkeypatch, script, "fisher_vector_product")
    for subsampling in (1, 3, 4):
        agent = policy(script)
        script.update_policy(agent, *batch(agent), settings(script, fisher_subsampling=subsampling))
    assert [len(obs) for _, obs, _ in products] == [200, 67, 50]


@pytest.mark.parametrize("name", NAMES)
def test_the_fisher_sample_spans_all_steps_and_environments(name, monkeypatch):
    """Rows are ordered (step, environment): each fourth one would be environment 0 alone, 4, 8 and 12 of 16."""
    script = SCRIPTS[name]
    agent = policy(script)
    _, actions, *advantages = batch(agent)
    step, env = torch.arange(200) // 4, torch.arange(200) % 4
    obs = torch.stack([step, env, torch.zeros(200)], -1) / 50
    products = spy(monkeypatch, script, "fisher_vector_product")
    for _ in range(2):
        script.update_policy(agent, obs, actions, *advantages, settings(script, fisher_subsampling=4))
    samples = [(sample * 50).round().int() for _, sample, _ in products]
    for sample in samples:
        assert len(sample.unique(dim=0)) == len(sample) == 50  # none is drawn twice
        assert (torch.bincount(sample[:, 1], minlength=4) >= 5).all()
        assert (torch.bincount(sample[:, 0] // 10, minlength=5) >= 4).all()
    assert not torch.equal(*samples)


# The steps ------------------------------------------------------------------------------------------------------------


def solve(g, b, H, c, delta):
    """CPO's problem by SciPy, in coordinates where the trust region is the unit ball: the best g'x, None if none."""
    root = np.linalg.cholesky(2 * delta * np.linalg.inv(H))  # x = root y, |y| <= 1
    g, b = root.T @ g, root.T @ b
    if c > np.linalg.norm(b):
        return None
    scale_g, scale_b = np.linalg.norm(g), np.linalg.norm(b)
    constraints = [
        dict(type="ineq", fun=lambda y: (-c - b @ y) / scale_b, jac=lambda y: -b / scale_b),
        dict(type="ineq", fun=lambda y: 1 - y @ y, jac=lambda y: -2 * y),
    ]
    best = minimize(
        lambda y: -g @ y / scale_g,
        -b / scale_b * min(1.0, max(c / scale_b, 0) + 1e-3),
        jac=lambda y: -g / scale_g,
        constraints=constraints,
        method="SLSQP",
        options=dict(ftol=1e-15, maxiter=500),
    )
    return -best.fun * scale_g


def test_cpo_step_is_the_convex_solvers_in_every_case():
    """A mistake in a sign breaks the constraints in a third of these."""
    rng = np.random.default_rng(1)
    seen = dict.fromkeys(range(5), 0)
    for problem in range(400):
        g, b, H, c, delta = random_problem(rng, scale=(1.0, 1e-2)[problem % 2])
        x, case = exact_cpo_step(g, b, H, c, delta)
        x = x.numpy()
        seen[case] += 1
        best = solve(g, b, H, c, delta)
        assert x @ H @ x / 2 <= delta * (1 + 1e-6)
        if best is None:  # then the cost is lowered as far as the trust region goes
            assert cpo.CASES[case] == "recovery"
            assert b @ x == pytest.approx(-math.sqrt(2 * delta * b @ np.linalg.solve(H, b)))
            continue
        assert cpo.CASES[case] != "recovery"
        assert c + b @ x <= 1e-6 * abs(c)
        unit = math.sqrt(2 * delta * g @ np.linalg.solve(H, g))  # what TRPO's step gains
        assert g @ x == pytest.approx(best, rel=1e-6, abs=1e-6 * unit), (problem, case)
    assert min(seen[case] for case in range(4)) > 30, seen


def test_cpo_step_on_the_limit_and_along_it():
    g, b, H = np.array([1.0, 0.5]), np.array([1.0, 0.0]), np.eye(2)
    for c in (0.0, 1e-12, -1e-12):
        x, _ = exact_cpo_step(g, b, H, c, 0.5)
        np.testing.assert_allclose(x.numpy(), [0, 1], atol=1e-6)  # only what is free of cost
    for c in (-0.4, 0.0, 0.4):  # return and cost go the same way, or the return goes nowhere
        for along in (b, 0 * b):
            x, _ = exact_cpo_step(along, b, H, c, 0.5)
            assert x[0].item() == pytest.approx(-c if along.any() else -max(c, 0), abs=1e-6) and x[1] == 0


def stiff_agent(seed):
    """Returns an agent with a Fisher matrix too hard for ten iterations of conjugate gradient, obs, actions, advantages
    and noise that makes other ones of them.
    """
    torch.manual_seed(seed)
    agent = cpo.Agent(6, gym.spaces.Box(-1, 1, (1,)))
    for layer in agent.actor[::2]:
        layer.weight.data.mul_((1.0, 1.5)[seed % 2])
    agent.actor[-1].weight.data.mul_(30)
    agent.std.fill_(0.1)
    obs = torch.randn(300, 6) * 3
    noise = torch.randn(300, 1)
    actions = agent.actor(obs).detach() + 0.1 * noise
    advantages = noise[:, 0] * obs[:, 0]
    return agent, obs, actions, (advantages - advantages.mean()) / advantages.std(), torch.randn(300)


@pytest.mark.parametrize("difference, cosine", [(0.1, 0.99), (0.003, 0.9999)])
@pytest.mark.parametrize("seed", range(4))
def test_cpo_step_where_return_and_cost_are_nearly_parallel(seed, difference, cosine, monkeypatch):
    """What conjugate gradient leaves unsolved of two long vectors is as long as their difference.

    It must neither leave the trust region nor miss the limit, and the return must be what the way to the limit earns.
    """
    agent, obs, actions, advantages, noise = stiff_agent(seed)
    cost_advantages = 0.1 * (advantages + difference * noise)
    args, parameters = settings(cpo, target_kl=1e-3), list(agent.actor.parameters())
    logprobs = agent.get_logprobs(agent.actor(obs), actions)
    ratio = (logprobs - logprobs.detach()).exp()
    g = cpo.flat_gradient((ratio * advantages).mean(), parameters, retain_graph=True)
    b = cpo.flat_gradient((ratio * cost_advantages).mean(), parameters)
    product = cpo.fisher_vector_product(agent, obs, args.cg_damping)
    natural_g, natural_b = (cpo.conjugate_gradient(product, x, args.cg_iters) for x in (g, b))
    q, r, s = (x.item() for x in (g @ natural_g, g @ natural_b, b @ natural_b))
    assert r / math.sqrt(q * s) > cosine
    reach, gain = math.sqrt(2 * args.target_kl * s), math.sqrt(2 * args.target_kl * q)
    searches = spy(monkeypatch, cpo, "line_search")
    for c in (-0.5 * reach, 0.0, 0.5 * reach):
        learner = copy.deepcopy(agent)
        learner.excess_cost.fill_(c)
        cpo.update_policy(learner, obs, actions, advantages, cost_advantages, args)
        step = searches[-1][2]
        assert (step @ product(step)).item() / 2 <= args.target_kl * (1 + 1e-3)
        assert abs(c + (b @ step).item()) < 0.03 * reach
        assert (g @ step).item() > -c * r / s - 0.03 * gain


@pytest.mark.parametrize("factor", [2.0**-10, 2.0**-17, 2.0**10])
@pytest.mark.parametrize("name", CONSTRAINED)
def test_the_step_does_not_depend_on_the_unit_of_cost(name, factor):
    """A threshold with a unit, as b'b <= 1e-6, would drop the constraint of a task whose costs are small.

    Powers of 2 change no digit of a floating-point number: the steps are the same to the last bit.
    """
    script = SCRIPTS[name]
    for c in (-1.0, -0.05, 0.0, 0.02, 1.0):
        results = []
        for unit in (1.0, factor):
            agent = policy(script)
            obs, actions, advantages, cost_advantages = batch(agent)
            agent.excess_cost.fill_(c * unit)
            args = settings(script)
            log = script.update_policy(agent, obs, actions, advantages, cost_advantages * unit, args)
            results.append((log.get("case"), log.get("projected"), weights(agent)))
        assert results[0][:2] == results[1][:2] and torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("name", CONSTRAINED)
def test_without_any_cost_the_step_is_trpos(name):
    results = []
    for script in (trpo, SCRIPTS[name]):
        agent = policy(script)
        obs, actions, advantages, cost_advantages = batch(agent)
        log = script.update_policy(agent, obs, actions, advantages, 0 * cost_advantages, settings(script))
        results.append(weights(agent))
    assert torch.equal(*results) and log.get("case", 4) == 4 and not log.get("projected")


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


def test_the_projection_is_the_one_that_is_asked_for(monkeypatch):
    """In L2 norm the way back to the limit is along b itself."""
    steps, searches = {}, spy(monkeypatch, pcpo, "line_search")
    for projection, c in (("kl", -1e9), ("kl", 0.1), ("l2", 0.1)):
        agent = policy(pcpo)
        agent.excess_cost.fill_(c)
        obs, actions, advantages, cost_advantages = batch(agent)
        logprobs = agent.get_logprobs(agent.actor(obs), actions)
        surrogate = ((logprobs - logprobs.detach()).exp() * cost_advantages).mean()
        b = pcpo.flat_gradient(surrogate, list(agent.actor.parameters()))
        args = settings(pcpo, projection=projection)
        pcpo.update_policy(agent, obs, actions, advantages, cost_advantages, args)
        steps[projection, c] = searches[-1][2]
    along_b = {p: steps[p, 0.1] - steps["kl", -1e9] for p in ("kl", "l2")}
    cosines = {p: torch.cosine_similarity(x, -b, dim=0).item() for p, x in along_b.items()}
    assert cosines["l2"] > 0.9999 and 0 < cosines["kl"] < 0.99


def test_the_natural_step_spends_the_trust_region_exactly():
    """Along H H^-1 g, as in a public PCPO, the KL divergence is up to 166 times the target."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        g, b, H, _, delta = random_problem(rng)
        natural_g, natural_b = np.linalg.solve(H, g), np.linalg.solve(H, b)
        for x in (
            trpo.trpo_step(*tensors(g, natural_g), delta),
            pcpo.pcpo_step(*tensors(g, b, natural_g, natural_b), -1e9, delta)[0],
            exact_cpo_step(g, b, H, -1e9, delta)[0],
        ):
            assert x.numpy() @ H @ x.numpy() / 2 == pytest.approx(delta)


@pytest.mark.parametrize("name", LAGRANGIAN)
def test_multiplier_direction_clamp_and_no_episode(name):
    update = SCRIPTS[name].update_multiplier
    assert update(1.0, np.array([30.0, 40.0]), 25, 0.1) == pytest.approx(2.0)  # 10 too much
    assert update(1.0, np.array([20.0]), 25, 0.1) == pytest.approx(0.5)
    assert update(1.0, np.array([21.0]), 25, 0.1) == pytest.approx(0.6)  # by the violation; Adam moves by its rate
    assert update(0.1, np.array([0.0]), 25, 0.1) == 0
    assert update(0.7, np.array([]), 25, 0.1) == 0.7


def test_lagrangian_advantages_by_hand():
    advantages, cost_advantages = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    assert SCRIPTS["pdo"].lagrangian_advantages(advantages, cost_advantages, 3.0).tolist() == [-8, 5]
    assert SCRIPTS["trpo_lagrangian"].lagrangian_advantages(advantages, cost_advantages, 3.0).tolist() == [-2, 1.25]


def test_the_step_does_not_depend_on_the_scale_of_the_objective():
    """So TRPO-L's division by 1 + multiplier does nothing: PDO takes the same step with the same multiplier."""

    def new_weights(script, scale=1.0):
        agent = policy(script, multiplier=3.0)
        obs, actions, advantages, cost_advantages = batch(agent)
        script.update_policy(agent, obs, actions, scale * advantages, cost_advantages, settings(script))
        return weights(agent)

    for scale in (2.0**-10, 0.5, 2.0**10):  # powers of 2 change no digit, so not the last bit differs
        assert torch.equal(new_weights(trpo, scale), new_weights(trpo))
    assert torch.equal(new_weights(SCRIPTS["trpo_lagrangian"]), new_weights(SCRIPTS["pdo"]))
    assert not torch.equal(new_weights(trpo), new_weights(SCRIPTS["pdo"]))


# The line search and what uses it -------------------------------------------------------------------------------------


def search(changes, max_kl=0.015, max_cost_change=math.inf, may_fall=False):
    """Starts at 0 with a step of 1, tries 3 lengths; changes: of each of them. Returns j of the accepted 0.5^j."""
    changes, zero = iter(changes), torch.zeros(1)
    new, exponent, _ = trpo.line_search(
        lambda _: next(changes), zero, torch.ones(1), max_kl, max_cost_change, may_fall, 0.5, 3
    )
    assert new.item() == pytest.approx(0.5**exponent if exponent < 3 else 0)
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


def line_search_rules(name, monkeypatch, c):
    """Returns max_kl, max_cost_change and may_fall as the line search gets them, c a step above the limit."""
    script = SCRIPTS[name]
    agent, searches = policy(script), spy(monkeypatch, script, "line_search")
    agent.excess_cost.fill_(c)
    script.update_policy(agent, *batch(agent), settings(script))
    return searches[0][3:6]


@pytest.mark.parametrize("name", CONSTRAINED)
@pytest.mark.parametrize("c", [-0.25, 0.25])
def test_the_cost_may_rise_by_what_the_limit_leaves(name, c, monkeypatch):
    assert line_search_rules(name, monkeypatch, c)[1] == max(-c, 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("c", [-0.25, 0.0, 0.25])
def test_the_objective_may_fall_only_while_the_limit_is_broken(name, c, monkeypatch):
    assert line_search_rules(name, monkeypatch, c)[2] is (name in CONSTRAINED and c > 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_beyond_one_and_a_half_times_the_target_is_shortened(name, monkeypatch):
    script = SCRIPTS[name]
    agent, args = policy(script), settings(script, target_kl=1e-4)
    agent.excess_cost.fill_(-10)
    measured = iter(torch.tensor([1.6, 1.4, 0.5]) * args.target_kl)
    kl = agent.get_kl  # the Fisher matrix is made of it as well
    monkeypatch.setattr(agent, "get_kl", lambda old, new: kl(old, new) if new.requires_grad else next(measured))
    assert script.update_policy(agent, *batch(agent), args)["line_search_exponent"] == 1


@pytest.mark.parametrize("spoilt", ["every length goes too far", "an advantage is NaN"])
@pytest.mark.parametrize("name", NAMES)
def test_a_rejected_step_leaves_the_policy_bit_identical(name, spoilt, monkeypatch):
    script = SCRIPTS[name]
    agent, args = policy(script), settings(script)
    before = weights(agent)
    obs, actions, advantages, cost_advantages = batch(agent)
    if spoilt == "an advantage is NaN":
        advantages[3] = math.nan
    else:
        kl = agent.get_kl
        monkeypatch.setattr(agent, "get_kl", lambda old, new: kl(old, new) * (1 if new.requires_grad else 1e9))
    log = script.update_policy(agent, obs, actions, advantages, cost_advantages, args)
    assert log["step_accepted"] == 0 and log["line_search_exponent"] == args.line_search_steps
    assert torch.equal(weights(agent), before)


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("name", NAMES)
def test_the_step_and_its_log(name, kind):
    """The logged changes and KL are those of the new policy, computed anew; the step raises what it is to raise."""
    script = SCRIPTS[name]
    agent, args = policy(script, kind), settings(script)
    obs, actions, advantages, cost_advantages = batch(agent)
    old_outputs = agent.actor(obs).detach()
    old = agent.get_logprobs(old_outputs, actions)
    log = script.update_policy(agent, obs, actions, advantages, cost_advantages, args)
    growth = (agent.get_logprobs(agent.actor(obs), actions) - old).detach().exp() - 1
    lagrangian = advantages - 2 * cost_advantages
    objective = {"trpo_lagrangian": lagrangian / 3, "pdo": lagrangian}.get(name, advantages)
    objective_change, cost_change = ((growth * x).mean().item() for x in (objective, cost_advantages))
    assert log["step_accepted"] == 1
    assert log["objective_change"] == pytest.approx(objective_change, rel=1e-3, abs=1e-6) and objective_change > 0
    assert log["cost_surrogate_change"] == pytest.approx(cost_change, rel=1e-3, abs=1e-6)
    assert log["kl"] == pytest.approx(agent.get_kl(old_outputs, agent.actor(obs)).item(), rel=1e-3)
    assert 0.3 * args.target_kl < log["kl"] <= 1.5 * args.target_kl


@pytest.mark.parametrize("name", LAGRANGIAN)
def test_step_and_line_search_are_of_the_lagrangian(name, monkeypatch):
    """Both advantages are equal and the multiplier is 3: what raises the return lowers the Lagrangian."""
    script = SCRIPTS[name]
    agent, args = policy(script, multiplier=3.0), settings(script)
    obs, actions, advantages, _ = batch(agent)
    searches = spy(monkeypatch, script, "line_search")
    log = script.update_policy(agent, obs, actions, advantages, advantages, args)
    surrogates, start, step = searches[0][:3]
    factor = {"trpo_lagrangian": -2 / 4, "pdo": -2}[name]
    for sign in (1, -1):
        objective_change, cost_change, _ = surrogates(start + sign * step)
        assert objective_change == pytest.approx(factor * cost_change, rel=1e-4) and sign * objective_change > 0
    assert log["step_accepted"] == 1 and log["cost_surrogate_change"] < 0


# The critics, the advantages and the normalisers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_cost_critic_starts_near_0(name):
    """Else what it starts with outweighs the costs of a task that counts in thousandths."""
    torch.manual_seed(0)
    agent, obs = SCRIPTS[name].Agent(3, SPACES["gaussian"]), torch.randn(100, 3)
    assert agent.cost_critic(obs).abs().max() < 1e-4 < 0.1 < agent.critic(obs).abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_each_critic_learns_its_own_targets(name):
    script = SCRIPTS[name]
    torch.manual_seed(0)
    agent, obs = script.Agent(3, SPACES["gaussian"]), torch.randn(400, 3)
    optimizer = torch.optim.Adam([*agent.critic.parameters(), *agent.cost_critic.parameters()], lr=1e-2)
    args = settings(script, critic_minibatches=4)
    for _ in range(6):
        losses = script.update_critics(agent, optimizer, obs, obs.sum(-1), -obs[:, 0], args)
    assert ((agent.critic(obs).squeeze(-1) - obs.sum(-1)) ** 2).mean() < 0.1
    assert ((agent.cost_critic(obs).squeeze(-1) + obs[:, 0]) ** 2).mean() < 0.1
    assert losses[0] < 0.2 and losses[1] < 0.2


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_is_cut_where_an_episode_ends(name):
    """An error of 100 after a time limit leaves the steps before it alone."""
    rewards = np.array([[1.0], [2.0], [100.0]])
    zero, dones = np.zeros((3, 1)), np.array([[0.0], [1.0], [0.0]])
    advantages = SCRIPTS[name].gae(rewards, zero, zero, zero, dones, 0.5, 0.5)
    assert advantages[:, 0].tolist() == [1 + 0.25 * 2, 2, 100]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_earned_after_a_termination_but_after_a_time_limit(name):
    rewards, values, next_values = np.ones((1, 2)), np.full((1, 2), 3.0), np.full((1, 2), 8.0)
    terminations, dones = np.array([[1.0, 0.0]]), np.ones((1, 2))
    advantages = SCRIPTS[name].gae(rewards, values, next_values, terminations, dones, 0.5, 0.5)
    assert advantages.tolist() == [[1 - 3, 1 + 0.5 * 8 - 3]]


def test_moments_are_numpys():
    rng = np.random.default_rng(0)
    parts = [rng.normal(3, 2, size=(n, 4)) for n in (1, 5, 30)]
    moments = (torch.zeros(()), torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    for part in parts:
        moments = trpo.add_to_moments(*moments, torch.as_tensor(part))
    whole = np.concatenate(parts)
    assert moments[0] == 36
    np.testing.assert_allclose(moments[1], whole.mean(0))
    np.testing.assert_allclose(moments[2], whole.var(0))


def test_discounted_sums_by_hand():
    rewards, dones = np.array([[1.0], [2.0], [3.0], [4.0]]), np.array([[0.0], [1.0], [0.0], [0.0]])
    sums, rest = trpo.discounted_sums(rewards, dones, np.array([10.0]), 0.5)
    assert sums[:, 0].tolist() == [6, 5, 3, 5.5] and rest.tolist() == [5.5]


# The loop -------------------------------------------------------------------------------------------------------------
# Five iterations on a task that keeps a diary. What the updates are given must follow from the diary.


class Diary(gym.Env):
    """Random states far from 0, large rewards, costs; episodes of 2 to 6 steps, half of them cut by a time limit."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    made = []

    def __init__(self):
        self.made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:  # the run begins
            self.steps = []
        self.left, self.is_cut = self.np_random.integers(2, 7), self.np_random.random() < 0.5
        self.obs = self.np_random.normal(5, 3, 2).astype(np.float32)
        return self.obs, {}

    def step(self, action):
        obs, self.obs = self.obs, self.np_random.normal(5, 3, 2).astype(np.float32)
        reward = float(self.np_random.normal(20, 40) * (50 if self.np_random.random() < 0.1 else 1))
        cost = float(self.np_random.integers(3))
        self.left -= 1
        terminated, truncated = self.left == 0 and not self.is_cut, self.left == 0 and self.is_cut
        self.steps.append((obs, reward, cost, self.obs, terminated, truncated))
        return self.obs, reward, terminated, truncated, {"cost": cost}


gym.register("Diary-v0", Diary)
GAMMA, LAMBDA, COST_LAMBDA, LENGTH = 0.9, 0.8, 0.3, 50


@functools.cache
def diary_of(name):
    """Returns a dict for each of five iterations of training: what the updates were given, the steps made, the log."""
    script = SCRIPTS[name]
    flags = dict(gamma=GAMMA, gae_lambda=LAMBDA, cost_gae_lambda=COST_LAMBDA, critic_minibatches=4, save_every=0)
    flags.update(num_envs=4, num_steps=LENGTH, total_timesteps=5 * 4 * LENGTH, cost_limit=3)
    flags.update(dict(lagrangian_init=0.25, lagrangian_lr=0.5) if name in LAGRANGIAN else {})
    Diary.made.clear()
    iterations, critics = [], None
    with pytest.MonkeyPatch.context() as patch:
        updates, fits = spy(patch, script, "update_policy"), spy(patch, script, "update_critics")
        for progress in script.train(script.Args(env_id="Diary-v0", **flags)):
            if "scalars" in progress:
                log = {key.split("/")[1]: value for key, value in progress["scalars"].items()}
                iterations.append(dict(critics=critics, log=log, episodes=progress["episodes"]))
            critics = [script.mlp(2, 1, 1.0), script.mlp(2, 1, 1.0)]
            for critic, prefix in zip(critics, ("critic.", "cost_critic.")):
                agent = progress["checkpoint"]["agent"]
                critic.load_state_dict({k[len(prefix) :]: x for k, x in agent.items() if k.startswith(prefix)})
    keys = ("obs", "rewards", "costs", "next_obs", "terminated", "truncated")
    diary = {key: np.stack([[step[i] for step in env.steps] for env in Diary.made], 1) for i, key in enumerate(keys)}
    for i, iteration in enumerate(iterations):
        iteration.update({key: x[i * LENGTH : (i + 1) * LENGTH] for key, x in diary.items()})
        iteration["before"] = {key: x[: i * LENGTH] for key, x in diary.items()}
        given = dict(zip(("given_obs", "_", "advantages", "cost_advantages"), updates[i][1:]))
        given.update(zip(("returns", "cost_returns"), fits[i][3:]))
        iteration.update(
            {key: x.numpy().reshape(LENGTH, 4, -1).squeeze(-1) for key, x in given.items() if x.dim() == 1}
        )
        iteration["given_obs"] = given["given_obs"].numpy().reshape(LENGTH, 4, 2)
    return iterations


def normalised(iteration, obs):
    seen = iteration["before"]["obs"][: 2 * LENGTH].reshape(-1, 2).astype(float)  # in the first half of five iterations
    mean, var = (seen.mean(0), seen.var(0)) if len(seen) else (0, 1)
    return np.clip((obs - mean) / np.sqrt(var + 1e-8), -10, 10)


def values(iteration, which, key):
    """Of the reward critic (0) or the cost critic (1), as it was before the iteration."""
    obs = torch.as_tensor(normalised(iteration, iteration[key]), dtype=torch.float32)
    return iteration["critics"][which](obs).squeeze(-1).detach().numpy()


def scaled_rewards(iteration):
    """In units of the deviation of the discounted return so far, clipped."""
    before, discounted = iteration["before"], []
    for env in range(4):
        total = 0
        for reward, *ends in zip(*(before[key][:, env] for key in ("rewards", "terminated", "truncated"))):
            total = GAMMA * total + reward
            discounted.append(total)
            total = 0 if any(ends) else total
    return np.clip(iteration["rewards"] / (np.std(discounted) if discounted else 1), -10, 10)


def lambda_returns(iteration, rewards, which, lam):
    """G_t = r + gamma ((1 - lam) V(s') + lam G_{t+1}); V(s') alone at an episode's end, 0 where it terminated."""
    next_values, targets = values(iteration, which, "next_obs"), np.zeros((LENGTH, 4))
    for t in reversed(range(LENGTH)):
        for env in range(4):
            after = next_values[t, env]
            if iteration["terminated"][t, env]:
                after = 0
            elif not iteration["truncated"][t, env] and t + 1 < LENGTH:
                after = (1 - lam) * after + lam * targets[t + 1, env]
            targets[t, env] = rewards[t, env] + GAMMA * after
    return targets


close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_observations_are_normalised_by_what_came_before_in_the_first_half(name):
    for iteration in diary_of(name):
        close(iteration["given_obs"], normalised(iteration, iteration["obs"]))


@pytest.mark.parametrize("name", NAMES)
def test_the_share_of_the_limit_is_passed_on_as_it_is(name):
    """Before the first cost it is 0. By its moments the first cost would look like the whole limit spent."""
    script = importlib.import_module(f"baselines.{name}")
    args = script.Args(env_id="toy_env:Toy-v0", cost_limit=25, num_envs=2, num_steps=64, augment_state=True)
    args.total_timesteps, args.save_every, args.critic_minibatches = 512, 0, 4
    for progress in script.train(args):
        weights = progress["checkpoint"]["agent"]
    agent = script.Agent(3, gym.spaces.Box(-1, 1, (2,)))
    agent.load_state_dict(weights)
    assert agent.obs_count > 0 and agent.obs_var[0] < 0.9
    obs = torch.tensor([[0.2, 0.1, 0.01], [0.2, 0.1, 1.0]])
    torch.testing.assert_close(agent.normalize(obs)[:, 2], torch.tensor([0.01, 1.0]))


@pytest.mark.parametrize("name", NAMES)
def test_rewards_are_scaled_and_clipped_and_costs_are_not(name):
    """Where an episode terminates, the return that is left is the last reward, and the cost the last cost."""
    for iteration in diary_of(name):
        last = iteration["terminated"]
        assert last.sum() > 5
        close(iteration["returns"][last], scaled_rewards(iteration)[last])
        close(iteration["cost_returns"][last], iteration["costs"][last])


@pytest.mark.parametrize("name", NAMES)
def test_a_time_limit_is_bootstrapped_from_the_state_it_ended_in(name):
    for iteration in diary_of(name):
        last = iteration["truncated"]
        assert last.sum() > 5
        next_values, next_cost_values = (values(iteration, which, "next_obs")[last] for which in (0, 1))
        close(iteration["returns"][last], scaled_rewards(iteration)[last] + GAMMA * next_values)
        close(iteration["cost_returns"][last], iteration["costs"][last] + GAMMA * next_cost_values)


@pytest.mark.parametrize("name", NAMES)
def test_return_and_cost_have_their_own_lambda_and_critic(name):
    for iteration in diary_of(name):
        close(iteration["returns"], lambda_returns(iteration, scaled_rewards(iteration), 0, LAMBDA))
        close(iteration["cost_returns"], lambda_returns(iteration, iteration["costs"], 1, COST_LAMBDA))


@pytest.mark.parametrize("name", NAMES)
def test_reward_advantages_are_standardised_and_cost_advantages_centred(name):
    for iteration in diary_of(name):
        advantages = iteration["returns"] - values(iteration, 0, "obs")
        cost_advantages = iteration["cost_returns"] - values(iteration, 1, "obs")
        close(iteration["advantages"], (advantages - advantages.mean()) / advantages.std())
        close(iteration["cost_advantages"], cost_advantages - cost_advantages.mean())


@pytest.mark.parametrize("name", NAMES)
def test_constraint_and_multiplier_follow_the_episodes_that_ended(name):
    """The constraint is a step's, the multiplier's rise an episode's. PDO's step uses the multiplier of one earlier."""
    multiplier = 0.25
    for iteration in diary_of(name):
        log, costs = iteration["log"], [episode["cost"] for episode in iteration["episodes"]]
        assert len(costs) == (iteration["terminated"] | iteration["truncated"]).sum()
        lengths = [episode["length"] for episode in iteration["episodes"]]
        assert log["constraint"] == pytest.approx((np.mean(costs) - 3) / np.mean(lengths), rel=1e-4)
        if name == "pdo":
            assert log["lagrangian_multiplier"] == pytest.approx(multiplier)
        multiplier = max(0, multiplier + 0.5 * (np.mean(costs) - 3))
        if name == "trpo_lagrangian":
            assert log["lagrangian_multiplier"] == pytest.approx(multiplier)
        if name == "cpo":
            assert log["recovering"] == (cpo.CASES[log["case"]] == "recovery")
    assert multiplier > 0.25
    stds = [iteration["log"]["std"] for iteration in diary_of(name)]
    assert stds == pytest.approx([0.1 + 0.409 * (1 - i / 5) for i in range(1, 6)])


@pytest.mark.parametrize("name", ["trpo_lagrangian", "cpo"])
def test_where_no_episode_ended_the_last_cost_holds(name):
    """16 steps an iteration, 20 an episode."""
    flags = dict(num_envs=4, num_steps=16, total_timesteps=4 * 64, cost_limit=0.0001, critic_minibatches=4)
    logs = list(SCRIPTS[name].train(SCRIPTS[name].Args(env_id="toy_env:Toy-v0", **flags)))[1:]
    assert [len(log["episodes"]) for log in logs] == [0, 4, 4, 4]
    assert logs[0]["scalars"]["policy/constraint"] == 0
    assert logs[0]["scalars"].get("policy/lagrangian_multiplier", 0.001) == pytest.approx(0.001)


@pytest.mark.parametrize("name, env_id", zip(NAMES, ["ToyDict-v0", "ToyChoice-v0", "ToyChoices-v0", "ToyFrom5-v0"]))
def test_trains_on_all_kinds_of_actions(name, env_id):
    flags = dict(num_envs=2, num_steps=32, total_timesteps=128, cost_limit=3, critic_minibatches=4)
    assert len(list(SCRIPTS[name].train(SCRIPTS[name].Args(env_id=f"toy_env:{env_id}", **flags)))) == 3


class ToyCents(Toy):
    """The toy task with costs in thousandths."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {"cost": 1e-3 * info["cost"]}


gym.register("ToyCents-v0", ToyCents, max_episode_steps=20)


@pytest.mark.parametrize("name, unit", [*((name, 1) for name in NAMES), ("cpo", 1e-3), ("pcpo", 1e-3)])
def test_it_learns_the_toy_task_within_its_limit(name, unit):
    """Unconstrained, the 20 steps of an episode earn 15 and cost 15; the limit is 5. A multiplier swings around it.

    In thousandths the task is the same. A cost critic that starts with values of about 1 lost the limit there.
    """
    flags = dict(
        env_id="toy_env:Toy-v0" if unit == 1 else "ToyCents-v0", cost_limit=5 * unit, target_kl=0.03, std_end=0.3
    )
    flags.update(num_envs=8, num_steps=100, total_timesteps=16000, critic_minibatches=4)
    logs = list(SCRIPTS[name].train(SCRIPTS[name].Args(**flags)))[1:]
    mean = {key: np.array([np.mean([x[key] for x in log["episodes"]]) for log in logs]) for key in ("return", "cost")}
    returned, cost = mean["return"], mean["cost"] / (5 * unit)
    if name == "trpo":
        assert returned[-4:].mean() > 13 and cost[-4:].mean() > 2.5
    elif name in LAGRANGIAN:
        first_over = np.argmax(cost > 1)
        assert cost[first_over] > 1 > cost[first_over:].min() and returned[-4:].mean() > returned[0] + 2
    else:
        assert returned[-4:].mean() > 7 and cost[-4:].mean() < 1.5


# Siblings -------------------------------------------------------------------------------------------------------------


@functools.cache
def parts(path):
    """Returns the source of each function, method and table of a script by name; of a class, what isn't a method."""
    text, found = (ROOT / path).read_text(), {}
    for node in ast.parse(text).body:
        source = functools.partial(ast.get_source_segment, text)
        if isinstance(node, ast.ClassDef):
            methods = [x for x in node.body if isinstance(x, ast.FunctionDef)]
            found.update({f"{node.name}.{x.name}": source(x) for x in methods})
            found[node.name] = [source(x) for x in node.body if x not in methods]
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = source(node)
        elif isinstance(node, ast.Assign):
            found[node.targets[0].id] = source(node)
        elif isinstance(node, ast.If):
            found["__main__"] = source(node)
    return found


def changed_lines(one, two, part):
    """Returns the lines of a function that only one of two baselines has."""
    sources = (parts(f"baselines/{name}.py")[part].splitlines() for name in (one, two))
    return [line[2:].strip() for line in difflib.ndiff(*sources) if line[0] in "+-"]


DIFFERENCES = {
    ("trpo", "cpo"): "TASK_SETTINGS Args CASES cpo_step update_policy",
    ("cpo", "pcpo"): "TASK_SETTINGS Args CASES cpo_step pcpo_step update_policy",
    ("trpo", "trpo_lagrangian"): "TASK_SETTINGS Args check_args Agent.__init__ lagrangian_advantages update_multiplier"
    " update_policy train",
    ("trpo_lagrangian", "pdo"): "TASK_SETTINGS Args lagrangian_advantages update_policy train",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_a_cost_has_no_cost_advantages(name, monkeypatch):
    """They would be the cost critic's noise, and with a limit of 0 CPO and PCPO would keep away from it."""
    script, seen = SCRIPTS[name], []
    update_policy = script.update_policy
    monkeypatch.setattr(script, "update_policy", lambda *args: seen.append(update_policy(*args)) or seen[-1])
    size = dict(num_envs=2, num_steps=64, total_timesteps=256, critic_minibatches=4)
    list(script.train(script.Args(env_id="toy_env:ToyFree-v0", cost_limit=0, **size)))
    assert len(seen) == 2 and {log["cost_surrogate_change"] for log in seen} == {0.0}
    if name == "cpo":
        assert {log["case"] for log in seen} == {4}
    assert not any(log.get("projected") for log in seen)


@pytest.mark.parametrize("name", NAMES)
def test_the_noise_of_the_first_checkpoint_is_the_one_that_training_starts_with(name):
    script = SCRIPTS[name]
    size = dict(num_envs=2, num_steps=64, total_timesteps=256, critic_minibatches=4)
    args = script.Args(env_id="toy_env:Toy-v0", cost_limit=25, **size)
    agent = next(script.train(args))["checkpoint"]["agent"]
    assert agent["std"].item() == pytest.approx(args.std_start)


@pytest.mark.parametrize("one, two", DIFFERENCES)
def test_two_baselines_differ_in_their_algorithm_alone(one, two):
    """And so do all pairs of the five: what isn't named here is the same, byte for byte, all along the chain."""
    first, second = (parts(f"baselines/{name}.py") for name in (one, two))
    differing = {part for part in {**first, **second} if first.get(part) != second.get(part)}
    assert differing == set(DIFFERENCES[one, two].split())


@pytest.mark.parametrize("one, two", DIFFERENCES)
def test_update_policy_differs_between_its_banners_alone(one, two):
    texts = []
    for name in (one, two):
        before, inside, after = re.split(r" *# (?:[A-Z-]* )?-{50,}\n", parts(f"baselines/{name}.py")["update_policy"])
        assert "step" in inside and "log = " in inside
        texts.append((before, after))
    assert texts[0] == texts[1]


def test_train_differs_in_the_multiplier_alone():
    added = changed_lines("trpo", "trpo_lagrangian", "train")
    assert added == [
        "agent.lagrangian_multiplier.fill_(args.lagrangian_init)",
        "multiplier = update_multiplier(",
        "agent.lagrangian_multiplier.item(), episode_costs, args.cost_limit, args.lagrangian_lr",
        ")",
        "agent.lagrangian_multiplier.fill_(multiplier)",
    ]
    moved = changed_lines("trpo_lagrangian", "pdo", "train")
    assert moved == ["policy_log = update_policy(agent, b_obs, b_actions, *estimates[:2], args)"] * 2


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shared_with_scpo_is_equal_byte_for_byte(name):
    scpo, baseline = parts("scpo_continuous.py"), parts(f"baselines/{name}.py")
    methods = [part for part in scpo if part.startswith("SafetyState")]
    assert len(methods) == 5
    for part in [*methods, "DELTA", "mlp", "gae", "__main__"]:
        shared = scpo[part].replace(' + " --fast" * args.fast', "") if part == "__main__" else scpo[part]
        assert shared == baseline[part], part


# docs/baselines.md ----------------------------------------------------------------------------------------------------
PAGE = (ROOT / "docs/baselines.md").read_text()
COLUMNS = {"TRPO": "trpo", "TRPO-L": "trpo_lagrangian", "CPO": "cpo", "PCPO": "pcpo", "PDO": "pdo"}


def test_the_settings_that_the_page_shows_are_the_scripts():
    assert f"| task | {' | '.join(COLUMNS)} |" in PAGE
    for task in trpo.TASK_SETTINGS:
        scripts = [SCRIPTS[name] for name in COLUMNS.values()]
        settings = [script.TASK_SETTINGS[task] or vars(script.Args()) for script in scripts]
        cells = (", ".join(str(x[key]) for key in ("target_kl", "lagrangian_lr") if key in x) for x in settings)
        assert f"| {task} | {' | '.join(cells)} |" in PAGE


def test_the_trials_that_the_page_shows_are_in_the_csv():
    with open(ROOT / "results/baseline_trials.csv") as file:
        trials = list(csv.DictReader(file))
    assert len(trials) > 50 and {trial["algo"] for trial in trials} == set(COLUMNS)
    section = PAGE[PAGE.index("## The trials") :]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(rows) > 10
    published = load_published()
    for algo, task, target_kl, rate, std, result, note in rows[1:]:
        shown = [algo, f"SafetyBall{task}-v0", target_kl, rate, std, *result.split(" / ")]
        keys = ("algo", "task", "target_kl", "lagrangian_lr", "std_end", "return", "cost")
        assert shown in [[trial[key] for key in keys] for trial in trials], shown
        for metric, value in zip(
            ("return", "cost"), re.findall(r"published (\S+) / (\S+)", note)[0] if note[:5] == "built" else ()
        ):
            iterations, values = published[f"SafetyBall{task}-v0", algo, metric]
            mean = values[(iterations > 36) & (iterations <= 40)].mean()
            assert value == f"{mean:.{len(value.partition('.')[2])}f}", (algo, task, metric)
