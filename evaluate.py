"""Judges a saved policy: python evaluate.py runs/NAME [--episodes 100] [--deterministic | --stochastic].

Rebuilds the task and the policy from the run's checkpoint and plays whole episodes, each with its own seed. The same
command gives the same answer. Prints the mean return, cost, length and share of safe episodes, and the worst episode.
Intervals are at 95 %: the exact binomial one for the share, the percentile bootstrap for the rest. With fewer than 20
episodes the bootstrap's is too narrow, and then the mean stands alone, as it does where all episodes are alike.

In your own Python: `env, policy, checkpoint = evaluate.load("runs/NAME")`, then `action = policy(obs)`.
"""

# ruff: noqa: E402
import json
import os
import random
import re
import runpy
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

if __name__ == "__main__":  # no traceback if Ctrl-C comes while torch is being imported, which takes seconds
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import gymnasium as gym
import numpy as np
import torch
from scipy import stats
from tqdm import tqdm
from tyro import conf

from scpo_envs.ball_tasks import BallRun
from scpo_run import RIGHT_ID, WRONG_ID, check, parse, say

ROOT = Path(__file__).parent
METRICS = ("return", "cost", "length", "safe")
MODES = ("deterministic", "stochastic")
FILMING = 'a film takes a task with render_mode="rgb_array", and without a display MUJOCO_GL=egl or osmesa for MuJoCo'


@dataclass
class Args:
    run: Annotated[str, conf.Positional, conf.arg(metavar="RUN")]  # runs/NAME or a checkpoint in it, runs/NAME/last.pt
    episodes: int = 100  # episodes in each mode
    deterministic: bool = False  # the mean or likeliest action alone, instead of both modes
    stochastic: bool = False  # actions drawn as in training alone, instead of both modes
    env_id: Optional[str] = None  # another task with the same observations and actions
    script: Optional[str] = None  # the file that made RUN, if it was renamed or copied
    seed: int = 10_000  # of the first episode; the next ones count up
    max_steps: int = 10_000  # an episode must end within as many
    json: bool = False  # print JSON
    video: Optional[str] = None  # FILE.mp4, for a film of an episode in each mode (pip install imageio imageio-ffmpeg)


def load(path, script=None, env_id=None):
    """Returns the task of a run, its policy and the content of its checkpoint, a dict.

    path: a run's folder (for its last.pt) or a checkpoint. script: the file that made it, if it isn't beside this one
    or in baselines/. env_id: another task with the same observations and actions. The task is wrapped as in training.
    `policy(obs)` returns the mean or likeliest action, `policy(obs, rng)` a sample. Raises ValueError, which says why.
    """
    try:
        path = Path(path) / "last.pt" if Path(path).is_dir() else Path(path)
        checkpoint = dict(torch.load(path, map_location="cpu", weights_only=True))
        args, weights, name = checkpoint["args"], checkpoint["agent"], Path(checkpoint["script"]).name
        task = [args[name] for name in ("env_id", "cost_limit", "augment_state")]
        args["seed"], checkpoint["iteration"] + 1, weights.items()
    except Exception as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else "damaged, or not a checkpoint of ours"
        raise ValueError(f"RUN: {path}: {getattr(error, 'strerror', None) or reason}") from error
    source = ROOT / name if (ROOT / name).is_file() else ROOT / "baselines" / name
    source = source if script is None else Path(script)
    try:
        module = runpy.run_path(str(source))
        make_env, Agent, numpy_policy = module["make_env"], module["Agent"], module["numpy_policy"]
    except (Exception, SystemExit) as error:
        raise ValueError(f"--script must name the file that made {path}; {source} won't do: {error!r}") from error
    env = make_env(task[0] if env_id is None else env_id, *task[1:])
    agent = Agent(env.observation_space.shape[0], env.action_space).requires_grad_(False)
    try:
        agent.load_state_dict(weights)
    except Exception as error:
        raise ValueError(f"{path} doesn't fit {env.spec.id} and {source.name}: {error}") from error
    if not all(torch.isfinite(x).all() for x in agent.parameters()):
        raise ValueError(f"RUN: {path}: its weights are NaN or infinite")
    act = numpy_policy(agent)

    def policy(obs, rng=None):
        noise = np.zeros((1, agent.noise_dim), dtype=np.float32) if rng is None else agent.sample_noise(rng, 1)
        return agent.to_env(act(obs[None], noise))[0]

    return env, policy, checkpoint


def seed_all(seed):
    """Seeds the global generators of Python and NumPy, from which some tasks draw."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def play(env, policy, seed, mode, max_steps):
    """Plays an episode and yields the `info` of each step. The last one has "episode", the episode's return and so on.

    Raises ValueError if the task fails, anything is NaN, or the episode hasn't ended after max_steps.
    """
    # the task draws from `seed` itself; the seed's child gives a stream that is independent of it
    rng = None if mode == "deterministic" else np.random.default_rng(np.random.SeedSequence(seed).spawn(1)[0])
    seed_all(seed)
    step = 0
    try:
        obs, _ = env.reset(seed=seed)
        for step in range(1, max_steps + 1):
            action = policy(obs, rng)
            obs, reward, terminated, truncated, info = env.step(action)
            if not all(np.isfinite(x).all() for x in (action, obs, reward)):
                raise ValueError("the action, observation or reward is NaN or infinite")
            yield info
            if terminated or truncated:
                return
    except Exception as error:
        raise ValueError(f"{env.spec.id} failed in step {step} of the episode with seed {seed}: {error!r}") from error
    raise ValueError(f"{env.spec.id}: the episode with seed {seed} hasn't ended after {step} steps, see --max-steps")


def judge(episodes, cost_limit):
    """Returns what there is to say about a list of episodes: n, mean and interval of each metric, the worst episode."""
    told = {"n": len(episodes), "cost_limit": cost_limit}
    for metric in METRICS:
        values = np.array([episode[metric] for episode in episodes], dtype=float)
        low = high = None
        if metric == "safe":
            low, high = stats.binomtest(int(values.sum()), len(values)).proportion_ci(method="exact")
        elif len(values) >= 20 and np.ptp(values) > 0:
            drawn = stats.bootstrap((values,), np.mean, method="percentile", batch=100, random_state=0)
            low, high = drawn.confidence_interval
        told[metric] = {"mean": float(values.mean()), "low": low, "high": high}
    told["worst_episode"] = max(episodes, key=lambda episode: (episode["cost"], -episode["return"]))
    return told


def as_text(results, run):
    """Returns a table with a line a metric and a column a mode, and below it the worst episodes."""
    header = "".join(f"{told['n']} episodes, {mode}".rjust(32) for mode, told in results.items())
    lines = [run, "", " " * 14 + header]
    for metric in METRICS:
        line = f"{'safe episodes' if metric == 'safe' else metric:14}"
        for told in results.values():
            interval = "" if told[metric]["low"] is None else " [{low:.3f}, {high:.3f}]".format(**told[metric])
            line += f" {told[metric]['mean']:.3f}{interval}".rjust(32)
        lines.append(line)
    for mode, told in results.items():
        worst = "cost {cost:g}, return {return:.3f}, length {length}, seed {seed}".format(**told["worst_episode"])
        lines.append(f"worst episode, {mode}: {worst} (cost limit {told['cost_limit']:g})")
    return "\n".join(lines)


def film(path, env, policy, seed, modes, max_steps):
    """Films an episode in each mode. Raises ValueError, which says why, if that fails; an older film then stays.

    Above the picture stand mode, step, cost and limit, and the speed where the task limits it. A bar shows the cost.
    """

    def frame(mode, safe):
        picture, task, cost, limit = drawn.render(), drawn.unwrapped, drawn.spent, drawn.cost_limit
        if not isinstance(picture, np.ndarray) or picture.ndim != 3:
            raise ValueError("its render() returns no picture in colour")
        text = f"{mode}, step {drawn.length}"
        if isinstance(task, BallRun):
            text += f", speed {np.hypot(*task.velocity[:2]):.2f} m/s, limit {task.speed_limit:g}"
        image = Image.fromarray(np.pad(picture[..., :3], ((60, 0), (0, 0), (0, 0)), constant_values=255))
        draw, width = ImageDraw.Draw(image), image.width - 16
        colour = "darkgreen" if safe else "crimson"
        draw.text((8, 3), f"{text}\ncost {cost:g}, limit {limit:g}", colour, ImageFont.load_default(14))
        draw.rectangle((8, 45, 8 + width * min(cost / max(limit, 1e-8), 1), 53), colour)
        draw.rectangle((8, 45, 8 + width, 53), outline="black")  # full at the limit
        return np.asarray(image)

    partial = Path(path).with_name(f".{os.getpid()}-{Path(path).name}")
    try:
        import imageio
        from PIL import Image, ImageDraw, ImageFont

        drawn = gym.make(env.spec.id, disable_env_checker=True, render_mode="rgb_array")
        drawn = type(env)(drawn, env.cost_limit, env.augment_state)
        open(partial, "wb").close()  # says what is wrong, where ffmpeg would print its log
        with imageio.get_writer(partial, fps=env.metadata.get("render_fps") or 30, macro_block_size=2) as writer:
            for mode in modes:
                for info in play(drawn, policy, seed, mode, max_steps):
                    writer.append_data(frame(mode, info["safe"]))
        os.replace(partial, path)
    except Exception as error:
        hint = f"pip install imageio imageio-ffmpeg; {FILMING}"
        raise ValueError(f"--video: can't film {env.spec.id} into {path} ({hint}): {error!r}") from error
    finally:
        partial.unlink(missing_ok=True)  # there after an error alone


def main(argv=None):
    try:
        args = parse(conf.FlagCreatePairsOff[Args], argv, prog="evaluate.py", description=__doc__)
        check(args, "episodes", 1 <= args.episodes <= 1e6, "in [1, 1e6]")
        check(args, "seed", 0 <= args.seed <= 2e9, "in [0, 2e9]")
        check(args, "max_steps", args.max_steps >= 1, "1 or more")
        check(args, "video", args.video is None or args.video.endswith(".mp4"), "the name of an .mp4 file")
        seed_all(args.seed)  # for what a task draws when it is made
        env, policy, checkpoint = load(args.run, args.script, args.env_id)
        modes = [mode for mode in MODES if getattr(args, mode)] or MODES
        if args.video:
            film(args.video, env, policy, args.seed, modes, args.max_steps)
        results, seeds = {}, range(args.seed, args.seed + args.episodes)
        for mode in modes:
            episodes = []
            for seed in tqdm(seeds, desc=mode, unit="episode", disable=None, leave=False):  # None: only on a terminal
                *_, info = play(env, policy, seed, mode, args.max_steps)
                episodes.append({"seed": seed, **info["episode"]})
            results[mode] = judge(episodes, env.cost_limit)
    except (ValueError, KeyboardInterrupt) as error:
        said = re.sub(WRONG_ID, RIGHT_ID, " ".join(str(error).split())[:500]) or "interrupted"
        say(f"evaluate.py: {said}", sys.stderr)
        raise SystemExit(2 if isinstance(error, ValueError) else 130) from None
    # best_safe.pt holds the policy that played its iteration, last.pt (with "files") the one that came out of it
    iteration = checkpoint["iteration"] - ("files" not in checkpoint)
    run = f"{env.spec.id}, {checkpoint['script']}, seed {checkpoint['args']['seed']}, after iteration {iteration}"
    say(json.dumps({"run": run, **results}, indent=2) if args.json else as_text(results, run), sys.stdout)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
