"""benchmark.sh: which runs are made, skipped, resumed, refused and kept; signals, faults and clusters."""

import errno
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import scpo_continuous as scpo
import scpo_run
from reproduce import benchmark, curves, field, film, held_out, plot, search
from reproduce.studies import STUDIES

ROOT = Path(__file__).parent.parent
# Stands for all seven scripts: logs an iteration every STUB_PACE seconds, saves and leaves on a first SIGTERM
STUB = """
import json, os, signal, sys, time
from pathlib import Path

stop = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: (stop.append(number), signal.signal(number, signal.SIG_DFL)))
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = Path(flags.get("--resume") or f"{flags['--runs-dir']}/attempt{os.getpid()}")
if os.environ.get("STUB_FAILS", "nothing") in str(folder):
    raise OSError(28, "No space left on device")
if "--resume" not in flags:
    folder.mkdir(parents=True)
    config = dict(env_id=flags["--env-id"], total_timesteps=int(flags["--total-timesteps"]), revision="unknown")
    (folder / "config.json").write_text(json.dumps(dict(config, seed=int(flags.get("--seed", 1)))))
    (folder / "progress.csv").write_text("COLUMNS\\n")
(folder / "last.pt").touch()
batch = 32768 if Path(sys.argv[0]).name.startswith("scpo_") else 32000
length = int(os.environ.get("STUB_ENDS", json.loads((folder / "config.json").read_text())["total_timesteps"] // batch))
with open(folder / "progress.csv", "r+") as file:
    for iteration in range(len(file.readlines()), length + 1):
        time.sleep(float(os.environ.get("STUB_PACE", 0)))
        file.write(f"{iteration},{iteration * batch},1,1,1,1,1,1,{iteration}\\n")
        file.flush()
        (folder / "last.pt").touch()
        if stop:
            raise SystemExit(128 + stop[0])
"""
HERE = benchmark.here
LAUNCH = "from reproduce import benchmark; benchmark.measured_seconds = lambda runs, stop: {}; benchmark.main()"


@pytest.fixture(autouse=True)
def committed(monkeypatch):
    """These tests are no others while the code is being changed."""
    monkeypatch.setattr(benchmark, "here", lambda: HERE().split("-dirty")[0])


@pytest.fixture
def project(tmp_path):
    """A project whose scripts are stubs, outside git."""
    root = tmp_path / "project"
    shutil.copytree(ROOT / "reproduce", root / "reproduce", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "reproduce" / "plot.py").write_text("print('drawn')")
    (root / "baselines").mkdir()
    for script in curves.ALGOS.values():
        (root / script).write_text(STUB.replace("COLUMNS", ",".join(curves.COLUMNS)))
    return root


def launch(project, *flags, code=LAUNCH, **settings):
    command = [sys.executable, "-c", code, *map(str, flags)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    env = dict(os.environ, **{name: str(value) for name, value in settings.items()})
    return subprocess.Popen(command, cwd=project, env=env, start_new_session=True, **pipes)


def finish(process, seconds=60):
    """Returns (exit status, output)."""
    said, _ = process.communicate(timeout=seconds)
    assert "Traceback" not in said, said
    return process.returncode, said


def wait_for(condition, seconds=30):
    for _ in range(20 * seconds):
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def curve_lengths(folder):
    return {path.stem: curves.length(path) for path in folder.glob("**/*__*__*.csv")}


def attempt(runs_dir, name, iterations, **config):
    """Makes the folder of a run that has so many iterations."""
    folder = runs_dir / name / "attempt"
    folder.mkdir(parents=True)
    (folder / "last.pt").touch()
    columns = [column for column in curves.COLUMNS if column != "iteration"]
    rows = [
        "iteration," + ",".join(columns),
        *(f"{i + 1}," + ",".join(str(i) for _ in columns) for i in range(iterations)),
    ]
    (folder / "progress.csv").write_text("\n".join(rows) + "\n")
    (folder / "config.json").write_text(json.dumps(dict(dict(revision=benchmark.here()), **config)))
    return folder


def commands(capsys, *flags):
    benchmark.main(["--dry-run", *map(str, flags)])
    return [line.split()[1:] for line in capsys.readouterr().out.splitlines()]


def refused(capsys, *flags):
    """Returns the one line that a command is refused with, before anything is made."""
    with pytest.raises(SystemExit) as stop:
        benchmark.main([*map(str, flags), *(["--dry-run"] if "--engine" not in flags else [])])
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.err.count("\n") == 1 and not said.out
    return said.err


# Which runs ---------------------------------------------------------------------------------------------------------


def test_the_campaign_is_the_papers_figure_and_cart_safe(capsys, tmp_path):
    lines = commands(capsys, "--runs-dir", tmp_path)
    assert len(lines) == 4 * (4 * 6 + 2)
    for line in lines:
        script, task = Path(line[0]).name, line[line.index("--env-id") + 1]
        steps = int(line[line.index("--total-timesteps") + 1])
        assert (script == "scpo_discrete.py") == (task == "CartSafe-v0")
        batch = 32768 if script.startswith("scpo_") else 32000
        assert steps == batch * {"SafetyBallRun-v0": 100, "CartSafe-v0": 150}.get(task, 500)
    assert len([line for line in lines if "--k" in line]) == 4  # PPO
    assert [line[line.index("--seed") + 1] for line in lines] == sorted(str(1 + i // 26) for i in range(104))


def test_quick_takes_the_seeds_that_are_given(capsys, tmp_path):
    for given, taken in (([], ["1"]), (["--seeds", 3, 4], ["3", "4"])):
        lines = commands(capsys, "--quick", "--tasks", "CartSafe-v0", "--runs-dir", tmp_path, *given)
        assert [line[line.index("--seed") + 1] for line in lines] == sorted(2 * taken)


def test_lengths_and_limits_are_those_built_into_the_scripts():
    import scpo_continuous
    import scpo_discrete

    for task, (cost_limit, iterations) in curves.TASKS.items():
        module = scpo_discrete if task == "CartSafe-v0" else scpo_continuous
        settings = module.TASK_SETTINGS[task]
        assert (settings["cost_limit"], settings["total_timesteps"] // 32768) == (cost_limit, iterations)


def test_the_studies_settings_made_their_committed_runs():
    for study in STUDIES.values():
        for label in study.labels:
            own = None if label in curves.ALGOS else study.iterations
            for seed in range(1, study.seeds + 1):
                run = benchmark.Run(study.task, label, seed, study.iterations, ROOT / "runs", own)
                kept = curves.config(ROOT / "results" / "runs" / f"{run.name}.json")
                assert not curves.differences(kept, run.settings), run.name
                module = importlib.import_module(run.script.removesuffix(".py").replace("/", "."))
                read, _ = scpo_run.read_flags(module.Args, module.TASK_SETTINGS, ROOT / run.script, run.flags())
                read = json.loads(json.dumps(vars(read)))
                assert not curves.differences(kept, read), run.name  # the defaults too
                assert curves.length(ROOT / "results" / "runs" / f"{run.name}.csv") >= study.iterations


def test_the_slow_box_is_trained_with_the_settings_of_reach():
    named = (("SafetyBallReach-v0", "SCPO"), ("SafetyBallReach-v0", "slow_box"))
    reach, slow = (benchmark.Run(*name, 1, 60, ROOT / "runs", 60).flags() for name in named)
    read = [
        scpo_run.read_flags(scpo.Args, scpo.TASK_SETTINGS, ROOT / "scpo_continuous.py", x)[0] for x in (reach, slow)
    ]
    assert slow[slow.index("--env-id") + 1] == read[1].env_id == "SafetyBallReachSlowBox-v0"
    assert vars(read[0]) == {**vars(read[1]), "env_id": "SafetyBallReach-v0"}


def test_a_study_shares_its_runs_with_the_campaign(capsys, tmp_path):
    lines = commands(capsys, "--study", "augmentation", "--seeds", 1, "--runs-dir", tmp_path)
    assert len(lines) == 2 and lines[0] == commands(capsys, "--tasks", "SafetyBallRun-v0", "--runs-dir", tmp_path)[0]
    assert "--no-augment-state" in lines[1] and lines[1][-1].endswith("SafetyBallRun-v0__not_augmented__1")
    boxes = commands(capsys, "--study", "box", "--runs-dir", tmp_path)
    assert len(boxes) == 4 and [line.count("--env-id") for line in boxes] == [1] * 4
    assert "SafetyBallReachSlowBox-v0" in boxes[1] and str(60 * 32768) in boxes[1] and str(500 * 32768) in boxes[0]


def test_finished_runs_are_skipped_and_interrupted_ones_resumed(capsys, tmp_path):
    narrow = ["--tasks", "SafetyBallRun-v0", "--algos", "CPO", "PDO", "TRPO", "--seeds", 1, 1, "--runs-dir", tmp_path]
    narrow += ["--replace"]  # the committed runs' settings are not the question here
    attempt(tmp_path, "SafetyBallRun-v0__CPO__1", 100)
    attempt(tmp_path, "SafetyBallRun-v0__PDO__1", 37)
    lines = commands(capsys, *narrow)
    assert [Path(line[0]).name for line in lines] == ["pdo.py", "trpo.py"]
    assert "--resume" not in lines[1] and lines[0][1] == "--resume" and lines[0][2].endswith("PDO__1/attempt")
    assert len(commands(capsys, *narrow, "--iterations", 30)) == 1


def test_the_scripts_use_the_files_of_their_own_clone():
    command = [sys.executable, "-c", "import scpo_run; print(scpo_run.__file__)"]
    told = subprocess.run(command, env=curves.ONE_THREAD, cwd="/", capture_output=True, text=True, check=True)
    assert curves.ONE_THREAD["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert told.stdout.strip() == str(ROOT / "scpo_run.py")


def test_it_starts_without_torch_and_matplotlib(tmp_path):
    code = "import sys; from reproduce import benchmark; benchmark.main(['--dry-run', '--runs-dir', sys.argv[1]]); "
    code += "assert not {'torch', 'matplotlib', 'scipy'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=True, capture_output=True)


def test_a_closed_pipe_is_no_fault(tmp_path):
    command = f"{sys.executable} -m reproduce.benchmark --dry-run --runs-dir {tmp_path} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "0\n" and not done.stderr


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--jobs", "0"], "--jobs is 0, but must be at least 1"),
        (["--iterations", "-3"], "--iterations is -3, but must be at least 1"),
        (["--hours", "0"], "--hours is 0, but must be at least 1"),
        (["--seeds", "1", "-1"], "--seeds has -1, but must be in [0, 2^31)"),
        (["--seeds", str(2**31)], f"--seeds has {2**31}, but must be in [0, 2^31)"),
        (["--seeds", "1.5"], "--seeds: invalid int value: '1.5'"),
        (["--runs-dir", ""], "--runs-dir is '', but must be a folder"),
        (["--runs-dir", __file__], "test_benchmark.py', but must be a folder"),
        (["--results", f"{__file__}/results"], "but must be a folder"),
        (["--runs-dir", "x" * 300], "x', but must be a folder"),
        (["--study", "box", "--algos", "CPO"], "--study has runs of its own"),
        (["--one", "104"], "--one is 104, but there are 104 runs"),
        (["--one", "-1"], "--one is -1, but there are 104 runs"),
        (["--tasks", "Ball"], "--tasks: invalid choice: 'Ball'"),
        (["--tasks", "CartSafe-v0", "--algos", "CPO"], "leave no run"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(flags, says, capsys):
    assert says in refused(capsys, *flags)


@pytest.mark.parametrize("flag", ["--runs-dir", "--results"])
@pytest.mark.parametrize("engine", ["local", "slurm"])
def test_a_folder_that_nothing_can_be_written_to_is_refused_first(flag, engine, tmp_path, capsys, monkeypatch):
    """Before the measurement and the runs, which would fail or be lost one by one. The last one is a dangling link."""
    monkeypatch.setattr(benchmark, "refuse_mixtures", lambda runs, args: pytest.fail("the folders come first"))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    told = "No such file or directory" if sys.platform == "linux" else "Read-only file system"
    for place, why in (("/proc/x", told), (tmp_path / "link", "File exists")):
        where = {"--runs-dir": tmp_path / "runs", "--results": tmp_path / "results", flag: place}
        words = [str(word) for pair in where.items() for word in pair]
        for command, more in ((benchmark.main, ["--engine", engine]), (field.main, [])):
            with pytest.raises(SystemExit) as stop:
                command([*words, *more])
            said = capsys.readouterr()
            assert stop.value.code == 2 and not said.out and said.err.count("\n") == 1
            assert said.err.endswith(f": {flag} is '{place}', but nothing can be written there: {why}\n")
            monkeypatch.setattr(benchmark, "PROGRAM", "benchmark.sh")


@pytest.mark.parametrize(
    "main, line",
    [
        (benchmark.main, "--engine slurm --dry"),  # would go into the job, which then does nothing
        (field.main, "--dry"),
        (plot.main, "--results /nowhere --iter 9"),
        (search.main, "CartSafe-v0 --trial 0"),
        (held_out.main, "RUN --batch 3"),
        (film.main, "RUN --wid 200"),
    ],
)
def test_flags_have_their_whole_names(main, line, capsys):
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    said = capsys.readouterr().err
    benchmark.PROGRAM = "benchmark.sh"
    assert stop.value.code == 2 and said.count("\n") == 1 and "unrecognized arguments: --" in said


# Runs of other settings or other code -------------------------------------------------------------------------------


def test_a_run_of_other_settings_does_not_count(capsys, tmp_path):
    where = ["--runs-dir", tmp_path / "runs", "--results", tmp_path / "results", "--tasks", "CartSafe-v0"]
    asked = dict(env_id="CartSafe-v0", seed=1, total_timesteps=150 * 32768)
    attempt(
        tmp_path / "runs", "CartSafe-v0__SCPO__1", 150, k=99, **asked
    )  # no flag of the command, but in the kept runs
    assert "has other settings: k 99, not 5" in refused(capsys, *where, "--algos", "SCPO")
    assert len(commands(capsys, *where, "--algos", "SCPO", "--replace")) == 3
    attempt(tmp_path / "runs", "CartSafe-v0__PPO__1", 150, k=99, **asked)  # the command's own flag
    assert "has other settings: k 99, not 0" in refused(capsys, *where, "--algos", "PPO", "--replace")
    attempt(tmp_path / "runs", "CartSafe-v0__SCPO__2", 9, k=98, **dict(asked, seed=2))  # two seeds, two settings
    assert "has other settings: k 98, not 99" in refused(capsys, *where, "--algos", "SCPO", "--replace")
    kept = tmp_path / "results" / "runs"
    kept.mkdir(parents=True)
    (kept / "CartSafe-v0__SCPO__1-98.json").write_text(json.dumps(dict(k=98)))  # no seed: kept beside, for comparison
    assert "has other settings: k 99, not 5" in refused(capsys, *where, "--algos", "SCPO")
    (tmp_path / "runs" / "CartSafe-v0__SCPO__1" / "attempt" / "config.json").unlink()
    assert "config.json is missing" in refused(capsys, *where, "--algos", "SCPO")


def test_outside_git_the_same_command_goes_on(capsys, tmp_path, monkeypatch):
    """As after a download without .git, and on the workers of a Ray cluster, which are told the revision."""
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    where = ["--runs-dir", tmp_path / "runs", "--tasks", "CartSafe-v0", "--algos", "SCPO", "--seeds", 1, "--dry-run"]
    made = attempt(tmp_path / "runs", "CartSafe-v0__SCPO__1", 3)
    (made / "config.json").write_text(json.dumps(dict(revision=scpo_run.git_revision(tmp_path))))
    assert benchmark.here() == "unknown" and "--resume" in commands(capsys, *where)[0]
    monkeypatch.setenv("SCPO_REVISION", "e72d9fe33146")
    assert scpo_run.git_revision(tmp_path) == benchmark.here() == "e72d9fe33146"


def test_code_of_another_revision_is_not_mixed_in_unasked(capsys, tmp_path, monkeypatch):
    git = ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run([*git, "init", "-q"], check=True)
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    revisions = []
    for name, text in (("scpo_discrete.py", "1"), ("README.md", "prose"), ("scpo_discrete.py", "2")):
        (tmp_path / name).write_text(text)
        subprocess.run([*git, "add", name], check=True)
        subprocess.run([*git, "commit", "-qm", name], check=True)
        revisions.append(benchmark.here())
    assert benchmark.same_code(revisions[0], revisions[1]) and not benchmark.same_code(revisions[0], revisions[2])
    edits = set()
    for text in ("3", "4", "3"):
        (tmp_path / "scpo_discrete.py").write_text(text)
        assert HERE() == scpo_run.git_revision(tmp_path) and HERE().startswith(f"{revisions[2]}-dirty-")
        edits.add(HERE())
    assert len(edits) == 2 and not benchmark.same_code(*edits)  # of the same commit, but not the same code
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("1")
    subprocess.run([*git, "add", "tests"], check=True)
    assert HERE() == scpo_run.git_revision(tmp_path) and HERE() in edits  # a test has no part in a run
    (tmp_path / "project").mkdir()
    with monkeypatch.context() as patch:  # a project in a folder of a larger repository
        patch.setattr(benchmark, "ROOT", tmp_path / "project")
        assert HERE() == scpo_run.git_revision(tmp_path / "project") in edits
    subprocess.run([*git, "checkout", "-q", "."], check=True)

    where = ["--runs-dir", tmp_path / "runs", "--tasks", "CartSafe-v0", "--algos", "SCPO", "--seeds", 1, "--dry-run"]
    made = attempt(tmp_path / "runs", "CartSafe-v0__SCPO__1", 3)
    assert "--resume" in commands(capsys, *where)[0]
    for named in (dict(revision=revisions[1]), dict(revision="", revisions=[revisions[2], revisions[1]])):
        (made / "config.json").write_text(json.dumps(named))
        assert f"was made by revision {revisions[1]}, not {revisions[2]}" in refused(capsys, *where)
        assert "--resume" in commands(capsys, *where, "--any-revision")[0]


def test_a_kept_curve_is_replaced_by_its_betters_alone(tmp_path):
    results, name = tmp_path / "results", "CartSafe-v0__SCPO__1"

    def offer(iterations, replace=False, **config):
        made = attempt(tmp_path / f"{time.time_ns()}", name, iterations, **config)
        return curves.keep(made, name, results, replace), curves.length(results / "runs" / f"{name}.csv")

    assert offer(20, k=4) == ("", 20) and offer(20, k=4) == ("", 20)
    (results / "runs" / f"{name}.json").unlink()  # as if the disk had been full
    for iterations in (5, 30):
        with pytest.raises(curves.BadFile, match=f"{name}.json is missing"):
            offer(iterations, k=4)
    assert offer(20, k=4) == ("", 20) and curves.config(results / "runs" / f"{name}.json")["k"] == 4
    said, length = offer(5, k=4)
    assert length == 20 and "its 5 iterations are not kept" in said
    said, length = offer(5, k=4, replace=True)
    assert length == 5 and "replaces 20 iterations" in said
    said, length = offer(30, k=4)
    assert length == 30 and "replaces 5 iterations" in said
    said, length = offer(40, k=99)
    assert length == 30 and "not kept without --replace" in said and "k 99, not 4" in said
    said, length = offer(150, k=99, replace=True)
    assert length == 150 and "replaces 30 iterations" in said and "k 99, not 4" in said
    said, length = offer(149, k=99, replace=True)
    assert length == 150 and "not kept" in said  # never, where the kept one has the paper's length
    assert json.loads((results / "runs" / f"{name}.json").read_text())["k"] == 99


@pytest.mark.parametrize(
    "other",
    [
        *(dict(norm_obs=True), dict(limit_factor=40), dict(reward_scale=0.02), dict(termination_cost=26)),
        *(dict(log_std_init=-1), dict(fast=True), dict(target_kl=0.03)),
    ],
)
def test_a_flag_that_came_after_a_kept_run_had_its_default_there(other, tmp_path):
    """The kept run is one of the paper's, from before most of these flags; its target_kl is null."""
    name, results = "SafetyBallRun-v0__SCPO__{}", tmp_path / "results"
    kept = curves.config(ROOT / "results" / "runs" / f"{name.format(1)}.json")
    assert kept.get(*other) is None
    kept.pop("runs_dir")
    today = json.loads(json.dumps({**vars(scpo.Args()), **kept}))
    assert not curves.differences(kept, today) and not curves.differences(today, kept)
    assert curves.differences({**kept, **other}, kept) and curves.differences({**today, **other}, kept)
    assert curves.keep(attempt(tmp_path / "1", name.format(1), 100, **kept), name.format(1), results) == ""
    made = attempt(tmp_path / "2", name.format(1), 101, **{**today, **other})
    says = f"other settings: {next(iter(other))} "
    said = curves.keep(made, name.format(1), results)
    assert "not kept without --replace" in said and says in said
    made = attempt(tmp_path / "3", name.format(2), 101, **{**today, **other, "seed": 2})
    curves.keep(made, name.format(2), results)
    with pytest.raises(curves.BadFile, match=says):
        curves.load(results, "SafetyBallRun-v0", "SCPO", 100)


ODD = {"no text": b"\xff\n1\n", "a long field": b"x" * 200_000 + b"\n1\n", "NUL": b"a\0,b\n1\0,2\n"}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_kept_file_gives_way_and_the_other_curves_are_kept(odd, tmp_path, capsys):
    names = [f"CartSafe-v0__SCPO__{seed}" for seed in (1, 2)]
    runs = [benchmark.Run("CartSafe-v0", "SCPO", seed, 20, tmp_path / "made") for seed in (1, 2)]
    for run in runs:
        attempt(tmp_path / "made", run.name, 20)
    (tmp_path / "runs").mkdir()
    for ending in ("csv", "json"):
        (tmp_path / "runs" / f"{names[0]}.{ending}").write_bytes(odd)
    assert not benchmark.make_all(runs, None, 2, [], SimpleNamespace(results=tmp_path, replace=False))
    assert curve_lengths(tmp_path / "runs") == dict.fromkeys(names, 20)


def test_a_longer_run_of_the_same_settings_replaces_a_shorter_one(tmp_path):
    """As on the field's tasks, where a run of 10^7 steps is another run than one of 2 million."""
    name = "SafetyHopperVelocity-v1__SCPO__1"
    for iterations, length, k in ((5, 5, 4), (9, 9, 4), (7, 9, 4), (12, 9, 99)):
        made = attempt(tmp_path / str(iterations), name, iterations, total_timesteps=iterations, k=k)
        curves.keep(made, name, tmp_path / "results")
        assert curves.length(tmp_path / "results" / "runs" / f"{name}.csv") == length


def test_only_what_is_missing_is_made(capsys, tmp_path, monkeypatch):
    results = tmp_path / "results"
    for seed, iterations in ((1, 150), (2, 149)):
        made = attempt(tmp_path / "made", f"CartSafe-v0__SCPO__{seed}", iterations)
        curves.keep(made, f"CartSafe-v0__SCPO__{seed}", results)
    where = ["--tasks", "CartSafe-v0", "--algos", "SCPO", "--runs-dir", tmp_path / "runs", "--results", results]
    lines = commands(capsys, *where, "--missing")
    assert [line[line.index("--seed") + 1] for line in lines] == ["2", "3", "4"]
    assert len(commands(capsys, *where)) == 4
    assert commands(capsys, *where, "--missing", "--seeds", 1) == [[]]  # an empty line
    assert "--missing doesn't work with --engine slurm" in refused(capsys, *where, "--missing", "--engine", "slurm")
    drawn = SimpleNamespace(returncode=0, stdout="")
    monkeypatch.setattr(benchmark.clusters, "connect_to_ray", lambda address, revision: None)
    monkeypatch.setattr(benchmark.subprocess, "run", lambda *args, **options: drawn)
    for engine in ("local", "ray"):
        benchmark.main([*map(str, where), "--missing", "--seeds", "1", "--engine", engine])
        assert "0 runs, 0 of them complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    "write",
    [
        lambda path, made: curves.keep(made, "CartSafe-v0__SCPO__1", path.parent.parent),
        lambda path, made: curves.write_rows(path, [dict(iteration=3, cost=9)]),
        lambda path, made: plot.write_columns(path, dict(iteration=[3, 4], cost=[8, 9])),
        lambda path, made: plot.write_blocks(path, {"a": ["b"]}),
        lambda path, made: plot.save(plot.plt.figure(), path),
    ],
)
def test_a_full_disk_leaves_what_was_there_whole(write, tmp_path, monkeypatch):
    name, results = "CartSafe-v0__SCPO__1", tmp_path / "results"
    curves.keep(attempt(tmp_path / "short", name, 20), name, results)
    path, longer, write_bytes = (
        results / "runs" / f"{name}.csv",
        attempt(tmp_path / "long", name, 150),
        Path.write_bytes,
    )
    for kind in ("svg", "png"):
        path.with_name(f"{path.name}.{kind}").write_text("a figure")
    before = {path.name: path.read_text() for path in (results / "runs").iterdir()}

    def half(path, content):
        write_bytes(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError):
        write(path, longer)
    monkeypatch.undo()
    assert {path.name: path.read_text() for path in (results / "runs").iterdir()} == before
    assert curve_lengths(results) == {name: 20}


# Making runs --------------------------------------------------------------------------------------------------------


def test_runs_are_made_kept_drawn_and_then_complete(project):
    narrow = ["--tasks", "CartSafe-v0", "--seeds", "1", "2", "--jobs", "2"]
    status, said = finish(launch(project, *narrow))
    made = {f"CartSafe-v0__{algo}__{seed}": 150 for algo in ("SCPO", "PPO") for seed in (1, 2)}
    assert status == 0 and "drawn" in said and curve_lengths(project / "results") == made, said
    status, said = finish(launch(project, *narrow))
    assert status == 0 and "4 runs, 4 of them complete" in said and "from iteration" not in said


def test_a_short_run_leaves_a_long_curve_alone(project):
    narrow = ["--tasks", "CartSafe-v0", "--algos", "SCPO", "--seeds", "1"]
    assert finish(launch(project, *narrow))[0] == 0
    shutil.rmtree(project / "runs")
    status, said = finish(launch(project, *narrow, "--iterations", "5", STUB_PACE=0.3))
    assert (
        status == 0 and "are not kept" in said and curve_lengths(project / "results") == {"CartSafe-v0__SCPO__1": 150}
    )


@pytest.mark.parametrize("fault", ["a file in its place", "a full disk", "an early end"])
def test_a_run_that_fails_is_named_and_the_others_are_made(project, fault):
    settings, failed = {}, 1
    if fault == "a file in its place":
        (project / "runs" / "benchmark").mkdir(parents=True)
        (project / "runs" / "benchmark" / "CartSafe-v0__SCPO__1").touch()
    elif fault == "a full disk":
        settings = dict(STUB_FAILS="SCPO__1")
    else:
        settings, failed = dict(STUB_ENDS=149), 4  # as if a script had left with status 0
    narrow = ["--tasks", "CartSafe-v0", "--seeds", "1", "2", "--jobs", "1"]
    status, said = finish(launch(project, *narrow, **settings))
    assert status == 1 and said.count("FAILED") == failed and "CartSafe-v0__SCPO__1 FAILED" in said, said
    assert (
        f"{failed} runs failed: CartSafe-v0__SCPO__1" in said and len(curve_lengths(project / "results")) == 4 - failed
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_gently_and_the_next_call_goes_on(project, number):
    narrow = ["--tasks", "CartSafe-v0", "--algos", "SCPO", "--jobs", "1"]
    process = launch(project, *narrow, STUB_PACE=0.4)
    wait_for(lambda: [path for path in project.glob("runs/*/*/*/progress.csv") if curves.length(path) >= 1])
    process.send_signal(number)
    status, said = finish(process)
    assert status == 128 + number and "Stopped" in said and "FAILED" not in said, said
    assert len(list(project.glob("runs/*/*/*/last.pt"))) == 1 and not curve_lengths(project / "results")
    status, said = finish(launch(project, *narrow))
    begun = int(said.split("CartSafe-v0__SCPO__1: from iteration ")[1].split()[0])
    assert status == 0 and 1 <= begun < 20 and len(curve_lengths(project / "results")) == 4


def test_a_second_signal_ends_it_at_once(project):
    process = launch(project, "--tasks", "CartSafe-v0", "--algos", "SCPO", "--jobs", "1", STUB_PACE=100)
    wait_for(lambda: list(project.glob("runs/*/*/*/last.pt")))
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.6)
    status, said = finish(process)
    assert status == 130 and "Stopped" in said


def test_a_signal_during_the_measurement_ends_it_too(project):
    measure = "from reproduce import benchmark; benchmark.main()"
    process = launch(project, "--tasks", "CartSafe-v0", "--algos", "SCPO", code=measure, STUB_PACE=100)
    wait_for(lambda: "Measuring" in process.stdout.readline())
    time.sleep(3)
    for _ in range(2):  # the stub is in mid-iteration for 100 seconds, finish waits for 60
        process.send_signal(signal.SIGINT)
        time.sleep(0.6)
    status, said = finish(process)
    assert status == 130 and "Stopped" in said and not list(project.glob("runs/*/*/*"))


def test_a_run_that_outlives_its_launcher_is_left_to_finish(project):
    narrow = ["--tasks", "CartSafe-v0", "--algos", "SCPO", "--seeds", "1"]
    process = launch(project, *narrow, STUB_PACE=0.02)
    (path,) = wait_for(lambda: [p for p in project.glob("runs/*/*/*/progress.csv") if curves.length(p)])
    process.kill()  # the run goes on: it is no child of the terminal
    process.wait()
    status, said = finish(launch(project, *narrow))
    assert status == 0 and "another process is at work on it" in said and "FAILED" not in said, said
    wait_for(lambda: curves.length(path) == 150)
    time.sleep(0.5)
    status, said = finish(launch(project, *narrow))
    assert status == 0 and curve_lengths(project / "results") == {"CartSafe-v0__SCPO__1": 150}
    assert len(list(project.glob("runs/*/*/*/last.pt"))) == 1


def test_two_at_once_make_every_run_once(project):
    narrow = ["--tasks", "CartSafe-v0", "--jobs", "2"]
    both = [launch(project, *narrow, STUB_PACE=0.005) for _ in range(2)]
    assert [finish(process)[0] for process in both] == [0, 0]
    assert len(list(project.glob("runs/*/*/*/last.pt"))) == 8 and set(curve_lengths(project / "results").values()) == {
        150
    }


def test_the_estimate_is_never_less_than_the_longest_run(tmp_path):
    new, begun = (
        benchmark.Run("SafetyBallRun-v0", "CPO", 1, None, tmp_path),
        benchmark.Run("CartSafe-v0", "PPO", 1, 40, tmp_path),
    )
    attempt(tmp_path, begun.name, 30)
    measured = {new.name: (100.0, 200.0), begun.name: (100.0, 3.0)}
    assert benchmark.estimate([new], measured, 1) == benchmark.estimate([new], measured, 8) == "5.6 hours"
    assert benchmark.estimate([begun], measured, 1) == "3 minutes"
    assert benchmark.estimate([new, begun], measured, 8) == "5.6 hours"
    assert benchmark.estimate([new, new, new, new], measured, 2) == "11.2 hours"


def test_a_real_run_is_stopped_at_its_iterations_and_would_go_on(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(benchmark, "measured_seconds", lambda runs, stop: {run.name: (10.0, 3600.0) for run in runs})
    results, name = tmp_path / "results", "CartSafe-v0__PPO__1"
    narrow = ["--tasks", "CartSafe-v0", "--algos", "PPO", "--seeds", "1", "--runs-dir", str(tmp_path / "runs")]
    narrow += ["--results", str(results)]
    benchmark.main([*narrow, "--iterations", "1"])
    said = capsys.readouterr().out
    assert "1 runs, 0 of them complete" in said and "About" in said
    (last,) = (tmp_path / "runs" / name).glob("*/last.pt")
    kept = curves.read(results / "runs" / f"{name}.csv")
    assert list(kept) == list(curves.COLUMNS) and list(kept["iteration"]) in ([1], [1, 2], [1, 2, 3])
    assert curves.config(results / "runs" / f"{name}.json")["k"] == 0
    assert (results / "campaign.png").stat().st_size > 10_000
    assert "CartSafe-v0 | PPO" in (results / "README.md").read_text()
    (command,) = commands(capsys, *narrow, "--any-revision")
    assert command[1:] == ["--resume", str(last.parent)]


# Clusters -----------------------------------------------------------------------------------------------------------


def test_slurm_gets_an_array_job_of_a_run_a_task(project, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(curves, "ROOT", project)
    monkeypatch.setattr("reproduce.clusters.ROOT", project)
    runs_dir, results = tmp_path / "my runs", tmp_path / "my results"
    flags = [
        "--tasks",
        "SafetyBallRun-v0",
        "--algos",
        "CPO",
        "TRPO-L",
        "--seeds",
        "1",
        "2",
        "--hours",
        "7",
        "--replace",
    ]
    flags += ["--runs-dir", str(runs_dir), "--results", str(results), "--engine", "slurm", "--iterations", "9"]
    monkeypatch.setattr(benchmark, "ROOT", project)
    attempt(runs_dir, "SafetyBallRun-v0__CPO__1", 100, revision="unknown")
    benchmark.main([*flags, "--dry-run"])
    job = capsys.readouterr().out
    assert "#SBATCH --array=1,2,3\n" in job and "#SBATCH --time=7:00:00\n" in job  # CPO 1 is complete
    assert f'--output="{runs_dir}/slurm' in job
    env = dict(os.environ, SLURM_ARRAY_TASK_ID="3", STUB_PACE="0.1")
    said = subprocess.run(["bash", "-c", job], capture_output=True, text=True, env=env)
    assert said.returncode == 0, said.stderr
    (length,) = curve_lengths(results).values()
    assert list(curve_lengths(results)) == ["SafetyBallRun-v0__TRPO-L__2"] and 9 <= length < 30
    assert not (project / "results").exists() and not (project / "runs").exists()
    assert (runs_dir / "SafetyBallRun-v0__TRPO-L__2").is_dir() and "drawn" not in said.stdout


def test_slurms_quick_runs_stay_out_of_results(project, capsys, monkeypatch):
    for module in ("curves", "benchmark", "clusters"):
        monkeypatch.setattr(f"reproduce.{module}.ROOT", project)
    benchmark.main(["--engine", "slurm", "--quick", "--tasks", "CartSafe-v0", "--algos", "PPO", "--dry-run"])
    job = capsys.readouterr().out
    subprocess.run(["bash", "-c", job], env=dict(os.environ, SLURM_ARRAY_TASK_ID="0", STUB_PACE="0.3"), check=True)
    assert list(curve_lengths(project / "runs" / "quick" / "results")) == ["CartSafe-v0__PPO__1"]
    assert not (project / "results").exists()


def test_slurm_is_asked_to_run_the_job(monkeypatch, capsys, tmp_path):
    narrow = ["--tasks", "CartSafe-v0", "--algos", "PPO", "--seeds", "1", "--runs-dir", str(tmp_path / "runs")]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no sbatch here" in refused(capsys, *narrow, "--engine", "slurm")
    for status in (0, 3):
        (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho $1 > {tmp_path}/asked\nexit {status}\n")
        (tmp_path / "sbatch").chmod(0o755)
        try:
            benchmark.main([*narrow, "--engine", "slurm"])
            assert status == 0
        except SystemExit as stop:
            assert stop.code == status
        assert Path((tmp_path / "asked").read_text().strip()).read_text().startswith("#!/bin/bash\n#SBATCH")


def test_ray_loses_nothing_when_a_worker_dies(project, monkeypatch):
    """A real cluster on this machine: a head that computes nothing and two workers, one of which is taken away."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("STUB_PACE", "0.5")  # for the workers
    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=0))
    workers = [cluster.add_node(num_cpus=1) for _ in range(2)]
    try:
        flags = ["--engine", "ray", "--ray-address", cluster.address, "--tasks", "CartSafe-v0", "--seeds", "1"]
        process = launch(project, *flags, "--iterations", "60")
        curves_so_far = lambda: [curves.length(path) for path in project.glob("runs/*/*/*/progress.csv")]  # noqa: E731
        wait_for(lambda: len(curves_so_far()) == 2 and min(curves_so_far()) >= 5, seconds=120)
        cluster.remove_node(workers[0], allow_graceful=False)
        status, said = finish(process, seconds=240)
    finally:
        cluster.shutdown()
    assert status == 0 and said.count("its worker is gone") == 1, said
    assert int(said.split("sent again from iteration ")[1].split()[0]) >= 5
    kept = list(project.glob("results/runs/*.csv"))
    assert {path.stem for path in kept} == {"CartSafe-v0__SCPO__1", "CartSafe-v0__PPO__1"}
    for path in kept:
        iterations = list(curves.read(path)["iteration"])
        assert iterations == list(range(1, len(iterations) + 1)) and 60 <= len(iterations) < 70
