"""Films one episode of each of some runs side by side, with cost and limit above: python -m reproduce.film RUN RUN.

RUN is a run's folder or a checkpoint in it, of any script whose task can draw itself. All play the same episode, which
--seed decides, with the mean action. The same command makes the same film.
"""

import io
from itertools import zip_longest
from pathlib import Path

import gymnasium as gym
import numpy as np
from PIL import Image, ImageDraw, ImageFont

import evaluate
from reproduce import curves
from reproduce.curves import ALGOS, RESULTS, fail, say
from scpo_envs.ball_tasks import BallTask

HEADER = 64  # pixels above each picture
GREEN, YELLOW, RED = "#006400", "#FFD700", "#E00000"
NAMES = {script.rpartition("/")[2]: algo for algo, script in ALGOS.items()} | {"scpo_discrete.py": "SCPO"}


def header(width, name, env, safe):
    """Returns a picture (HEADER, width) of an episode so far: algorithm, step, return, and the cost as a bar.

    The bar's scale ends at twice the limit, and a line marks the limit.
    """
    image = Image.new("RGB", (width, HEADER), "white")
    draw, colour = ImageDraw.Draw(image), GREEN if safe else RED
    draw.text((8, 2), name, "black", ImageFont.load_default(22))
    draw.text((100, 4), f"step {env.length}, return {round(env.earned)}", "black", ImageFont.load_default(16))
    draw.text((100, 23), f"cost {env.spent:g}, limit {env.cost_limit:g}", colour, ImageFont.load_default(16))
    left, right, scale = 8, width - 8, 2 * max(env.cost_limit, 1e-8)
    draw.rectangle((left, 46, left + (right - left) * min(env.spent / scale, 1), 58), colour)
    draw.rectangle((left, 46, right, 58), outline="black")
    draw.line(((left + right) // 2, 42, (left + right) // 2, 62), "black", 3)
    return image


def place(task, position):
    """Where a position (3,) in m is in a Ball task's picture as it is drawn now, (2,) in pixels."""
    view = task.bullet.computeViewMatrixFromYawPitchRoll(**task.camera, roll=0, upAxisIndex=2)
    projection = task.bullet.computeProjectionMatrixFOV(fov=60, aspect=4 / 3, nearVal=0.1, farVal=100.0)
    view, projection = (np.reshape(matrix, (4, 4)).T for matrix in (view, projection))
    x, y, _, w = projection @ view @ (*position, 1)
    return 480 * (1 + x / w) / 2, 360 * (1 - y / w) / 2


def frames(env, policy, checkpoint, seed, every):
    """Plays an episode and yields a picture of every so many steps and of the last one, with the ball's path in it."""
    drawn = gym.make(env.spec.id, disable_env_checker=True, render_mode="rgb_array")
    drawn = type(env)(drawn, env.cost_limit, env.augment_state)
    name, path = NAMES.get(checkpoint["script"], checkpoint["script"]), []
    for info in evaluate.play(drawn, policy, seed, "deterministic", 10_000):
        if isinstance(drawn.unwrapped, BallTask):
            path.append((drawn.unwrapped.position, YELLOW if info["cost"] == 0 else RED))
        if (drawn.length - 1) % every and "episode" not in info:
            continue
        picture = drawn.render()
        if not isinstance(picture, np.ndarray) or picture.ndim != 3:
            raise ValueError("its render() returns no picture in colour")
        frame = Image.new("RGB", (picture.shape[1], picture.shape[0] + HEADER))
        frame.paste(header(frame.width, name, drawn, info["safe"]), (0, 0))
        frame.paste(Image.fromarray(picture[..., :3]), (0, HEADER))
        draw = ImageDraw.Draw(frame)
        for i, (position, colour) in enumerate(path, 1):  # anew in each picture: on Run the camera moves
            x, y = place(drawn.unwrapped, position)
            draw.circle((x, y + HEADER), 3 if i < len(path) else 11, colour)
        yield frame
    say(f"{name}: return {drawn.earned:.1f}, cost {drawn.spent:g}, limit {drawn.cost_limit:g}")


def film(path, runs, script, seed, every, width):
    """Writes an animated GIF. Where an episode is over, its last picture stays until the others are over too."""
    films = []
    for run in runs:
        evaluate.seed_all(seed)  # for what a task draws when it is made
        env, policy, checkpoint = evaluate.load(run, script)
        try:
            films.append(list(frames(env, policy, checkpoint, seed, every)))
        except Exception as error:
            raise ValueError(f"{env.spec.id} can't be filmed ({evaluate.FILMING}): {error!r}") from error
    last = [frames[-1] for frames in films]
    pictures = []
    for row in zip_longest(*films):
        row = [picture or end for picture, end in zip(row, last)]
        whole = Image.new("RGB", (sum(picture.width for picture in row), max(picture.height for picture in row)))
        for i, picture in enumerate(row):
            whole.paste(picture, (sum(earlier.width for earlier in row[:i]), 0))
        pictures.append(whole.resize((width, whole.height * width // whole.width), Image.Resampling.LANCZOS))
    # one palette for all, made from the last picture: what doesn't move stays the same and takes no space
    palette = pictures[-1].quantize(256)
    first, *rest = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    durations = [80] * len(rest) + [2000]  # ms a picture; the end stays for a while
    content = io.BytesIO()
    first.save(content, "GIF", save_all=True, append_images=rest, duration=durations, loop=0, optimize=True)
    curves.write(Path(path), content.getvalue())  # as a whole or not at all


@curves.interruptible("reproduce.film")
def main(argv=None):
    parser = curves.parser("reproduce.film", __doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's folder or a checkpoint, from left to right")
    parser.add_argument("--out", default=str(RESULTS / "film.gif"), help="FILE.gif (default: results/film.gif)")
    parser.add_argument("--script", help="the file that made the runs, if it was renamed or copied")
    parser.add_argument("--seed", type=int, default=10_000, help="of the episode (default: 10000)")
    parser.add_argument("--every", type=int, default=3, help="steps from picture to picture (default: 3)")
    parser.add_argument("--width", type=int, default=800, help="pixels of the whole film (default: 800)")
    args = parser.parse_args(argv)
    try:
        for name, least, most in (("seed", 0, 2**31 - 1), ("every", 1, 10_000), ("width", 100, 4000)):
            if not least <= getattr(args, name) <= most:
                raise ValueError(f"--{name} is {getattr(args, name)}, but must be in [{least}, {most}]")
        if not args.out.endswith(".gif"):
            raise ValueError(f"--out is {args.out}, but must be the name of a .gif file")
        if not Path(args.out).parent.is_dir():
            raise ValueError(f"--out is {args.out}, but there is no folder {Path(args.out).parent}")
        film(args.out, args.runs, args.script, args.seed, args.every, args.width)
    except (ValueError, OSError) as error:
        fail("reproduce.film", error)


if __name__ == "__main__":
    main()
