"""TRPO with a Lagrange multiplier (TRPO-L): it is the weight of the cost, and rises while the limit is exceeded.

Paper: Ray, Achiam & Amodei (2019), "Benchmarking Safe Exploration in Deep Reinforcement Learning".

In each batch the multiplier first follows the costs of the batch's episodes. Then the policy takes TRPO's step for
reward minus weighted cost:

    multiplier <- max(0, multiplier + lr (mean episode cost - limit))
    max g'x   such that   x'Hx / 2 <= delta,   g the gradient of   (A_r - multiplier A_c) / (1 + multiplier)

Read the functions under "The mathematics", then `train`.

docs/baselines.md lists mistakes of public versions that this one avoids, and settings that differ from published ones.
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
from torch.nn.utils import parameters_to_vector, vector_to_parameters

with contextlib.suppress(ImportError):
    import scpo_envs  # noqa: F401  registers the paper's tasks; any other Gymnasium task works without it

# Defaults by task, in place of those in Args. Ball tasks: limits and lengths of SCPO's paper, the rest by trials
T = 32000  # steps an iteration
TASK_SETTINGS = {
    "SafetyBallCircle-v0": dict(cost_limit=25, target_kl=0.01, lagrangian_lr=0.05, total_timesteps=500 * T),
    "SafetyBallRun-v0": dict(cost_limit=25, target_kl=0.001, lagrangian_lr=0.01, total_timesteps=100 * T),
    "SafetyBallGather-v0": dict(cost_limit=0.2, target_kl=0.01, lagrangian_lr=5, total_timesteps=500 * T),
    "SafetyBallReach-v0": dict(cost_limit=10, target_kl=0.01, lagrangian_lr=0.1, total_timesteps=500 * T),
    "CartSafe-v0": dict(cost_limit=1, target_kl=0.01, lagrangian_lr=0.05, total_timesteps=150 * T),
    "any other task": {},  # as in Args
}
DELTA = 0.1  # with --augment-state: the share of the limit spent stops at 1 + DELTA


@dataclass
class Args:
    env_id: str = "SafetyBallCircle-v0"  # Gymnasium id of the task; `module:id` imports the module first
    seed: int = 1  # of everything: weights, actions, minibatches, environments
    total_timesteps: int = 100 * T  # environment steps, rounded down to whole iterations
    num_envs: int = 16  # environments stepped side by side
    num_steps: int = 2000  # steps in each environment an iteration: eight whole episodes of a Ball task
    gamma: float = 0.99  # discount of reward and cost
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation, for the reward
    cost_gae_lambda: float = 0.95  # the same for the cost
    critic_learning_rate: float = 1e-3  # Adam's step size for both critics
    critic_epochs: int = 5  # passes of the critics over an iteration's steps
    critic_minibatches: int = 16  # gradient steps in one of these passes
    lagrangian_init: float = 0.001  # multiplier at the start
    lagrangian_lr: float = 0.05  # what the multiplier rises by for each unit of mean episode cost above the limit
    target_kl: float = 0.01  # the trust region's delta: mean KL divergence that a step is computed for
    kl_margin: float = 1.5  # a step is accepted up to this many times target-kl
    cg_iters: int = 10  # iterations of conjugate gradient
    cg_damping: float = 0.1  # added to the Fisher matrix's diagonal
    fisher_subsampling: int = 4  # the Fisher matrix is estimated on one in this many observations, drawn at random
    backtrack: float = 0.8  # what a step is multiplied by, again and again, until it is accepted
    line_search_steps: int = 20  # lengths tried; when none is accepted the policy stays
    std_start: float = 0.509  # standard deviation of continuous actions, not learned; it falls linearly from here
    std_end: float = 0.1  # to this, in the last iteration
    cost_limit: Optional[float] = None  # cost an episode may spend on average, undiscounted (None: must be given)
    augment_state: bool = False  # append the share of the cost limit spent so far to the observation, as SCPO does
    device: Literal["cpu", "cuda"] = "cpu"  # where the updates run; the CPU is faster for networks this small
    save_every: int = 10  # iterations from checkpoint to checkpoint; at each, new episodes begin (0: only at the end)


def check_args(args):
    """Raises ValueError, which names the flag and what is allowed, before anything is made."""
    batch_size = args.num_envs * args.num_steps
    for names, allowed, is_allowed in (
        ("num_envs", "in [1, 1024]", lambda x: 1 <= x <= 1024),
        ("num_steps", "1 or more, with num-envs x num-steps at most 1e7", lambda x: x >= 1 and batch_size <= 1e7),
        ("critic_epochs cg_iters fisher_subsampling line_search_steps kl_margin", "1 to 1e5", lambda x: 1 <= x <= 1e5),
        ("critic_learning_rate target_kl", "in [1e-9, 1e6]", lambda x: 1e-9 <= x <= 1e6),
        ("std_start std_end", "in [1e-4, 1e6]", lambda x: 1e-4 <= x <= 1e6),
        ("cg_damping lagrangian_init lagrangian_lr cost_limit", "in [0, 1e6]", lambda x: 0 <= x <= 1e6),
        ("seed save_every", "in [0, 2^31)", lambda x: 0 <= x < 2**31),
        ("gamma gae_lambda cost_gae_lambda", "in [0, 1]", lambda x: 0 <= x <= 1),
        ("backtrack", "between 0 and 1", lambda x: 0 < x < 1),
        ("critic_minibatches", f"a divisor of the {batch_size} steps", lambda x: x >= 1 and batch_size % x == 0),
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
        is_box = isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating) and all(space.shape)
        if not is_box and not isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
            raise ValueError(f"actions must be a Box of floats, Discrete or MultiDiscrete, not {space}")
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
    """Policy, reward critic and cost critic, three separate networks, and the normalisers of what they see."""

    def __init__(self, obs_dim, action_space):
        super().__init__()
        self.action_space, self.num_choices = action_space, []
        self.is_continuous = isinstance(action_space, gym.spaces.Box)
        if self.is_continuous:
            self.action_dim = self.noise_dim = math.prod(action_space.shape)
            has_range = np.maximum(-action_space.low, action_space.high) < 1e30  # float32's largest numbers mean none
            low, high = np.where(has_range, action_space.low, -1), np.where(has_range, action_space.high, 1)
            self.middle, self.half = (high + low) / 2, (high - low) / 2
        else:
            self.num_choices = np.ravel(action_space.n if action_space.shape == () else action_space.nvec).tolist()
            self.action_dim, self.noise_dim = len(self.num_choices), sum(self.num_choices)
        self.actor = mlp(obs_dim, self.noise_dim, last_std=0.01)  # the mean of a Gaussian, or logits
        self.critic = mlp(obs_dim, 1, last_std=1.0)
        self.cost_critic = mlp(obs_dim, 1, last_std=1e-6)  # near 0, for the task's costs may be small
        self.register_buffer("std", torch.ones(()))  # of continuous actions
        self.register_buffer("obs_count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("obs_mean", torch.zeros(obs_dim, dtype=torch.float64))
        self.register_buffer("obs_var", torch.ones(obs_dim, dtype=torch.float64))
        self.register_buffer("return_count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("return_mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("return_var", torch.ones((), dtype=torch.float64))  # of the discounted return
        self.register_buffer("excess_cost", torch.zeros(()))  # (mean cost of an episode - limit) / mean length
        self.register_buffer("lagrangian_multiplier", torch.zeros((), dtype=torch.float64))

    def normalize(self, obs):
        return ((obs - self.obs_mean) / (self.obs_var + 1e-8).sqrt()).clamp(-10, 10).float()

    def get_logprobs(self, outputs, actions):
        """outputs: of the actor, means or logits (batch, n); actions: (batch, action_dim). Returns (batch,)."""
        if self.is_continuous:
            return (-0.5 * ((actions - outputs) / self.std) ** 2 - self.std.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
        choices = zip(outputs.split(self.num_choices, dim=-1), actions.long().unbind(-1))
        return sum(logits.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1) for logits, action in choices)

    def get_kl(self, old_outputs, outputs):
        """Mean KL divergence of the policy from the old one over a batch of both actors' outputs."""
        if self.is_continuous:
            return (0.5 * ((outputs - old_outputs) / self.std) ** 2).sum(-1).mean()
        pairs = zip(old_outputs.split(self.num_choices, dim=-1), outputs.split(self.num_choices, dim=-1))
        return sum((old.softmax(-1) * (old.log_softmax(-1) - new.log_softmax(-1))).sum(-1).mean() for old, new in pairs)

    def sample_noise(self, rng, *shape):
        """Noise (*shape, noise_dim) for the policy of `numpy_policy`: standard normal, or Gumbel for choices."""
        if self.is_continuous:
            return rng.standard_normal((*shape, self.noise_dim)).astype(np.float32)
        return rng.gumbel(size=(*shape, self.noise_dim)).astype(np.float32)

    def to_env(self, actions):
        """Maps actions (num_envs, action_dim) to the task's: [-1, 1] to a component's range, if it has one; clips."""
        space, actions = self.action_space, actions.reshape(-1, *self.action_space.shape)
        if not self.is_continuous:
            return actions.astype(np.int64) + getattr(space, "start", 0)
        return np.clip(self.middle + self.half * actions, space.low, space.high).astype(space.dtype)


def numpy_policy(agent):
    """Returns the policy as a function of NumPy arrays: (num_envs, obs_dim), noise (num_envs, noise_dim) -> actions.

    For a dozen rows a forward pass in torch takes several times as long as the multiplications. Of choices, the one
    with the largest sum of logit and noise is taken: with Gumbel noise it is a sample of the softmax.
    """
    layers = [(x.weight.detach().T.cpu().numpy(), x.bias.detach().cpu().numpy()) for x in agent.actor[::2]]
    mean, scale = agent.obs_mean.cpu().numpy(), 1 / np.sqrt(agent.obs_var.cpu().numpy() + 1e-8)
    ends, std = np.cumsum(agent.num_choices)[:-1], agent.std.item()

    def act(obs, noise):
        x = np.clip((obs - mean) * scale, -10, 10).astype(np.float32)
        for weight, bias in layers[:-1]:
            x = np.tanh(x @ weight + bias)
        weight, bias = layers[-1]
        if agent.is_continuous:
            return x @ weight + bias + std * noise
        perturbed = x @ weight + bias + noise
        return np.stack([choice.argmax(-1) for choice in np.split(perturbed, ends, axis=-1)], axis=-1)

    return act


# The mathematics ------------------------------------------------------------------------------------------------------
# Arrays are (num_steps, num_envs) unless said otherwise. `dones` marks an episode's last step, terminated or cut off.
# Vectors are as long as the actor has weights. Gradients point uphill: g of the objective's surrogate, b of the cost's.


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


def add_to_moments(count, mean, var, x):
    """Returns count, mean and variance of what was counted before and the rows of x together."""
    total = count + len(x)
    delta = x.mean(0) - mean
    sum_of_squares = var * count + x.var(0, unbiased=False) * len(x) + delta**2 * count * len(x) / total
    return total, mean + delta * len(x) / total, sum_of_squares / total


def discounted_sums(rewards, dones, sums, gamma):
    """Returns R_t = gamma R_{t-1} + r_t, which is 0 before an episode, and the next rollout's `sums` (num_envs,)."""
    all_sums = np.empty_like(rewards)
    for t in range(len(rewards)):
        all_sums[t] = sums = gamma * sums + rewards[t]
        sums = sums * (1 - dones[t])
    return all_sums, sums


def flat_gradient(value, parameters, **kwargs):
    return torch.cat([x.flatten() for x in torch.autograd.grad(value, parameters, **kwargs)])


def fisher_vector_product(agent, obs, damping):
    """Returns v -> H v; H is the Fisher matrix, the Hessian of the mean KL divergence on obs, plus the damping."""
    parameters = list(agent.actor.parameters())
    outputs = agent.actor(obs)
    slope = flat_gradient(agent.get_kl(outputs.detach(), outputs), parameters, create_graph=True)
    return lambda v: flat_gradient(slope @ v, parameters, retain_graph=True) + damping * v


def conjugate_gradient(matrix_vector_product, b, iterations, tolerance=1e-10):
    """Solves A x = b for a positive definite A. It solves for b / |b| and scales back: small b are solved as well."""
    norm = b.norm()
    x, residual = torch.zeros_like(b), b / norm if norm > 0 else torch.zeros_like(b)
    direction, square = residual, residual @ residual
    for _ in range(iterations):
        if square < tolerance:
            break
        product = matrix_vector_product(direction)
        length = square / (direction @ product)
        x, residual = x + length * direction, residual - length * product
        square, last_square = residual @ residual, square
        direction = residual + square / last_square * direction
    return x * norm


def trpo_step(g, natural_g, delta):
    """The step x that maximises g'x within x'Hx / 2 <= delta; natural_g: H^-1 g."""
    return math.sqrt(2 * delta / max((g @ natural_g).item(), 1e-20)) * natural_g


# TRPO-L ---------------------------------------------------------------------------------------------------------------


def lagrangian_advantages(advantages, cost_advantages, multiplier):
    """What the policy step and its line search raise: (A_r - multiplier A_c) / (1 + multiplier)."""
    return (advantages - multiplier * cost_advantages) / (1 + multiplier)


def update_multiplier(multiplier, episode_costs, cost_limit, learning_rate):
    """Gradient ascent: up while an episode costs more than the limit, else down to 0; kept where no episode ended."""
    if not len(episode_costs):
        return multiplier
    return max(0.0, multiplier + learning_rate * (float(np.mean(episode_costs)) - cost_limit))


# ----------------------------------------------------------------------------------------------------------------------


def line_search(surrogates, weights, step, max_kl, max_cost_change, may_fall, backtrack, tries):
    """Returns the first weights + backtrack^j step that is accepted, j and its surrogates, or `weights` as they are.

    surrogates: weights -> changes of the objective and of the cost, and the KL divergence. Weights are accepted if all
    of these are finite, the KL divergence is within max_kl, the cost rises by at most max_cost_change and the objective
    doesn't fall, unless may_fall.
    """
    for exponent in range(tries):
        new_weights = weights + backtrack**exponent * step
        changes = objective_change, cost_change, kl = surrogates(new_weights)
        finite = new_weights.isfinite().all() and all(map(math.isfinite, changes))
        if finite and kl <= max_kl and cost_change <= max_cost_change and (may_fall or objective_change >= 0):
            return new_weights, exponent, changes
    return weights, tries, (0.0, 0.0, 0.0)


def update_policy(agent, obs, actions, advantages, cost_advantages, args):
    """One step of the policy. Normalised obs (batch, obs_dim), actions (batch, action_dim), both advantages (batch,).

    The mean of ratio x advantage, with the ratio of the new to the old policy, is the surrogate: it estimates how the
    step changes the return (the cost). Returns what there is to log.
    """
    parameters = list(agent.actor.parameters())
    weights = parameters_to_vector(parameters).detach()
    outputs = agent.actor(obs)
    logprobs = agent.get_logprobs(outputs, actions)
    old_outputs, old_logprobs = outputs.detach(), logprobs.detach()
    ratio = (logprobs - old_logprobs).exp()
    sample = torch.randperm(len(obs))[: math.ceil(len(obs) / args.fisher_subsampling)].to(obs.device)
    matrix_vector_product = fisher_vector_product(agent, obs[sample], args.cg_damping)
    # TRPO-L -----------------------------------------------------------------------------------------------------------
    multiplier, c = agent.lagrangian_multiplier.item(), agent.excess_cost.item()
    objective = lagrangian_advantages(advantages, cost_advantages, multiplier)
    g = flat_gradient((ratio * objective).mean(), parameters)
    step = trpo_step(g, conjugate_gradient(matrix_vector_product, g, args.cg_iters), args.target_kl)
    max_cost_change, may_fall = math.inf, False  # the objective has the cost in it
    log = {"constraint": c, "lagrangian_multiplier": multiplier}
    # ------------------------------------------------------------------------------------------------------------------

    def surrogates(new_weights):
        vector_to_parameters(new_weights, parameters)
        with torch.no_grad():
            outputs = agent.actor(obs)
            growth = torch.expm1(agent.get_logprobs(outputs, actions) - old_logprobs)
            kl = agent.get_kl(old_outputs, outputs)
            return (growth * objective).mean().item(), (growth * cost_advantages).mean().item(), kl.item()

    max_kl = args.kl_margin * args.target_kl
    new_weights, exponent, (objective_change, cost_change, kl) = line_search(
        surrogates, weights, step, max_kl, max_cost_change, may_fall, args.backtrack, args.line_search_steps
    )
    vector_to_parameters(new_weights, parameters)
    return {
        "kl": kl,
        "objective_change": objective_change,
        "cost_surrogate_change": cost_change,
        "line_search_exponent": exponent,
        "step_accepted": int(exponent < args.line_search_steps),
        **log,
    }


def update_critics(agent, optimizer, obs, returns, cost_returns, args):
    """Fits both critics to their returns (batch,); returns the mean losses of value and cost value."""
    losses = []
    for _ in range(args.critic_epochs):
        order = torch.randperm(len(obs)).to(obs.device)
        for rows in order.split(len(obs) // args.critic_minibatches):
            value_loss = ((agent.critic(obs[rows]).squeeze(-1) - returns[rows]) ** 2).mean()
            cost_value_loss = ((agent.cost_critic(obs[rows]).squeeze(-1) - cost_returns[rows]) ** 2).mean()
            optimizer.zero_grad()
            (value_loss + cost_value_loss).backward()
            optimizer.step()
            losses.append(torch.stack([value_loss, cost_value_loss]).detach())
    return torch.stack(losses).mean(0).tolist()


# The algorithm --------------------------------------------------------------------------------------------------------


def train(args, checkpoint=None, make_env=make_env):
    """A generator: yields what there is to save before the first iteration, and to log and save after each.

    checkpoint: one that it has yielded (a copy: the next iteration changes it), to go on from. New episodes begin then,
    and every save_every iterations. A run resumed from one of these checkpoints is the same as one without a break.
    """
    check_args(args)
    torch.set_num_threads(1)  # the matrices are too small to share
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002  some tasks draw from it
    rng = np.random.default_rng(args.seed)
    device = torch.device(args.device)
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size

    # Environments
    envs = [make_env(args.env_id, args.cost_limit, args.augment_state) for _ in range(args.num_envs)]
    obs_dim, longest = envs[0].observation_space.shape[0], envs[0].spec.max_episode_steps
    if any(f"Normalize{x}" in str(envs[0]) for x in ("Observation", "Reward", "Cost")):
        print("A Normalize wrapper isn't saved and may alter the returns; this script has its own", file=sys.stderr)
    for flag, iterations in (("--total-timesteps", num_iterations), ("--save-every", args.save_every)):
        if longest and 0 < iterations * args.num_steps < longest:
            allowed = f"{flag} must give each environment at least {longest} steps, an episode's length"
            raise ValueError(f"{allowed}, but {iterations} iterations are {iterations * args.num_steps}")

    # Networks and the critics' optimiser
    agent = Agent(obs_dim, envs[0].action_space).to(device)
    agent.std.fill_(args.std_start)
    actor = list(agent.actor.parameters())
    vector_to_parameters(parameters_to_vector(actor).detach(), actor)  # as after a step: memory layout affects rounding
    critic_parameters = [*agent.critic.parameters(), *agent.cost_critic.parameters()]
    optimizer = torch.optim.Adam(critic_parameters, lr=args.critic_learning_rate)
    agent.lagrangian_multiplier.fill_(args.lagrangian_init)

    # Storage of an iteration
    shape = (args.num_steps, args.num_envs)
    obs, next_obs = np.zeros((2, *shape, obs_dim), dtype=np.float32)
    actions = np.zeros((*shape, agent.action_dim), dtype=np.float32)
    rewards, costs, terminations, dones = np.zeros((4, *shape), dtype=np.float32)

    first = checkpoint["iteration"] + 1 if checkpoint else 1
    if checkpoint:
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["torch_rng"])
        rng.bit_generator.state = json.loads(checkpoint["numpy_rng"])

    def snapshot_after(iteration):
        generators = dict(torch_rng=torch.get_rng_state(), numpy_rng=json.dumps(rng.bit_generator.state))
        return dict(iteration=iteration, agent=agent.state_dict(), optimizer=optimizer.state_dict(), **generators)

    yield dict(checkpoint=snapshot_after(first - 1))
    for iteration in range(first, num_iterations + 1):
        # Sample
        if iteration == first or (args.save_every and (iteration - 1) % args.save_every == 0):
            resets = [env.reset(seed=int(rng.integers(2**31))) for env in envs]  # asks all workers, then waits for them
            current_obs = np.stack([first_obs for first_obs, _ in resets])
            discounted_return = np.zeros(args.num_envs)
        agent.std.fill_(args.std_end + (args.std_start - args.std_end) * (1 - iteration / num_iterations))
        start_time, episodes = time.monotonic(), []
        policy, sampled_from = numpy_policy(agent), {name: x.clone() for name, x in agent.state_dict().items()}
        noise = agent.sample_noise(rng, *shape)
        for t in range(args.num_steps):
            obs[t] = current_obs
            actions[t] = policy(obs[t], noise[t])
            results = [env.step(action) for env, action in zip(envs, agent.to_env(actions[t]))]
            for i, (env, result) in enumerate(zip(envs, results)):  # with --num-workers it is here that we wait
                next_obs[t, i], rewards[t, i], terminated, truncated, info = result
                costs[t, i] = info["cost"]
                terminations[t, i], dones[t, i] = terminated, terminated or truncated
                current_obs[i] = next_obs[t, i]
                if terminated or truncated:
                    global_step = (iteration - 1) * batch_size + (t + 1) * args.num_envs
                    episodes.append(dict(iteration=iteration, global_step=global_step, env=i, **info["episode"]))
                    current_obs[i] = env.reset()[0]
        sampling_seconds = time.monotonic() - start_time
        for name, array in (("observation", obs), ("observation", next_obs), ("reward", rewards), ("action", actions)):
            if not np.isfinite(array).all():
                raise FloatingPointError(f"the {name} is NaN or infinite in iteration {iteration}")
        episode_costs = [episode["cost"] for episode in episodes]
        if episodes:  # otherwise the value of the last episodes still holds
            mean_length = np.mean([episode["length"] for episode in episodes])
            agent.excess_cost.fill_((np.mean(episode_costs) - args.cost_limit) / mean_length)

        # Advantages: the reward's in units of their standard deviation, the cost's in units of cost
        reward_scale = agent.return_var.sqrt().item() + 1e-8
        scaled_rewards = np.clip(rewards / reward_scale, -10, 10)
        with torch.no_grad():
            inputs, next_inputs = (agent.normalize(torch.as_tensor(x, device=device)) for x in (obs, next_obs))
            critics = (agent.critic, agent.cost_critic)
            values, cost_values = (critic(inputs).squeeze(-1).cpu().numpy() for critic in critics)
            next_values, next_cost_values = (critic(next_inputs).squeeze(-1).cpu().numpy() for critic in critics)
        ends = (terminations, dones)
        advantages = gae(scaled_rewards, values, next_values, *ends, args.gamma, args.gae_lambda)
        cost_advantages = gae(costs, cost_values, next_cost_values, *ends, args.gamma, args.cost_gae_lambda)
        returns, cost_returns = advantages + values, cost_advantages + cost_values
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        cost_advantages = (cost_advantages - cost_advantages.mean()) * costs.any()  # in a batch without cost: noise

        # Optimise the policy, then both critics
        estimates = (advantages, cost_advantages, returns, cost_returns)
        estimates = [torch.as_tensor(x, device=device).flatten() for x in estimates]
        b_obs, b_actions = inputs.flatten(0, 1), torch.as_tensor(actions, device=device).flatten(0, 1)
        multiplier = update_multiplier(
            agent.lagrangian_multiplier.item(), episode_costs, args.cost_limit, args.lagrangian_lr
        )
        agent.lagrangian_multiplier.fill_(multiplier)
        policy_log = update_policy(agent, b_obs, b_actions, *estimates[:2], args)
        value_loss, cost_value_loss = update_critics(agent, optimizer, b_obs, *estimates[2:], args)

        # Normalise the next iteration's observations and rewards by what has been seen so far. In the second half of a
        # run the observations' moments stay: their drift could push a policy over the limit
        discounted_returns, discounted_return = discounted_sums(rewards, dones, discounted_return, args.gamma)
        seen = {"return": discounted_returns.ravel()}
        if 2 * iteration <= num_iterations:
            seen["obs"] = obs.reshape(-1, obs_dim)
        for name, x in seen.items():
            moments = [getattr(agent, f"{name}_{moment}") for moment in ("count", "mean", "var")]
            x = torch.as_tensor(x, dtype=torch.float64, device=device)
            for buffer, value in zip(moments, add_to_moments(*moments, x)):
                buffer.copy_(value)
        if args.augment_state:  # a share needs no scaling, and its variance is 0 until there is a cost
            agent.obs_mean[-1], agent.obs_var[-1] = 0, 1

        # What there is to log and to save
        scalars = {
            **{f"policy/{name}": value for name, value in policy_log.items()},
            "policy/std": agent.std.item(),
            "losses/value_loss": value_loss,
            "losses/cost_value_loss": cost_value_loss,
            "losses/explained_variance": 1 - (returns - values).var() / (returns.var() + 1e-8),
            "losses/cost_explained_variance": 1 - (cost_returns - cost_values).var() / (cost_returns.var() + 1e-8),
            "losses/reward_scale": reward_scale,
            "charts/sampling_SPS": int(batch_size / sampling_seconds),
        }
        yield dict(checkpoint=snapshot_after(iteration), scalars=scalars, episodes=episodes, sampled_from=sampled_from)


if __name__ == "__main__":
    try:
        from scpo_run import run  # more flags, a folder for each run, checkpoints, --resume, signals
    except ImportError:  # this file alone: it trains, prints and logs to TensorBoard
        from torch.utils.tensorboard import SummaryWriter

        def run(train, Args, task_settings):
            args, _ = tyro.cli(Args, add_help=False, return_unknown_args=True)  # --env-id sets the defaults
            settings = task_settings.get(args.env_id, task_settings["any other task"])
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
