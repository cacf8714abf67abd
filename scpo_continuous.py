"""Safety Critic Policy Optimization (SCPO) for continuous actions: PPO for constrained MDPs, in one file.

Paper: Mhamed & Gu (2023), "SCPO: Safe Reinforcement Learning with Safety Critic Policy Optimization".

An episode is safe if its costs add up to at most the cost limit c_0. A safety critic V^c(s) learns the probability that
an episode passing through s is safe; a violation far ahead counts less. SCPO is PPO with one change, the reward:

    r <- (r + b) Q^c(s, a)^k - beta (1 - Q^c(s, a)^k) c

The less safe an action is, the less its reward counts. The second term pushes cost down while everything is still
unsafe. The state carries q_t / c_0, the share of the limit spent so far: without it the policy could not tell how much
is left. Read the functions under "The mathematics", then `train`, which follows the paper's Algorithm 1.

Where we depart from the paper, and why (docs/scpo.md has the details):
1. V^c is clipped to [0, 1] where it is used, not where it is trained: below 0 the clip would leave no gradient.
2. V^c_gamma has a term for the state after the last action, so the last cost counts. The printed closed form lacks it.
3. At a time limit only the reward critic bootstraps. V^c is known there, and is 0 once the limit is exceeded.
4. Q^c is the mean of two estimates, one-step and Monte Carlo, discounted like V^c_gamma. The paper's aren't.
5. Delta is 0.1; the paper has about 0. At each checkpoint new episodes begin, so that a run resumes exactly.
"""

import contextlib
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from typing import Literal, Optional

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn

with contextlib.suppress(ImportError):
    import scpo_envs  # noqa: F401  registers the paper's tasks; any other Gymnasium task works without it

# Defaults by task, in place of those in Args: the paper's, and ours for any other task. A flag overrides both
T = 32768  # steps an iteration
FAST_SETTINGS = dict(num_steps=512, learning_rate=1e-3, anneal_lr=True, reward_scale=0.02)  # what --fast changes
TASK_SETTINGS = {
    "SafetyBallCircle-v0": dict(cost_limit=25, k=2, beta=0, reward_bias=1.5, ent_coef=0.01, total_timesteps=500 * T),
    "SafetyBallRun-v0": dict(cost_limit=25, k=4, beta=0.5, reward_bias=1, ent_coef=0.005, total_timesteps=100 * T),
    "SafetyBallGather-v0": dict(cost_limit=0.2, k=4, beta=15, reward_bias=0.05, ent_coef=0.01, total_timesteps=500 * T),
    "SafetyBallReach-v0": dict(cost_limit=10, k=4, beta=0, reward_bias=0.1, ent_coef=0.01, total_timesteps=500 * T),
    "any other task": dict(FAST_SETTINGS, num_envs=8, num_steps=1024, norm_obs=True, log_std_init=-0.5),
}
for task, steps in (("SafetyBallCircle-v0", 100 * T), ("SafetyBallRun-v0", 20 * T)):
    TASK_SETTINGS[f"{task} --fast"] = dict(TASK_SETTINGS[task], total_timesteps=steps, **FAST_SETTINGS)
DELTA = 0.1  # the paper's Delta: in the state, the share of the limit spent stops at 1 + DELTA


@dataclass
class Args:
    env_id: str = "SafetyBallCircle-v0"  # Gymnasium id of the task; `module:id` imports the module first
    fast: bool = False  # settings of our own for a fifth of the paper's steps (docs/fast-settings.md)
    seed: int = 1  # of everything: weights, actions, minibatches, environments
    total_timesteps: int = 100 * T  # environment steps, rounded down to whole iterations
    num_envs: int = 16  # environments stepped side by side
    num_steps: int = 2048  # steps in each environment an iteration; num-envs x num-steps is the paper's T
    update_epochs: int = 5  # passes over an iteration's steps
    minibatch_size: int = 64  # steps in a gradient step
    learning_rate: float = 2e-4  # Adam's step size
    anneal_lr: bool = False  # lower the learning rate linearly to 0 over the run (the paper doesn't)
    gamma: float = 0.99  # discount of the reward
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    clip_coef: float = (
        0.2  # the paper's epsilon: how far the surrogate follows pi/pi_0 away from 1; pi_0: the old policy
    )
    surrogate: Literal["l1", "l2"] = "l1"  # what is clipped: l1 is PPO's pi/pi_0 - 1, l2 is 1 - pi_0/pi
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the reward critic's squared error
    safety_vf_coef: float = 0.5  # weight of the safety critic's squared error
    max_grad_norm: float = 0.5  # norm that the gradient of all three networks together is scaled down to
    log_std_init: float = 0  # log of the standard deviation that actions start with
    target_kl: Optional[float] = None  # no further epoch once the mean KL divergence of one exceeds this (None: never)
    cost_limit: Optional[float] = None  # the paper's c_0: cost an episode may spend, undiscounted (None: must be given)
    limit_factor: float = 1  # the limit begins this many times as large and is as given from half of the run on
    k: float = 4  # power of Q^c in the reward; 0: it counts in full; inf, with --safety-lambdas 1: if surely safe
    beta: float = 1  # weight of the cost term; with k 0 it needs --penalty always
    reward_scale: float = 1  # factor of the nullified reward; below 1 it keeps the critic's gradient small
    reward_bias: float = 0  # the paper's b, added to each reward to make it positive
    penalty: Literal["unsafe", "always"] = "unsafe"  # cost term: beta (1 - Q^k) c, or beta c whatever Q is
    termination_cost: float = 0  # above 0: an episode that terminates is unsafe, and its last step costs this much more
    safety_gamma: float = 0.995  # discount of V^c_gamma, the safety critic's target
    safety_lambdas: tuple[float, ...] = (0.0, 1.0)  # Q^c is the mean of these estimates: 0 one-step, 1 Monte Carlo
    norm_obs: bool = False  # normalise observations by mean and variance of those in the first half of the run
    augment_state: bool = True  # append the share of the cost limit spent so far to the observation
    device: Literal["cpu", "cuda"] = "cpu"  # where the updates run; the CPU is faster for networks this small
    compile: bool = True  # compile the gradient step: takes 20 s once, then training is 3 times faster
    save_every: int = 10  # iterations from checkpoint to checkpoint; at each, new episodes begin (0: only at the end)


def check_args(args):
    """Raises ValueError, which names the flag and what is allowed, before anything is made."""
    batch_size = args.num_envs * args.num_steps
    for names, allowed, is_allowed in (
        ("fast", f"off for {args.env_id}", lambda x: not x or f"{args.env_id} --fast".split(":")[-1] in TASK_SETTINGS),
        ("num_envs update_epochs", "in [1, 1024]", lambda x: 1 <= x <= 1024),
        ("num_steps", "1 or more, with num-envs x num-steps at most 1e7", lambda x: x >= 1 and batch_size <= 1e7),
        ("learning_rate clip_coef max_grad_norm reward_scale target_kl", "in (0, 1e6]", lambda x: 0 < x <= 1e6),
        ("vf_coef safety_vf_coef beta cost_limit termination_cost", "in [0, 1e6]", lambda x: 0 <= x <= 1e6),
        ("seed save_every", "in [0, 2^31)", lambda x: 0 <= x < 2**31),
        ("limit_factor", "in [1, 1e6]; 1 for a limit of 0", lambda x: 1 <= x <= (1 if args.cost_limit == 0 else 1e6)),
        ("k", "0 or more", lambda x: x >= 0),
        ("ent_coef reward_bias", "in [-1e6, 1e6]", lambda x: abs(x) <= 1e6),
        ("log_std_init", "in [-5, 2]", lambda x: -5 <= x <= 2),
        ("gamma gae_lambda", "in [0, 1]", lambda x: 0 <= x <= 1),
        ("safety_gamma", "in (0, 1]", lambda x: 0 < x <= 1),
        ("safety_lambdas", "one or more numbers in [0, 1]", lambda x: x and all(0 <= lam <= 1 for lam in x)),
        ("minibatch_size", f"2 or more and divide {batch_size} steps", lambda x: x >= 2 and batch_size % x == 0),
        ("total_timesteps", f"in [{batch_size}, 1e15], an iteration or more", lambda x: batch_size <= x <= 1e15),
        ("device", "cpu, for torch sees no CUDA device", lambda x: x == "cpu" or torch.cuda.is_available()),
    ):
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not is_allowed(value):
                raise ValueError(f"--{name.replace('_', '-')} is {value}, but must be {allowed}")


class SafetyState(gym.Wrapper):
    """SCPO's "Augmented States": appends clip(q_t / c_0, 0, 1 + DELTA) to the state; q_t is the cost before action t.

    Flattens the observation to float32 (n,). Adds to `info`: "cost", "safe" (SCPO's f of the state reached, 1
    while q <= c_0) and, at an episode's end, "episode" with its "return", "cost", "length" and "safe". Raises
    ValueError if a step gives no cost, or one that isn't a number of 0 or more.
    """

    def __init__(self, env, cost_limit, augment_state=True):
        if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
            env = gym.wrappers.FlattenObservation(env)
        super().__init__(env)
        self.cost_limit, self.augment_state = cost_limit, augment_state
        size = gym.spaces.utils.flatdim(env.observation_space) + augment_state
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), dtype=np.float32)

    def augmented(self, obs):
        state = np.empty(self.observation_space.shape, dtype=np.float32)
        if len(obs) != len(state) - self.augment_state:
            raise ValueError(f"an observation has {len(obs)} numbers, its space {len(state) - self.augment_state}")
        state[: len(obs)] = obs
        state[len(obs) :] = min(self.spent / max(self.cost_limit, 1e-8), 1 + DELTA)  # empty without augment_state
        return state

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.action_space.seed(seed)  # some tasks draw noise from it
        obs, info = self.env.reset(seed=seed, options=options)
        self.spent, self.earned, self.length = 0.0, 0.0, 0
        return self.augmented(obs), info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        cost = info["cost"] if "cost" in info else np.sum(info.get("constraint_costs"))  # gym-safety's name
        if cost is None or np.ndim(cost) or not 0 <= cost < math.inf:
            raise ValueError(f'info["cost"] is {cost}, but each step must put one number, 0 or more, into it')
        info = {**info, "cost": float(cost)}  # the task may go on using its own dict
        self.spent += info["cost"]
        self.earned += float(reward)
        self.length += 1
        info["safe"] = int(self.spent <= self.cost_limit * (1 + 1e-6))  # in floating point 0.1 + 0.1 + 0.1 > 0.3
        if terminated or truncated:
            info["episode"] = {"return": self.earned, "cost": self.spent, "length": self.length, "safe": info["safe"]}
        return self.augmented(obs), reward, terminated, truncated, info


def make_env(env_id, cost_limit, augment_state):
    """Returns the task, wrapped and tried for one step. Raises ValueError, which says why, if it can't be used."""
    try:
        env = gym.make(env_id, disable_env_checker=True)
        space = env.action_space
        if not isinstance(space, gym.spaces.Box) or not np.issubdtype(space.dtype, np.floating) or not all(space.shape):
            raise ValueError(f"actions must be a Box of floats, not {space}; scpo_discrete.py takes (Multi)Discrete")
        if cost_limit is None:
            raise ValueError("--cost-limit is needed: the cost that an episode may spend, 0 or more")
        env = SafetyState(env, cost_limit, augment_state)
        env.reset(seed=0)
        env.step(space.sample())
    except Exception as error:
        reason = isinstance(error, (ValueError, ImportError, gym.error.Error)) and str(error) or repr(error)
        if "values to unpack" in reason:
            reason += '; reset must return obs, info; step obs, reward, terminated, truncated, info, with info["cost"]'
        raise ValueError(f"--env-id {env_id}: {reason}") from error
    return env


def mlp(num_inputs, num_outputs, last_std):
    """Two hidden layers of 64 with tanh, as in SCPO's paper, orthogonal weights; last_std: the last layer's gain."""
    layers = [nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs)]
    for layer, std in zip(layers[::2], (2**0.5, 2**0.5, last_std)):
        nn.init.orthogonal_(layer.weight, std)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Agent(nn.Module):
    """The policy pi, the reward critic V^{rc,k} and the safety critic V^c, three separate networks."""

    def __init__(self, obs_dim, action_space):
        super().__init__()
        self.action_space = action_space
        self.action_dim = self.noise_dim = math.prod(action_space.shape)
        has_range = np.maximum(-action_space.low, action_space.high) < 1e30  # float32's largest numbers mean none
        low, high = np.where(has_range, action_space.low, -1), np.where(has_range, action_space.high, 1)
        self.middle, self.half = (high + low) / 2, (high - low) / 2
        self.actor = mlp(obs_dim, self.action_dim, last_std=0.01)  # the mean of a Gaussian
        self.actor_logstd = nn.Parameter(torch.zeros(self.action_dim))
        self.critic = mlp(obs_dim, 1, last_std=1.0)
        self.safety_critic = mlp(obs_dim, 1, last_std=0.01)  # near 0: at first no state counts as safe
        self.register_buffer("obs_mean", torch.zeros(obs_dim))
        self.register_buffer("obs_var", torch.ones(obs_dim))

    def normalize(self, obs):
        """What all networks get. Without --norm-obs the mean stays 0 and the variance 1, and nothing is changed."""
        bound = torch.where(self.obs_var == 1, torch.inf, 10.0)  # a tiny variance makes what is scaled huge
        return ((obs - self.obs_mean) / (self.obs_var + 1e-8).sqrt()).clamp(-bound, bound)

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)

    def get_raw_safety_value(self, obs):
        """The output that is trained, in (-1, 1). Unlike the clipped one it has a gradient everywhere."""
        return torch.tanh(self.safety_critic(obs)).squeeze(-1)

    def get_safety_value(self, obs):
        """V^c in [0, 1], the output that is used."""
        return self.get_raw_safety_value(obs).clamp(0, 1)

    def get_logprob_and_entropy(self, obs, actions):
        """Returns log pi(a|s) and the entropy, both (minibatch,). The deviation doesn't depend on the state."""
        noise = (actions - self.actor(obs)) * torch.exp(-self.actor_logstd)
        logprobs = (-0.5 * noise**2 - self.actor_logstd - 0.5 * math.log(2 * math.pi)).sum(-1)
        entropy = (self.actor_logstd + 0.5 + 0.5 * math.log(2 * math.pi)).sum()
        return logprobs, entropy.expand_as(logprobs)

    def forward(self, obs, actions):
        return (*self.get_logprob_and_entropy(obs, actions), self.get_value(obs), self.get_raw_safety_value(obs))

    def sample_noise(self, rng, *shape):
        """Standard normal noise (*shape, noise_dim) for the policy of `numpy_policy`."""
        return rng.standard_normal((*shape, self.noise_dim), dtype=np.float32)

    def to_env(self, actions):
        """Maps actions (num_envs, action_dim) to the task's: [-1, 1] to a component's range, if it has one; clips."""
        low, high = self.action_space.low, self.action_space.high
        return np.clip(self.middle + self.half * actions.reshape(-1, *low.shape), low, high).astype(low.dtype)


def numpy_policy(agent):
    """Returns the policy as a function of NumPy arrays: (num_envs, obs_dim), noise (num_envs, noise_dim) -> actions."""
    # For a dozen rows a forward pass in torch takes several times as long as the multiplications
    *hidden, (last_weight, last_bias) = [(x.weight.T.cpu().numpy(), x.bias.cpu().numpy()) for x in agent.actor[::2]]
    obs_mean, obs_var = agent.obs_mean.cpu().numpy(), agent.obs_var.cpu().numpy()
    obs_std, bound = np.sqrt(obs_var + 1e-8), np.where(obs_var == 1, np.inf, 10).astype(np.float32)
    std = agent.actor_logstd.exp().cpu().numpy()

    def act(obs, noise):
        x = np.clip((obs - obs_mean) / obs_std, -bound, bound)
        for weight, bias in hidden:
            x = np.tanh(x @ weight + bias)
        return x @ last_weight + last_bias + std * noise

    return act


# The mathematics ------------------------------------------------------------------------------------------------------
# Arrays are (num_steps, num_envs) unless said otherwise. `dones` marks an episode's last step, terminated or cut off.


def safety_q(safe, next_safety_values, dones, safety_gamma, lam):
    """Estimates Q^c(s_t, a_t) in [0, 1] (appendix "Q^c and V^c estimate"):

        Q_t = (1 - lambda) V(s_{t+1}) + lambda [(1 - gamma) f(s_{t+1}) + gamma Q_{t+1}]

    and Q_t = V(s_{t+1}) where an episode ends. safe: f(s_t), 1 within the limit. next_safety_values: V^c(s_{t+1}).
    lam: 0 is the one-step estimate, 1 is Monte Carlo; between them n-step ones are averaged geometrically.
    """
    q = np.empty_like(next_safety_values)
    backup = next_safety_values[-1]  # after the rollout only the critic's estimate is left
    for t in reversed(range(len(q))):
        average = (1 - lam) * next_safety_values[t] + lam * backup
        q[t] = np.where(dones[t], next_safety_values[t], average)
        backup = (1 - safety_gamma) * safe[t] + safety_gamma * q[t]
    return q


def safety_target(safe, next_safety_values, dones, safety_gamma):
    """The safety critic's target: V^c_gamma(s_t) = (1 - gamma) f(s_t) + gamma V^c_gamma(s_{t+1}) (same appendix)."""
    return (1 - safety_gamma) * safe + safety_gamma * safety_q(safe, next_safety_values, dones, safety_gamma, 1.0)


def nullify(rewards, costs, q, k, beta, reward_bias, penalty="unsafe"):
    """Returns (r + b) Q^k - beta (1 - Q^k) c (Algorithm 1, lines 4 and 5), or (r + b) Q^k - beta c (penalty always)."""
    safety = q**k
    return (rewards + reward_bias) * safety - beta * (1 - safety if penalty == "unsafe" else 1) * costs


def gae(rewards, values, next_values, terminations, dones, gamma, gae_lambda):
    """Generalized advantage estimates, (num_steps, num_envs).

    next_values: V(s_{t+1}). At an episode's end s_{t+1} is the state it ended in, not the first of the next episode.
    After a termination the value is 0, after a time limit it is the critic's. Both cut the trace.
    """
    deltas = rewards + gamma * (1 - terminations) * next_values - values
    advantages, last = np.empty_like(deltas), np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = last = deltas[t] + gamma * gae_lambda * (1 - dones[t]) * last
    return advantages


def clipped_surrogate(logratio, advantages, clip_coef, surrogate):
    """L_1^CLIP or L_2^CLIP of a minibatch (appendix "Practical implementation"), to be maximised; the share clipped."""
    change = torch.expm1(logratio) if surrogate == "l1" else -torch.expm1(-logratio)  # pi/pi_0 - 1 or 1 - pi_0/pi
    clipped = change.clamp(-clip_coef, clip_coef)
    return torch.min(change * advantages, clipped * advantages).mean(), (change != clipped).float().mean()


# The update -----------------------------------------------------------------------------------------------------------

LOGGED = ("policy_loss", "value_loss", "safety_loss", "entropy", "approx_kl", "clipfrac", "grad_norm")


def loss(weights, agent, minibatch, args):
    """Returns what a gradient step minimises, and LOGGED but grad_norm. weights: all parameters in a flat vector."""
    obs, actions, old_logprobs, advantages, returns, safety_targets = minibatch
    shapes = {name: parameter.shape for name, parameter in agent.named_parameters()}
    parts = weights.split([shape.numel() for shape in shapes.values()])
    parameters = {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items())}
    logprobs, entropies, values, safety_values = torch.func.functional_call(agent, parameters, (obs, actions))
    logratio = logprobs - old_logprobs
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    objective, clipfrac = clipped_surrogate(logratio, advantages, args.clip_coef, args.surrogate)
    value_loss = ((values - returns) ** 2).mean()
    safety_loss = ((safety_values - safety_targets) ** 2).mean()
    entropy = entropies.mean()
    total = -objective - args.ent_coef * entropy + args.vf_coef * value_loss + args.safety_vf_coef * safety_loss
    approx_kl = (logratio.exp() - 1 - logratio).mean()  # http://joschu.net/blog/kl-approx.html
    return total, torch.stack([-objective, value_loss, safety_loss, entropy, approx_kl, clipfrac]).detach()


def update(weights, adam, learning_rate, agent, minibatch, args):
    """One gradient step: returns the new weights, Adam's new (mean, square, count) and the values of LOGGED."""
    gradient, logged = torch.func.grad(loss, has_aux=True)(weights, agent, minibatch, args)
    # The gradient of all three networks together is scaled down: where the critics err a lot, as in the first batch
    # beyond the limit, the policy hardly moves until they have adapted
    grad_norm = gradient.norm()
    gradient = gradient * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1)
    # Adam, written out so that the step compiles to one function: a second call would take longer than Adam does
    mean, square, count = adam
    count = count + 1
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient**2
    step = (mean / (1 - 0.9**count)) / ((square / (1 - 0.999**count)).sqrt() + 1e-5)
    return weights - learning_rate * step, (mean, square, count), torch.cat([logged, grad_norm[None]])


def compiled(function, *example):
    """Returns the function compiled for inputs like the example's, or as it is where that can't be done."""
    print("Compiling the gradient step (about 20 s the first time, --no-compile to skip it)", file=sys.stderr)
    for options in ({"cpp_wrapper": True}, None):  # calling it through C++ takes 14 % less time, where that works
        try:
            fast = torch.compile(function, fullgraph=True, options=options)
            fast(*example)
            return fast
        except Exception as error:  # no compiler, no place for its files, ...
            reason = next((line for line in str(error).splitlines() if "error: " in line), repr(error)[:300])
    print(f"Going on without torch.compile, three times slower; it needs a C++ compiler ({reason})", file=sys.stderr)
    return function


def train(args, checkpoint=None, make_env=make_env):
    """Algorithm 1, a generator: yields what to save before the first iteration, and what to log and save after each.

    checkpoint: one that it has yielded (a copy: the next iteration changes it), to go on from. New episodes begin then,
    and every save_every iterations. A run resumed from one of these checkpoints is the same as one without a break.
    """
    check_args(args)
    torch.set_num_threads(1)  # the matrices are too small to share
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002  some tasks draw from it
    rng = np.random.default_rng(args.seed)
    device, batch_size = torch.device(args.device), args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size

    # Environments
    envs = [make_env(args.env_id, args.cost_limit, args.augment_state) for _ in range(args.num_envs)]
    obs_dim, longest = envs[0].observation_space.shape[0], envs[0].spec.max_episode_steps
    if any(f"Normalize{x}" in str(envs[0]) for x in ("Observation", "Reward", "Cost")):
        print("A Normalize wrapper isn't saved and may alter the returns; --norm-obs is saved", file=sys.stderr)
    for flag, iterations in (("--total-timesteps", num_iterations), ("--save-every", args.save_every)):
        if longest and 0 < iterations * args.num_steps < longest:
            allowed = f"{flag} must give each environment at least {longest} steps, an episode's length"
            raise ValueError(f"{allowed}, but {iterations} iterations are {iterations * args.num_steps}")

    # Networks and optimiser: the gradient is with respect to one flat vector of all weights. The networks are its views
    agent = Agent(obs_dim, envs[0].action_space).to(device).requires_grad_(False)
    agent.actor_logstd.fill_(args.log_std_init)
    weights = nn.utils.parameters_to_vector(agent.parameters())
    nn.utils.vector_to_parameters(weights, agent.parameters())
    adam = (torch.zeros_like(weights), torch.zeros_like(weights), torch.zeros((), device=device))
    learning_rate = torch.tensor(args.learning_rate, device=device)

    # Storage of an iteration: s, a, r, c, s' and f(s), f(s') of every step
    shape = (args.num_steps, args.num_envs)
    obs, next_obs = np.zeros((2, *shape, obs_dim), dtype=np.float32)
    actions = np.zeros((*shape, agent.action_dim), dtype=np.float32)
    rewards, costs, safe, next_safe, terminations, dones = np.zeros((6, *shape), dtype=np.float32)

    example = tuple(torch.zeros(args.minibatch_size, *x.shape[2:]).to(device) for x in (obs, actions, *[safe] * 4))
    gradient_step = compiled(update, weights, adam, learning_rate, agent, example, args) if args.compile else update
    first = checkpoint["iteration"] + 1 if checkpoint else 1
    if checkpoint:
        agent.load_state_dict(checkpoint["agent"])  # and with it `weights`
        adam = tuple(x.to(device) for x in checkpoint["adam"])
        torch.set_rng_state(checkpoint["torch_rng"])
        rng.bit_generator.state = json.loads(checkpoint["numpy_rng"])

    def snapshot_after(iteration):
        generators = dict(torch_rng=torch.get_rng_state(), numpy_rng=json.dumps(rng.bit_generator.state))
        return dict(iteration=iteration, agent=agent.state_dict(), adam=list(adam), **generators)

    yield dict(checkpoint=snapshot_after(first - 1))
    for iteration in range(first, num_iterations + 1):
        # Sample (a_t, s_t) ~ pi for T steps (Algorithm 1, line 2)
        limit = args.cost_limit * args.limit_factor ** max(1 - 2 * (iteration - 1) / num_iterations, 0)
        for env in envs:
            env.cost_limit = limit  # an episode under way takes it from its next step on
        if iteration == first or (args.save_every and (iteration - 1) % args.save_every == 0):
            resets = [env.reset(seed=int(rng.integers(2**31))) for env in envs]  # asks all workers, then waits for them
            current_obs, current_safe = np.stack([first_obs for first_obs, _ in resets]), np.ones(args.num_envs)
        start_time, episodes = time.monotonic(), []
        policy, sampled_from = numpy_policy(agent), {name: x.clone() for name, x in agent.state_dict().items()}
        noise = agent.sample_noise(rng, *shape)
        for t in range(args.num_steps):
            obs[t], safe[t] = current_obs, current_safe
            actions[t] = policy(obs[t], noise[t])
            results = [env.step(action) for env, action in zip(envs, agent.to_env(actions[t]))]
            for i, (env, result) in enumerate(zip(envs, results)):  # with --num-workers it is here that we wait
                next_obs[t, i], rewards[t, i], terminated, truncated, info = result
                costs[t, i], next_safe[t, i] = info["cost"], info["safe"]
                terminations[t, i], dones[t, i] = terminated, terminated or truncated
                current_obs[i], current_safe[i] = next_obs[t, i], info["safe"]
                if terminated or truncated:  # the log's "safe" goes by --cost-limit, info's by this iteration's limit
                    global_step = (iteration - 1) * batch_size + (t + 1) * args.num_envs
                    episode = {**info["episode"], "safe": int(info["episode"]["cost"] <= args.cost_limit * (1 + 1e-6))}
                    episodes.append(dict(iteration=iteration, global_step=global_step, env=i, **episode))
                    current_obs[i], current_safe[i] = env.reset()[0], 1
        sampling_seconds = time.monotonic() - start_time
        for name, array in (("observation", obs), ("observation", next_obs), ("reward", rewards), ("action", actions)):
            if not np.isfinite(array).all():
                raise FloatingPointError(f"the {name} is NaN or infinite in iteration {iteration}")
        costs += args.termination_cost * terminations  # else failing early would be a free way to keep the limit
        next_safe[(terminations == 1) & (args.termination_cost > 0)] = 0

        # Evaluate Q^c(s_t, a_t) (line 3)
        inputs, next_inputs = (agent.normalize(torch.as_tensor(x, device=device)) for x in (obs, next_obs))
        values, next_values = (agent.get_value(x).cpu().numpy() for x in (inputs, next_inputs))
        safety_values, next_safety_values = (agent.get_safety_value(x).cpu().numpy() for x in (inputs, next_inputs))
        next_safety_values = np.where(dones == 1, 1, next_safety_values)  # over within the limit: it was safe
        next_safety_values = np.where(next_safe == 1, next_safety_values, 0)  # beyond the limit: unsafe for ever
        q = np.mean([safety_q(safe, next_safety_values, dones, args.safety_gamma, x) for x in args.safety_lambdas], 0)
        safety_targets = safety_target(safe, next_safety_values, dones, args.safety_gamma)

        # Nullify unsafe reward, estimate A^{rc,k} (lines 4 to 6)
        nullified = args.reward_scale * nullify(rewards, costs, q, args.k, args.beta, args.reward_bias, args.penalty)
        advantages = gae(nullified, values, next_values, terminations, dones, args.gamma, args.gae_lambda)
        returns = advantages + values

        # Optimise the policy and both critics (lines 7 to 10)
        if args.anneal_lr:
            learning_rate = torch.tensor(args.learning_rate * (1 - (iteration - 1) / num_iterations), device=device)
        b_obs, b_actions = inputs.flatten(0, 1), torch.as_tensor(actions, device=device).flatten(0, 1)
        b_logprobs, _ = agent.get_logprob_and_entropy(b_obs, b_actions)
        b_estimates = (torch.as_tensor(x, device=device).flatten() for x in (advantages, returns, safety_targets))
        batch = [b_obs, b_actions, b_logprobs, *b_estimates]
        logged = []
        for epoch in range(1, args.update_epochs + 1):
            order = torch.randperm(batch_size).to(device)
            for minibatch in zip(*(x[order].split(args.minibatch_size) for x in batch)):
                weights, adam, step_logged = gradient_step(weights, adam, learning_rate, agent, minibatch, args)
                logged.append(step_logged)
            epoch_logged = torch.stack(logged[-(batch_size // args.minibatch_size) :])
            approx_kl = epoch_logged[:, LOGGED.index("approx_kl")].mean().item()  # of the last epoch alone
            if args.target_kl is not None and approx_kl > args.target_kl:
                break
        nn.utils.vector_to_parameters(weights, agent.parameters())

        # Mean and variance of the observations so far, without the share of the limit, for the next iteration. In the
        # second half of a run they stay: the policy is then near the limit, and a drift could push it over the limit
        if args.norm_obs and 2 * iteration <= num_iterations:
            n = obs_dim - args.augment_state
            x = torch.as_tensor(obs[..., :n], device=device).flatten(0, 1).double()
            mean, var, weight = agent.obs_mean[:n], agent.obs_var[:n], 1 / iteration  # all batches weigh the same
            delta = x.mean(0) - mean
            var += weight * (x.var(0) - var + (1 - weight) * delta**2)
            mean += weight * delta

        # What there is to log and to save
        scalars = {f"losses/{name}": value for name, value in zip(LOGGED, torch.stack(logged).mean(0).tolist())}
        scalars["losses/explained_variance"] = 1 - (returns - values).var() / (returns.var() + 1e-8)
        scalars["losses/approx_kl"] = approx_kl
        scalars["losses/epochs"] = epoch
        scalars["losses/learning_rate"] = learning_rate.item()
        scalars["safety/safety_value_mean"] = safety_values.mean()
        scalars["safety/safety_q_mean"] = q.mean()
        scalars["safety/safety_target_mean"] = safety_targets.mean()
        scalars["safety/unsafe_share"] = 1 - safe.mean()
        scalars["safety/negative_reward_share"] = (rewards + args.reward_bias < 0).mean()
        scalars["safety/cost_limit"] = limit
        scalars["charts/sampling_SPS"] = int(batch_size / sampling_seconds)
        played = dict(episodes=episodes, sampled_from=sampled_from if limit == args.cost_limit else None)
        yield dict(checkpoint=snapshot_after(iteration), scalars=scalars, **played)


if __name__ == "__main__":
    try:
        from scpo_run import run  # more flags, a folder for each run, checkpoints, --resume, signals
    except ImportError:  # this file alone: it trains, prints and logs to TensorBoard
        from torch.utils.tensorboard import SummaryWriter

        def run(train, Args, task_settings):
            args, _ = tyro.cli(Args, add_help=False, return_unknown_args=True)  # --env-id sets the defaults
            settings = task_settings.get(args.env_id + " --fast" * args.fast, task_settings["any other task"])
            args = tyro.cli(Args, default=Args(**dict(settings, env_id=args.env_id)))
            print("There is no scpo_run.py to import: no checkpoints, no --resume, logs for TensorBoard in runs/")
            name = f"{args.env_id}__{__file__.split('/')[-1]}__{args.seed}__{int(time.time())}"
            writer = SummaryWriter("runs/" + name.replace(":", "-").replace("/", "-"))
            writer.add_text("hyperparameters", json.dumps(vars(args), indent=4))
            for progress in train(args):
                global_step = progress["checkpoint"]["iteration"] * args.num_envs * args.num_steps
                scalars, episodes = progress.get("scalars", {}), progress.get("episodes", [])
                for name in ("return", "cost", "safe") if episodes else ():
                    scalars[f"charts/episodic_{name}"] = np.mean([episode[name] for episode in episodes])
                for name, value in scalars.items():
                    writer.add_scalar(name, value, global_step)
                print(global_step, *(f"{name[7:]} {x:.2f}" for name, x in scalars.items() if "/episodic" in name))
            writer.close()

    run(train, Args, TASK_SETTINGS)
