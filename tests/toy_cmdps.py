"""Small CMDPs that tests/test_theory.py solves exactly: expectations are sums over all transitions, none is sampled."""

import itertools

import numpy as np

START = 0  # the state all episodes start in


class Cmdp:
    """A CMDP with a finite horizon: T actions from T + 1 states.

    transition (n, actions, n), reward (n, actions), cost (n,), f (n,): 1 where a state is safe. Policies are
    (T, n, actions), one a time step, since the horizon is finite.
    """

    def __init__(self, transition, reward, cost, f, horizon):
        self.transition, self.reward, self.cost, self.f = (
            np.array(x, dtype=float) for x in (transition, reward, cost, f)
        )
        self.horizon, self.n, self.actions = horizon, *self.reward.shape

    def logits(self, seed):
        return np.random.default_rng(seed).normal(size=(self.horizon, self.n, self.actions))

    def safety(self, pi):
        """V^c (T + 1, n) and Q^c (T, n, actions): the probability that all states from t on are safe."""
        v, q = np.zeros((self.horizon + 1, self.n)), np.zeros((self.horizon, self.n, self.actions))
        v[-1] = self.f
        for t in reversed(range(self.horizon)):
            q[t] = self.f[:, None] * (self.transition @ v[t + 1])
            v[t] = (pi[t] * q[t]).sum(-1)
        return v, q.round(12)  # a sum of probabilities may be 1 - 1e-16, and that to the infinity is 0

    def values(self, pi, reward, gamma):
        """V (T + 1, n) and Q (T, n, actions) of rewards (T, n, actions), or (n, actions) for the same at all t."""
        reward = np.broadcast_to(reward, (self.horizon, self.n, self.actions))
        v, q = np.zeros((self.horizon + 1, self.n)), np.zeros((self.horizon, self.n, self.actions))
        for t in reversed(range(self.horizon)):
            q[t] = reward[t] + gamma * self.transition @ v[t + 1]
            v[t] = (pi[t] * q[t]).sum(-1)
        return v, q

    def visits(self, pi):
        """P[S_t = s] (T, n)."""
        d = np.zeros((self.horizon, self.n))
        d[0, START] = 1
        for t in range(self.horizon - 1):
            d[t + 1] = np.einsum("s,sa,sak->k", d[t], pi[t], self.transition)
        return d

    def mean(self, pi, function, gamma):
        """E_pi[sum_t gamma^t function(t, S_t, A_t)], the function as (T, n, actions)."""
        discount = gamma ** np.arange(self.horizon)[:, None, None]
        return (discount * self.visits(pi)[:, :, None] * pi * function).sum()

    def trajectories(self, pi):
        """All episodes: probabilities (N,), states (T + 1, N), actions (T, N)."""
        episodes = [(1.0, [START], [])]
        for t in range(self.horizon):
            episodes = [
                (p * pi[t, s[-1], a] * self.transition[s[-1], a, k], [*s, k], [*acts, a])
                for p, s, acts in episodes
                for a in range(self.actions)
                for k in np.flatnonzero(self.transition[s[-1], a])
            ]
        p, states, actions = zip(*episodes)
        return np.array(p), np.array(states).T, np.array(actions).T

    def probability_of_the_same_state(self, pi, other):
        """P[S_t = S'_t] (T,) of both policies, coupled: while together they take the same action as often as can be."""
        joint, same = np.zeros((self.n, self.n)), np.zeros(self.horizon)
        joint[START, START] = 1
        for t in range(self.horizon):
            same[t] = joint.trace()
            new = np.zeros_like(joint)
            for s, s_other in np.argwhere(joint):
                p, q = pi[t, s], other[t, s_other]
                both = np.minimum(p, q) if s == s_other else np.zeros(self.actions)
                apart = np.outer((p - both) @ self.transition[s], (q - both) @ self.transition[s_other]) / (
                    1 - both.sum()
                )
                new += joint[s, s_other] * (np.diag(both @ self.transition[s]) + apart)
            joint = new
        return same


def random_cmdp(seed, limit=1):
    """Three states, two actions, T = 4, on the augmented states (s, q), q = 0 .. 4, numbered 5 s + q; r in [0, 1].

    State 1 costs 1. A cost is paid on leaving a state, so q is the cost of the states before; f = 1 where q <= limit.
    """
    states, actions, horizon, width = 3, 2, 4, 5
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(states), (states, actions))
    cost = np.array([0, 1, 0])
    transition = np.zeros((states * width, actions, states * width))
    for s, q, a, later in itertools.product(range(states), range(width), range(actions), range(states)):
        transition[s * width + q, a, later * width + min(q + cost[s], horizon)] += p[s, a, later]
    reward = np.repeat(rng.uniform(size=(states, actions)), width, axis=0)
    return Cmdp(transition, reward, np.repeat(cost, width), np.tile(np.arange(width) <= limit, states), horizon)


def two_steps(unsafe):
    """The first action leads to state 1 or 2. The second action earns 1 or 0 in state 1, 0 or 1 in state 2.

    unsafe: the probability (2 states, 2 actions) that the second action ends in state 4, which is unsafe, and not in 3.
    """
    transition = np.zeros((5, 2, 5))
    transition[0, [0, 1], [1, 2]] = transition[3, :, 3] = transition[4, :, 4] = 1
    transition[1:3, :, 4], transition[1:3, :, 3] = unsafe, 1 - np.array(unsafe)
    return Cmdp(transition, [[0, 0], [0, 1], [1, 0], [0, 0], [0, 0]], np.zeros(5), [1, 1, 1, 1, 0], 2)


def softmax(logits):
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def policies(cmdp, seed):
    """Two unrelated ones."""
    return softmax(cmdp.logits(seed)), softmax(cmdp.logits(seed + 100))


def uniform_and_other(cmdp, alpha):
    """A policy that takes both actions alike, and one that takes the first with a probability higher by alpha."""
    pi = np.full((cmdp.horizon, cmdp.n, 2), 0.5)
    return pi, pi + np.array([alpha, -alpha])


class Parting:
    """The CMDP in which a policy at a total variation of alpha from pi falls furthest behind its estimate. No horizon.

    State 0 leads to state 1, to state 2 or back to 0, by the action; 1 and 2 are for good. pi leaves 0 for 2, the other
    policy for 1, both with probability alpha a step. Weight x advantage has a mean of -epsilon in state 1 and
    +epsilon in state 2. pi's value is 0 everywhere, so that its advantages are the rewards.
    """

    def __init__(self, alpha, weight):
        """weight: "pi'/pi - 1" for Theorem 3's worst case, "1 - pi/pi'" for Theorem 4's."""
        rare = 1e-6 * alpha  # instead of 0, so that no ratio is infinite
        stay = 1 - alpha - 2 * rare
        if weight == "pi'/pi - 1":
            leaving = [0, 0, 0]
            less = (1 - rare) / 2
            advantages = np.array([-0.5, 0.5, 0])
        else:
            leaving = [-(alpha + rare), -rare, 2 * rare * (alpha + rare) / stay]
            less = (1 - rare - alpha) / 2
            advantages = np.array([-(less + alpha), less, 0])
        more = 1 - rare - less
        self.pi = np.array([(rare, alpha + rare, stay), (less, more, rare), (less, more, rare)])
        self.other = np.array([(alpha + rare, rare, stay), *[(less + alpha, more - alpha, rare)] * 2])
        self.advantages = np.array([leaving, advantages, -advantages])
        self.transition = np.eye(3)[[[1, 2, 0], [1, 1, 1], [2, 2, 2]]]  # (state, action, next state)

    def mean(self, pi, function, gamma):
        """E_pi[sum_t gamma^t function(S_t, A_t)] from state 0, the function as (3, actions)."""
        chain = np.einsum("sa,sak->sk", pi, self.transition)
        return np.linalg.solve(np.eye(3) - gamma * chain, (pi * function).sum(-1))[0]


class Transient:
    """The CMDP of the Lyapunov appendix: each action of each of n states ends the episode with probability 0.2.

    c (n, actions) is to be minimised, d (n,) >= 0 constrained. The terminal state, where L is 0, is left out.
    """

    def __init__(self, seed, n=4, actions=3):
        self.rng, self.n, self.actions = np.random.default_rng(seed), n, actions
        self.transition = 0.8 * self.rng.dirichlet(0.3 * np.ones(n), (n, actions))
        self.c, self.d = self.rng.uniform(size=(n, actions)), self.rng.uniform(size=n)

    def random_policy(self, allowed=True):
        """(n, actions), on the allowed actions (n, actions) alone."""
        weights = self.rng.uniform(0.1, 1, (self.n, self.actions)) * allowed
        return weights / weights.sum(1, keepdims=True)

    def chain(self, pi):
        """P_pi[X_{t+1} = x', X_t = x] (n, n)."""
        return np.einsum("sa,sak->sk", pi, self.transition)

    def total(self, pi, cost):
        """E_pi[sum of a cost (n,) until the end] (n,); of d it is D_pi."""
        return np.linalg.solve(np.eye(self.n) - self.chain(pi), cost)

    def backup(self, pi, values):
        """T_{pi,d}[values] (n,)."""
        return self.d + self.chain(pi) @ values

    def optimum(self, limit):
        """The deterministic policy of least C_pi from state 0 among those whose D_pi is at most the limit."""
        plans = [np.eye(self.actions)[list(plan)] for plan in itertools.product(range(self.actions), repeat=self.n)]
        feasible = [pi for pi in plans if self.total(pi, self.d)[0] <= limit]
        return min(feasible, key=lambda pi: self.total(pi, (pi * self.c).sum(1))[0])


class Deterministic:
    """A deterministic CMDP of four steps, a random deterministic pi_B, the best plan with D(x_0) <= D_{pi_B}(x_0) + 1.

    All by (t, x): `mixed` is pi_1*, the plan on its path and pi_B elsewhere; `d_base` is L = D_{pi_B}, `backups`
    T_{pi_1*,d}[L]. `l_star` is the least Lyapunov function of pi_B that has pi_1* in its set F: what the worse of both
    costs from there on. The paper's assumption, that pi* is in F_{L_eps*}, is l_star[0, x_0] <= limit.
    """

    def __init__(self, seed, n=5, actions=3, steps=4):
        rng = np.random.default_rng(seed)
        self.steps, self.move = steps, rng.integers(0, n, (n, actions))
        c, d = rng.uniform(size=(n, actions)), rng.integers(0, 3, n).astype(float)
        base, states = rng.integers(0, actions, (steps, n)), np.arange(n)
        self.d_base, self.l_star = np.zeros((2, steps + 1, n))
        for t in reversed(range(steps)):
            self.d_base[t] = d + self.d_base[t + 1][self.move[states, base[t]]]
        self.limit = self.d_base[0, START] + 1

        plans = []
        for plan in itertools.product(range(actions), repeat=steps):
            path = self.trajectory(np.repeat(plan, n).reshape(steps, n))
            if sum(d[x] for _, x in path) <= self.limit:
                plans.append((sum(c[x, a] for (_, x), a in zip(path, plan)), plan, path))
        _, plan, self.path = min(plans)
        self.mixed = base.copy()
        for at, action in zip(self.path, plan):
            self.mixed[at] = action
        self.backups = np.array([d + self.d_base[t + 1][self.move[states, self.mixed[t]]] for t in range(steps)])
        for t in reversed(range(steps)):
            later = self.l_star[t + 1][self.move[states, [base[t], self.mixed[t]]]]
            self.l_star[t] = d + later.max(0)

    def trajectory(self, policy):
        """The (t, x) that a policy (steps, n) comes to."""
        path = [(0, START)]
        for t in range(self.steps - 1):
            path.append((t + 1, int(self.move[path[-1][1], policy[path[-1]]])))
        return path
