"""The paper's claims on small random tabular CMDPs, by exact dynamic programming.

Finite horizon, as in the paper's definitions of f and V^c: states are (t, s, q) with q the cost spent so far, a state costs 0
or 1. All expectations are sums over all transitions, none is sampled.
"""

import itertools

import numpy as np
import pytest

NUM_STATES, NUM_ACTIONS, HORIZON, LIMIT = 3, 2, 4, 1


class Cmdp:
    """A random CMDP on the augmented states (s, q), q = 0 .. HORIZON, as flat indices s * (HORIZON + 1) + q.

    transition (n, actions, n), reward (n, actions) >= 0, cost (n,), f (n,), all of the augmented state. The cost of a state is
    paid on leaving it, so q is the cost of the states before. An episode is s_0 .. s_T with T = HORIZON actions.
    """

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        width = HORIZON + 1
        self.n = NUM_STATES * width
        p = rng.dirichlet(np.ones(NUM_STATES), (NUM_STATES, NUM_ACTIONS))
        state_cost = np.array([0, 1, 0])
        self.cost = np.repeat(state_cost, width).astype(float)
        self.reward = np.repeat(rng.uniform(0, 1, (NUM_STATES, NUM_ACTIONS)), width, axis=0)
        self.f = np.tile(np.arange(width) <= LIMIT, NUM_STATES).astype(float)
        self.transition = np.zeros((self.n, NUM_ACTIONS, self.n))
        for s, q, a, later in itertools.product(range(NUM_STATES), range(width), range(NUM_ACTIONS), range(NUM_STATES)):
            spent = min(q + state_cost[s], HORIZON)
            self.transition[s * width + q, a, later * width + spent] += p[s, a, later]

    def policy(self, seed):
        """Logits (HORIZON, n, actions): one policy a time step, since the horizon is finite."""
        return np.random.default_rng(seed).normal(size=(HORIZON, self.n, NUM_ACTIONS))

    def safety(self, pi):
        """V^c (HORIZON + 1, n) and Q^c (HORIZON, n, actions): the probability that all states from t on are safe."""
        v, q = np.zeros((HORIZON + 1, self.n)), np.zeros((HORIZON, self.n, NUM_ACTIONS))
        v[-1] = self.f
        for t in reversed(range(HORIZON)):
            q[t] = self.f[:, None] * (self.transition @ v[t + 1])
            v[t] = (pi[t] * q[t]).sum(-1)
        return v, q

    def values(self, pi, reward, gamma):
        """V (HORIZON + 1, n) and Q (HORIZON, n, actions) of rewards (HORIZON, n, actions)."""
        v, q = np.zeros((HORIZON + 1, self.n)), np.zeros((HORIZON, self.n, NUM_ACTIONS))
        for t in reversed(range(HORIZON)):
            q[t] = reward[t] + gamma * self.transition @ v[t + 1]
            v[t] = (pi[t] * q[t]).sum(-1)
        return v, q

    def visits(self, pi, start):
        """P[S_t = s] (HORIZON, n)."""
        d = np.zeros((HORIZON, self.n))
        d[0, start] = 1
        for t in range(HORIZON - 1):
            d[t + 1] = np.einsum("s,sa,sak->k", d[t], pi[t], self.transition)
        return d


def softmax(logits):
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def trajectories(cmdp, pi, start):
    """All (probability, states (T + 1), actions (T)) of an episode from `start`."""
    open_ends = [(1.0, [start], [])]
    for t in range(HORIZON):
        open_ends = [
            (p * pi[t, s[-1], a] * cmdp.transition[s[-1], a, k], [*s, k], [*acts, a])
            for p, s, acts in open_ends
            for a in range(NUM_ACTIONS)
            for k in np.flatnonzero(cmdp.transition[s[-1], a])
        ]
    return open_ends


SEEDS = range(5)
START = 0  # state 0 with nothing spent


@pytest.mark.parametrize("seed", SEEDS)
def test_v_c_is_the_probability_of_a_safe_trajectory_and_q_c_the_mean_of_the_next(seed):
    cmdp = Cmdp(seed)
    pi = softmax(cmdp.policy(seed))
    v, q = cmdp.safety(pi)
    total = sum(p * np.prod(cmdp.f[states]) for p, states, _ in trajectories(cmdp, pi, START))
    assert v[0, START] == pytest.approx(total)
    assert 0 < total < 1
    # Q^c(s, a) = sum p V^c(s'), without f(s): an unsafe state has only unsafe successors
    np.testing.assert_allclose(q, np.stack([cmdp.transition @ v[t + 1] for t in range(HORIZON)]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("advantage", [False, True])
def test_gradient_theorem_of_v_c(seed, advantage):
    """Theorem 1 and its corollary against finite differences: the gradient of V^c(s_0) in all logits."""
    cmdp = Cmdp(seed)
    logits = cmdp.policy(seed)
    pi = softmax(logits)
    v, q = cmdp.safety(pi)
    d = cmdp.visits(pi, START)
    weight = q - v[:-1, :, None] if advantage else q
    # sum_a pi grad log pi weight, by the softmax: pi_a (weight_a - sum_b pi_b weight_b)
    analytic = d[:, :, None] * pi * (weight - (pi * weight).sum(-1, keepdims=True))
    numeric = np.zeros_like(logits)
    for index in np.ndindex(logits.shape):
        bump = np.zeros_like(logits)
        bump[index] = 1e-5
        numeric[index] = cmdp.safety(softmax(logits + bump))[0][0, START] - cmdp.safety(softmax(logits - bump))[0][0, START]
    np.testing.assert_allclose(analytic, numeric / 2e-5, atol=1e-8)
    assert abs(analytic).max() > 1e-3


def difference_terms(cmdp, pi, other, weight, gamma, under):
    """sum_t gamma^t E_under[(1 - pi/other) weight], and the same with (other/pi - 1), for `under` one of both policies."""
    d = cmdp.visits(under, START)
    discount = gamma ** np.arange(HORIZON)[:, None, None]
    occupancy = discount * d[:, :, None] * under
    return (occupancy * (1 - pi / other) * weight).sum(), (occupancy * (other / pi - 1) * weight).sum()


@pytest.mark.parametrize("seed", SEEDS)
def test_performance_difference_with_one_minus_the_ratio(seed):
    """Theorem 2, for V and V^c, with Q and with A."""
    cmdp = Cmdp(seed)
    pi, other = softmax(cmdp.policy(seed)), softmax(cmdp.policy(seed + 100))
    reward = np.broadcast_to(cmdp.reward, (HORIZON, *cmdp.reward.shape))
    for (v, q), (v_other, _), gamma in (
        (cmdp.values(pi, reward, 0.9), cmdp.values(other, reward, 0.9), 0.9),
        (cmdp.safety(pi), cmdp.safety(other), 1.0),
    ):
        gain = v_other[0, START] - v[0, START]
        assert abs(gain) > 1e-3
        assert gain == pytest.approx(difference_terms(cmdp, pi, other, q, gamma, other)[0])
        assert gain == pytest.approx(difference_terms(cmdp, pi, other, q - v[:-1, :, None], gamma, other)[0])


def total_variation(pi, other):
    return 0.5 * abs(pi - other).sum(-1).max()


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("step", [0.05, 0.3, 1.0])
def test_lower_bounds(seed, step):
    """Theorems 3 and 4 in the form that holds (docs/scpo.md).

    The first bound holds with 2 alpha gamma epsilon / (1 - gamma)^2, epsilon without a second factor of the ratio. The second,
    with 1 - pi/pi', needs gamma^0: the policies may part at the very first action, 2 alpha epsilon' / (1 - gamma)^2.
    """
    gamma = 0.9
    cmdp = Cmdp(seed)
    logits = cmdp.policy(seed)
    pi, other = softmax(logits), softmax(logits + step * cmdp.policy(seed + 100))
    reward = np.broadcast_to(cmdp.reward, (HORIZON, *cmdp.reward.shape))
    v, q = cmdp.values(pi, reward, gamma)
    v_other, _ = cmdp.values(other, reward, gamma)
    advantages = q - v[:-1, :, None]
    alpha = total_variation(pi, other)
    second, first = difference_terms(cmdp, pi, other, advantages, gamma, pi)
    epsilon_1 = abs((other / pi - 1) * advantages).max()
    epsilon_2 = abs((1 - pi / other) * advantages).max()
    gain = v_other[0, START] - v[0, START]
    assert gain >= first - 2 * alpha * gamma * epsilon_1 / (1 - gamma) ** 2
    assert gain >= second - 2 * alpha * epsilon_2 / (1 - gamma) ** 2


def test_the_second_bound_fails_as_printed():
    """One step, rewards 1 and 0: as gamma falls the printed penalty, which has it as a factor, vanishes, the error doesn't."""
    gamma = 0.01
    pi, other = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    advantages = np.array([0.5, -0.5])  # rewards 1 and 0, one step
    gain = 0.9 - 0.5
    estimate = (pi * (1 - pi / other) * advantages).sum()
    epsilon = abs((1 - pi / other) * advantages).max()
    printed = estimate - 2 * 0.4 * gamma * epsilon / (1 - gamma) ** 2
    assert printed > gain  # the "lower bound" lies above
    assert estimate - 2 * 0.4 * epsilon <= gain


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_v_r_is_the_value_of_the_nullified_reward(seed, gamma):
    """V^r = sum_tau P(tau) R(tau) f(tau) against the value of r Q^c: equal from a start state that is safe."""
    cmdp = Cmdp(seed)
    pi = softmax(cmdp.policy(seed))
    _, q = cmdp.safety(pi)
    v_r, _ = cmdp.values(pi, cmdp.reward * q, gamma)
    total = sum(
        p * np.prod(cmdp.f[states]) * sum(gamma**t * cmdp.reward[states[t], actions[t]] for t in range(HORIZON))
        for p, states, actions in trajectories(cmdp, pi, START)
    )
    assert v_r[0, START] == pytest.approx(total)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [1, 4])
def test_first_order_approximation_of_v_r_k(seed, k):
    """Theorem "V-rc-bar": the other policy's value of pi's nullified reward is pi's, plus its own mean of pi's advantages."""
    cmdp = Cmdp(seed)
    pi, other = softmax(cmdp.policy(seed)), softmax(cmdp.policy(seed + 100))
    reward = cmdp.reward * cmdp.safety(pi)[1] ** k
    (v, q), (v_bar, _) = cmdp.values(pi, reward, 0.9), cmdp.values(other, reward, 0.9)
    occupancy = 0.9 ** np.arange(HORIZON)[:, None, None] * cmdp.visits(other, START)[:, :, None] * other
    assert v_bar[0, START] == pytest.approx(v[0, START] + (occupancy * (q - v[:-1, :, None])).sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_v_r_k_falls_in_k(seed):
    cmdp = Cmdp(seed)
    pi = softmax(cmdp.policy(seed))
    q = cmdp.safety(pi)[1].clip(0, 1).round(12)  # a sum of probabilities may be 1 + 2e-16, and that to the infinity is not 1
    values = [cmdp.values(pi, cmdp.reward * q**k, 0.9)[0] for k in (0, 1, 2, 4, 8, np.inf)]
    for lower, higher in zip(values[1:], values[:-1]):
        assert (lower <= higher + 1e-12).all()
    assert values[0][0, START] > values[1][0, START] > values[4][0, START]


def outcome(to_1_from_0, to_1_from_1, steps=10, limit=5):
    """P[safe] and E[reward; safe] in the CMDP of "Augmented States": two states, reward and cost 1 in s^1, start in s^1.

    The policy goes to s^1 with probability to_1_from_0[q] or to_1_from_1[q]; q: the cost spent, that of this step included.
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

    With q in the state the best policy does just that. Without, staying has one probability for all steps: the best one throws
    dice, is unsafe at times and earns less; both deterministic ones earn 1, or are unsafe.
    """
    never = [0.0] * 11
    assert outcome(never, [1.0] * 5 + [0.0] * 6) == (1.0, 5.0)
    plain = {stay: outcome(never, [stay] * 11) for stay in np.linspace(0, 1, 1001)}
    best = max(plain, key=lambda stay: plain[stay][1])
    assert 0 < best < 1 and plain[best][0] < 1 and plain[best][1] < 2.5
    assert plain[0.0] == (1.0, 1.0) and plain[1.0] == (0.0, 0.0)


def test_where_one_can_return_to_s_1_alternating_needs_no_augmentation():
    """The text leaves open whether s^0 leads back. If it does, s^1, s^0, s^1, ... spends the limit of 5 in 10 steps exactly."""
    assert outcome([1.0] * 11, [0.0] * 11) == (1.0, 5.0)


@pytest.mark.parametrize("seed", range(20))
def test_deterministic_lyapunov_corollary(seed):
    """Appendix "Deterministic cases": pi_1*, optimal on its trajectory, pi_B elsewhere, is in {T_{pi,d}[L] <= max(d_0, L)}.

    L = D_{pi_B} for a feasible deterministic pi_B; costs to minimise c, constraint costs d, all exact. The paper assumes that
    pi* is in F_{L_eps*}; where L(x) > d_0 on pi*'s trajectory that assumption fails, and the instance says nothing.
    """
    rng = np.random.default_rng(seed)
    n, actions, steps = 5, 3, 4
    move = rng.integers(0, n, (n, actions))
    c, d = rng.uniform(size=(n, actions)), rng.integers(0, 3, n).astype(float)
    plans = list(itertools.product(range(actions), repeat=steps))

    def follow(plan):
        x, spent, paid, path = 0, 0.0, 0.0, []
        for t, a in enumerate(plan):
            path.append((t, x))
            spent, paid, x = spent + d[x], paid + c[x, a], move[x, a]
        return spent, paid, path

    safest = min(follow(plan)[0] for plan in plans)
    limit = safest + 1
    # pi_B: minimises the constraint cost from everywhere, feasible since safest <= limit
    value, base = np.zeros((steps + 1, n)), np.zeros((steps, n), dtype=int)
    for t in reversed(range(steps)):
        ahead = value[t + 1][move]
        base[t] = ahead.argmin(1)
        value[t] = d + ahead.min(1)
    assert value[0, 0] <= limit
    best = min((plan for plan in plans if follow(plan)[0] <= limit), key=lambda plan: follow(plan)[1])
    policy = base.copy()
    for (t, x), a in zip(follow(best)[2], best):
        policy[t, x] = a
    for t in range(steps):
        backup = d + value[t + 1][move[np.arange(n), policy[t]]]
        assert (backup <= np.maximum(limit, value[t]) + 1e-12).all()
