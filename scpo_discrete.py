"""Safety Critic Policy Optimization (SCPO) for discrete actions: PPO for constrained MDPs, in one file.

Paper: Mhamed & Gu (2023), "SCPO: Safe Reinforcement Learning with Safety Critic Policy Optimization".

The constraint: the costs of an episode add up to at most the cost limit c_0. A safety critic V^c(s) learns the probability that
an episode passing through s keeps it. The one change to PPO is the reward,

    r <- (r + b) Q^c(s, a)^k - beta (1 - Q^c(s, a)^k) c,

so that reward earned on the way to a violation counts for nothing, and cost is pushed down while everything is still unsafe.
The state carries q_t / c_0, the share of the limit spent so far, or the policy could not tell how much is left. Read the
functions under "The mathematics", then `main`, which follows the paper's Algorithm 1.

Where we depart from the paper, and why (docs/scpo.md has the measurements):
1. The safety critic is trained on its tanh and clipped to [0, 1] where it is used. Trained through the clip, as printed, a
   state whose output has fallen below 0 has no gradient and would stay there.
2. The last state of an episode is the one after the last action, at a termination and at a time limit alike, so the last cost
   counts. The printed closed form of V^c_gamma drops that state's term; we use the recursion, which has it.
3. A rollout that ends in mid-episode bootstraps from both critics, a time limit from the reward critic alone: whether an
   episode that is over was safe is known.
4. Once the limit is exceeded V^c is 0, whatever the network says.
5. Q^c is the mean of the Monte Carlo and the one-step estimate. The paper allows any average; this one stayed away from the
   limit best (Monte Carlo alone falls over it, the critic alone notices too late).
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
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

try:
    import scpo_envs  # noqa: F401  registers the paper's tasks; any other Gymnasium task works without it
except ImportError:
    pass

# The paper's hyperparameter tables ("Details of Implementing Experiments") and, as its last line, ours for any other task.
# iterations: the length of the published runs. OURS: what the paper leaves open (docs/scpo.md).
OURS = dict(vf_coef=0.5, safety_estimator="mean")
PAPER_SETTINGS = {
    "CartSafe-v0": dict(
        cost_limit=1, k=5, beta=3, reward_bias=0, ent_coef=0.001, iterations=150, vf_coef=0.005, safety_estimator="mc"
    ),
    "any other task": dict(cost_limit=None, k=4, beta=1, reward_bias=0, ent_coef=0.01, iterations=100, **OURS),
}
DELTA = 0.1  # the paper's Delta: the appended q_t / c_0 stops at 1 + DELTA, since past the limit how far no longer matters


@dataclass
class Args:
    env_id: str = "CartSafe-v0"
    """Gymnasium id of the task; `module:id` imports the module first"""
    seed: int = 1
    """seed of everything: weights, actions, minibatches, environments"""
    total_timesteps: Optional[int] = None
    """environment steps, rounded down to whole iterations (None: as long as the paper's run)"""
    num_envs: int = 16
    """environments stepped side by side"""
    num_steps: int = 2048
    """steps in each environment an iteration; num-envs x num-steps is the paper's T"""
    update_epochs: int = 5
    """passes over an iteration's steps"""
    minibatch_size: int = 64
    """steps in a gradient step"""
    learning_rate: float = 2e-4
    """Adam's step size"""
    anneal_lr: bool = False
    """lower the learning rate linearly to 0 over the run (the paper doesn't)"""
    gamma: float = 0.99
    """discount of the reward"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    clip_coef: float = 0.2
    """the paper's epsilon: how far the surrogate follows the probability ratio away from 1"""
    surrogate: Literal["l1", "l2"] = "l1"
    """clipped surrogate: l1 is PPO's pi/pi_0 - 1, l2 the paper's second, 1 - pi_0/pi"""
    ent_coef: Optional[float] = None
    """weight of the entropy bonus (None: the task's, see above)"""
    vf_coef: Optional[float] = None
    """weight of the reward critic's squared error (None: the task's, see above)"""
    safety_vf_coef: float = 0.5
    """weight of the safety critic's squared error"""
    max_grad_norm: float = 0.5
    """norm that the gradient of all three networks together is scaled down to"""
    target_kl: Optional[float] = None
    """no further epoch once the mean KL divergence of one exceeds this (None: never, as the paper)"""
    cost_limit: Optional[float] = None
    """the paper's c_0: cost an episode may spend, undiscounted (None: the task's, see above)"""
    k: Optional[float] = None
    """power of Q^c in the reward; 0 switches the safety critic off, inf counts only what is surely safe (None: the task's)"""
    beta: Optional[float] = None
    """weight of the cost term (None: the task's, see above)"""
    reward_bias: Optional[float] = None
    """the paper's b, added to each reward to make it positive (None: the task's, see above)"""
    penalty: Literal["unsafe", "always"] = "unsafe"
    """cost term: unsafe is beta (1 - Q^k) c, always is beta c, a fixed Lagrange multiplier where k = 0"""
    safety_gamma: float = 0.995
    """discount of V^c_gamma, the safety critic's target"""
    safety_estimator: Optional[str] = None
    """estimate of Q^c: mc (Monte Carlo), one-step, mean of both, or the lambda of their geometric average (None: the task's)"""
    augment_state: bool = True
    """append the share of the cost limit spent so far to the observation"""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """where the updates run; auto is the CPU, faster for networks this small"""
    compile: bool = True
    """compile the gradient step (about 20 s once, then training is 3 times faster); needs a C++ compiler"""
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
        for env_id, settings in PAPER_SETTINGS.items()
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
    settings = dict(PAPER_SETTINGS.get(args.env_id, PAPER_SETTINGS["any other task"]))
    batch_size = args.num_envs * args.num_steps
    settings["total_timesteps"] = settings.pop("iterations") * batch_size
    for name, value in settings.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    rules = (
        ("at least 1", lambda x: x >= 1, "num_envs num_steps update_epochs"),
        ("0 or more", lambda x: 0 <= x < math.inf, "seed vf_coef safety_vf_coef beta"),
        ("0 or more", lambda x: x >= 0, "k"),
        ("0 or more", lambda x: x is None or 0 <= x < math.inf, "cost_limit"),
        ("above 0", lambda x: 0 < x < math.inf, "learning_rate clip_coef max_grad_norm"),
        ("above 0, or None", lambda x: x is None or x > 0, "target_kl"),
        ("in [0, 1]", lambda x: 0 <= x <= 1, "gamma gae_lambda"),
        ("in (0, 1]", lambda x: 0 < x <= 1, "safety_gamma"),
        ("finite", math.isfinite, "ent_coef reward_bias"),
        ("mc, one-step, mean or a number in [0, 1]", lambda x: 0 <= max(safety_lambdas(x)) <= 1, "safety_estimator"),
        ("at least 2, for advantages are normalised over it", lambda x: x >= 2, "minibatch_size"),
        (f"a divisor of num-envs x num-steps = {batch_size}", lambda x: batch_size % x == 0, "minibatch_size"),
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


def safety_lambdas(estimator):
    """Returns the lambdas of `safety_q` whose mean a --safety-estimator stands for, (nan,) for none."""
    try:
        return {"mc": (1.0,), "one-step": (0.0,), "mean": (0.0, 1.0)}.get(estimator) or (float(estimator),)
    except ValueError:
        return (math.nan,)


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
        if not isinstance(env.action_space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
            hint = "; for Box there is scpo_continuous.py"
            fail(f"--env-id {env_id}: actions must be Discrete or MultiDiscrete, not {type(env.action_space).__name__}{hint}")
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
    """The policy pi, the reward critic V^{rc,k} and the safety critic V^c, three separate networks."""

    def __init__(self, obs_dim, num_choices):
        super().__init__()
        self.num_choices = num_choices  # [n] for Discrete(n), one number a component for MultiDiscrete
        self.actor = mlp(obs_dim, sum(num_choices), last_std=0.01)
        self.critic = mlp(obs_dim, 1, last_std=1.0)
        self.safety_critic = mlp(obs_dim, 1, last_std=0.01)  # near 0: every state is unsafe until proven otherwise

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)

    def get_raw_safety_value(self, obs):
        """Trained, in (-1, 1): unlike the clipped value it has a gradient everywhere."""
        return torch.tanh(self.safety_critic(obs)).squeeze(-1)

    def get_safety_value(self, obs):
        """Used: V^c in [0, 1]."""
        return self.get_raw_safety_value(obs).clamp(0, 1)

    def get_logprob_and_entropy(self, obs, actions):
        """Of independent categorical distributions, one a component of the action: both (minibatch,)."""
        logprobs, entropies = 0, 0
        for logits, action in zip(self.actor(obs).split(self.num_choices, dim=-1), actions.long().unbind(-1)):
            log_softmax = logits.log_softmax(-1)
            logprobs = logprobs + log_softmax.gather(-1, action[:, None]).squeeze(-1)
            entropies = entropies - (log_softmax.exp() * log_softmax).sum(-1)
        return logprobs, entropies

    def forward(self, obs, actions):
        return (*self.get_logprob_and_entropy(obs, actions), self.get_value(obs), self.get_raw_safety_value(obs))


def sampler(agent):
    """Returns the policy as a function of NumPy arrays: (num_envs, obs_dim), noise (num_envs, sum(num_choices)) -> actions.

    For a dozen rows a forward pass in torch costs several times the multiplications. The noise is Gumbel's: the choice with the
    largest sum of logit and noise is a sample of the softmax.
    """
    hidden_1, hidden_2, output = [
        (layer.weight.T.cpu().numpy(), layer.bias.cpu().numpy()) for layer in agent.actor if isinstance(layer, nn.Linear)
    ]
    ends = np.cumsum(agent.num_choices)[:-1]

    def sample(obs, noise):
        hidden = np.tanh(obs @ hidden_1[0] + hidden_1[1])
        hidden = np.tanh(hidden @ hidden_2[0] + hidden_2[1])
        perturbed = hidden @ output[0] + output[1] + noise
        return np.stack([choice.argmax(-1) for choice in np.split(perturbed, ends, axis=-1)], axis=-1)

    return sample


# The mathematics ------------------------------------------------------------------------------------------------------------
# Arrays are (num_steps, num_envs) unless said otherwise; `dones` marks the last step of an episode, terminated or cut off.


def safety_q(safe, next_safety_values, dones, safety_gamma, lam):
    """Estimates Q^c(s_t, a_t) in [0, 1] (appendix "Q^c and V^c estimate").

    safe: f(s_t), 1 where the cost spent before step t is within the limit. next_safety_values: V^c(s_{t+1}), 0 where that state
    is unsafe and f of it where the episode is over. Returns the geometric average, by `lam`, of the paper's n-step
    estimates, discounted like V^c_gamma: 0 is one step, V^c(s_{t+1}), 1 is Monte Carlo, V^c_gamma(s_{t+1}).
    """
    q = np.empty_like(next_safety_values)
    later = next_safety_values[-1]  # the rollout's end: nothing beyond the critic is known
    for t in reversed(range(len(q))):
        average = (1 - lam) * next_safety_values[t] + lam * later
        q[t] = np.where(dones[t], next_safety_values[t], average)
        later = (1 - safety_gamma) * safe[t] + safety_gamma * q[t]
    return q


def safety_targets(safe, next_safety_values, dones, safety_gamma):
    """V^c_gamma(s_t) in [0, 1], what the safety critic learns: (1 - gamma) f(s_t) + gamma V^c_gamma(s_{t+1}) (same appendix).

    The recursion ends in f of the state after the last action. The closed form printed below it omits that term.
    """
    return (1 - safety_gamma) * safe + safety_gamma * safety_q(safe, next_safety_values, dones, safety_gamma, 1.0)


def nullify(rewards, costs, q, k, beta, reward_bias, penalty="unsafe"):
    """Algorithm 1, lines 4 and 5: (r + b) Q^k - beta (1 - Q^k) c. Penalty "always" is appendix "GAE": (r + b) Q^k - beta c."""
    safety = q**k
    return (rewards + reward_bias) * safety - beta * (1 - safety if penalty == "unsafe" else 1) * costs


def gae(rewards, values, next_values, terminations, dones, gamma, gae_lambda):
    """Generalized advantage estimates of A^{rc,k}.

    next_values: V(s_{t+1}), of the state an episode ended in, not of the next episode's first. After a termination there is
    nothing to earn, after a time limit what the critic says; the trace is cut by both.
    """
    deltas = rewards + gamma * (1 - terminations) * next_values - values
    advantages = np.empty_like(deltas)
    last = np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = last = deltas[t] + gamma * gae_lambda * (1 - dones[t]) * last
    return advantages


def surrogate_objective(logratio, advantages, clip_coef, surrogate):
    """L_1^CLIP or L_2^CLIP (section "Practical Implementation"), to be maximised; logratio: log pi - log pi_0, (minibatch,)."""
    ratio = torch.expm1(logratio) if surrogate == "l1" else -torch.expm1(-logratio)
    return torch.min(ratio * advantages, ratio.clamp(-clip_coef, clip_coef) * advantages).mean()


LOSSES = ("policy_loss", "value_loss", "safety_loss", "entropy", "approx_kl", "clipfrac", "grad_norm")


def loss(weights, agent, minibatch, args):
    """Returns what a gradient step minimises and, for the log, its parts; weights: all parameters in one flat vector."""
    obs, actions, old_logprobs, advantages, returns, target_safety = minibatch
    shapes = {name: parameter.shape for name, parameter in agent.named_parameters()}
    parts = weights.split([shape.numel() for shape in shapes.values()])
    parameters = {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items())}
    logprobs, entropies, values, safety_values = torch.func.functional_call(agent, parameters, (obs, actions))
    logratio = logprobs - old_logprobs
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = -surrogate_objective(logratio, advantages, args.clip_coef, args.surrogate)
    value_loss = ((values - returns) ** 2).mean()
    safety_loss = ((safety_values - target_safety) ** 2).mean()
    entropy = entropies.mean()
    total = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss + args.safety_vf_coef * safety_loss
    ratio = logratio.exp()
    approx_kl = (ratio - 1 - logratio).mean()  # http://joschu.net/blog/kl-approx.html
    clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
    return total, torch.stack([policy_loss, value_loss, safety_loss, entropy, approx_kl, clipfrac]).detach()


def update(weights, adam, learning_rate, agent, minibatch, args):
    """One gradient step: returns the new weights, Adam's new (mean, square, count) and the values of LOSSES.

    One function of tensors, Adam and all, since what lies between two compiled functions costs more than they do. The gradient
    of all three networks together is scaled down to max_grad_norm. So a batch that surprises the critics, such as the first one
    beyond the limit, hardly moves the policy until they have adapted.
    """
    gradient, losses = torch.func.grad(loss, has_aux=True)(weights, agent, minibatch, args)
    grad_norm = gradient.norm()
    gradient = gradient * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1)
    mean, square, count = adam
    count = count + 1
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient**2
    step = (mean / (1 - 0.9**count)) / ((square / (1 - 0.999**count)).sqrt() + 1e-5)
    return weights - learning_rate * step, (mean, square, count), torch.cat([losses, grad_norm[None]])


# The run --------------------------------------------------------------------------------------------------------------------


def compiled(update, agent, weights, adam, learning_rate, args, obs_dim, action_dim):
    """Returns `update` compiled for the run's shapes, or as it is where that can't be done."""
    shapes = ((obs_dim,), (action_dim,), (), (), (), ())
    minibatch = tuple(torch.zeros(args.minibatch_size, *shape, device=weights.device) for shape in shapes)
    print("Compiling the gradient step (about 20 s the first time, --no-compile to skip it)", flush=True)
    for options in ({"cpp_wrapper": True}, None):  # called through C++ it takes 14 % less, where that works
        try:
            fast_update = torch.compile(update, fullgraph=True, options=options)
            fast_update(weights, adam, learning_rate, agent, minibatch, args)
            return fast_update
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
    print(f"Going on without torch.compile, three times slower; it needs a C++ compiler ({reason})")
    return update


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
    num_choices = np.ravel(action_space.n if isinstance(action_space, gym.spaces.Discrete) else action_space.nvec).tolist()
    action_dim = len(num_choices)

    # Networks and optimiser. `update` takes gradients of one flat vector that holds all weights
    agent = Agent(obs_dim, num_choices).to(device).requires_grad_(False)
    weights = nn.utils.parameters_to_vector(agent.parameters())
    nn.utils.vector_to_parameters(weights, agent.parameters())  # views of it: where they lie decides about the last bits
    adam = (torch.zeros_like(weights), torch.zeros_like(weights), torch.zeros((), device=device))
    learning_rate = torch.tensor(args.learning_rate, device=device)
    update_step = update
    if args.compile:
        update_step = compiled(update, agent, weights, adam, learning_rate, args, obs_dim, action_dim)

    # Storage of an iteration
    obs = np.zeros((args.num_steps + 1, args.num_envs, obs_dim), dtype=np.float32)  # the last row starts the next iteration
    final_obs = np.zeros_like(obs[1:])  # where an episode ended: the state it ended in
    actions = np.zeros((args.num_steps, args.num_envs, action_dim), dtype=np.float32)
    safe = np.ones((args.num_steps + 1, args.num_envs), dtype=np.float32)  # f(s_t)
    rewards, costs, next_safe, terminations, dones = np.zeros((5, args.num_steps, args.num_envs), dtype=np.float32)

    # A new run, or one to go on with
    first, history, start_time = 1, [], time.time()
    best = dict(iteration=0, episodic_return=-math.inf, agent=None)  # that kept the limit on average
    if checkpoint:
        first, history, best = checkpoint["iteration"] + 1, checkpoint["history"], dict(checkpoint["best"], agent=None)
        start_time -= checkpoint["seconds"]
        if first > num_iterations:
            fail(f"--resume {args.resume} is complete; more --total-timesteps than {args.total_timesteps} make it longer")
        agent.load_state_dict(checkpoint["agent"])  # and with it `weights`
        adam = tuple(x.to(device) for x in checkpoint["adam"])
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
        save_checkpoint(run_dir / "last.pt", agent.state_dict(), args, adam=list(adam), **progress, **generators)

    if not checkpoint:
        save(0)
    begin_anew = True
    bar = tqdm(range(first, num_iterations + 1), unit="iteration", initial=first - 1, total=num_iterations, dynamic_ncols=True)
    for iteration in bar:
        if begin_anew:  # at the start and after each checkpoint, so that a resumed run is the run that wasn't interrupted
            for i, env in enumerate(envs):
                obs[-1, i], _ = env.reset(seed=int(rng.integers(2**31)))
            safe[-1] = 1
        # Sample (a_t, s_t) ~ pi for T steps (Algorithm 1, line 2)
        sampling_start = time.time()
        sample_actions, sampled_from = sampler(agent), {name: x.clone() for name, x in agent.state_dict().items()}
        noise = rng.gumbel(size=(args.num_steps, args.num_envs, sum(num_choices))).astype(np.float32)
        obs[0], safe[0], terminations[:], dones[:] = obs[-1], safe[-1], 0, 0
        episodes = []
        for t in range(args.num_steps):
            if stop is not None:
                signal.setitimer(signal.ITIMER_REAL, args.step_timeout)
            actions[t] = sample_actions(obs[t], noise[t])
            env_actions = actions[t].reshape(-1, *action_space.shape).astype(np.int64) + getattr(action_space, "start", 0)
            for i, env in enumerate(envs):
                next_obs, rewards[t, i], terminated, truncated, info = env.step(env_actions[i])
                costs[t, i] = info["cost"]
                next_safe[t, i] = safe[t + 1, i] = info["safe"]
                if terminated or truncated:
                    terminations[t, i], dones[t, i], final_obs[t, i] = terminated, True, next_obs
                    global_step = (iteration - 1) * batch_size + (t + 1) * args.num_envs
                    counts = dict(iteration=iteration, global_step=global_step, env=i)
                    episodes.append(dict(counts, **info["episode"], safe=int(info["safe"])))
                    next_obs, _ = env.reset()
                    safe[t + 1, i] = 1
                obs[t + 1, i] = next_obs
        if stop is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        sampling_seconds = time.time() - sampling_start
        for name, array in (("an observation", obs), ("a reward", rewards), ("an action", actions)):
            if not np.isfinite(array).all():
                raise SystemExit(f"{name} is NaN or infinite in iteration {iteration}; stopped, {run_dir} is intact")

        # Evaluate Q^c(s_t, a_t) (line 3)
        with torch.no_grad():
            b_obs = torch.as_tensor(obs, device=device)
            values, safety_values = agent.get_value(b_obs).cpu().numpy(), agent.get_safety_value(b_obs).cpu().numpy()
            next_values = values[1:].copy()
            next_values[dones == 1] = agent.get_value(torch.as_tensor(final_obs[dones == 1], device=device)).cpu().numpy()
        next_safety_values = next_safe * np.where(dones == 1, 1, safety_values[1:])  # f alone where the episode is over
        lambdas = safety_lambdas(args.safety_estimator)
        q = np.mean([safety_q(safe[:-1], next_safety_values, dones, args.safety_gamma, lam) for lam in lambdas], axis=0)
        target_safety_values = safety_targets(safe[:-1], next_safety_values, dones, args.safety_gamma)

        # Nullify unsafe reward, estimate A^{rc,k} (lines 4 to 6)
        nullified = nullify(rewards, costs, q, args.k, args.beta, args.reward_bias, args.penalty)
        advantages = gae(nullified, values[:-1], next_values, terminations, dones, args.gamma, args.gae_lambda)
        returns = advantages + values[:-1]

        # Optimise the policy and both critics (lines 7 to 10)
        if args.anneal_lr:
            learning_rate = torch.tensor(args.learning_rate * (1 - (iteration - 1) / num_iterations), device=device)
        b_obs = b_obs[:-1].flatten(0, 1)
        b_actions = torch.as_tensor(actions, device=device).flatten(0, 1)
        b_logprobs, _ = agent.get_logprob_and_entropy(b_obs, b_actions)
        estimates = [torch.as_tensor(x, device=device).flatten() for x in (advantages, returns, target_safety_values)]
        batch = [b_obs, b_actions, b_logprobs, *estimates]
        losses = []
        for epoch in range(1, args.update_epochs + 1):
            order = torch.randperm(batch_size).to(device)
            for minibatch in zip(*(x[order].split(args.minibatch_size) for x in batch)):
                weights, adam, step_losses = update_step(weights, adam, learning_rate, agent, minibatch, args)
                losses.append(step_losses)
            epoch_losses = torch.stack(losses[-len(order) // args.minibatch_size :])
            for name, finite in zip(LOSSES, epoch_losses.isfinite().all(0)):
                if not finite:
                    raise SystemExit(f"{name} is NaN or infinite in iteration {iteration}; stopped, {run_dir} is intact")
            approx_kl = epoch_losses[:, LOSSES.index("approx_kl")].mean().item()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break
        nn.utils.vector_to_parameters(weights, agent.parameters())

        # Log
        global_step, seconds = iteration * batch_size, time.time() - start_time
        columns = ([episode[name] for episode in episodes] or [math.nan] for name in ("return", "cost", "length", "safe"))
        returned, cost, length, was_safe = map(np.array, columns)
        scalars = {
            "charts/episodic_return": returned.mean(),
            "charts/episodic_return_std": returned.std(),
            "charts/episodic_cost": cost.mean(),
            "charts/episodic_cost_std": cost.std(),
            "charts/episodic_length": length.mean(),
            "charts/safe_episode_rate": was_safe.mean(),
            **{f"losses/{name}": value for name, value in zip(LOSSES, torch.stack(losses).mean(0).tolist())},
            "losses/approx_kl": approx_kl,  # of the last epoch: how far the iteration has moved the policy
            "losses/explained_variance": 1 - (returns - values[:-1]).var() / (returns.var() + 1e-8),
            "losses/epochs": epoch,
            "losses/learning_rate": learning_rate.item(),
            "safety/safety_value_mean": safety_values[:-1].mean(),
            "safety/safety_q_mean": q.mean(),
            "safety/safety_target_mean": target_safety_values.mean(),
            "safety/unsafe_share": 1 - safe[:-1].mean(),
            "safety/negative_reward_share": (rewards + args.reward_bias < 0).mean(),
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
