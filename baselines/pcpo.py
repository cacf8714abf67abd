"""Projection-based Constrained Policy Optimization (PCPO): a step for the return, then a projection onto what keeps the limit.

Paper: Yang, Rosca, Narasimhan & Ramadge (2020), "Projection-Based Constrained Policy Optimization".

Two steps of the weights x a batch, from linear models of return and cost and a quadratic one of the KL divergence:

    x1 = argmax g'x   such that   x'Hx / 2 <= delta
    x2 = the nearest x to x1   such that   c + b'x <= 0,   near by KL divergence or L2 norm,

then shortened until the sampled surrogates agree. Read the functions under "The mathematics", then `main`.

Where public versions err and this one doesn't, and where we depart from the paper: docs/baselines.md.
"""

import contextlib
import fcntl
import importlib.util
import io
import json
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Optional

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

try:
    import scpo_envs  # noqa: F401  registers the paper's tasks; any other Gymnasium task works without it
except ImportError:
    pass

# The limits and lengths of the SCPO paper; what was chosen here, on seeds 101 and up, is in docs/baselines.md with its grid.
TASK_SETTINGS = {
    "SafetyBallCircle-v0": dict(cost_limit=25, target_kl=0.003, iterations=500),
    "SafetyBallRun-v0": dict(cost_limit=25, target_kl=0.001, iterations=100),
    "SafetyBallGather-v0": dict(cost_limit=0.2, target_kl=0.001, iterations=500),
    "SafetyBallReach-v0": dict(cost_limit=10, target_kl=0.0003, iterations=500),
    "CartSafe-v0": dict(cost_limit=1, target_kl=0.001, iterations=150),
    "any other task": dict(cost_limit=None, target_kl=0.001, iterations=100),
}
DELTA = 0.1  # with --augment-state: the share of the limit spent stops at 1 + DELTA


@dataclass
class Args:
    env_id: str = "SafetyBallCircle-v0"
    """Gymnasium id of the task; `module:id` imports the module first"""
    seed: int = 1
    """seed of everything: weights, actions, minibatches, environments"""
    total_timesteps: Optional[int] = None
    """environment steps, rounded down to whole iterations (None: as long as the published run)"""
    num_envs: int = 16
    """environments stepped side by side"""
    num_steps: int = 2000
    """steps in each environment an iteration: eight whole episodes of a Ball task"""
    gamma: float = 0.99
    """discount of reward and cost"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation, for the reward"""
    cost_gae_lambda: float = 0.95
    """the same for the cost"""
    critic_learning_rate: float = 1e-3
    """Adam's step size for both critics"""
    critic_epochs: int = 5
    """passes of the critics over an iteration's steps"""
    critic_minibatches: int = 16
    """gradient steps in one of these passes"""
    target_kl: Optional[float] = None
    """the trust region's delta: mean KL divergence that a step is computed for (None: the task's, see above)"""
    projection: Literal["kl", "l2"] = "kl"
    """distance that the projection keeps small: KL divergence or the weights' L2 norm"""
    kl_margin: float = 1.5
    """times target-kl, the KL divergence that is accepted"""
    cg_iters: int = 10
    """iterations of conjugate gradient"""
    cg_damping: float = 0.1
    """added to the Fisher matrix's diagonal"""
    fisher_stride: int = 4
    """the Fisher matrix is that of every so manieth observation"""
    backtrack: float = 0.8
    """what a step is multiplied by, again and again, until it is accepted"""
    line_search_steps: int = 20
    """lengths tried; when none is accepted the policy stays"""
    std_start: float = 0.509
    """standard deviation of continuous actions at the start; it isn't learned but falls linearly"""
    std_end: float = 0.1
    """standard deviation at the end"""
    cost_limit: Optional[float] = None
    """cost an episode may spend on average, undiscounted (None: the task's, see above)"""
    augment_state: bool = False
    """append the share of the cost limit spent so far to the observation, as SCPO does (the published runs didn't)"""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """where the updates run; auto is the CPU, faster for networks this small"""
    runs_dir: str = "runs"
    """folder that gets a folder for this run"""
    save_every: int = 10
    """iterations from checkpoint to checkpoint (0: only at the end); at each all environments start new episodes"""
    resume: Optional[str] = None
    """folder of a run to go on with from its last checkpoint, with the settings it has; more total-timesteps make it longer"""
    step_timeout: float = 60.0
    """seconds that a step of all environments may take before the run is given up"""
    track: bool = False
    """log to Weights & Biases too (pip install wandb)"""
    wandb_project_name: str = "scpo"
    """Weights & Biases project"""
    wandb_entity: Optional[str] = None
    """Weights & Biases team (None: yours)"""


def fail(message):
    """Answers bad input: one line, exit status 2."""
    print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


def parse_args(argv=None):
    """Returns the `Args` of a command line; a wrong flag gets one line where tyro prints a box."""
    table = "\n\n".join(
        f"{env_id}: " + ", ".join(f"{name.replace('_', '-')} {value}" for name, value in settings.items())
        for env_id, settings in TASK_SETTINGS.items()
    )
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(Args, args=argv, description=f"Settings that differ by task:\n\n{table}")
    except SystemExit as stop:
        if not stop.code:
            raise
        box = [line.strip(" │") for line in said.getvalue().splitlines()[1:]]
        fail(" ".join(box[: next((i for i, line in enumerate(box) if line.startswith(("─", "╰"))), None)]))


def check_args(args):
    """Fills in the task's settings and refuses what can't work, before anything is made."""
    settings = dict(TASK_SETTINGS.get(args.env_id, TASK_SETTINGS["any other task"]))
    batch_size = args.num_envs * args.num_steps
    settings["total_timesteps"] = settings.pop("iterations") * batch_size
    for name, value in settings.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    counts = "num_envs num_steps critic_epochs critic_minibatches cg_iters fisher_stride line_search_steps kl_margin"
    rules = (
        ("at least 1", lambda x: 1 <= x < math.inf, counts),
        ("0 or more", lambda x: 0 <= x < math.inf, "seed cg_damping"),
        ("0 or more", lambda x: x is None or 0 <= x < math.inf, "cost_limit"),
        ("above 0", lambda x: 0 < x < math.inf, "critic_learning_rate target_kl std_start std_end"),
        ("in [0, 1]", lambda x: 0 <= x <= 1, "gamma gae_lambda cost_gae_lambda"),
        ("between 0 and 1", lambda x: 0 < x < 1, "backtrack"),
        (f"a divisor of num-envs x num-steps = {batch_size}", lambda x: batch_size % x == 0, "critic_minibatches"),
        (f"at least num-envs x num-steps = {batch_size}", lambda x: x >= batch_size, "total_timesteps"),
        ("0 or more", lambda x: x >= 0, "save_every"),
        ("above 0", lambda x: 0 < x < math.inf, "step_timeout"),
        ("off, for there is no wandb: pip install wandb", lambda x: not x or importlib.util.find_spec("wandb"), "track"),
        ("cpu or auto, for torch sees no CUDA device", lambda x: x != "cuda" or torch.cuda.is_available(), "device"),
    )
    for allowed, is_allowed, names in rules:
        for name in names.split():
            if not is_allowed(getattr(args, name)):
                fail(f"--{name.replace('_', '-')} is {getattr(args, name)}, but must be {allowed}")
    return args


class SafetyState(gym.Wrapper):
    """Section "Augmented States": the state carries q_t, the cost spent before action t.

    Flattens the observation to float32 `(n,)` and appends clip(q_t / c_0, 0, 1 + DELTA). Adds to `info`: "cost" (float), "safe"
    (f of the state reached: q <= c_0) and, when an episode ends, "episode" with its "return", "cost" and "length". Raises
    `ValueError` if the task reports no cost, or one below 0.
    """

    def __init__(self, env, cost_limit, augment_state=True):
        super().__init__(env)
        space = gym.spaces.utils.flatten_space(env.observation_space)
        if not isinstance(space, gym.spaces.Box):
            raise ValueError(f"observations of type {type(env.observation_space).__name__} can't be flattened to a vector")
        self.is_flat = isinstance(env.observation_space, gym.spaces.Box) and len(env.observation_space.shape) == 1
        self.cost_limit, self.augment_state = cost_limit, augment_state
        low, high = (np.append(space.low, 0), np.append(space.high, 1 + DELTA)) if augment_state else (space.low, space.high)
        self.observation_space = gym.spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)

    def observe(self, obs):
        if not self.is_flat:
            obs = gym.spaces.utils.flatten(self.env.observation_space, obs)
        if not self.augment_state:
            return np.asarray(obs, dtype=np.float32)
        state = np.empty(self.observation_space.shape, dtype=np.float32)
        state[:-1] = obs
        state[-1] = min(self.spent / max(self.cost_limit, 1e-8), 1 + DELTA)
        return state

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        self.spent, self.episodic_return, self.length = 0.0, 0.0, 0
        return self.observe(obs), info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        cost = info["cost"] if "cost" in info else np.sum(info["constraint_costs"]) if "constraint_costs" in info else None
        if cost is None:
            raise ValueError('the task reports no cost: its step must put a number, 0.0 or more, into info["cost"] every time')
        if np.ndim(cost) or not 0 <= cost < math.inf:
            raise ValueError(f"the task reports a cost of {cost}, but a cost must be one number, 0 or more")
        cost = float(cost)
        self.spent += cost
        self.episodic_return += float(reward)
        self.length += 1
        info["cost"], info["safe"] = cost, self.spent <= self.cost_limit
        if terminated or truncated:
            info["episode"] = {"return": self.episodic_return, "cost": self.spent, "length": self.length}
        return self.observe(obs), reward, terminated, truncated, info


def make_env(env_id, cost_limit, augment_state):
    """Returns the wrapped environment, or says in one line why there is none; one step shows whether it reports a cost."""
    try:
        env = gym.make(env_id, disable_env_checker=True)
        if not isinstance(env.action_space, (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
            fail(f"--env-id {env_id}: actions must be Box, Discrete or MultiDiscrete, not {type(env.action_space).__name__}")
        if cost_limit is None:
            fail(f"--cost-limit is needed for {env_id}: the cost an episode may spend, 0 or more")
        env = SafetyState(env, cost_limit, augment_state)
        env.action_space.seed(0)
        env.reset(seed=0)
        env.step(env.action_space.sample())
    except Exception as error:
        fail(f"--env-id {env_id}: {str(error) or type(error).__name__}".splitlines()[0])
    return env


def mlp(num_inputs, num_outputs, last_std):
    """Two hidden layers of 64 with tanh, as in the paper, initialised orthogonally; last_std: gain of the last layer."""
    layers = [nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs)]
    for layer, std in zip(layers[::2], (2**0.5, 2**0.5, last_std)):
        nn.init.orthogonal_(layer.weight, std)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Agent(nn.Module):
    """Policy, reward critic and cost critic, three separate networks, and the normalisers of what they see."""

    def __init__(self, obs_dim, action_space):
        super().__init__()
        self.is_continuous = isinstance(action_space, gym.spaces.Box)
        self.num_choices = []  # [n] for Discrete(n), one number a component for MultiDiscrete
        if not self.is_continuous:
            self.num_choices = np.ravel(
                action_space.n if isinstance(action_space, gym.spaces.Discrete) else action_space.nvec
            ).tolist()
        self.actor = mlp(obs_dim, sum(self.num_choices) or math.prod(action_space.shape), last_std=0.01)
        self.critic = mlp(obs_dim, 1, last_std=1.0)
        self.cost_critic = mlp(obs_dim, 1, last_std=1.0)
        self.register_buffer("std", torch.ones(()))  # of continuous actions
        self.register_buffer("obs_count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("obs_mean", torch.zeros(obs_dim, dtype=torch.float64))
        self.register_buffer("obs_var", torch.ones(obs_dim, dtype=torch.float64))
        self.register_buffer("return_count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("return_mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("return_var", torch.ones((), dtype=torch.float64))  # of the discounted return
        self.register_buffer("excess_cost", torch.zeros(()))  # mean cost of an episode above the limit, a step

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


def sampler(agent):
    """Returns the policy as a function of NumPy arrays: (num_envs, obs_dim), noise as the actor's output -> actions.

    For some dozen rows a forward pass in torch costs several times the multiplications. The noise is standard normal, or
    Gumbel's: the choice with the largest sum of logit and noise is a sample of the softmax.
    """
    hidden_1, hidden_2, output = [
        (layer.weight.detach().T.cpu().numpy(), layer.bias.detach().cpu().numpy())
        for layer in agent.actor
        if isinstance(layer, nn.Linear)
    ]
    mean, scale = agent.obs_mean.cpu().numpy(), 1 / np.sqrt(agent.obs_var.cpu().numpy() + 1e-8)
    ends, std = np.cumsum(agent.num_choices)[:-1], agent.std.item()

    def sample(obs, noise):
        hidden = np.tanh(np.clip((obs - mean) * scale, -10, 10).astype(np.float32) @ hidden_1[0] + hidden_1[1])
        hidden = np.tanh(hidden @ hidden_2[0] + hidden_2[1])
        if agent.is_continuous:
            return hidden @ output[0] + output[1] + std * noise
        perturbed = hidden @ output[0] + output[1] + noise
        return np.stack([choice.argmax(-1) for choice in np.split(perturbed, ends, axis=-1)], axis=-1)

    return sample


# The mathematics ------------------------------------------------------------------------------------------------------------
# Arrays are (num_steps, num_envs) unless said otherwise; `dones` marks the last step of an episode, terminated or cut off.
# Vectors are as long as the actor has weights. All gradients point uphill: g of the return's surrogate, b of the cost's.


def gae(rewards, values, next_values, terminations, dones, gamma, gae_lambda):
    """Generalized advantage estimates, of reward or cost.

    next_values: V(s_{t+1}), of the state an episode ended in, not of the next episode's first. After a termination there is
    nothing to earn, after a time limit what the critic says; the trace is cut by both.
    """
    deltas = rewards + gamma * (1 - terminations) * next_values - values
    advantages = np.empty_like(deltas)
    last = np.zeros_like(deltas[0])
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
    """R_t = gamma R_{t-1} + r_t from the last rollout's sums (num_envs,), 0 where an episode begins; and the next sums."""
    all_sums = np.empty_like(rewards)
    for t in range(len(rewards)):
        all_sums[t] = sums = gamma * sums + rewards[t]
        sums = sums * (1 - dones[t])
    return all_sums, sums


def flat_gradient(value, parameters, **kwargs):
    return torch.cat([x.flatten() for x in torch.autograd.grad(value, parameters, **kwargs)])


def fisher_vector_product(agent, obs, damping):
    """Returns v -> (H + damping) v, with H the Fisher matrix: the Hessian of the mean KL divergence on obs (batch, obs_dim)."""
    parameters = list(agent.actor.parameters())
    outputs = agent.actor(obs)
    slope = flat_gradient(agent.get_kl(outputs.detach(), outputs), parameters, create_graph=True)
    return lambda v: flat_gradient(slope @ v, parameters, retain_graph=True) + damping * v


def conjugate_gradient(matrix_vector_product, b, iterations, tolerance=1e-10):
    """Solves A x = b for a positive definite A, for b / |b| and scaled back: small b are solved as well as large."""
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


# PCPO -------------------------------------------------------------------------------------------------------------------------


def pcpo_step(g, b, natural_g, projected_b, c, delta):
    """The step for the return, then back onto c + b'x <= 0 if it leaves that (Yang et al., section 4). Returns x, if projected.

    natural_g: H^-1 g. projected_b: L^-1 b, with L = H for the projection that is nearest in KL divergence, the identity for
    the nearest in L2 norm. c: mean cost of an episode above the limit, a step, the unit of b.
    """
    step = trpo_step(g, natural_g, delta)
    if (b @ b).item() <= 1e-8:
        return step, False
    distance = max(0.0, (b @ step).item() + c)
    return step - distance / (b @ projected_b).item() * projected_b, distance > 0


# ------------------------------------------------------------------------------------------------------------------------------


def line_search(surrogates, weights, step, max_kl, max_cost_change, may_fall, backtrack, tries):
    """Returns the first weights + backtrack^j step that is accepted, j and its surrogates; else `weights` as they are.

    surrogates: weights -> changes of the objective and of the cost, and the KL divergence. Accepted is what is finite, within
    max_kl, doesn't raise the cost by more than max_cost_change, and, unless may_fall, doesn't lower the objective.
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

    The ratio to the old policy makes a surrogate of an advantage: its mean is the change of the return (cost) a step. Returns
    what there is to log.
    """
    parameters = list(agent.actor.parameters())
    weights = parameters_to_vector(parameters).detach()
    outputs = agent.actor(obs)
    logprobs = agent.get_logprobs(outputs, actions)
    old_outputs, old_logprobs = outputs.detach(), logprobs.detach()
    ratio = (logprobs - old_logprobs).exp()
    matrix_vector_product = fisher_vector_product(agent, obs[:: args.fisher_stride], args.cg_damping)
    # PCPO ---------------------------------------------------------------------------------------------------------------------
    objective, c = advantages, agent.excess_cost.item()
    g = flat_gradient((ratio * advantages).mean(), parameters, retain_graph=True)
    b = flat_gradient((ratio * cost_advantages).mean(), parameters)
    natural_g, natural_b = (conjugate_gradient(matrix_vector_product, x, args.cg_iters) for x in (g, b))
    step, projected = pcpo_step(g, b, natural_g, natural_b if args.projection == "kl" else b, c, args.target_kl)
    max_cost_change, may_fall = max(-c, 0.0), c >= 0  # while the limit is broken, the return may fall
    log = {"constraint": c, "projected": int(projected)}
    # --------------------------------------------------------------------------------------------------------------------------

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


# The run --------------------------------------------------------------------------------------------------------------------


def git_revision():
    """The commit, with "-dirty" where a Python file differs from it, "unknown" outside git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "describe", "--always", "--abbrev=12"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ":/*.py"], capture_output=True).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("-dirty" if changed else "")


def versions():
    return dict(python=platform.python_version(), torch=str(torch.__version__), numpy=np.__version__, gymnasium=gym.__version__)


def load_checkpoint(args):
    """Returns the checkpoint of --resume and the `Args` to go on with, or says in one line why there is none."""
    path = Path(args.resume) / "last.pt"
    if not path.is_file():
        fail(f"--resume {args.resume}: there is no {path}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        script, saved, _ = checkpoint["script"], checkpoint["args"], checkpoint["files"]
    except Exception:
        fail(f"--resume {args.resume}: {path} is truncated or not a checkpoint of ours")
    if script != Path(__file__).name:
        fail(f"--resume {args.resume}: that run was made by {script}")
    for name, value in asdict(args).items():
        if name not in ("resume", "total_timesteps", "device") and value not in (getattr(Args(), name), saved[name]):
            fail(f"--{name.replace('_', '-')} is {value}, but must be {saved[name]}, as in the run that --resume goes on with")
    total_timesteps = args.total_timesteps or saved["total_timesteps"]
    return checkpoint, Args(**{**saved, "total_timesteps": total_timesteps, "device": args.device, "resume": args.resume})


def save_checkpoint(path, agent_state, args, **state):
    """Writes a checkpoint, of tensors and plain values, as a whole or not at all: beside `path`, to the disk, then in place.

    files: how long the run's logs are at this moment, for a resumed run cuts off what was logged later.
    """
    files = {}
    for log in [*path.parent.glob("*.csv"), *path.parent.glob("events.*")]:
        with open(log, "rb") as file:
            os.fsync(file.fileno())
            files[log.name] = os.fstat(file.fileno()).st_size
    buffer = io.BytesIO()
    identity = dict(script=Path(__file__).name, versions=versions(), args=dict(asdict(args), resume=None))
    torch.save(dict(identity, agent=agent_state, files=files, **state), buffer)
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        file.write(buffer.getvalue())
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def start_run(args, num_iterations, checkpoint):
    """Makes <runs-dir>/<env>__<script>__<seed>__<time>/ with config.json, or opens that of --resume. Returns path and lock."""
    name = f"{args.env_id.replace('/', '-').replace(':', '-')}__{Path(__file__).stem}__{args.seed}__{int(time.time())}"
    run_dir = Path(args.resume or Path(args.runs_dir) / name)
    made_by = dict(num_iterations=num_iterations, script=Path(__file__).name, revision=git_revision())
    try:
        if not checkpoint:
            run_dir.mkdir(parents=True)
            (run_dir / "config.json").write_text(json.dumps(dict(asdict(args), **made_by, **versions()), indent=2) + "\n")
        lock = open(run_dir / "config.json")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it does
        for path in [*run_dir.glob("*.csv"), *run_dir.glob("events.*")]:
            if path.name in checkpoint["files"]:
                os.truncate(path, checkpoint["files"][path.name])
            else:
                path.unlink()
    except BlockingIOError:
        fail(f"--resume {run_dir}: another process is at work on that run")
    except OSError as error:
        fail(f"--{'resume' if args.resume else 'runs-dir'}: can't write {run_dir} ({error.strerror})")
    return run_dir, lock


def append_rows(path, rows):
    """Appends dicts to a CSV file, with a header if it is new; closed each time, so that a crash loses nothing."""
    with open(path, "a", newline="") as file:
        for row in rows:
            if file.tell() == 0:
                file.write(",".join(row) + "\n")
            values = (f"{value:.6g}" if isinstance(value, (float, np.floating)) else str(value) for value in row.values())
            file.write(",".join(values) + "\n")


def explained_variance(values, returns):
    return 1 - (returns - values).var() / (returns.var() + 1e-8)


def catch_signals():
    """Returns the list that a first SIGINT or SIGTERM is put into; a second one ends the process. SIGALRM: a step hangs."""
    caught = []

    def stop(number, frame):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    def hangs(number, frame):
        raise TimeoutError("an environment takes longer for a step than --step-timeout allows")

    for number, handler in ((signal.SIGINT, stop), (signal.SIGTERM, stop), (signal.SIGALRM, hangs)):
        signal.signal(number, handler)
    return caught


def report_crash(kind, error, trace):
    """What a crash in mid-run says instead of a traceback, which SCPO_DEBUG=1 brings back."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    if os.environ.get("SCPO_DEBUG"):
        return sys.__excepthook__(kind, error, trace)
    trace = error.__cause__.__traceback__ if error.__cause__ else trace
    frame = traceback.extract_tb(trace)[-1]
    said = (
        f"{kind.__name__}: {' '.join(str(error).split())} ({Path(frame.filename).name}:{frame.lineno}; SCPO_DEBUG=1 shows more)"
    )
    print(f"\n{Path(__file__).name}: {said}. What was logged and saved is intact", file=sys.stderr)


def main(args, stop=None):
    """Trains. stop: the list of `catch_signals`, for a process of its own."""
    checkpoint, args = load_checkpoint(args) if args.resume else (None, args)
    args = check_args(args)
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    device = torch.device("cuda" if args.device == "cuda" else "cpu")
    torch.set_num_threads(1)  # the matrices are too small to share
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)

    # Environments
    envs = [make_env(args.env_id, args.cost_limit, args.augment_state) for _ in range(args.num_envs)]
    steps_each, longest = num_iterations * args.num_steps, envs[0].spec.max_episode_steps or 1
    if steps_each < longest:
        fail(f"--total-timesteps is {steps_each} steps an environment, but must be at least {longest}, an episode's length")
    obs_dim, action_space = envs[0].observation_space.shape[0], envs[0].action_space

    # Networks and the critics' optimiser
    agent = Agent(obs_dim, action_space).to(device)
    actor = list(agent.actor.parameters())
    vector_to_parameters(parameters_to_vector(actor).detach(), actor)  # one vector: where they lie decides about the last bits
    optimizer = torch.optim.Adam([*agent.critic.parameters(), *agent.cost_critic.parameters()], lr=args.critic_learning_rate)

    # Storage of an iteration
    num_outputs = agent.actor[-1].out_features
    action_dim = num_outputs if agent.is_continuous else len(agent.num_choices)
    obs = np.zeros((args.num_steps + 1, args.num_envs, obs_dim), dtype=np.float32)  # the last row starts the next iteration
    final_obs = np.zeros_like(obs[1:])  # where an episode ended: the state it ended in
    actions = np.zeros((args.num_steps, args.num_envs, action_dim), dtype=np.float32)
    rewards, costs, terminations, dones = np.zeros((4, args.num_steps, args.num_envs), dtype=np.float32)
    sums = np.zeros(args.num_envs)  # of discounted rewards, for the reward's normaliser

    # A new run, or one to go on with
    first, history, start_time = 1, [], time.time()
    best = dict(iteration=0, episodic_return=-math.inf, agent=None)  # that kept the limit on average
    if checkpoint:
        first, history, best = checkpoint["iteration"] + 1, checkpoint["history"], dict(checkpoint["best"], agent=None)
        start_time -= checkpoint["seconds"]
        if first > num_iterations:
            fail(f"--resume {args.resume} is complete; more --total-timesteps than {args.total_timesteps} make it longer")
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["torch_rng"])
        rng.bit_generator.state = json.loads(checkpoint["numpy_rng"])
    run_dir, lock = start_run(args, num_iterations, checkpoint)
    writer = SummaryWriter(run_dir)
    if args.track:
        import wandb

        settings = dict(project=args.wandb_project_name, entity=args.wandb_entity, config=asdict(args), dir=run_dir)
        wandb.init(id=run_dir.name, name=run_dir.name, resume="allow", **settings)

    def save(iteration):
        writer.flush()
        if best["agent"]:
            save_checkpoint(run_dir / "best_safe.pt", best["agent"], args, iteration=best["iteration"])
        progress = dict(iteration=iteration, seconds=time.time() - start_time, history=history, best=dict(best, agent=None))
        generators = dict(torch_rng=torch.get_rng_state(), numpy_rng=json.dumps(rng.bit_generator.state))
        save_checkpoint(
            run_dir / "last.pt", agent.state_dict(), args, optimizer=optimizer.state_dict(), **progress, **generators
        )

    if not checkpoint:
        save(0)
    begin_anew = True
    bar = tqdm(range(first, num_iterations + 1), unit="iteration", initial=first - 1, total=num_iterations, dynamic_ncols=True)
    for iteration in bar:
        if begin_anew:  # at the start and after each checkpoint, so that a resumed run is the run that wasn't interrupted
            for i, env in enumerate(envs):
                obs[-1, i], _ = env.reset(seed=int(rng.integers(2**31)))
            sums[:] = 0
        # Sample
        sampling_start = time.time()
        agent.std.fill_(args.std_end + (args.std_start - args.std_end) * (1 - iteration / num_iterations))
        sample_actions, sampled_from = sampler(agent), {name: x.clone() for name, x in agent.state_dict().items()}
        shape = (args.num_steps, args.num_envs, num_outputs)
        noise = (rng.standard_normal(shape) if agent.is_continuous else rng.gumbel(size=shape)).astype(np.float32)
        obs[0], terminations[:], dones[:] = obs[-1], 0, 0
        episodes = []
        for t in range(args.num_steps):
            if stop is not None:
                signal.setitimer(signal.ITIMER_REAL, args.step_timeout)
            actions[t] = sample_actions(obs[t], noise[t])
            env_actions = actions[t].reshape(-1, *action_space.shape)
            if agent.is_continuous:
                env_actions = np.clip(env_actions, action_space.low, action_space.high)
            else:
                env_actions = env_actions.astype(np.int64) + getattr(action_space, "start", 0)
            for i, env in enumerate(envs):
                next_obs, rewards[t, i], terminated, truncated, info = env.step(env_actions[i])
                costs[t, i] = info["cost"]
                if terminated or truncated:
                    terminations[t, i], dones[t, i], final_obs[t, i] = terminated, True, next_obs
                    global_step = (iteration - 1) * batch_size + (t + 1) * args.num_envs
                    counts = dict(iteration=iteration, global_step=global_step, env=i)
                    episodes.append(dict(counts, **info["episode"], safe=int(info["safe"])))
                    next_obs, _ = env.reset()
                obs[t + 1, i] = next_obs
        if stop is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        sampling_seconds = time.time() - sampling_start
        for name, array in (("an observation", obs), ("a reward", rewards), ("an action", actions)):
            if not np.isfinite(array).all():
                raise SystemExit(f"{name} is NaN or infinite in iteration {iteration}; stopped, {run_dir} is intact")
        columns = ([episode[name] for episode in episodes] or [math.nan] for name in ("return", "cost", "length", "safe"))
        returned, cost, length, was_safe = map(np.array, columns)
        if episodes:  # otherwise what the last finished episodes cost still holds
            agent.excess_cost.fill_((cost.mean() - args.cost_limit) / length.mean())

        # Advantages: the reward's in units of their standard deviation, the cost's in units of cost
        scale = agent.return_var.sqrt().item() + 1e-8
        scaled_rewards = np.clip(rewards / scale, -10, 10)
        with torch.no_grad():
            b_obs = agent.normalize(torch.as_tensor(obs, device=device))
            b_final_obs = agent.normalize(torch.as_tensor(final_obs[dones == 1], device=device))
            values, cost_values = (critic(b_obs).squeeze(-1).cpu().numpy() for critic in (agent.critic, agent.cost_critic))
            next_values, next_cost_values = values[1:].copy(), cost_values[1:].copy()
            next_values[dones == 1] = agent.critic(b_final_obs).squeeze(-1).cpu().numpy()
            next_cost_values[dones == 1] = agent.cost_critic(b_final_obs).squeeze(-1).cpu().numpy()
        advantages = gae(scaled_rewards, values[:-1], next_values, terminations, dones, args.gamma, args.gae_lambda)
        cost_advantages = gae(costs, cost_values[:-1], next_cost_values, terminations, dones, args.gamma, args.cost_gae_lambda)
        returns, cost_returns = advantages + values[:-1], cost_advantages + cost_values[:-1]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        cost_advantages = cost_advantages - cost_advantages.mean()

        # Optimise the policy, then both critics
        estimates = [torch.as_tensor(x, device=device).flatten() for x in (advantages, cost_advantages, returns, cost_returns)]
        b_obs, b_actions = b_obs[:-1].flatten(0, 1), torch.as_tensor(actions, device=device).flatten(0, 1)
        policy_log = update_policy(agent, b_obs, b_actions, *estimates[:2], args)
        value_loss, cost_value_loss = update_critics(agent, optimizer, b_obs, *estimates[2:], args)

        # Normalise the next iteration's observations and rewards by what has been seen so far
        all_sums, sums = discounted_sums(rewards, dones, sums, args.gamma)
        for name, x in (("obs", obs[:-1].reshape(-1, obs_dim)), ("return", all_sums.ravel())):
            moments = [getattr(agent, f"{name}_{moment}") for moment in ("count", "mean", "var")]
            x = torch.as_tensor(x, dtype=torch.float64, device=device)
            for buffer, value in zip(moments, add_to_moments(*moments, x)):
                buffer.copy_(value)

        # Log
        global_step, seconds = iteration * batch_size, time.time() - start_time
        scalars = {
            "charts/episodic_return": returned.mean(),
            "charts/episodic_return_std": returned.std(),
            "charts/episodic_cost": cost.mean(),
            "charts/episodic_cost_std": cost.std(),
            "charts/episodic_length": length.mean(),
            "charts/safe_episode_rate": was_safe.mean(),
            **{f"policy/{name}": value for name, value in policy_log.items()},
            "policy/std": agent.std.item(),
            "losses/value_loss": value_loss,
            "losses/cost_value_loss": cost_value_loss,
            "losses/explained_variance": explained_variance(values[:-1], returns),
            "losses/cost_explained_variance": explained_variance(cost_values[:-1], cost_returns),
            "losses/reward_scale": scale,
            "charts/SPS": int(global_step / seconds),
            "charts/sampling_SPS": int(batch_size / sampling_seconds),
        }
        for name, value in scalars.items():
            writer.add_scalar(name, value, global_step)
        if args.track:
            wandb.log(scalars, step=global_step)
        row = {"iteration": iteration, "global_step": global_step, "episodes": len(episodes)}
        row.update({name.split("/")[1].lower(): value for name, value in scalars.items()}, seconds=seconds)
        append_rows(run_dir / "progress.csv", [row])
        append_rows(run_dir / "episodes.csv", episodes)
        history.append([float(row[name]) for name in ("episodic_return", "episodic_cost", "safe_episode_rate")])
        bar.set_postfix_str("{} steps/s, return {:.1f}, cost {:.2f}, safe {:.0%}".format(row["sps"], *history[-1]))

        # Save
        if episodes and cost.mean() <= args.cost_limit and returned.mean() > best["episodic_return"]:
            best.update(iteration=iteration, episodic_return=float(returned.mean()), agent=sampled_from)
        begin_anew = bool(stop) or (args.save_every > 0 and iteration % args.save_every == 0)
        if begin_anew or iteration == num_iterations:
            save(iteration)
        if stop and iteration < num_iterations:
            print(f"\nStopped after iteration {iteration} of {num_iterations}; go on with --resume {run_dir}")
            raise SystemExit(128 + stop[0])
    writer.close()
    if args.track:
        wandb.finish()
    for env in envs:
        env.close()
    lock.close()
    last = history[-max(1, num_iterations // 10) :]
    print(
        f"{args.env_id}, seed {args.seed}, {global_step} steps in {seconds:.0f} s. Mean of the last {len(last)} iterations: "
        "return {:.1f}, cost {:.2f}, safe episodes {:.1%}. {}".format(*np.mean(last, axis=0), run_dir)
    )


if __name__ == "__main__":
    sys.excepthook = report_crash
    threading.excepthook = lambda _: None  # of TensorBoard's writer: the run meets a full disk itself
    main(parse_args(), stop=catch_signals())
