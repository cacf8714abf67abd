"""Judges a saved policy: python evaluate.py runs/NAME [--episodes 100] [--deterministic | --stochastic | --both].

Rebuilds the task and the policy from the run's checkpoint alone and plays whole episodes, each from its own seed, so that the
same command gives the same answer. Prints return, cost, length and the share of safe episodes, each with its 95 % bootstrap
interval, and the worst episode. --json prints the same as JSON; --video FILE.mp4 films an episode of each mode, with the cost
spent so far and the limit drawn in (pip install imageio imageio-ffmpeg).
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).parent
METRICS = ("return", "cost", "length", "safe")


def fail(message):
    """Answers bad input: one line, exit status 2."""
    print(f"evaluate.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def load(path):
    """Returns the checkpoint in `path`, a file or a run's folder (its last.pt), and the module of the script that wrote it."""
    path = Path(path) / "last.pt" if Path(path).is_dir() else Path(path)
    if not path.is_file():
        fail(f"RUN: there is no {path}; give a run's folder or a checkpoint, runs/NAME or runs/NAME/best_safe.pt")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        script = Path(checkpoint["script"]).name
        checkpoint["agent"], checkpoint["args"]["env_id"]
    except Exception:
        fail(f"RUN: {path} is truncated or not a checkpoint of ours")
    source = next((folder / script for folder in (ROOT, ROOT / "baselines") if (folder / script).is_file()), None)
    if source is None:
        fail(f"RUN: {path} was made by {script}, which isn't here")
    spec = importlib.util.spec_from_file_location(source.stem, source)
    module = sys.modules[source.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return checkpoint, module


def make_env(module, args, env_id, render):
    """The run's wrapped task, or another of the same spaces; one that draws itself if it is to be filmed."""
    env = module.make_env(env_id, args["cost_limit"], args["augment_state"])
    if render:
        env.close()
        try:
            env = gym.make(env_id, disable_env_checker=True, render_mode="rgb_array")
        except Exception as error:
            fail(f"--video: {env_id} doesn't draw itself ({error})")
        env = module.SafetyState(env, args["cost_limit"], args["augment_state"])
    return env


def make_policy(checkpoint, module, env):
    """Returns the policy as a function of an observation (n,), a generator and `deterministic`, to an action of the task."""
    actor_inputs = next(x for name, x in checkpoint["agent"].items() if name.startswith("actor") and x.ndim == 2).shape[1]
    if env.observation_space.shape[0] != actor_inputs:
        fail(f"--env-id: observations have {env.observation_space.shape[0]} numbers, but the policy takes {actor_inputs}")
    space = env.action_space
    is_box = isinstance(space, gym.spaces.Box)
    if module.__name__.startswith("scpo_"):
        choices = None if is_box else np.ravel(getattr(space, "nvec", getattr(space, "n", 0))).tolist()
        agent = module.Agent(actor_inputs, int(np.prod(space.shape)) if is_box else choices)
    else:
        agent = module.Agent(actor_inputs, space)
    try:
        agent.load_state_dict({name: checkpoint["agent"][name] for name in agent.state_dict()})
    except (KeyError, RuntimeError):
        fail(f"--env-id: the policy's actions aren't those of the task, {space}")
    agent.requires_grad_(False)
    sample = module.sampler(agent)
    layers = [
        layer for layer in (agent.actor_mean if hasattr(agent, "actor_mean") else agent.actor) if isinstance(layer, nn.Linear)
    ]
    num_outputs = layers[-1].out_features

    def policy(obs, rng, deterministic):
        noise = np.zeros((1, num_outputs), dtype=np.float32)
        if not deterministic:
            noise = (rng.standard_normal(noise.shape) if is_box else rng.gumbel(size=noise.shape)).astype(np.float32)
        action = sample(obs[None], noise)[0]
        if is_box:
            return np.clip(action.reshape(space.shape), space.low, space.high)
        return action.reshape(space.shape).astype(np.int64) + getattr(space, "start", 0)

    return policy


def play(env, policy, seed, deterministic, frames=None):
    """Plays one episode; returns its return, cost, length and whether it was safe. Appends (image, cost so far) to `frames`."""
    rng = np.random.default_rng(seed)
    obs, _ = env.reset(seed=seed)
    spent, over, info = 0.0, False, {}
    while not over:
        if frames is not None:
            frames.append((env.render(), spent))
        obs, _, terminated, truncated, info = env.step(policy(obs, rng, deterministic))
        spent += info["cost"]
        over = terminated or truncated
    return {**info["episode"], "safe": float(info["safe"])}


def bootstrap(values, statistic=np.mean, samples=10_000, seed=0):
    """95 % percentile bootstrap interval of a statistic of `values` (n, ...), resampled along the first axis: two (...)."""
    values = np.asarray(values, dtype=float)
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(values), size=(samples, len(values)))
    return tuple(np.percentile([statistic(values[pick], axis=0) for pick in picks], [2.5, 97.5], axis=0))


def judge(episodes, cost_limit):
    """Returns what there is to say about a list of episodes: mean and interval of each metric, the worst episode, n."""
    told = {"n": len(episodes), "cost_limit": cost_limit}
    for metric in METRICS:
        values = np.array([episode[metric] for episode in episodes], dtype=float)
        low, high = bootstrap(values)
        told[metric] = {"mean": values.mean(), "low": float(low), "high": float(high)}
    worst = max(range(len(episodes)), key=lambda i: (episodes[i]["cost"], -episodes[i]["return"]))
    told["worst_episode"] = {"seed": episodes[worst]["seed"], **{metric: episodes[worst][metric] for metric in METRICS[:3]}}
    return told


def as_text(results, heading):
    lines = [heading, ""]
    lines.append(f"{'':14}{'n':>5}  " + "".join(f"{name:>30}" for name in ("return", "cost", "length", "safe episodes")))
    for mode, told in results.items():
        cells = [f"{told[metric]['mean']:.3f} [{told[metric]['low']:.3f}, {told[metric]['high']:.3f}]" for metric in METRICS]
        lines.append(f"{mode:14}{told['n']:>5}  " + "".join(f"{cell:>30}" for cell in cells))
    lines.append("")
    for mode, told in results.items():
        worst = told["worst_episode"]
        lines.append(
            f"worst episode, {mode}: cost {worst['cost']:g} (limit {told['cost_limit']:g}), return {worst['return']:.3f}, "
            f"length {worst['length']}, seed {worst['seed']}"
        )
    return "\n".join(lines)


def film(path, frames, cost_limit, fps):
    """Writes the frames, (image, cost so far), with the cost and its limit drawn in as figures and as a bar."""
    import imageio
    from PIL import Image, ImageDraw

    with imageio.get_writer(path, fps=fps, macro_block_size=2) as writer:
        for image, spent in frames:
            picture = Image.fromarray(np.asarray(image, dtype=np.uint8)[..., :3])
            draw = ImageDraw.Draw(picture)
            colour = (200, 40, 30) if spent > cost_limit else (20, 110, 60)
            share = min(spent / max(cost_limit, 1e-8), 1.25) / 1.25
            draw.rectangle((8, 8, 220, 40), fill=(255, 255, 255), outline=(90, 90, 90))
            draw.rectangle((12, 28, 12 + 204 * share, 36), fill=colour)
            draw.line((12 + 204 / 1.25, 25, 12 + 204 / 1.25, 39), fill=(0, 0, 0), width=2)  # the limit
            draw.text((14, 12), f"cost {spent:.1f}, limit {cost_limit:g}", fill=colour)
            writer.append_data(np.asarray(picture))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(message.replace("argument ", ""))
    parser.add_argument("run", metavar="RUN", help="runs/NAME, or a checkpoint in it such as runs/NAME/best_safe.pt")
    parser.add_argument("--episodes", type=int, default=100)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--deterministic", action="store_const", dest="modes", const=("deterministic",), help="the mean or likeliest action"
    )
    modes.add_argument("--stochastic", action="store_const", dest="modes", const=("stochastic",), help="actions as in training")
    modes.add_argument("--both", action="store_const", dest="modes", const=("deterministic", "stochastic"), help="the default")
    parser.add_argument("--env-id", help="another task with the same observations and actions")
    parser.add_argument("--seed", type=int, default=10_000, help="of the first episode; the next ones count up")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--video", metavar="FILE.mp4")
    args = parser.parse_args(argv)
    if args.episodes < 1:
        fail(f"--episodes is {args.episodes}, but must be at least 1")
    if args.seed < 0:
        fail(f"--seed is {args.seed}, but must be 0 or more")
    if args.video and not (importlib.util.find_spec("imageio") and importlib.util.find_spec("imageio_ffmpeg")):
        fail("--video needs imageio and imageio-ffmpeg: pip install imageio imageio-ffmpeg")
    if args.video and not Path(args.video).parent.is_dir():
        fail(f"--video: there is no folder {Path(args.video).parent}")
    torch.set_num_threads(1)
    checkpoint, module = load(args.run)
    env_id = args.env_id or checkpoint["args"]["env_id"]
    env = make_env(module, checkpoint["args"], env_id, render=args.video)
    policy = make_policy(checkpoint, module, env)
    results, frames = {}, []
    for mode in args.modes or ("deterministic", "stochastic"):
        episodes = []
        for seed in range(args.seed, args.seed + args.episodes):
            shown = frames if args.video and seed == args.seed else None
            episodes.append({"seed": seed, **play(env, policy, seed, mode == "deterministic", shown)})
        results[mode] = judge(episodes, checkpoint["args"]["cost_limit"])
    if args.video:
        film(args.video, frames, checkpoint["args"]["cost_limit"], env.metadata.get("render_fps", 60))
    heading = f"{env_id}, {checkpoint['script']}, seed {checkpoint['args']['seed']}, after iteration {checkpoint['iteration']}"
    print(json.dumps({"run": heading, **results}, indent=2) if args.json else as_text(results, heading))


if __name__ == "__main__":
    main()
