"""benchmark.sh and plot.py: which runs are made, skipped and resumed, and what the table says of known curves."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import benchmark
import plot
import studies

ROOT = Path(__file__).parent.parent


def start(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["benchmark.sh", *map(str, flags)])
    benchmark.main()


def commands(monkeypatch, capsys, *flags):
    start(monkeypatch, "--dry-run", *flags)
    return [line.split()[1:] for line in capsys.readouterr().out.splitlines()]


def test_the_campaign_is_the_papers_figure_and_cart_safe(monkeypatch, capsys, tmp_path):
    lines = commands(monkeypatch, capsys, "--runs-dir", tmp_path)
    assert len(lines) == 4 * (4 * 6 + 2)
    for line in lines:
        script, task = Path(line[0]).name, line[line.index("--env-id") + 1]
        steps = int(line[line.index("--total-timesteps") + 1])
        assert (script == "scpo_discrete.py") == (task == "CartSafe-v0")
        batch = 32768 if script.startswith("scpo_") else 32000
        assert steps == batch * {"SafetyBallRun-v0": 100, "CartSafe-v0": 150}.get(task, 500)
    assert len([line for line in lines if "--k" in line]) == 4  # PPO


def test_lengths_and_limits_are_those_built_into_the_scripts():
    import scpo_continuous
    import scpo_discrete

    for task in benchmark.TASKS:
        settings = {**scpo_continuous.PAPER_SETTINGS, **scpo_discrete.PAPER_SETTINGS}[task]
        assert settings["iterations"] == benchmark.LENGTHS.get(task, 500) and settings["cost_limit"] == benchmark.LIMITS[task]


def test_finished_runs_are_skipped_and_interrupted_ones_resumed(monkeypatch, capsys, tmp_path):
    narrow = ["--tasks", "SafetyBallRun-v0", "--algos", "CPO", "PDO", "TRPO", "--seeds", 1, "--runs-dir", tmp_path]
    for algo, count in (("CPO", 100), ("PDO", 37)):
        attempt = tmp_path / f"SafetyBallRun-v0__{algo}__1" / "attempt"
        attempt.mkdir(parents=True)
        (attempt / "progress.csv").write_text("iteration\n" + "".join(f"{i + 1}\n" for i in range(count)))
        (attempt / "last.pt").touch()
    lines = commands(monkeypatch, capsys, *narrow)
    assert [Path(line[0]).name for line in lines] == ["pdo.py", "trpo.py"]
    assert "--resume" not in lines[1] and lines[0][lines[0].index("--resume") + 1].endswith("PDO__1/attempt")
    assert len(commands(monkeypatch, capsys, *narrow, "--iterations", 30)) == 1


def test_a_run_is_stopped_at_its_iterations_and_goes_on_later(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(benchmark, "measured_seconds", lambda runs: {run.name: (10.0, 3600.0) for run in runs})
    monkeypatch.setattr(benchmark, "ROOT", tmp_path / "root")
    (tmp_path / "root" / "results").mkdir(parents=True)
    (tmp_path / "root" / "results" / "published_curves.csv.gz").symlink_to(ROOT / "results" / "published_curves.csv.gz")
    for name in ("scpo_discrete.py", "scpo_envs", "plot.py", "benchmark.py", "evaluate.py", "studies.py", "scpo_continuous.py"):
        (tmp_path / "root" / name).symlink_to(ROOT / name)
    narrow = ["--tasks", "CartSafe-v0", "--algos", "PPO", "--seeds", 1, "--runs-dir", tmp_path / "runs"]
    for iterations in (1, 4):
        start(monkeypatch, *narrow, "--iterations", iterations)
        said = capsys.readouterr().out
        (kept,) = (tmp_path / "root" / "results" / "runs").glob("*.csv")
        with open(kept) as file:
            done = [int(row["iteration"]) for row in csv.DictReader(file)]
        assert done == list(range(1, len(done) + 1)) and iterations <= len(done) <= iterations + 2
        assert kept.stem == "CartSafe-v0__PPO__1" and "1 runs, 0 of them complete" in said and "About" in said
    (attempt,) = (tmp_path / "runs" / "CartSafe-v0__PPO__1").glob("*/last.pt")
    assert torch.load(attempt, weights_only=True)["iteration"] == len(done)
    assert json.loads(kept.with_suffix(".json").read_text())["k"] == 0
    assert (tmp_path / "root" / "results" / "campaign.png").stat().st_size > 10_000


def test_ray_loses_nothing_when_a_worker_dies(tmp_path):
    """A real cluster on this machine: a head that computes nothing and two workers, one of which is taken away in mid-run."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=0))
    workers = [cluster.add_node(num_cpus=1) for _ in range(2)]
    try:
        command = [
            sys.executable,
            str(ROOT / "benchmark.py"),
            "--engine",
            "ray",
            "--ray-address",
            cluster.address,
            "--iterations",
            "24",
        ]
        command += ["--tasks", "CartSafe-v0", "--seeds", "1", "--runs-dir", str(tmp_path / "runs"), "--one"]
        command += ["--results", str(tmp_path / "results")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(600):
            lasts = list((tmp_path / "runs").glob("*/*/last.pt"))
            if len(lasts) == 2 and all(torch.load(last, weights_only=True)["iteration"] >= 10 for last in lasts):
                break
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.5)
        cluster.remove_node(workers[0], allow_graceful=False)
        said, _ = process.communicate(timeout=400)
    finally:
        cluster.shutdown()
    assert process.returncode == 0, said
    assert said.count("its worker is gone") == 1 and "from iteration 1" in said.split("its worker is gone")[1], said
    for algo in ("SCPO", "PPO"):
        (attempt,) = (tmp_path / "runs" / f"CartSafe-v0__{algo}__1").iterdir()
        with open(attempt / "progress.csv") as file:
            iterations = [int(row["iteration"]) for row in csv.DictReader(file)]
        assert iterations == list(range(1, len(iterations) + 1)) and len(iterations) >= 24
        assert (tmp_path / "results" / "runs" / f"CartSafe-v0__{algo}__1.csv").exists()


def test_slurm_gets_an_array_job_of_a_run_a_task(monkeypatch, capsys, tmp_path):
    narrow = ["--tasks", "SafetyBallRun-v0", "--algos", "CPO", "TRPO-L", "--seeds", 1, 2, "--runs-dir", tmp_path]
    start(monkeypatch, "--engine", "slurm", "--dry-run", *narrow, "--iterations", 7)
    job = capsys.readouterr().out
    assert "#SBATCH --array=0-3\n" in job and '"SafetyBallRun-v0 TRPO-L 2"' in job and not list(tmp_path.iterdir())
    # what a task of the array runs, with a benchmark.py that says what it was asked for
    (tmp_path / "benchmark.py").write_text("import sys; print(sys.argv[1:])")
    job = job.replace(f"cd {ROOT}", f"cd {tmp_path}")
    env = {"SLURM_ARRAY_TASK_ID": "3", "PATH": "/usr/bin:/bin"}
    said = subprocess.run(["bash", "-c", job], capture_output=True, text=True, env=env).stdout
    expected = "--tasks SafetyBallRun-v0 --algos TRPO-L --seeds 2 --jobs 1 --runs-dir".split() + [
        str(tmp_path),
        "--iterations",
        "7",
    ]
    assert said.strip() == str([*expected, "--one"])


def test_slurm_is_asked_to_run_the_job(monkeypatch, capsys, tmp_path):
    narrow = ["--tasks", "CartSafe-v0", "--algos", "PPO", "--seeds", 1, "--runs-dir", tmp_path / "runs", "--engine", "slurm"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        start(monkeypatch, *narrow)
    assert stop.value.code == 2 and "there is no sbatch here" in capsys.readouterr().err
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho $1 > {tmp_path}/asked\n")
    (tmp_path / "sbatch").chmod(0o755)
    start(monkeypatch, *narrow)
    assert Path((tmp_path / "asked").read_text().strip()).read_text().startswith("#!/bin/bash\n#SBATCH")


def test_the_estimate_counts_what_is_left(tmp_path):
    new, begun = (
        benchmark.Run("CPO", "SafetyBallRun-v0", 1, None, tmp_path),
        benchmark.Run("PDO", "CartSafe-v0", 1, 40, tmp_path),
    )
    (begun.folder / "attempt").mkdir(parents=True)
    (begun.folder / "attempt" / "last.pt").touch()
    (begun.folder / "attempt" / "progress.csv").write_text("iteration\n" + "1\n" * 30)
    measured = {new.name: (100.0, 200.0), begun.name: (100.0, 3.0)}
    assert benchmark.estimate([new], measured, 2) == "2.8 hours"
    assert benchmark.estimate([begun], measured, 1) == "3 minutes"
    assert benchmark.estimate([new, begun], measured, 8) == "43 minutes"


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--jobs", "0"], "--jobs is 0, but must be at least 1"),
        (["--tasks", "Ball"], "--tasks: invalid choice: 'Ball'"),
        (["--tasks", "CartSafe-v0", "--algos", "CPO"], "leave no run"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(flags, says, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        start(monkeypatch, *flags)
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and says in said and "\n" not in said


def test_what_results_keep_of_a_run(tmp_path):
    run = {name: [f"{number}.123456789", "nan"] for number, name in enumerate(studies.COLUMNS, 100)}
    run.update(losses=["1", "2"], iteration=["1", "2"], global_step=["16384000", "32768000"])
    (tmp_path / "progress.csv").write_text("\n".join(",".join(row) for row in [run, *zip(*run.values())]))
    (tmp_path / "config.json").write_text('{"seed": 7}')
    studies.keep(tmp_path, "SafetyBallRun-v0__SCPO__7", tmp_path / "results")
    kept = studies.read(tmp_path / "results" / "runs" / "SafetyBallRun-v0__SCPO__7.csv")
    assert list(kept) == list(studies.COLUMNS) and json.loads(next(tmp_path.rglob("*__7.json")).read_text()) == {"seed": 7}
    for name, values in kept.items():
        assert np.allclose(values, np.array(run[name], dtype=float), rtol=1e-4, equal_nan=True), name
    assert list(kept["global_step"]) == [16384000, 32768000]


# The table ------------------------------------------------------------------------------------------------------------------


def curve(returns, costs):
    length = len(returns)
    run = {"iteration": np.arange(1, length + 1), "global_step": 32000 * np.arange(1, length + 1), "episodic_return": returns}
    return {**run, "episodic_cost": costs, "safe_episode_rate": np.ones(length), "episodes": np.full(length, 10)}


def test_the_table_by_hand():
    seeds = {
        1: curve(np.arange(1.0, 101), np.full(100, 20.0)),
        2: curve(np.arange(1.0, 101) + 2, np.full(100, 22.0)),
        3: curve(np.arange(1.0, 121), np.full(120, 24.0)),
    }
    iterations = np.arange(1, 101)
    published = {("SafetyBallRun-v0", "CPO", "return"): (iterations, np.minimum(iterations, 50.0))}
    (row,) = plot.table({("SafetyBallRun-v0", "CPO"): seeds}, published)
    assert (row["iterations"], row["seeds"]) == (100, 3)  # cut to the shortest
    assert row["return"] == pytest.approx((95.5 + 97.5 + 95.5) / 3) and row["worst_return"] == 95.5
    assert row["cost"] == pytest.approx(22) and row["worst_cost"] == 24 and row["published_return"] == 50
    assert row["steps_to_published_final"] == pytest.approx((50 + 48 + 50) / 3 * 32000)
    assert row["total_cost_paid"] == pytest.approx(100 * 10 * 22) and row["beside_published"] == "ahead"
    assert np.isnan(row["published_cost"])


def test_minutes_to_the_published_final_return():
    iterations = np.arange(1, 101)
    published = {("SafetyBallRun-v0", "CPO", "return"): (iterations, np.full(100, 50.0))}
    seeds = {seed: curve(np.arange(1.0, 101) + seed, np.full(100, 20.0)) for seed in (0, 2)}
    (row,) = plot.table({("SafetyBallRun-v0", "CPO"): seeds}, published)
    assert row["minutes_to_published_final"] is None  # curves kept before there was a clock in them
    for speed, run in zip((6.0, 12.0), seeds.values()):
        run["seconds"] = speed * iterations
    (row,) = plot.table({("SafetyBallRun-v0", "CPO"): seeds}, published)
    assert row["minutes_to_published_final"] == pytest.approx((50 * 6 + 48 * 12) / 2 / 60)
    assert (
        plot.as_markdown([row])[-1].count("|") == plot.as_markdown([row])[0].count("|") == plot.as_markdown([row])[1].count("|")
    )


def test_only_what_is_constrained_has_to_keep_the_limit():
    costly = {1: curve(np.arange(1.0, 101), np.full(100, 90.0))}
    published = {("SafetyBallRun-v0", algo, "return"): (np.arange(1, 101), np.full(100, 50.0)) for algo in ("CPO", "TRPO")}
    trpo, cpo = plot.table({("SafetyBallRun-v0", algo): costly for algo in ("TRPO", "CPO")}, published)
    assert trpo["steps_to_published_final"] == 50 * 32000 and trpo["beside_published"] == "ahead"
    assert cpo["steps_to_published_final"] is None and cpo["beside_published"] == "over the limit"


def test_the_speed_table_is_the_csvs(tmp_path):
    (tmp_path / "speed.csv").write_text(
        "task,script,steps_per_second,ratio,startup_seconds\nSafetyBallRun-v0,scpo_continuous.py,15907,1.00,9.1\n"
    )
    assert plot.speed(tmp_path / "speed.csv")[-1] == "| SafetyBallRun-v0 | scpo_continuous.py | 15,907 | 1.00 |"


def test_verdicts():
    assert plot.verdict(100, 90, 20, 25) == "ahead" and plot.verdict(80, 90, 20, 25) == "behind"
    assert plot.verdict(92, 90, 27, 25) == "equal" and plot.verdict(200, 90, 28, 25) == "over the limit"
    assert plot.verdict(-0.5, -1.0, 5, 10) == "ahead" and plot.verdict(3, np.nan, 5, 10) == "not published"


def test_figures_that_nobody_reached_are_not_made_up():
    (row,) = plot.table({("SafetyBallRun-v0", "CPO"): {1: curve(np.ones(100), np.ones(100))}}, {})
    assert row["steps_to_published_final"] is None and "not reached" in plot.as_markdown([row])[-1]


def test_the_pairs_are_those_of_one_task_and_seed():
    better, worse = curve(np.full(100, 4.0), np.ones(100)), curve(np.full(100, 2.0), np.full(100, 3.0))
    runs = {("SafetyBallRun-v0", "SCPO"): {1: better, 2: better, 3: better}, ("SafetyBallRun-v0", "CPO"): {1: worse, 2: worse}}
    lines = plot.aggregate(runs)
    assert lines[-1].startswith("| CPO | 2 | 100% | +100% | 100% |") and len(lines) == 3


def test_committed_figures_are_made_from_the_committed_runs():
    made = (ROOT / "results" / "campaign.md").read_text()
    rows = plot.as_markdown(plot.table(plot.load_runs(ROOT / "results"), plot.load_published()))
    assert "\n".join(rows) in made
    tracked = subprocess.run(["git", "ls-files", "results/runs"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert not tracked or len([name for name in tracked if name.endswith(".csv")]) >= 10  # a copy without git has none
    assert sum(path.stat().st_size for path in (ROOT / "results").rglob("*") if path.is_file()) < 5e6
