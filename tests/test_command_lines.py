"""Hostile command lines for every command: one clear line and status 2, or it does what was asked.

Lines are drawn at random with a fixed seed: numbers too large, negative, NaN, of the wrong type, missing or unknown
flags, folders where files are meant. No line may allocate gigabytes: the address space is limited meanwhile.
"""

import contextlib
import dataclasses
import importlib
import io
import math
import os
import random
import resource
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import evaluate
import scpo_run

SCRIPTS = ["scpo_continuous", "scpo_discrete"]
SCRIPTS += [f"baselines.{name}" for name in ("trpo", "trpo_lagrangian", "cpo", "pcpo", "pdo")]
LINES = 30  # for each command
HUGE = "9" * 30
INTS = "-1 0 1 2 3 4 20 40 64 65 1025 100001 1000000 5000001 2147483648 1_0 +2".split() + [HUGE, f"-{HUGE}"]
FLOATS = "nan inf -inf -1 -0.0 0 1e-320 1e-9 0.1 0.5 1 1.5 1e5 1e7 1e30 1e400 -1e400".split() + [HUGE]
WORDS = [
    "",
    " ",
    "None",
    "True",
    "1e3",
    "0x10",
    "1,2",
    "é",
    "-",
    "--",
    "--seed",
    "a\nb",
    "\x1b[31m",
    "%s",
    "~",
    "9" * 5000,
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A run of scpo_continuous and what could be taken for one."""
    folder = tmp_path_factory.mktemp("places")
    run_dir = folder / "runs"
    module = importlib.import_module("scpo_continuous")
    scpo_run.run(
        module.train, module.Args, module.TASK_SETTINGS, [*small("scpo_continuous"), "--runs-dir", str(run_dir)]
    )
    (good,) = run_dir.iterdir()
    whole = torch.load(good / "last.pt", weights_only=True)
    agent = whole["agent"]
    spoiled = {
        "text": "no checkpoint",
        "half": (good / "last.pt").read_bytes()[:5000],
        "list": [1, 2],
        "empty": {},
        "no agent": {key: value for key, value in whole.items() if key != "agent"},
        "no adam": {key: value for key, value in whole.items() if key != "adam"},
        "no critic": dict(whole, agent={name: x for name, x in agent.items() if not name.startswith("critic")}),
        "wide": dict(whole, agent={name: torch.zeros(7, 7) for name in agent}),
        "other script": dict(whole, script="cpo.py"),
        "no script": dict(whole, script="../nowhere.py"),
        "other task": dict(whole, args=dict(whole["args"], env_id="CartPole-v1")),
    }
    paths = [
        good,
        good / "last.pt",
        good / "best_safe.pt",
        run_dir,
        folder / "nowhere",
        "/dev/null",
        "/proc/1",
        "n" * 300,
    ]
    for name, content in spoiled.items():
        (folder / name).mkdir()
        path = folder / name / "last.pt"
        if isinstance(content, str):
            path.write_text(content)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        paths.append(path.parent)
    (folder / "folder" / "last.pt").mkdir(parents=True)
    return [*map(str, paths), str(folder / "folder")]


@pytest.fixture(autouse=True)
def limits(monkeypatch, tmp_path):
    """At most two gigabytes more than now, where the system tells how much that is; signals and folder as before."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    for number, handler in handlers.items():
        signal.signal(number, handler)


def small(script):
    task = "toy_env:ToyChoice-v0" if "discrete" in script else "toy_env:Toy-v0"
    size = "--num-envs 2 --num-steps 20 --total-timesteps 80 --cost-limit 3"
    size += " --minibatch-size 20 --no-compile" if "scpo" in script else " --critic-minibatches 2"
    return f"--env-id {task} {size}".split()


def hostile(rng, types, places):
    """Draws one or two flags of {name: type} with odd values, mostly of their type.

    Sometimes a value is missing, a word too many or a flag unknown.
    """
    words = []
    for name in rng.sample(sorted(types), rng.choice([1, 1, 2])):
        flag, anything = f"--{name.replace('_', '-')}", [*INTS, *FLOATS, *WORDS, *places]
        typed = INTS if types[name] is int else FLOATS if "float" in str(types[name]) else [*WORDS, *places]
        value = rng.choice(typed if rng.random() < 0.8 else anything)
        words += rng.choice([[flag, value]] * 8 + [[f"{flag}={value}"], [flag]])
    return words + rng.choice([[]] * 12 + [[rng.choice(WORDS)], ["--unknown", "1"]])


def outcome(command, argv, prints):
    """Returns the one line that refuses argv, or None if it works."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            command(argv)
    except SystemExit as stop:
        line = err.getvalue()
        assert (stop.code, out.getvalue(), line.count("\n")) == (2, "", 1), (argv, line)
        names = ["--", "RUN", "Unrecognized options", *(word for word in argv if len(word) > 9)]
        assert len(line) <= 540 and any(name in line for name in names), (argv, line)
        return line
    except BaseException as error:
        raise AssertionError(f"{argv} ends with {error!r}") from error
    assert bool(out.getvalue()) == prints, argv


def assert_as_given(args, argv):
    """Each flag has the value that the command line gave it last, and no word was left aside."""
    words = list(argv if argv[-1] != "--" else argv[:-1])  # -- ends the flags, and nothing follows
    while words:
        flag, equals, text = words.pop(0).partition("=")
        value = getattr(args, flag[2:].replace("no-", "").replace("-", "_"))
        if isinstance(value, tuple):
            assert len(value) <= len(words) + bool(equals)
            words = words[len(value) - bool(equals) :]
        elif not isinstance(value, bool):
            text = text if equals else words.pop(0)
            is_last = not any(word.partition("=")[0] == flag for word in words)
            assert not is_last or value == (None if text == "None" else type(value)(text)), (argv, flag, value)


def train_an_iteration(iterations, args):
    """Trains for an iteration, where that takes no longer than a moment."""
    counts = "update_epochs critic_epochs cg_iters line_search_steps fisher_subsampling".split()
    if args.num_envs * args.num_steps <= 100 and all(getattr(args, name, 1) <= 10 for name in counts):
        with contextlib.suppress(FloatingPointError):  # a learning rate of 1e6 is allowed
            next(iterations)


def script_command(script, monkeypatch):
    """Returns the script as a function of argv that trains for an iteration, if it is short, and the args it took."""
    module, taken = importlib.import_module(script), []

    def keep(iterations, checkpoint, loaded, args, *rest):
        taken.append(args)
        train_an_iteration(iterations, args)

    monkeypatch.setattr(scpo_run, "keep", keep)
    monkeypatch.setattr(module, "compiled", lambda function, *example: function, raising=False)
    return lambda argv: scpo_run.run(module.train, module.Args, module.TASK_SETTINGS, argv), taken


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_refuses_or_does_as_told(script, places, monkeypatch):
    module, rng = importlib.import_module(script), random.Random(script)
    command, taken = script_command(script, monkeypatch)
    types = {field.name: field.type for cls in (module.Args, scpo_run.RunArgs) for field in dataclasses.fields(cls)}
    refused = set()
    for _ in range(LINES):
        argv = [*small(script), *hostile(rng, types, places)]
        before = len(taken)
        line = outcome(command, argv, prints=False)
        if line is None:
            assert_as_given(taken[-1], argv)
        else:
            assert line.startswith(f"{script.split('.')[-1]}.py: ") and len(taken) == before
            refused.add(line)
    assert len(taken) >= LINES / 10 and len(refused) >= LINES / 3  # both were tried


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_number_passes_that_can_not_be_used(script):
    """Each flag with each number, one at a time: refused by name, or the largest and the smallest train."""
    module = importlib.import_module(script)
    usual, _ = scpo_run.read_flags(module.Args, module.TASK_SETTINGS, Path(module.__file__), small(script))
    quick = dict(minibatch_size=2, update_epochs=1) if "scpo" in script else dict(critic_minibatches=1, critic_epochs=1)
    usual = dataclasses.replace(usual, total_timesteps=10**15, save_every=0, **quick)
    for field in dataclasses.fields(module.Args):
        values = INTS if field.type is int else FLOATS if "float" in str(field.type) else []
        accepted = {}
        for text in values if "tuple" not in str(field.type) else ():
            value = int(text) if field.type is int else float(text)
            args = dataclasses.replace(usual, **{field.name: value})
            try:
                module.check_args(args)
                accepted[value] = args
            except ValueError as error:
                assert f"--{field.name.replace('_', '-')} is" in str(error) or field.name in (
                    "num_envs",
                    "num_steps",
                ), error
        assert not any(map(math.isnan, accepted)), field.name
        assert field.name in ("k", "target_kl") or not any(map(math.isinf, accepted)), field.name
        for value in {min(accepted), max(accepted)} if accepted else ():
            iterations = module.train(accepted[value])
            next(iterations)
            train_an_iteration(iterations, accepted[value])


def test_resume_refuses_whatever_is_no_run_of_the_script(places, monkeypatch):
    command, taken = script_command("scpo_continuous", monkeypatch)
    for place in [*places, *WORDS]:
        line = outcome(command, [f"--resume={place}", "--total-timesteps", "120"], prints=False)
        if place == places[0]:
            assert line is None and taken.pop().resume == place
        else:
            assert "None" == place or "--resume" in line or "--env-id CartPole-v1" in line, line  # None: a new run
    assert not taken


EVALUATE = dict(episodes=int, seed=int, max_steps=int, env_id=str, script=str, video=str)


def test_evaluate_refuses_or_does_as_told(places, monkeypatch):
    monkeypatch.setattr(evaluate, "tqdm", lambda seeds, **kwargs: seeds[:2])  # a million episodes are allowed
    rng, lines = random.Random(1), []
    for _ in range(2 * LINES):
        run = places[0] if rng.random() < 0.8 else rng.choice([*places, *WORDS])
        argv = [run, "--episodes", "1", "--deterministic", *hostile(rng, EVALUATE, places)]
        lines.append(outcome(evaluate.main, argv, prints=True))
    assert lines.count(None) >= LINES / 10 and len(set(lines)) >= LINES / 3


def test_evaluate_refuses_whatever_is_no_run(places):
    good = [*places[:3], *(place for place in places if place.endswith("no adam"))]
    for place in [*places, *WORDS]:
        line = outcome(evaluate.main, ["--episodes", "1", "--", place], prints=place in good)
        assert (line is None) == (place in good), (place, line)


def test_ctrl_c_while_evaluate_is_still_importing(tmp_path):
    (tmp_path / "torch.py").write_text("import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(60)\n")
    argv = [sys.executable, str(Path(evaluate.__file__))]
    env = dict(os.environ, PYTHONPATH=str(tmp_path))
    process = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while process.poll() is None and not (tmp_path / "importing").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert (process.returncode, said) == (-signal.SIGINT, b"")  # 130 in a shell


@pytest.mark.parametrize(
    "line, says",
    [
        ("env_speed x", "STEPS is x, but must be one number, 1000 or more"),
        ("env_speed 0", "STEPS is 0"),
        ("env_speed 2000 2000", "STEPS is 2000 2000"),
        ("training_speed --rounds 0", "--rounds is 0, but must be 1 or more"),
        ("training_speed --round 1", "unrecognized arguments: --round 1"),
        ("training_speed --iterations 1", "--iterations is 1, but must be 2 or more"),
        ("training_speed --peer a", "but must be NAME=command"),
        ("training_speed --tasks X", "invalid choice: 'X'"),
        ("training_speed --csv /nope/x.csv", "--csv is /nope/x.csv"),
        ("training_speed --scripts nope.py", "files of this project"),
        ("training_speed --scripts ''", "files of this project"),
        ("training_speed --scripts 'scpo_continuous.py --fast'", "the first one without --fast"),
        ("training_speed --csv /tmp", "--csv is /tmp, but must be a file's name"),
    ],
)
def test_the_measurements_of_speed_refuse_what_is_wrong_before_they_begin(monkeypatch, capsys, line, says):
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(f"reproduce.speed.{line.split()[0]}", run_name="__main__")
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.out == "" and said.err.count("\n") == 1 and says in said.err
