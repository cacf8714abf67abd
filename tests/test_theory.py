"""The paper's statements on small CMDPs, by exact dynamic programming (toy_cmdps.py); docs/theory.md lists them."""

import inspect
import itertools
import math
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import toy_env
from toy_cmdps import (
    START,
    Cmdp,
    Deterministic,
    Parting,
    Transient,
    policies,
    random_cmdp,
    softmax,
    two_steps,
    uniform_and_other,
)

import scpo_continuous as scpo

SEEDS = range(5)

# The code's functions, called here and nowhere below ------------------------------------------------------------------

SAFETY_GAMMA = scpo.Args().safety_gamma


def estimated_q(f, next_values, dones, gamma, lam):
    """Q^c's estimate; all arrays (num_steps, num_envs)."""
    return scpo.safety_q(f, next_values, dones, gamma, lam)


def discounted_safety(f, next_values, dones, gamma):
    return scpo.safety_target(f, next_values, dones, gamma)


def nullified(reward, q, k, cost=0, beta=0):
    return scpo.nullify(reward, cost, q, k, beta, 0.0)


def advantage_estimates(rewards, values, next_values, terminations, dones, gamma, lam):
    return scpo.gae(rewards, values, next_values, terminations, dones, gamma, lam)


def surrogate(logratio, advantages, kind):
    return scpo.clipped_surrogate(logratio, advantages, math.inf, kind)[0]


def wrapped_episode(costs, limit):
    """(undiscounted cost, cost discounted by 0.99, f of the last state) of one episode through the code's wrapper."""
    env = scpo.SafetyState(toy_env.Toy(costs=costs), limit)
    env.reset(seed=0)
    paid = [env.step(np.zeros(2))[4] for _ in costs]
    return env.spent, sum(0.99**t * info["cost"] for t, info in enumerate(paid)), paid[-1]["safe"]


class Enough(Exception):
    """Ends a run before its first gradient step."""


def handed_to_nullify(monkeypatch, critic, **settings):
    """Runs up to `nullify`, with a function of observations (..., n) for V^c.

    Returns the arguments of `nullify`, in order, and for each environment the (obs, reward, info, done) of its steps.
    """
    signature, step, handed, steps = inspect.signature(scpo.nullify), scpo.SafetyState.step, [], {}

    def watched_nullify(*args, **kwargs):
        handed.extend(signature.bind(*args, **kwargs).arguments.values())
        raise Enough

    def watched_step(self, action):
        obs, reward, terminated, truncated, info = step(self, action)
        steps.setdefault(id(self), []).append((obs, reward, info, terminated or truncated))
        return obs, reward, terminated, truncated, info

    monkeypatch.setattr(scpo, "nullify", watched_nullify)
    monkeypatch.setattr(scpo.SafetyState, "step", watched_step)
    monkeypatch.setattr(scpo.Agent, "get_safety_value", lambda self, obs: torch.as_tensor(critic(obs.numpy())))
    with pytest.raises(Enough):
        list(scpo.train(scpo.Args(compile=False, **settings)))
    return handed, list(steps.values())


# The safety critic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_v_c_is_the_probability_of_a_safe_trajectory_and_q_c_the_mean_of_the_next(seed):
    cmdp = random_cmdp(seed)
    pi, _ = policies(cmdp, seed)
    v, q = cmdp.safety(pi)
    p, states, _ = cmdp.trajectories(pi)
    assert v[0, START] == pytest.approx((p * cmdp.f[states].prod(0)).sum())
    assert 0.1 < v[0, START] < 0.99
    # Q^c(s, a) = sum p V^c(s'), without f(s): an unsafe state has only unsafe successors
    np.testing.assert_allclose(q, np.stack([cmdp.transition @ v[t + 1] for t in range(cmdp.horizon)]), atol=1e-11)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("advantage", [False, True])
def test_gradient_theorem_of_v_c(seed, advantage):
    """Theorem 1 and its corollary against finite differences: the gradient of V^c(s_0) in all logits."""
    cmdp = random_cmdp(seed)
    logits = cmdp.logits(seed)
    pi = softmax(logits)
    v, q = cmdp.safety(pi)
    weight = q - v[:-1, :, None] if advantage else q
    # sum_a pi grad log pi weight, by the softmax: pi_a (weight_a - sum_b pi_b weight_b)
    analytic = cmdp.visits(pi)[:, :, None] * pi * (weight - (pi * weight).sum(-1, keepdims=True))
    numeric = np.zeros_like(logits)
    for index in np.ndindex(logits.shape):
        bump = np.zeros_like(logits)
        bump[index] = 1e-5
        numeric[index] = (
            cmdp.safety(softmax(logits + bump))[0][0, START] - cmdp.safety(softmax(logits - bump))[0][0, START]
        )
    np.testing.assert_allclose(analytic, numeric / 2e-5, atol=1e-8)
    assert abs(analytic).max() > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_safety_advantage_is_a_c_on_average_for_every_n_step_estimate(seed):
    """A-hat^c = Q-bar^c - V^c over all episodes, given V^c, by `safety_q` and by the printed n-step estimates."""
    cmdp = random_cmdp(seed)
    pi, _ = policies(cmdp, seed)
    v, q = cmdp.safety(pi)
    p, states, actions = cmdp.trajectories(pi)
    f, values = cmdp.f[states], v[np.arange(cmdp.horizon + 1)[:, None], states]  # V^c(s_T) = f(s_T)
    dones = np.zeros_like(f[1:])
    dones[-1] = 1

    def mean_by_state_and_action(estimates):
        """Of the first steps' estimates (up to T, N) by (t, s, a); NaN where no episode comes to."""
        total, weight = np.zeros((2, len(estimates), *q.shape[1:]))
        for t, estimate in enumerate(estimates):
            np.add.at(total[t], (states[t], actions[t]), p * estimate)
            np.add.at(weight[t], (states[t], actions[t]), p)
        return np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0)

    q_c = np.where(np.isnan(mean_by_state_and_action(dones)), np.nan, q)
    a_c = q_c - v[:-1, :, None]
    assert np.nanmax(abs(a_c)) > 0.1
    for lam in (0.0, 0.3, 0.95, 1.0):
        a_hat = estimated_q(f[:-1], values[1:], dones, 1.0, lam) - values[:-1]
        np.testing.assert_allclose(mean_by_state_and_action(a_hat), a_c, atol=1e-9)
        assert abs(a_hat[0] - a_c[0, states[0], actions[0]]).max() > 0.1  # single estimates are not the mean
    for n in range(1, cmdp.horizon + 1):
        starts = range(cmdp.horizon - n + 1)
        printed = [f[t : t + n].prod(0) * values[t + n] for t in starts]
        np.testing.assert_allclose(mean_by_state_and_action(printed), q_c[: len(printed)], atol=1e-9)
        np.testing.assert_array_equal(printed, [f[t + n - 1] * values[t + n] for t in starts])  # unsafe once, unsafe on
    # Q^{c,(2)} as printed, f(S_t) f(S_{t+1}) V^c(S_{t+1}), is the one-step estimate
    np.testing.assert_array_equal(f[:-1] * f[1:] * values[1:], f[:-1] * values[1:])


def n_step_estimates(f, next_values, dones, gamma, t):
    """Of one environment: n steps of f, discounted like V^c_gamma, then V^c, for n up to the end that comes first."""
    estimates, known, weight = [], 0.0, 1.0
    for n in range(t, len(next_values)):
        estimates.append(known + weight * next_values[n])
        if dones[n] or n + 1 == len(next_values):
            return estimates
        known += weight * (1 - gamma) * f[n + 1]
        weight *= gamma


def geometric_average(estimates, lam):
    weights = [(1 - lam) * lam**n for n in range(len(estimates) - 1)]
    return np.dot([*weights, 1 - sum(weights)], estimates)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.7, 0.995, 1.0])
def test_safety_q_is_the_geometric_average_of_discounted_n_step_estimates(lam, gamma):
    """Two environments: two episodes that end, one of them unsafe, and one that the rollout cuts off in each."""
    rng = np.random.default_rng(0)
    dones = np.zeros((12, 2))
    dones[[4, 9], 0] = dones[[2, 7], 1] = 1
    f = np.ones((12, 2))
    f[[3, 4], 0] = f[[10, 11], 1] = 0
    next_f = np.where(dones == 1, [[0, 1]], np.vstack([f[1:], [[1, 0]]]))
    next_values = next_f * np.where(dones == 1, 1, rng.uniform(size=(12, 2)))
    q = estimated_q(f, next_values, dones, gamma, lam)
    for t, i in np.ndindex(12, 2):
        estimates = n_step_estimates(f[:, i], next_values[:, i], dones[:, i], gamma, t)
        assert q[t, i] == pytest.approx(geometric_average(estimates, lam)), (t, i)


class SafeAndUnsafe(toy_env.Toy):
    """Every second episode ends within a limit of 3, every second one beyond."""

    def reset(self, **kwargs):
        self.episodes = getattr(self, "episodes", 0) + 1
        self.costs = np.linspace(0.1, 0.5, 20) / (3 if self.episodes % 2 else 1)
        return super().reset(**kwargs)


gym.register("SafeAndUnsafe-v0", SafeAndUnsafe, max_episode_steps=20)


@pytest.mark.parametrize("lambdas", [(1,), (0,), (0, 1), (0.3,)])
def test_what_nullify_gets(lambdas, monkeypatch):
    """Rewards, costs and the mean of the estimates of Q^c against the steps that a run took, before it has learned."""

    def critic(obs):
        return 0.5 + 0.4 * np.sin(3 * obs.sum(-1))

    task = dict(env_id="SafeAndUnsafe-v0", num_envs=2, num_steps=64, total_timesteps=128, cost_limit=3)
    reward = dict(safety_gamma=0.9, k=3, beta=0.7, reward_bias=0.2, penalty="always", safety_lambdas=lambdas)
    (rewards, costs, q, *settings), steps = handed_to_nullify(monkeypatch, critic, **task, **reward)
    assert settings == [3, 0.7, 0.2, "always"]
    for i, rollout in enumerate(steps):
        obs, reward, info, dones = zip(*rollout[-64:])  # before, one step shows whether the task reports a cost
        np.testing.assert_allclose(rewards[:, i], reward, rtol=1e-6)
        np.testing.assert_allclose(costs[:, i], [step["cost"] for step in info], rtol=1e-6)
        safe = np.array([step["safe"] for step in info], dtype=float)
        assert set(safe[np.array(dones)]) == {0, 1}
        next_values = safe * np.where(dones, 1, critic(np.array(obs)))
        f = np.append(1, safe)  # of the episode's state before each step; of a new episode's first it isn't asked
        for t in range(64):
            estimates = n_step_estimates(f, next_values, dones, 0.9, t)
            expected = np.mean([geometric_average(estimates, lam) for lam in lambdas])
            assert q[t, i] == pytest.approx(expected, abs=1e-5), t


@pytest.mark.parametrize("gamma", [0.9, 0.995, 1.0])
def test_discounted_safety_value(gamma):
    """V^c_gamma is the mean of f at a geometrically distributed step: 1 for a safe episode, not <= 1 - gamma^n."""
    steps = 6
    dones = np.eye(steps)[:, -1:]
    for first_unsafe in range(1, steps + 2):  # steps + 1: a safe episode
        f = (np.arange(steps + 1) < first_unsafe).astype(float)
        targets = discounted_safety(f[:-1, None], f[1:, None], dones, gamma)[:, 0]
        for t in range(steps):
            drawn = [(1 - gamma) * gamma**n for n in range(steps - t)]
            assert targets[t] == pytest.approx(np.dot([*drawn, 1 - sum(drawn)], f[t:]))
    np.testing.assert_allclose(targets, 1)
    printed_bound = 1 - gamma ** np.arange(steps, 0, -1)
    assert (targets > printed_bound).all()


# The three constraints ------------------------------------------------------------------------------------------------


def test_the_three_constraints_disagree():
    """But a mean within the limit keeps the paper's constraint: discounting only lowers it."""
    late, free, dear = [0] * 10 + [1] * 10, [0] * 20, [1] * 20
    cost, discounted, safe = wrapped_episode(late, limit=9.5)
    assert (cost, discounted, safe) == (10, pytest.approx(8.65, abs=5e-3), False)
    costs, discounted, safe = zip(*(wrapped_episode(costs, limit=11) for costs in (free, dear)))
    assert np.mean(costs) == 10 and np.mean(safe) == 0.5
    costs, discounted, safe = zip(*(wrapped_episode(costs, limit=1) for costs in [free] * 9 + [dear]))
    assert np.mean(costs) == 2 and np.mean(safe) == 0.9
    assert 1 < np.mean(discounted) <= np.mean(costs)


def test_reward_long_before_a_violation_still_counts():
    """250 steps, the last exceeds the limit: Q^c(s_0, a_0) is 0.713 by each estimate, if the critic has learned it."""
    gamma, steps = SAFETY_GAMMA, 250
    learned = 1 - gamma ** np.arange(steps, -1.0, -1)  # V^c_gamma(s_t), of s_0 .. s_250
    f, dones = np.ones((steps, 1)), np.eye(steps)[:, -1:]
    np.testing.assert_allclose(discounted_safety(f, learned[1:, None], dones, gamma)[:, 0], learned[:-1])
    for lam in (0.0, 0.5, 1.0):
        q = estimated_q(f, learned[1:, None], dones, gamma, lam)[:, 0]
        assert gamma == 0.995 and q[0] == pytest.approx(1 - 0.995**249) == pytest.approx(0.713, abs=5e-4)
        assert nullified(1.0, q, 2)[0] == pytest.approx(0.508, abs=5e-4)
        assert nullified(1.0, q, 4)[0] == pytest.approx(0.258, abs=5e-4)
        assert nullified(1.0, q, 2).mean() == pytest.approx(0.225, abs=5e-4)  # of the whole episode's constant reward
    assert (estimated_q(f, learned[1:, None], dones, 1.0, 1.0) == 0).all()  # Monte Carlo without a discount


@pytest.mark.parametrize("seed", SEEDS)
def test_v_c_depends_on_the_time_left(seed):
    """One policy for all times, one state, the same cost spent: the fewer steps are left the safer."""
    cmdp = random_cmdp(seed)
    pi = np.broadcast_to(policies(cmdp, seed)[0][0], (cmdp.horizon, cmdp.n, cmdp.actions))
    v = cmdp.safety(pi)[0][:, START]
    assert (np.diff(v) > -1e-12).all() and v[-1] - v[0] > 0.1


# Trust region results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_performance_difference_with_one_minus_the_ratio(seed):
    """Theorem 2, for V and V^c, and its corollary, with A for Q."""
    cmdp = random_cmdp(seed)
    pi, other = policies(cmdp, seed)
    for (v, q), (v_other, _), gamma in (
        (cmdp.values(pi, cmdp.reward, 0.9), cmdp.values(other, cmdp.reward, 0.9), 0.9),
        (cmdp.safety(pi), cmdp.safety(other), 1.0),
    ):
        gain = v_other[0, START] - v[0, START]
        assert abs(gain) > 1e-3
        for weight in (q, q - v[:-1, :, None]):
            assert gain == pytest.approx(cmdp.mean(other, (1 - pi / other) * weight, gamma))


def test_performance_difference_needs_every_action_of_pi():
    """Theorem 2 "for arbitrary policies": pi' can't weigh what it never does. One step, two actions."""
    pi, other = np.array([0.5, 0.5]), np.array([1.0, 0.0])

    def printed(weight):
        return other[0] * (1 - pi[0] / other[0]) * weight[0]  # the second action has probability 0 under pi'

    equal, unequal = np.array([1.0, 1.0]), np.array([1.0, 0.0])
    assert (other - pi) @ equal == 0 and printed(equal) == 0.5  # with Q
    assert (other - pi) @ unequal == 0.5 and printed(unequal - pi @ unequal) == 0.25  # with A


WEIGHTS = {"pi'/pi - 1": lambda pi, other: other / pi - 1, "1 - pi/pi'": lambda pi, other: 1 - pi / other}


def shortfall(mean, pi, other, advantages, gain, weight, gamma):
    """How far the estimate of Theorem 3 or 4, by its weight, exceeds the gain; and 2 alpha epsilon."""
    alpha = 0.5 * abs(pi - other).sum(-1).max()
    estimates = WEIGHTS[weight](pi, other) * advantages
    return mean(pi, estimates, gamma) - gain, 2 * alpha * abs(estimates).max()


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("gamma", [0.01, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("alpha", [0.001, 0.05, 0.3])
def test_lower_bounds(weight, gamma, alpha):
    """Theorem 3 with its penalty, Theorem 4 without gamma in it, where they are tight as alpha falls."""
    worst = Parting(alpha, weight)
    gain = worst.mean(worst.other, worst.advantages, gamma)
    assert worst.mean(worst.pi, worst.advantages, gamma) == pytest.approx(0, abs=1e-12)
    missing, penalty = shortfall(worst.mean, worst.pi, worst.other, worst.advantages, gain, weight, gamma)
    penalty *= (gamma if weight == "pi'/pi - 1" else 1) / (1 - gamma) ** 2
    assert missing <= penalty
    assert missing == pytest.approx(penalty * (1 - gamma) / (1 - gamma * (1 - alpha)), rel=1e-3)


def test_the_second_bound_fails_as_printed():
    """One step, rewards 1 and 0: as gamma falls the printed penalty vanishes, the error doesn't."""
    gamma = 0.01
    pi, other = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    advantages = np.array([0.5, -0.5])
    gain = 0.9 - 0.5
    missing, penalty = shortfall(lambda p, x, _: p @ x, pi, other, advantages, gain, "1 - pi/pi'", gamma)
    assert missing == pytest.approx(0.711, abs=5e-4)
    assert gamma * penalty / (1 - gamma) ** 2 == pytest.approx(0.016, abs=5e-4)
    assert penalty / (1 - gamma) ** 2 >= missing


def test_the_last_line_of_theorem_3s_proof_fails():
    """Two steps, gamma = 0.1: the difference is -0.0320; the theorem allows -0.0395, that line, by gamma^2, -0.0040."""
    gamma, alpha = 0.1, 0.4
    cmdp = two_steps(unsafe=np.zeros((2, 2)))
    pi, other = uniform_and_other(cmdp, alpha)
    v, q = cmdp.values(pi, cmdp.reward, gamma)
    advantages = q - v[:-1, :, None]
    gain = cmdp.values(other, cmdp.reward, gamma)[0][0, START] - v[0, START]
    missing, penalty = shortfall(cmdp.mean, pi, other, advantages, gain, "pi'/pi - 1", gamma)
    # the proof's difference, of H under both policies, is the theorem's
    h = (pi * (other / pi - 1) * advantages).sum(-1, keepdims=True)
    assert cmdp.mean(other, h, gamma) - cmdp.mean(pi, h, gamma) == pytest.approx(-missing)
    assert missing == pytest.approx(0.0320, abs=5e-5)
    assert gamma * penalty / (1 - gamma) ** 2 == pytest.approx(0.0395, abs=5e-5)
    assert gamma**2 * penalty / (1 - gamma) ** 2 == pytest.approx(0.0040, abs=5e-5)
    # the sum in it: alpha gamma / ((1 - gamma)(1 - gamma (1 - alpha))); printed with another factor gamma
    total = sum(gamma**t * (1 - (1 - alpha) ** t) for t in range(100))
    assert total == pytest.approx(alpha * gamma / ((1 - gamma) * (1 - gamma * (1 - alpha))))
    assert missing <= total * penalty / alpha


def test_the_lower_bound_of_v_c_needs_a_horizon():
    """V^c has gamma = 1: the penalty is infinite. For T steps 2 epsilon sum_t (1 - (1 - alpha)^t) is, here reached."""
    alpha = 0.4
    cmdp = two_steps(unsafe=np.eye(2))
    pi, other = uniform_and_other(cmdp, alpha)
    v, q = cmdp.safety(pi)
    gain = cmdp.safety(other)[0][0, START] - v[0, START]
    missing, penalty = shortfall(cmdp.mean, pi, other, q - v[:-1, :, None], gain, "pi'/pi - 1", 1.0)
    assert missing == pytest.approx(penalty / alpha * sum(1 - (1 - alpha) ** t for t in range(2)))
    assert missing > 0.3


@pytest.mark.parametrize("seed", SEEDS)
def test_coupled_policies_are_together_at_least_this_often(seed):
    """P[S'_t = S_t] >= (1 - alpha)^t, printed with <=: they may meet again."""
    cmdp = random_cmdp(seed)
    pi, other = policies(cmdp, seed)
    alpha = 0.5 * abs(pi - other).sum(-1).max()
    together = cmdp.probability_of_the_same_state(pi, other)
    assert together[0] == 1
    assert (together[1:] > (1 - alpha) ** np.arange(1, cmdp.horizon) + 0.01).all()
    cmdp = two_steps(unsafe=np.zeros((2, 2)))  # where they part for good
    assert cmdp.probability_of_the_same_state(*uniform_and_other(cmdp, 0.4)) == pytest.approx([1, 0.6])


def test_gradients_of_both_surrogates():
    """pi_0 A grad pi, times 1 / pi_0 for L_1 and pi_0 / pi^2 for L_2; ratio and ratio - 1 have the same gradient."""
    torch.manual_seed(0)
    logits, advantages = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)
    pi, pi_0 = torch.softmax(logits, 0), torch.full((5,), 0.2, dtype=torch.float64)

    def gradient(objective):
        return torch.autograd.grad(objective, logits, retain_graph=True)[0].numpy()

    for kind, factor in (("l1", 1 / pi_0), ("l2", pi_0 / pi.detach() ** 2)):
        analytic = gradient((pi_0 * factor * advantages * pi).sum())
        np.testing.assert_allclose(gradient(surrogate((pi / pi_0).log(), advantages, kind)), analytic)
    np.testing.assert_allclose(
        gradient(surrogate((pi / pi_0).log(), advantages, "l1")), gradient((pi / pi_0 * advantages).mean())
    )


# The nullified reward -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_v_r_is_the_value_of_the_nullified_reward(seed, gamma):
    """V^r = sum_tau P(tau) R(tau) f(tau) is the value of r Q^c."""
    cmdp = random_cmdp(seed)
    pi, _ = policies(cmdp, seed)
    v_r, _ = cmdp.values(pi, nullified(cmdp.reward, cmdp.safety(pi)[1], 1), gamma)
    p, states, actions = cmdp.trajectories(pi)
    returns = sum(gamma**t * cmdp.reward[states[t], actions[t]] for t in range(cmdp.horizon))
    assert v_r[0, START] == pytest.approx((p * returns * cmdp.f[states].prod(0)).sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_v_r_k_falls_in_k(seed):
    cmdp = random_cmdp(seed)
    pi, _ = policies(cmdp, seed)
    q = cmdp.safety(pi)[1]
    values = [cmdp.values(pi, nullified(cmdp.reward, q, k), 0.9)[0] for k in (0, 1, 2, 4, 8, 1e9, np.inf)]
    for lower, higher in zip(values[1:], values[:-1]):
        assert (lower <= higher + 1e-12).all()
    assert values[0][0, START] > values[1][0, START] > values[4][0, START]
    np.testing.assert_allclose(values[0], cmdp.values(pi, cmdp.reward, 0.9)[0])
    np.testing.assert_allclose(values[-2], values[-1])  # the limit in k counts what is surely safe


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [1, 4])
def test_v_of_the_nullified_reward_of_pi(seed, k):
    """Theorem 6: the other policy's value of pi's nullified reward is pi's, plus its own mean of pi's advantages."""
    cmdp = random_cmdp(seed)
    pi, other = policies(cmdp, seed)
    reward = nullified(cmdp.reward, cmdp.safety(pi)[1], k)
    (v, q), (v_bar, _) = cmdp.values(pi, reward, 0.9), cmdp.values(other, reward, 0.9)
    gain = v_bar[0, START] - v[0, START]
    assert abs(gain) > 1e-3 and gain == pytest.approx(cmdp.mean(other, q - v[:-1, :, None], 0.9))
    assert gain == pytest.approx(cmdp.mean(other, (1 - pi / other) * q, 0.9))  # what its proof ends in


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [0, 1, 4])
def test_v_bar_is_no_first_order_approximation(seed, k):
    """V-bar leaves out how Q^c changes with the policy: its error falls with the step, not with the step's square."""
    cmdp = random_cmdp(seed)
    logits, direction = cmdp.logits(seed), cmdp.logits(seed + 100)
    pi = softmax(logits)

    def error(step):
        other = softmax(logits + step * direction)
        rewards = [nullified(cmdp.reward, cmdp.safety(policy)[1], k) for policy in (other, pi)]
        return np.subtract(*[cmdp.values(other, reward, 0.9)[0][0, START] for reward in rewards])

    slopes = [error(step) / step for step in (1e-3, 1e-4)]
    if k == 0:
        assert slopes == [0, 0]
    else:
        assert abs(slopes[0]) > 1e-3 and slopes[0] == pytest.approx(slopes[1], rel=0.05)


def one_choice(q, rewards):
    """The paper's first two toys: one step, whose action is safe with probability q (2,) and earns rewards (2,)."""
    transition = np.zeros((3, 2, 3))
    transition[0, :, 1], transition[0, :, 2] = q, 1 - np.array(q)
    return Cmdp(transition, [rewards, [0, 0], [0, 0]], np.zeros(3), [1, 1, 0], 1)


@pytest.mark.parametrize("k", [1, 4])
def test_convergence_theorem(k):
    """Theorem 7: Theorem 3 for the nullified reward holds, Theorem 4 needs its penalty without gamma.

    Nearly tight: for the first two steps that are safe with probability 1/2, for the second the paper's first toy.
    """

    def bounds(cmdp, alpha, weight, gamma):
        pi, other = uniform_and_other(cmdp, alpha)
        q_c = cmdp.safety(pi)[1]
        reward = nullified(cmdp.reward, q_c, k)
        assert 0 < q_c[0, START, 0] < 1
        (v, q), v_bar = cmdp.values(pi, reward, gamma), cmdp.values(other, reward, gamma)[0]
        gain = v_bar[0, START] - v[0, START]
        missing, penalty = shortfall(cmdp.mean, pi, other, q - v[:-1, :, None], gain, weight, gamma)
        return missing, penalty / (1 - gamma) ** 2

    missing, penalty = bounds(two_steps(unsafe=np.full((2, 2), 0.5)), 0.4, "pi'/pi - 1", 0.1)
    assert 0.8 * 0.1 * penalty < missing <= 0.1 * penalty
    favoured = 0.4 if k == 1 else -0.4  # which action, by the paper's numbers
    missing, penalty = bounds(one_choice((0.5, 1.0), (200, 20)), favoured, "1 - pi/pi'", 0.01)
    assert 0.4 * penalty < missing <= penalty
    assert missing > 0.01 * penalty  # as printed


def test_a_gamble_maximises_v_r_inf():
    """Theorem 5 fails even where a surely safe policy earns: reward after a gamble that went well counts in full.

    Action 0 leads to state 1, worth 100, or to the unsafe state 3, at equal odds; action 1 to state 2, worth 1.
    """
    transition = np.zeros((4, 2, 4))
    transition[0, 0, [1, 3]], transition[0, 1, 2] = 0.5, 1
    transition[1:, :, 1:] = np.eye(3)[:, None]
    cmdp = Cmdp(transition, [[0, 0], [100, 100], [1, 1], [0, 0]], np.zeros(4), [1, 1, 1, 0], 2)
    found = []
    for gamble in np.linspace(0, 1, 11):
        pi = np.full((2, 4, 2), 0.5)
        pi[0, 0] = gamble, 1 - gamble
        v_c, q = cmdp.safety(pi)
        found.append((cmdp.values(pi, nullified(cmdp.reward, q, np.inf), 0.9)[0][0, START], v_c[0, START]))
    assert found[0] == pytest.approx((0.9, 1))  # surely safe
    assert max(found) == found[-1] == pytest.approx((45, 0.5))


@pytest.mark.parametrize("seed", range(10))
def test_stability_where_nothing_is_left_to_chance(seed):
    """Theorem 5 where transitions are deterministic and some safe episode earns something.

    Three steps, two actions; each of the eight last states is unsafe with probability 1/2. All policies with
    probabilities 0, 1/2 and 1 in the 1 + 2 + 4 states before.
    """
    rng = np.random.default_rng(seed)
    gamma = 0.9
    first = np.array(list(itertools.product((0, 0.5, 1), repeat=7)))  # (policies, states): probability of action 0
    rewards, f = rng.uniform(0.1, 1, (7, 2)), rng.integers(0, 2, 8)

    def values(state):
        """(V^c, V^{r,inf}) of all policies; actions lead from state s to 2 s + 1 and 2 s + 2; 7 to 14 are the last."""
        if state >= 7:
            return np.full(len(first), f[state - 7], dtype=float), np.zeros(len(first))
        pi = np.stack([first[:, state], 1 - first[:, state]])
        q_c, later = map(np.array, zip(values(2 * state + 1), values(2 * state + 2)))
        reward = nullified(rewards[state][:, None], q_c, np.inf)
        return (pi * q_c).sum(0), (pi * (reward + gamma * later)).sum(0)

    v_c, v_r = values(0)
    assert f.any()
    best = v_r > v_r.max() - 1e-12
    assert v_r.max() > 0 and (v_c[best] == 1).all() and (v_c < 1).any()


def test_where_no_policy_is_safe_v_r_inf_says_nothing():
    """Theorem 5 and the paper's second toy: 0 for every policy, so each maximises it and none is safe."""
    cmdp = one_choice((0.5, 0.7), (200, 20))
    for first in (0, 0.3, 1):
        pi = np.full((1, 3, 2), [first, 1 - first])
        v_c, q = cmdp.safety(pi)
        assert v_c[0, START] <= 0.7
        assert cmdp.values(pi, nullified(cmdp.reward, q, np.inf), 0.9)[0][0, START] == 0


@pytest.mark.parametrize("k", [0, 1, 4, np.inf])
def test_third_toy(k):
    """Two actions as safe and as rewarding as each other: V^{r,k} favours neither, V^{rc,k} the one of less cost.

    The source has no figure; the numbers are ours: safe with probability 0.9, else a cost of 10 or of 1.
    """
    transition = np.zeros((4, 2, 4))
    transition[0, :, 1] = 0.9
    transition[0, [0, 1], [2, 3]] = 0.1
    transition[1:, :, 1:] = np.eye(3)[:, None]
    cmdp = Cmdp(transition, [[100, 100], [0, 0], [0, 0], [0, 0]], [0, 0, 10, 1], [1, 1, 0, 0], 2)
    pi = np.full((2, 4, 2), 0.5)
    q_c = cmdp.safety(pi)[1]
    assert q_c[0, START] == pytest.approx([0.9, 0.9])
    for beta, expected in ((0, 0), (2, 0 if k == 0 else 0.9)):
        v, q = cmdp.values(pi, nullified(cmdp.reward, q_c, k, cmdp.cost[:, None], beta), 1.0)
        assert q[0, START] - v[0, START] == pytest.approx([-expected, expected])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [1, 4, np.inf])
def test_where_all_is_unsafe_v_rc_k_is_the_cost(seed, k):
    """V^{rc,k} = -beta E[sum gamma^t c], printed without beta; with k = 0 it is V, with beta = 0 it says nothing."""
    cmdp = random_cmdp(seed, limit=-1)
    pi, _ = policies(cmdp, seed)
    q = cmdp.safety(pi)[1]
    assert (q == 0).all()

    def value(k, beta):
        return cmdp.values(pi, nullified(cmdp.reward, q, k, cmdp.cost[:, None], beta), 0.9)[0][0, START]

    p, states, _ = cmdp.trajectories(pi)
    cost = sum(0.9**t * p @ cmdp.cost[states[t]] for t in range(cmdp.horizon))
    assert cost > 0.3
    assert value(k, 3) == pytest.approx(-3 * cost)
    assert value(k, 0) == 0
    assert value(0, 3) == pytest.approx(cmdp.values(pi, cmdp.reward, 0.9)[0][0, START])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [0, 1, 4, np.inf])
def test_where_all_is_safe_nothing_is_taken_away(seed, k):
    """V = V^{r,k} = V^{rc,k} where V^c = 1, costs or not."""
    cmdp = random_cmdp(seed, limit=4)
    pi, _ = policies(cmdp, seed)
    q = cmdp.safety(pi)[1]
    assert (q == 1).all() and cmdp.mean(pi, cmdp.cost[:, None], 1.0) > 0.3
    v = cmdp.values(pi, cmdp.reward, 0.9)[0]
    np.testing.assert_allclose(cmdp.values(pi, nullified(cmdp.reward, q, k), 0.9)[0], v)
    np.testing.assert_allclose(cmdp.values(pi, nullified(cmdp.reward, q, k, cmdp.cost[:, None], 3), 0.9)[0], v)


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_gae_is_the_geometric_average_of_the_n_step_advantages(lam):
    """A-hat^(q) = -V_t + r'_t + gamma r'_{t+1} + ... + gamma^(q-1) r'_{t+q-1} + gamma^q V_{t+q}."""
    rng = np.random.default_rng(0)
    gamma, steps = 0.9, 5
    rewards, values = rng.normal(size=steps), rng.normal(size=steps + 1)
    dones = np.eye(steps)[:, -1:]  # by a time limit
    estimates = advantage_estimates(rewards[:, None], values[:-1, None], values[1:, None], 0 * dones, dones, gamma, lam)
    for t in range(steps):
        n_step = [
            -values[t] + sum(gamma**i * rewards[t + i] for i in range(n)) + gamma**n * values[t + n]
            for n in range(1, steps - t + 1)
        ]
        assert estimates[t, 0] == pytest.approx(geometric_average(n_step, lam))


# Augmented states -----------------------------------------------------------------------------------------------------


def outcome(to_1_from_0, to_1_from_1, steps=10, limit=5):
    """P[safe] and E[reward; safe] in the CMDP of "Augmented States": start in s^1, reward and cost 1 in s^1, 0 in s^0.

    to_1_from_0[q], to_1_from_1[q]: the policy's probability of s^1 next; q is the cost spent, this step's included.
    """
    ways = {(1, 0): 1.0}  # (state, spent) -> probability
    for _ in range(steps):
        new = {}
        for (state, spent), p in ways.items():
            spent += state
            to_1 = (to_1_from_1 if state else to_1_from_0)[spent]
            for later, chance in ((1, to_1), (0, 1 - to_1)):
                new[later, spent] = new.get((later, spent), 0) + p * chance
        ways = new
    safe = [(p, spent) for (_, spent), p in ways.items() if spent <= limit]
    return sum(p for p, _ in safe), sum(p * spent for p, spent in safe)


def test_the_augmented_policy_is_deterministic_and_better():
    """Where s^0 is for good, as in the paper's account: stay in s^1 for five steps, leave at t = 5.

    With q in the state the best policy does just that. Without it staying has one probability for all steps: the best
    policy throws dice, is unsafe at times and earns less; of the deterministic ones one earns 1, the other is unsafe.
    """
    never = [0.0] * 11
    assert outcome(never, [1.0] * 5 + [0.0] * 6) == (1.0, 5.0)
    plain = {stay: outcome(never, [stay] * 11) for stay in np.linspace(0, 1, 1001)}
    best = max(plain, key=lambda stay: plain[stay][1])
    assert 0 < best < 1 and plain[best][0] < 1 and plain[best][1] < 2.5
    assert plain[0.0] == (1.0, 1.0) and plain[1.0] == (0.0, 0.0)


def test_where_one_can_return_to_s_1_alternating_needs_no_augmentation():
    """The text leaves open whether s^0 leads back. If it does, s^1, s^0, s^1, ... spends the limit of 5 in 10 steps."""
    assert outcome([1.0] * 11, [0.0] * 11) == (1.0, 5.0)


# Lyapunov appendix ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_lyapunov_lemma_1(seed):
    """epsilon = D_{pi*} - T_{pi_B,d}[D_{pi*}] makes L_epsilon = D_{pi*}, a Lyapunov function only if epsilon >= 0."""
    cmdp = Transient(seed)
    base = cmdp.random_policy()
    d_best = cmdp.total(cmdp.optimum(cmdp.total(base, cmdp.d)[0]), cmdp.d)
    epsilon = d_best - cmdp.backup(base, d_best)
    np.testing.assert_allclose(cmdp.total(base, cmdp.d + epsilon), d_best)
    assert (epsilon < 0).any()  # so the condition T_{pi_B,d}[L] <= L fails, in each of these


@pytest.mark.parametrize("seed", SEEDS)
def test_lyapunov_lemma_2(seed):
    """Backups of a Lyapunov function fall, from L to D_pi."""
    cmdp = Transient(seed)
    pi = cmdp.random_policy()
    lyapunov = cmdp.total(pi, cmdp.d + cmdp.rng.uniform(size=cmdp.n))
    d_pi = cmdp.total(pi, cmdp.d)
    assert (cmdp.backup(pi, lyapunov) <= lyapunov).all() and (lyapunov > d_pi + 0.3).all()
    backups = [lyapunov]
    for _ in range(200):
        backups.append(cmdp.backup(pi, backups[-1]))
        assert (d_pi - 1e-12 <= backups[-1]).all() and (backups[-1] <= backups[-2] + 1e-12).all()
    np.testing.assert_allclose(backups[-1], d_pi)


@pytest.mark.parametrize("seed", SEEDS)
def test_lyapunov_lemma_3_and_its_corollary(seed):
    """For a policy of F_L, other than pi_B: the costs up to T and L of what follows are at most L(x_0)."""
    cmdp = Transient(seed)
    base = cmdp.random_policy()
    lyapunov = cmdp.total(base, cmdp.d + cmdp.rng.uniform(0, 0.02, cmdp.n))
    pi = cmdp.random_policy(cmdp.d[:, None] + cmdp.transition @ lyapunov <= lyapunov[:, None])
    assert abs(pi - base).max() > 0.1 and (cmdp.backup(pi, lyapunov) <= lyapunov).all()

    def paid_and_left(pi, lyapunov):
        """The printed left side for T = 0 .. 49, and P[X_t = x] L(x) (50, n)."""
        here, paid, sums, products = np.eye(cmdp.n)[START], 0, [], []
        for _ in range(50):
            products.append(here * lyapunov)
            paid += here @ cmdp.d
            here = here @ cmdp.chain(pi)
            sums.append(paid + here @ lyapunov)
        return np.array(sums), np.array(products)

    sums, products = paid_and_left(pi, lyapunov)
    assert (sums < lyapunov[START]).all() and (products <= lyapunov[START] + 1e-12).all()
    d_base = cmdp.total(base, cmdp.d)
    np.testing.assert_allclose(paid_and_left(base, d_base)[0], d_base[START])  # reached by pi_B with L = D_{pi_B}
    dearest = np.eye(cmdp.actions)[(cmdp.transition @ lyapunov).argmax(1)]
    assert (cmdp.backup(dearest, lyapunov) > lyapunov).any()  # outside F_L the lemma fails with T = 0


def test_a_deterministic_cmdp_may_need_a_random_policy():
    """Against the appendix. One step, d_0 = 1: action 0 has c = 0 and d = 2, action 1 has c = 1 and d = 0."""
    c, d, d_0 = np.array([0.0, 1.0]), np.array([2.0, 0.0]), 1
    deterministic = [c[a] for a in range(2) if d[a] <= d_0]
    half = np.array([0.5, 0.5])
    assert half @ d <= d_0 and half @ c == 0.5 < min(deterministic) == 1


def test_deterministic_lyapunov_corollary():
    """Appendix "Deterministic cases", lemma 4 and corollary 4: with L = D_{pi_B}, T_{pi_1*,d}[L] <= max(d_0, L).

    They hold where the paper's assumption does and may fail elsewhere; pi_B is any policy, not the constraint's best.
    """
    kept, failed, above_l = 0, 0, 0
    for seed in range(100):
        cmdp = Deterministic(seed)
        assert cmdp.trajectory(cmdp.mixed) == cmdp.path  # so pi_1* is as good as pi*
        lemma = all(cmdp.d_base[at] <= cmdp.limit and cmdp.backups[at] <= cmdp.limit for at in cmdp.path)
        corollary = (cmdp.backups <= np.maximum(cmdp.limit, cmdp.d_base[:-1])).all()
        if cmdp.l_star[0, START] <= cmdp.limit:
            assert lemma and corollary, seed
            kept += 1
            above_l += (cmdp.backups > cmdp.d_base[:-1]).any()
        else:
            failed += not lemma and not corollary
    assert kept >= 50 and above_l >= 20 and failed >= 3


# The page -------------------------------------------------------------------------------------------------------------


def test_every_statement_on_the_page_has_a_verdict_and_a_test():
    page = (Path(__file__).parent.parent / "docs/theory.md").read_text()
    tables = [table for table in page.split("\n\n") if table.startswith("| statement |")]
    rows = [row for table in tables for row in table.splitlines()[2:]]
    assert len(rows) >= 50
    for row in rows:
        _, _, verdict, test = row.strip("| ").split(" | ")
        assert verdict.startswith(("holds as printed", "holds with a change: ", "fails: ")), row
        assert re.fullmatch(r"`test_\w+`", test), row
