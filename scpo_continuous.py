"""Safety Critic Policy Optimization (SCPO) for continuous actions: PPO for constrained MDPs, in one file.

Paper: Mhamed & Gu (2023), "SCPO: Safe Reinforcement Learning with Safety Critic Policy Optimization".

The constraint is that an episode's costs add up to at most the cost limit c_0. A safety critic V^c(s) learns the probability
that an episode passing through s keeps within it. The one change to PPO is the reward,

    r <- (r + b) Q^c(s, a)^k - beta (1 - Q^c(s, a)^k) c,

so reward earned on the way to a violation counts for nothing, and while everything is still unsafe cost is pushed down. The state
carries the cost spent so far, q_t / c_0, or nobody could tell how much is left. Read the functions under "The mathematics", then
`main`, which follows the paper's Algorithm 1.

Where we depart from the paper, and why (docs/scpo.md has the measurements):
1. The safety critic is trained on its tanh and clipped to [0, 1] where it is used. Trained through the clip, as printed, a state
   whose output has fallen below 0 has no gradient and could never recover.
2. The last state of an episode is the one after the last action, for terminations and time limits alike, so the last cost counts.
   The printed closed form of V^c_gamma drops that state's term; we use the recursion, which has it.
3. A rollout that ends in mid-episode bootstraps from both critics; a time limit bootstraps the reward critic alone, as the
   cost of an episode that is over is known.
4. Once the limit is exceeded V^c is 0 exactly, whatever the network says.
"""

import contextlib
import csv
import io
import json
import math
import platform
import subprocess
import sys
import time
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
# iterations: the length of the published runs.
PAPER_SETTINGS = {
    "SafetyBallCircle-v0": dict(cost_limit=25, k=2, beta=0, reward_bias=1.5, ent_coef=0.01, iterations=500),
    "SafetyBallRun-v0": dict(cost_limit=25, k=4, beta=0.5, reward_bias=1, ent_coef=0.005, iterations=100),
    "SafetyBallGather-v0": dict(cost_limit=0.2, k=4, beta=15, reward_bias=0.05, ent_coef=0.01, iterations=500),
    "SafetyBallReach-v0": dict(cost_limit=10, k=4, beta=0, reward_bias=0.1, ent_coef=0.01, iterations=500),
    "any other task": dict(cost_limit=None, k=4, beta=1, reward_bias=0, ent_coef=0.01, iterations=100),
}
DELTA = 0.1  # the paper's Delta: the appended q_t/c_0 stops at 1 + DELTA, since past the limit all states are alike


@dataclass
class Args:
    env_id: str = "SafetyBallCircle-v0"
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
    vf_coef: float = 0.5
    """weight of the reward critic's squared error"""
    safety_vf_coef: float = 0.5
    """weight of the safety critic's squared error"""
    max_grad_norm: float = 0.5
    """the gradient of all weights together is scaled down to this norm"""
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
    safety_estimator: str = "mc"
    """estimate of Q^c: mc (Monte Carlo), one-step, or the lambda in (0, 1) of their geometric average"""
    augment_state: bool = True
    """append the share of the cost limit spent so far to the observation"""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """where the updates run; auto is the CPU, faster for networks this small"""
    compile: bool = True
    """compile the gradient step (about 20 s once, then 4 times faster); needs a C++ compiler"""
    runs_dir: str = "runs"
    """folder that gets a folder for this run"""


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
    iterations = settings.pop("iterations")
    for name, value in settings.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    batch_size = args.num_envs * args.num_steps
    if args.total_timesteps is None:
        args.total_timesteps = iterations * batch_size
    try:
        safety_lambda = {"mc": 1.0, "one-step": 0.0}.get(args.safety_estimator) or float(args.safety_estimator)
    except ValueError:
        safety_lambda = {"one-step": 0.0}.get(args.safety_estimator, math.nan)
    if args.cost_limit is None:
        fail(f"--cost-limit is needed for {args.env_id}: the cost an episode may spend, 0 or more")
    at_least_1 = "must be at least 1"
    for flag, fine, allowed in (
        ("seed", args.seed >= 0, "must be 0 or more"),
        ("num-envs", args.num_envs >= 1, at_least_1),
        ("num-steps", args.num_steps >= 1, at_least_1),
        ("update-epochs", args.update_epochs >= 1, at_least_1),
        ("minibatch-size", args.minibatch_size >= 2, "must be at least 2: advantages are normalised over it"),
        ("minibatch-size", batch_size % args.minibatch_size == 0, f"must divide num-envs x num-steps = {batch_size}"),
        ("total-timesteps", args.total_timesteps >= batch_size, f"must be at least num-envs x num-steps = {batch_size}"),
        ("learning-rate", 0 < args.learning_rate < math.inf, "must be above 0"),
        ("gamma", 0 <= args.gamma <= 1, "must be in [0, 1]"),
        ("gae-lambda", 0 <= args.gae_lambda <= 1, "must be in [0, 1]"),
        ("clip-coef", 0 < args.clip_coef < math.inf, "must be above 0"),
        ("ent-coef", math.isfinite(args.ent_coef), "must be finite"),
        ("vf-coef", 0 <= args.vf_coef < math.inf, "must be 0 or more"),
        ("safety-vf-coef", 0 <= args.safety_vf_coef < math.inf, "must be 0 or more"),
        ("max-grad-norm", args.max_grad_norm > 0, "must be above 0"),
        ("target-kl", args.target_kl is None or args.target_kl > 0, "must be above 0, or None"),
        ("cost-limit", 0 <= args.cost_limit < math.inf, "must be 0 or more"),
        ("k", args.k >= 0, "must be 0 or more"),
        ("beta", 0 <= args.beta < math.inf, "must be 0 or more"),
        ("reward-bias", math.isfinite(args.reward_bias), "must be finite"),
        ("safety-gamma", 0 < args.safety_gamma <= 1, "must be in (0, 1]"),
        ("safety-estimator", 0 <= safety_lambda <= 1, "must be mc, one-step or a number in [0, 1]"),
        ("device", args.device != "cuda" or torch.cuda.is_available(), "is not there: use cpu or auto"),
    ):
        if not fine:
            fail(f"--{flag} {getattr(args, flag.replace('-', '_'))} {allowed}")
    return args, safety_lambda


class SafetyState(gym.Wrapper):
    """Section "Augmented States": the state carries q_t, the cost spent before action t.

    Flattens the observation to float32 `(n,)` and appends clip(q_t / c_0, 0, 1 + DELTA). Adds to `info`: "cost" (float), "safe" (f of
    the state reached: q <= c_0) and, when an episode ends, "episode" with its return "r", cost "c" and length "l".
    Raises `ValueError` if the task reports no cost.
    """

    def __init__(self, env, cost_limit, augment_state=True):
        super().__init__(env)
        space = gym.spaces.utils.flatten_space(env.observation_space)
        if not isinstance(space, gym.spaces.Box):
            raise ValueError(f"observations of type {type(env.observation_space).__name__} can't be flattened to a vector")
        self.is_flat = isinstance(env.observation_space, gym.spaces.Box) and len(env.observation_space.shape) == 1
        self.cost_limit, self.augment_state = cost_limit, augment_state
        low, high = (np.append(bound, end) if augment_state else bound for bound, end in ((space.low, 0), (space.high, 1 + DELTA)))
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
        if "cost" in info:
            cost = float(info["cost"])
        elif "constraint_costs" in info:
            cost = float(sum(info["constraint_costs"]))
        else:
            raise ValueError('the task reports no cost: its step must put a number, 0.0 or more, into info["cost"] every time')
        self.spent += cost
        self.episodic_return += float(reward)
        self.length += 1
        info["cost"], info["safe"] = cost, self.spent <= self.cost_limit
        if terminated or truncated:
            info["episode"] = {"r": self.episodic_return, "c": self.spent, "l": self.length}
        return self.observe(obs), reward, terminated, truncated, info


def make_env(env_id, cost_limit, augment_state):
    """Returns the wrapped environment, or says in one line why there is none."""
    try:
        env = SafetyState(gym.make(env_id, disable_env_checker=True), cost_limit, augment_state)
        env.reset(seed=0)
        env.action_space.seed(0)
        env.step(env.action_space.sample())  # a task without costs is refused here, not in mid-training
    except Exception as error:
        fail(f"--env-id {env_id}: {str(error) or type(error).__name__}".splitlines()[0])
    if isinstance(env.action_space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        fail(f"--env-id {env_id}: its actions are discrete; use scpo_discrete.py")
    if not isinstance(env.action_space, gym.spaces.Box):
        fail(f"--env-id {env_id}: its actions are {type(env.action_space).__name__}, but must be Box")
    return env


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


def mlp(num_inputs, num_outputs, last_std):
    """Two hidden layers of 64 with tanh, as in the paper."""
    return nn.Sequential(
        layer_init(nn.Linear(num_inputs, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, num_outputs), std=last_std),
    )


class Agent(nn.Module):
    """The policy pi, the reward critic V^{rc,k} and the safety critic V^c, three separate networks."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.actor_mean = mlp(obs_dim, action_dim, last_std=0.01)
        self.actor_logstd = nn.Parameter(torch.zeros(action_dim))
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
        noise = (actions - self.actor_mean(obs)) * torch.exp(-self.actor_logstd)
        logprobs = (-0.5 * noise**2 - self.actor_logstd - 0.5 * math.log(2 * math.pi)).sum(-1)
        entropy = (self.actor_logstd + 0.5 + 0.5 * math.log(2 * math.pi)).sum()
        return logprobs, entropy

    def forward(self, obs, actions):
        return (*self.get_logprob_and_entropy(obs, actions), self.get_value(obs), self.get_raw_safety_value(obs))


def sampler(agent):
    """Returns the policy as a function of NumPy arrays: (num_envs, obs_dim), noise (num_envs, action_dim) -> actions.

    For a dozen rows a forward pass in torch costs several times the multiplications.
    """
    layers = [(layer.weight.T.cpu().numpy(), layer.bias.cpu().numpy()) for layer in agent.actor_mean if isinstance(layer, nn.Linear)]
    std = agent.actor_logstd.exp().cpu().numpy()

    def sample(obs, noise):
        hidden = obs
        for weight, bias in layers[:-1]:
            hidden = np.tanh(hidden @ weight + bias)
        weight, bias = layers[-1]
        return hidden @ weight + bias + std * noise

    return sample


# The mathematics ------------------------------------------------------------------------------------------------------------
# Arrays are (num_steps, num_envs) unless said otherwise; `dones` marks the last step of an episode, terminated or cut off.


def safety_q(safe, next_safety_values, dones, safety_gamma, safety_lambda):
    """Estimates Q^c(s_t, a_t) in [0, 1] (appendix "Q^c and V^c estimate").

    safe: f(s_t), 1 where the cost spent before step t is within the limit. next_safety_values: V^c(s_{t+1}), with f of that state
    where the episode ends, and 0 where it is unsafe. The estimate is the geometric average, weight safety_lambda, of the paper's
    n-step ones: 0 is V^c(s_{t+1}), 1 is Monte Carlo, V^c_gamma(s_{t+1}).
    """
    q = np.empty_like(next_safety_values)
    later = next_safety_values[-1]  # the rollout's end: nothing beyond the critic is known
    for t in reversed(range(len(q))):
        average = (1 - safety_lambda) * next_safety_values[t] + safety_lambda * later
        q[t] = np.where(dones[t], next_safety_values[t], average)
        later = (1 - safety_gamma) * safe[t] + safety_gamma * q[t]
    return q


def safety_targets(safe, next_safety_values, dones, safety_gamma):
    """V^c_gamma(s_t) in [0, 1], what the safety critic learns: (1 - gamma) f(s_t) + gamma V^c_gamma(s_{t+1}) (same appendix).

    The recursion ends in f of the state after the last action. The closed form printed below it omits that term.
    """
    return (1 - safety_gamma) * safe + safety_gamma * safety_q(safe, next_safety_values, dones, safety_gamma, 1.0)


def nullify(rewards, costs, q, k, beta, reward_bias, penalty="unsafe"):
    """Algorithm 1, lines 4 and 5: (r + b) Q^k - beta (1 - Q^k) c; with penalty "always" (r + b) Q^k - beta c, as in appendix "GAE"."""
    safety = q**k
    return (rewards + reward_bias) * safety - beta * (1 - safety if penalty == "unsafe" else 1) * costs


def gae(rewards, values, next_values, terminations, dones, gamma, gae_lambda):
    """Generalized advantage estimates of A^{rc,k}.

    next_values: V(s_{t+1}), of the state the episode ended in, not of the next episode's first. A termination is worth 0 from there
    on, a time limit what the critic says; the trace is cut by both.
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
    logprobs, entropy, values, safety_values = torch.func.functional_call(agent, parameters, (obs, actions))
    logratio = logprobs - old_logprobs
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = -surrogate_objective(logratio, advantages, args.clip_coef, args.surrogate)
    value_loss = ((values - returns) ** 2).mean()
    safety_loss = ((safety_values - target_safety) ** 2).mean()
    total = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss + args.safety_vf_coef * safety_loss
    ratio = logratio.exp()
    approx_kl = (ratio - 1 - logratio).mean()  # http://joschu.net/blog/kl-approx.html
    clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
    return total, torch.stack([policy_loss, value_loss, safety_loss, entropy, approx_kl, clipfrac]).detach()


def update(weights, adam, learning_rate, agent, minibatch, args):
    """One gradient step: returns the new weights, Adam's new (mean, square, count) and the values of LOSSES.

    Written as one function of tensors, Adam and all, since what lies between two compiled functions costs more than they do.
    """
    gradient, losses = torch.func.grad(loss, has_aux=True)(weights, agent, minibatch, args)
    grad_norm = gradient.norm()
    gradient = gradient * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    mean, square, count = adam
    count = count + 1
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient**2
    step = (mean / (1 - 0.9**count)) / ((square / (1 - 0.999**count)).sqrt() + 1e-5)
    return weights - learning_rate * step, (mean, square, count), torch.cat([losses, grad_norm[None]])


# ----------------------------------------------------------------------------------------------------------------------------


def main(args):
    args, safety_lambda = check_args(args)
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    device = torch.device("cuda" if args.device == "cuda" else "cpu")
    torch.set_num_threads(1)  # the matrices are too small to share
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)

    envs = [make_env(args.env_id, args.cost_limit, args.augment_state) for _ in range(args.num_envs)]
    longest = envs[0].spec.max_episode_steps or 1
    if num_iterations * args.num_steps < longest:
        fail(
            f"--total-timesteps {args.total_timesteps} gives each environment {num_iterations * args.num_steps} steps, but an "
            f"episode takes {longest}: no episode would finish"
        )
    obs_dim, action_shape = envs[0].observation_space.shape[0], envs[0].action_space.shape
    low, high = envs[0].action_space.low, envs[0].action_space.high
    agent = Agent(obs_dim, math.prod(action_shape)).to(device).requires_grad_(False)  # `update` takes gradients itself
    weights = nn.utils.parameters_to_vector(agent.parameters())
    adam = (torch.zeros_like(weights), torch.zeros_like(weights), torch.zeros((), device=device))
    nn.utils.vector_to_parameters(weights, agent.parameters())
    step = update
    if args.compile:
        step = torch.compile(update, fullgraph=True)
        example = [torch.zeros(args.minibatch_size, *shape, device=device) for shape in ((obs_dim,), (math.prod(action_shape),), (), (), (), ())]
        started = time.time()
        try:
            step(weights, adam, torch.tensor(args.learning_rate, device=device), agent, example, args)
            print("compiled", time.time() - started)
        except Exception as error:
            print(f"Going on without torch.compile, which failed ({str(error).splitlines()[0]}); a C++ compiler is needed.")
            step = update

    name = f"{args.env_id.replace('/', '-').replace(':', '-')}__{Path(__file__).stem}__{args.seed}__{int(time.time())}"
    run_dir = Path(args.runs_dir) / name
    run_dir.mkdir(parents=True)
    writer = SummaryWriter(run_dir)
    obs = np.zeros((args.num_steps + 1, args.num_envs, obs_dim), dtype=np.float32)
    final_obs = np.zeros_like(obs[1:])
    actions = np.zeros((args.num_steps, args.num_envs, *action_shape), dtype=np.float32)
    rewards, costs, terminations, dones, next_safe = np.zeros((5, args.num_steps, args.num_envs), dtype=np.float32)
    safe = np.ones((args.num_steps + 1, args.num_envs), dtype=np.float32)
    for i, env in enumerate(envs):
        obs[-1, i], _ = env.reset(seed=int(rng.integers(2**31)))
    start_time = time.time()
    bar = tqdm(range(1, num_iterations + 1))
    for iteration in bar:
        t0=time.time()
        sample = sampler(agent)
        noise = rng.standard_normal(actions.shape, dtype=np.float32)
        episodes = []
        obs[0], safe[0] = obs[-1], safe[-1]
        terminations[:], dones[:] = 0, 0
        for t in range(args.num_steps):
            actions[t] = sample(obs[t], noise[t])
            clipped = np.clip(actions[t], low, high)
            for i, env in enumerate(envs):
                next_obs, rewards[t, i], terminated, truncated, info = env.step(clipped[i])
                costs[t, i], next_safe[t, i] = info["cost"], info["safe"]
                safe[t + 1, i] = next_safe[t, i]
                if terminated or truncated:
                    terminations[t, i], dones[t, i] = terminated, True
                    final_obs[t, i] = next_obs
                    episodes.append(info["episode"])
                    next_obs, _ = env.reset()
                    safe[t + 1, i] = 1
                obs[t + 1, i] = next_obs
        t1=time.time()
        with torch.no_grad():
            all_obs = torch.as_tensor(obs, device=device)
            b_obs = all_obs[:-1].flatten(0, 1)
            b_actions = torch.as_tensor(actions, device=device).reshape(batch_size, -1)
            logprobs, _ = agent.get_logprob_and_entropy(b_obs, b_actions)
            values = agent.get_value(all_obs).cpu().numpy()
            safety_values = agent.get_safety_value(all_obs).cpu().numpy()
            next_values = values[1:].copy()
            next_values[dones == 1] = agent.get_value(torch.as_tensor(final_obs[dones == 1], device=device)).cpu().numpy()
        next_safety_values = next_safe * np.where(dones, 1.0, safety_values[1:]).astype(np.float32)
        q = safety_q(safe[:-1], next_safety_values, dones, args.safety_gamma, safety_lambda)
        targets = safety_targets(safe[:-1], next_safety_values, dones, args.safety_gamma)
        nullified = nullify(rewards, costs, q, args.k, args.beta, args.reward_bias, args.penalty)
        advantages = gae(nullified, values[:-1], next_values, terminations, dones, args.gamma, args.gae_lambda)
        returns = advantages + values[:-1]
        batch = [b_obs, b_actions, logprobs] + [torch.as_tensor(x, device=device).flatten() for x in (advantages, returns, targets)]
        t2=time.time()
        lr = torch.tensor(args.learning_rate, device=device)
        losses = []
        for epoch in range(args.update_epochs):
            order = torch.randperm(batch_size, device=device)
            for minibatch in zip(*(x[order].split(args.minibatch_size) for x in batch)):
                weights, adam, step_losses = step(weights, adam, lr, agent, list(minibatch), args)
                losses.append(step_losses)
        nn.utils.vector_to_parameters(weights, agent.parameters())
        t3=time.time()
        L = torch.stack(losses).mean(0).tolist()
        r=np.mean([e["r"] for e in episodes]); c=np.mean([e["c"] for e in episodes])
        print(iteration, "ret %.1f cost %.2f"%(r,c), "safe %.2f" % np.mean([e["c"]<=args.cost_limit for e in episodes]), "std", agent.actor_logstd.exp().numpy(), "q %.3f v %.3f"%(q.mean(), safety_values.mean()), "kl %.4f"%L[4], "roll %.2f est %.2f upd %.2f sps %.0f"%(t1-t0,t2-t1,t3-t2,batch_size/(t3-t0)), flush=True)


if __name__ == "__main__":
    main(parse_args())
