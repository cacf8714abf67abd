"""docs/your-own-env.md: its task, saved as it says, trains with the commands it gives, and its other lines work too."""

import csv
import importlib
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import evaluate
import scpo_continuous
import scpo_discrete
import scpo_run

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "your-own-env.md").read_text()
TASK, TIMES_100, LOAD = re.findall(r"```python\n(.*?)```", PAGE, re.S)
LINES = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
TRAINING = [line for line in LINES if "my_task:" in line]
JUDGING = [line for line in LINES if "evaluate.py" in line]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with the task in it, from which the commands run."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    (tmp_path / "my_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_task", None)
    for number, handler in before.items():
        signal.signal(number, handler)


def train(command, *more, runs_dir="runs"):
    """Trains in this process for three short iterations. Returns the rows of progress.csv, as numbers."""
    _, script, *words = shlex.split(command)
    module = importlib.import_module(script.replace("/", ".").replace(".py", ""))
    size = "--total-timesteps 12288 --num-envs 4 --num-steps 1024".split()
    size += ["--no-compile", *"--minibatch-size 256 --learning-rate 1e-3".split()] if "scpo_" in script else []
    scpo_run.run(module.train, module.Args, module.TASK_SETTINGS, [*words, *size, *more, "--runs-dir", runs_dir])
    (progress,) = Path(runs_dir).glob("*/progress.csv")
    with open(progress) as file:
        return [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]


def test_the_task_is_short_and_every_script_has_its_command():
    assert len([line for line in TASK.splitlines() if line.strip()]) <= 22
    assert len({command.split()[1] for command in TRAINING}) == 7 and len(JUDGING) == 2


def test_the_table_of_settings():
    """A row a flag that differs: what it is on the paper's tasks, "by task" where these differ, and elsewhere."""
    others = scpo_continuous.TASK_SETTINGS["any other task"]
    ours, discrete = (vars(x.Args(**x.TASK_SETTINGS["any other task"])) for x in (scpo_continuous, scpo_discrete))
    assert {name for name in ours if name not in discrete} == {"log_std_init"}
    assert {name for name in discrete if discrete[name] != ours[name]} == {"env_id"}
    both = {**scpo_discrete.TASK_SETTINGS, **scpo_continuous.TASK_SETTINGS}
    papers = [values for task, values in both.items() if task != "any other task" and not task.endswith("--fast")]
    expected = {}
    for name, default in vars(scpo_continuous.Args()).items():
        usual, value = {values.get(name, default) for values in papers}, others.get(name, default)
        if usual != {value}:
            shown = "by task" if len(usual) > 1 else usual.pop(), "needed" if value is None else value
            shown = [" ".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in shown]
            expected[name] = [{"True": "on", "False": "off"}.get(x, x) for x in shown]
    rows = re.findall(r"^\| `--([a-z-]+)` \| (.*?) \| (.*?) \|", PAGE, re.M)
    assert {flag.replace("-", "_"): values for flag, *values in rows} == expected


@pytest.mark.parametrize("command", TRAINING[:7], ids=lambda command: Path(command.split()[1]).stem)
def test_the_task_trains_with_each_script(command):
    progress = train(command, *(["--total-timesteps", "40960"] if "scpo_" in command else []))
    assert len(progress) == (10 if "scpo_" in command else 3)
    first, last = (row["episodic_return"] - row["episodic_cost"] for row in (progress[0], progress[-1]))
    assert last > first + 2


def test_the_policy_is_judged_and_acts(folder, capsys):
    train(TRAINING[0])
    (run_dir,) = Path("runs").iterdir()
    capsys.readouterr()
    for command in JUDGING:
        evaluate.main(shlex.split(command.replace("runs/NAME", str(run_dir)))[2:])
        assert "MyTask-v0, scpo_continuous.py, seed 1, after iteration" in capsys.readouterr().out
    names = {"np": np}
    exec(LOAD.replace("runs/NAME", str(run_dir)), names)
    env, policy, obs = names["env"], names["policy"], names["obs"]
    assert len([line for line in LOAD.splitlines() if line]) == 4 and names["checkpoint"]["iteration"] == 3
    assert env.length == 1 and env.spec.id == "MyTask-v0" and names["info"]["cost"] == 0
    env.spent = 4.0
    assert env.augmented(obs[:1])[-1] == pytest.approx(0.8)  # the last number is min(cost so far / limit, 1.1)
    env.spent = 9.0
    assert env.augmented(obs[:1])[-1] == pytest.approx(1.1)
    assert policy(obs).shape == (1,) and (policy(obs) == policy(obs)).all()
    assert policy(obs, np.random.default_rng(1)) != policy(obs)


def test_one_file_alone_trains(folder, monkeypatch, capsys):
    """As without scpo_run.py; which is installed here."""
    command = next(line for line in LINES if line.startswith("mkdir"))
    assert "cp scpo_continuous.py my_task.py alone" in command
    words = shlex.split(TRAINING[-1])[1:]
    (folder / words[0]).write_text((ROOT / words[0]).read_text())
    monkeypatch.setitem(sys.modules, "scpo_run", None)
    size = "--total-timesteps 512 --num-envs 2 --num-steps 128 --no-compile".split()
    monkeypatch.setattr(sys, "argv", [*words, *size])
    runpy.run_path(words[0], run_name="__main__")
    assert re.search(r"^512 episodic_return \S+ episodic_cost \S+ episodic_safe \S+$", capsys.readouterr().out, re.M)
    assert list(Path("runs").glob("*/events.*")) and not list(Path("runs").glob("*/*.pt"))


@pytest.mark.parametrize(
    "change, flags, columns",
    [
        (
            "cost = 1.0",
            "--cost-limit 5",
            dict(safe_episode_rate=(0, 0), safety_q_mean=(0, 0.1), unsafe_share=(0.85, 1)),
        ),
        ("cost = 0.0", "--cost-limit 5", dict(safe_episode_rate=(1, 1), safety_q_mean=(0.9, 1), unsafe_share=(0, 0))),
        ("self.speed = -0.5", "--cost-limit 5", dict(negative_reward_share=(1, 1))),
        ("self.speed = -0.5", "--cost-limit 5 --reward-bias 1", dict(negative_reward_share=(0, 0))),
    ],
)
def test_the_columns_that_show_what_goes_wrong(change, flags, columns, folder):
    """The table under "When a run goes wrong", with tasks on which nothing else can happen."""
    at = "        return np.array([self.speed], dtype=np.float32), self.speed, False"
    assert TASK.count(at) == 1
    (folder / "my_task.py").write_text(TASK.replace(at, f"        {change}\n{at}"))
    last = train("python scpo_continuous.py --env-id my_task:MyTask-v0", *flags.split())[-1]
    for name, (low, high) in columns.items():
        assert f"`{name}`" in PAGE and low <= last[name] <= high, (name, last[name])


def test_100_times_the_reward(folder):
    (folder / "my_task.py").write_text(TASK + TIMES_100)
    words = "--env-id my_task:Times100-v0 --beta 100"
    assert f"| `{words}` |" in PAGE and f"| `{words} --reward-scale 1` |" in PAGE
    progress = train(f"python scpo_continuous.py --cost-limit 5 {words}")
    assert abs(progress[0]["episodic_return"]) > 20 and progress[-1]["grad_norm"] < 50
    unscaled = train(f"python scpo_continuous.py --cost-limit 5 {words} --reward-scale 1", runs_dir="unscaled")
    assert unscaled[-1]["grad_norm"] > 500


def test_reward_scale_undoes_100_times_the_reward(folder):
    """`--reward-scale 0.0002` on it is the run of the task itself, as the page says, but for rounding."""
    assert "With `--reward-scale 0.0002` instead, the run is the same as in the first row but for rounding" in PAGE
    (folder / "my_task.py").write_text(TASK + TIMES_100)
    plain = train(TRAINING[0], runs_dir="plain")
    scaled = train(TRAINING[0].replace("MyTask", "Times100") + " --beta 100 --reward-scale 0.0002", runs_dir="scaled")
    for ours, theirs in zip(plain, scaled):
        assert theirs["episodic_return"] == pytest.approx(100 * ours["episodic_return"], rel=0.02, abs=1)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=0.05)


def test_bullet_safety_gyms_other_robots_train_and_do_the_same_again():
    """In a process of their own, since they write where pytest reads. They draw from NumPy's global generator."""
    code = """
import scpo_continuous, baselines.cpo, scpo_run
car, drone = "SafetyCarCircle-v0 --no-compile", "SafetyDroneRun-v0"
for module, flags in ((scpo_continuous, car), (baselines.cpo, drone)):
    flags = f"--env-id {flags} --cost-limit 25 --num-envs 1 --num-steps 512 --total-timesteps 512"
    for time in ("first", "second"):
        argv = [*flags.split(), "--runs-dir", time]
        scpo_run.run(module.train, module.Args, module.TASK_SETTINGS, argv)
"""
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert told.returncode == 0, told.stderr
    first, second = ([path.read_text() for path in sorted(Path(x).glob("*/episodes.csv"))] for x in ("first", "second"))
    assert first == second and len(first) == 2 and all(text.count("\n") > 1 for text in first)
    for env_id in re.findall(r"Safety(?:Car|Drone)\w+-v0", PAGE):
        assert env_id in told.stdout
