"""The settings of --fast: their search (reproduce/search.py), their figure and tables (reproduce/fast.py)."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from test_plot import published_as, runs_of

import scpo_continuous
import scpo_discrete
from reproduce import curves, fast, plot, search
from reproduce.speed import training_speed

RUN = "SafetyBallRun-v0"


def test_lengths_are_those_of_the_scripts():
    tables = {**scpo_continuous.TASK_SETTINGS, **scpo_discrete.TASK_SETTINGS}
    assert {name[: -len(" --fast")] for name in tables if name.endswith(" --fast")} == curves.FAST.keys()
    for task, (iterations, batch) in curves.FAST.items():
        args = search.script_of(task).Args(**search.script_of(task).TASK_SETTINGS[f"{task} --fast"])
        assert (iterations, batch) == (args.total_timesteps // batch, args.num_envs * args.num_steps)
        assert args.total_timesteps == iterations * batch


# The search -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script, task", [(scpo_continuous, RUN), (scpo_discrete, "CartSafe-v0")])
def test_fast_is_known_of_a_task_with_its_module(script, task):
    script.check_args(script.Args(env_id=f"scpo_envs:{task}", fast=True))
    with pytest.raises(ValueError, match="--fast is True, but must be off for x:Other-v0"):
        script.check_args(script.Args(env_id="x:Other-v0", fast=True))


def test_the_score_by_hand():
    returns, costs = np.linspace(10, 200, 20), np.full(20, 3.0)
    assert search.score(returns, costs, 100, 3, 4, True) == pytest.approx(1.95)
    assert search.score(returns, costs, 100, 2, 4, True) == pytest.approx(1.95 - 0.25)  # half as much again as allowed
    assert search.score(returns, costs, 100, 0.1, 4, True) == pytest.approx(1.95 - 1)  # at most 1
    late = np.where(np.arange(20) == 12, 5.0, 3.0)  # one of ten over the limit
    assert search.score(returns, late, 100, 3, 4, True) == pytest.approx(1.95 - 0.2)
    assert search.score(returns, late, 100, 3, 4, False) == pytest.approx(1.95)
    early = np.where(np.arange(20) < 10, 5.0, 3.0)
    assert search.score(returns, early, 100, 3, 4, True) == pytest.approx(1.95)


def trainings(monkeypatch):
    """Replaces training: the return grows to 500 learning rates, at no cost. Returns the list of what was trained."""
    made = []

    def iterations(args, schedule="none", hold=None, ent_coef_end=None):
        made.append(args)
        num_iterations = args.total_timesteps // (args.num_envs * args.num_steps)
        return ([5e5 * args.learning_rate * (i + 1) / num_iterations, 0.0, 1.0] for i in range(num_iterations))

    monkeypatch.setattr(search, "iterations", iterations)
    return made


def test_a_search_goes_on_ends_poor_trials_and_tells_all(tmp_path, monkeypatch):
    made = trainings(monkeypatch)
    monkeypatch.setattr(search, "FOLDER", tmp_path / "search")
    for trials in (6, 12, 12):
        search.main([RUN, "--trials", str(trials), "--seeds", "107"])
        assert len(made) == trials
    with open(tmp_path / "search.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12 and {row["state"] for row in rows} == {"complete", "pruned"}
    best = max(rows, key=lambda row: float(row["score"]))
    assert best["state"] == "complete" and {row["seed"] for row in rows} == {"107"}
    for args, row in zip(made, rows):
        assert args.seed == 107 and args.anneal_lr and args.total_timesteps == 327680 and args.cost_limit == 25
        assert float(row["learning_rate"]) == pytest.approx(args.learning_rate, rel=1e-4)
        assert args.safety_lambdas == tuple(map(float, row["safety_lambdas"].split()))
    assert made[0].learning_rate == 1e-3 and made[0].num_steps == 512  # begins where trials by hand had led
    journal = (tmp_path / "search" / f"{RUN}.journal").read_bytes()
    search.write_trials()
    assert (tmp_path / "search" / f"{RUN}.journal").read_bytes() == journal  # telling changes nothing


def test_the_seeds_of_the_figures_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        search.main([RUN, "--seeds", "101", "4"])
    assert stop.value.code == 2 and "--seeds is [101, 4], but each must be in [101, 2^31)" in capsys.readouterr().err


def test_one_trial_of_given_values(tmp_path, monkeypatch):
    made = trainings(monkeypatch)
    monkeypatch.setattr(search, "FOLDER", tmp_path / "search")
    values = ["num_steps=512", "learning_rate=1e-3", "safety_lambdas=1", "norm_obs=True", "vf_coef=0.01"]
    search.main([RUN, "--seeds", "101", "102", "101", "--steps", "65536", "--try", *values])
    assert [args.seed for args in made] == [101, 102]
    for args in made:
        said = args.num_steps, args.learning_rate, args.safety_lambdas, args.norm_obs, args.vf_coef, args.anneal_lr
        assert said == (512, 1e-3, (1.0,), True, 0.01, True)
        assert args.total_timesteps == 65536 and args.minibatch_size == 64 and args.ent_coef == 0.005  # the paper's
    (row,) = curves.rows_of(tmp_path / "search.csv")
    assert row["seed"] == "101 102" and row["state"] == "complete" and row["vf_coef"] == "0.01"
    assert [float(x) for x in row["return"].split()] == [500.0, 500.0]  # one number a seed
    assert row["ent_coef"] == "0.005"
    search.main([RUN, "--steps", "65536", "--try", "ent_coef=0.02"])  # neither the task's nor 0
    assert made[-1].ent_coef == 0.02 and curves.rows_of(tmp_path / "search.csv")[-1]["ent_coef"] == "0.02"
    search.main([RUN, "--steps", "65536", "--try", "penalty=always"])
    assert made[-1].penalty == "always" and "penalty always" in fast.told(curves.rows_of(tmp_path / "search.csv")[-1])


@pytest.mark.parametrize(
    "argv, says",
    [
        (f"{RUN} --try num_steps", "--try: num_steps must be a flag's name, = and a number"),
        (f"{RUN} --try num_steps=513", "--try: num_steps=513 must be one of 2048, 256"),
        (f"{RUN} --try norm_obs=true", "--try: norm_obs=true must be one of False, True"),
        (f"{RUN} --try learning_rate=fast", "--try: learning_rate=fast must be a flag's name"),
        (f"{RUN} --try schedule=gamma", "--try: schedule=gamma must be one of none, k, beta, limit"),
        (f"{RUN} --try penalty=never", "--try: penalty=never must be one of unsafe, always"),
        (f"{RUN} --try seed=7", "--try: seed has a flag of its own, --seeds"),
        (f"{RUN} --try total_timesteps=1e7", "--try: total_timesteps has a flag of its own, --steps"),
        (f"{RUN} --changes --seeds 101 102", "--seeds has 2 seeds, but --changes takes one"),
        (f"{RUN} --try speed=1", "--try: speed is no flag of SCPO's for SafetyBallRun-v0"),
        ("CartSafe-v0 --try log_std_init=-0.5", "--try: log_std_init is no flag of SCPO's for CartSafe-v0"),
        (f"{RUN} --try hold=0.3", "--try: hold needs schedule=limit"),
        (f"{RUN} --try schedule=limit limit_factor=9", "--try: limit_factor can't be set where schedule=limit sets it"),
        (f"{RUN} --try schedule=limit hold=2", "--try: hold is 2.0, but must be in [0, 1]"),
        (f"{RUN} --try ent_coef_end=nan", "--try: ent_coef_end is nan, but must be in [-1e+06, 1e+06]"),
        (f"{RUN} --try gamma=0.98 clip_coef=-1", "--clip-coef is -1.0, but must be in (0, 1e6]"),
        (f"{RUN} --steps 100", "--steps is 100, but must be at least 131072, an iteration of the largest trial"),
        (f"{RUN} --steps 16000 --try num_steps=1024", "--steps is 16000, but must be at least 16384"),
        (f"{RUN} --seeds {2**31}", f"--seeds is [{2**31}], but each must be in [101, 2^31)"),
        (f"{RUN} --try surrogate=1", "--try: surrogate is no flag of SCPO's for SafetyBallRun-v0 that takes a number"),
        (f"{RUN} --try fast=1", "--try: fast is no flag of SCPO's for SafetyBallRun-v0 that takes a number"),
        (f"{RUN} --try env_id=1", "--try: env_id is no flag of SCPO's for SafetyBallRun-v0 that takes a number"),
        (f"{RUN} --try save_every=2.5", "--try: save_every is 2.5, but must be a whole number"),
        (f"{RUN} --try augment_state=0", "--try: augment_state is no flag of SCPO's for SafetyBallRun-v0 that"),
        (f"{RUN} --try minibatch_size=64.0", "minibatch_size=64.0 must be one of 64, 128, 256"),
        (f"{RUN} --try target_kl=0", "--target-kl is 0.0, but must be in (0, 1e6]"),
        (f"{RUN} --trials 0", "--trials is 0, but must be 1 or more"),
        (f"{RUN} --try gamma=0.98 --trials 3", "--try is a call of its own, without --trials"),
        (f"{RUN} --changes --trials 3", "--changes is a call of its own, without --trials"),
        (f"{RUN} --changes --steps 655360", "--changes is a call of its own, without --steps"),
        (f"{RUN} --changes --try gamma=0.98", "--changes is a call of its own, without --try"),
        ("SafetyBallReach-v0 --changes", "--changes: SafetyBallReach-v0 has no --fast"),
        ("SafetyHopperVelocity-v1", "Safety-Gymnasium isn't installed"),
    ],
)
def test_what_no_trial_can_be_made_of_is_refused(argv, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search, "FOLDER", tmp_path / "search")
    monkeypatch.setattr(search, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        search.main(argv.split())
    said = capsys.readouterr().err
    assert stop.value.code == 2 and says in said and said.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_trial_begins_with_what_the_script_has():
    assert search.starting_values("CartSafe-v0")["safety_lambdas"] == "1"
    assert search.starting_values(RUN)["safety_lambdas"] == "0 1" and search.starting_values(RUN)["ent_coef"] == 0.005
    hopper = search.starting_values("SafetyHopperVelocity-v1")
    assert hopper["num_envs"] == 8 and hopper["norm_obs"] and hopper["log_std_init"] == -0.5
    for task in ("CartSafe-v0", RUN, "SafetyHopperVelocity-v1"):
        values = search.starting_values(task)
        assert all(values[name] in search.SPACE[name] for name in values if name in search.SPACE)


def test_a_trial_is_told_by_what_is_unusual_for_its_task():
    usual = dict(
        num_steps="2048", learning_rate="2e-4", norm_obs="False", safety_lambdas="0 1", k="4.0", schedule="none"
    )
    assert fast.told({**usual, "task": RUN, "late": "3", "hold": ""}) == ""
    unusual = dict(usual, num_steps="512", norm_obs="True", safety_lambdas="1", target_kl="0.03", schedule="limit")
    assert fast.told({**unusual, "task": RUN}) == (
        "num_steps 512, target_kl 0.03, safety_lambdas 1, norm_obs True, a schedule of limit"
    )
    assert fast.told({**usual, "task": RUN, "ent_coef_end": "0.0"}) == "ent_coef moves to 0"
    assert fast.told({**unusual, "task": RUN}, ["target_kl", "num_steps"]).startswith("safety_lambdas 1, norm_obs")
    assert "safety_lambdas 0 1" in fast.told({**usual, "task": "CartSafe-v0"})  # where the built-in one is 1


def test_goals_are_the_best_published_within_the_limit():
    assert search.goal("SafetyHopperVelocity-v1") == (1716.08, 7.48, 25, 10**7)  # CUP; CPO has 1714 at 13.4
    target, cost, limit, steps = search.goal(RUN)
    assert (round(target), round(cost, 1), limit, steps) == (578, 2.5, 25, 100 * 32768)


def test_schedules(monkeypatch):
    seen, entropies = [], []

    def train(args, make_env):
        make_env("CartSafe-v0", 1, True)
        yield {}
        for i in range(8):
            seen.append((args.k, args.beta, args.cost_limit * args.limit_factor))
            entropies.append(float(args.ent_coef))
            yield {"episodes": [] if i == 2 else [{"return": 1, "cost": cost, "safe": 1} for cost in (0, 1, 2)]}

    monkeypatch.setattr(scpo_discrete, "train", train)
    for schedule in ("none", "k", "beta", "limit"):
        args = scpo_discrete.Args(k=4, beta=2, cost_limit=1, total_timesteps=8 * 64, num_envs=1, num_steps=64)
        monkeypatch.setattr(search, "script_of", lambda task: scpo_discrete)
        rows = list(search.iterations(args, schedule))
        assert rows == [pytest.approx([1, 1, 2 / 3])] * 8  # safe by the limit of the end
    plain, k, beta, limit = (seen[8 * i : 8 * i + 8] for i in range(4))
    rise, hold = [0.25, 0.5, 0.75, 1], [1] * 4
    assert plain == [(4, 2, 1)] * 8
    assert k == [(4 * x, 2, 1) for x in rise + hold] and beta == [(4, 2 * x, 1) for x in rise + hold]
    assert [x[2] for x in limit] == [300] * 8  # where it begins: train lets it fall

    seen.clear()
    args = scpo_discrete.Args(cost_limit=0.9, total_timesteps=8 * 64, num_envs=1, num_steps=64)
    list(search.iterations(args, "limit", 0.5))
    # held for half of the run; then 0.97 times the mean cost, which is 1
    assert [x[2] for x in seen] == pytest.approx([300] * 4 + [0.97] * 4)
    assert {*entropies} == {scpo_discrete.Args().ent_coef}

    entropies.clear()
    args = scpo_discrete.Args(cost_limit=1, ent_coef=0.08, total_timesteps=8 * 64, num_envs=1, num_steps=64)
    list(search.iterations(args, ent_coef_end=0.04))
    assert entropies == pytest.approx([0.08, 0.075, 0.07, 0.065, 0.06, 0.055, 0.05, 0.045])  # 0.04 after the last
    assert torch.is_tensor(args.ent_coef)  # a number would be compiled anew in each iteration


def test_changes_are_made_one_by_one_and_only_once(tmp_path, monkeypatch):
    made = trainings(monkeypatch)
    monkeypatch.setattr(search, "RESULTS", tmp_path)
    for _ in range(2):
        search.main([RUN, "--changes"])
    names = list(scpo_continuous.FAST_SETTINGS)
    assert len(made) == 2 * len(names) + 2
    rows = curves.rows_of(tmp_path / "fast_changes.csv")
    paper, quick = (search.script_of(RUN).TASK_SETTINGS[name] for name in (RUN, f"{RUN} --fast"))
    for args, row in zip(made, rows):
        changed = {name for name in names if getattr(args, name) == quick[name]}
        said = row["changes"]
        assert args.total_timesteps == quick["total_timesteps"] and args.cost_limit == paper["cost_limit"]
        only, but = said.replace(" alone", ""), said.replace("all but ", "")
        assert changed == {"none": set(), "all": set(names)}.get(said, {only} if "alone" in said else {*names} - {but})
        assert float(row["return"]) == pytest.approx(5e5 * args.learning_rate * 0.95, rel=0.05)


# Figure and tables ----------------------------------------------------------------------------------------------------


def test_finals_and_the_way_there_by_hand(tmp_path):
    up, late = np.linspace(1, 100, 100), np.where(np.arange(80) == 60, 30.0, 2.0)
    groups = {RUN: {"SCPO": runs_of([up, up], 5.0, batch=32768), "fast": runs_of([up[20:], up[20:] + 2], late, 8192)}}
    published = {**published_as(up, algos=["SCPO"]), (RUN, "SCPO", "cost"): (np.arange(1, 101), np.full(100, 3.0))}
    slow, quick = fast.finals(groups, published)
    assert quick["return"] == pytest.approx((97.5, 96.5, 98.5)) and quick["cost"] == (2, 2, 2)
    assert quick["published return"] == pytest.approx(95.5) and quick["published cost"] == 3
    assert quick["over the limit late"] == "2 of 80 iterations" and slow["over the limit late"] == "0 of 100 iterations"
    assert quick["million steps"] == pytest.approx(0.65536) and slow["million steps"] == pytest.approx(3.2768)
    speeds = {(RUN, "scpo_continuous.py"): 1000.0, (RUN, "scpo_continuous.py --fast"): 500.0, (RUN, fast.SB3): 100.0}
    slow, quick, peer = fast.paid(groups, published, speeds)
    assert slow["minutes"] == pytest.approx(91 * 32768 / 60e3) and peer["minutes"] == pytest.approx(3276800 / 6e3)
    target = 0.9 * 95.5  # 85.95: the mean of ten iterations is there 4.5 iterations later
    assert slow["target"] == pytest.approx(target)
    assert slow["million steps"] == pytest.approx((91 * 0.032768,) * 3) and slow["cost paid"] == (91 * 50,) * 3
    first, second = 91 - 20, 89 - 20  # the second seed earns 2 more
    assert quick["million steps"] == pytest.approx((70 * 0.008192, second * 0.008192, first * 0.008192))
    assert quick["cost paid"] == pytest.approx((1680, 1660, 1700))  # 280 more in the one iteration over the limit
    assert quick["seeds"] == "2 of 2" and quick["minutes"] == pytest.approx(70 * 8192 / 500 / 60)
    assert slow["seeds there"] == "0 of 2" and "million steps to all of it" not in slow  # 95.5 isn't held
    (row,) = fast.paid({RUN: {"SCPO": runs_of([up, up + 20], 5.0, batch=32768)}}, published, {})
    assert row["seeds there"] == "1 of 2" and row["seeds"] == "2 of 2"
    assert row["million steps to all of it"] == pytest.approx((80 * 0.032768,) * 3)


def test_what_the_page_shows_is_in_the_committed_runs(monkeypatch):
    monkeypatch.setattr(plot, "save", lambda figure, path: plot.plt.close(figure))
    groups = {task: labels for task, labels in fast.load(curves.RESULTS).items() if "fast" in labels}
    assert groups.keys() == curves.FAST.keys()
    assert all(list(labels["fast"]["seed"]) == [1, 2, 3, 4] for labels in groups.values())
    page = Path(fast.PAGE).read_text()
    blocks = fast.make(curves.RESULTS, curves.load_published())
    assert len(blocks) == 4 and all(len(lines) > 3 for lines in blocks.values())
    for lines in blocks.values():
        assert "\n".join(lines) in page


# The speeds -----------------------------------------------------------------------------------------------------------


def test_speeds_that_were_not_measured_again_are_kept(tmp_path, monkeypatch, capsys):
    speeds = {"scpo_continuous.py": [100, 90], "scpo_continuous.py --fast": [40, 50]}
    monkeypatch.setattr(training_speed, "ours", lambda script, env_id, iterations: (speeds[script].pop(), 8.0))
    path = tmp_path / "speed.csv"
    columns = "task script steps_per_second ratio startup_seconds".split()
    old = [(RUN, "peer, old", 7, 9.0, 0.0), (RUN, "scpo_continuous.py", 80, 1.0, 7.0)]
    curves.write_rows(path, [dict(zip(columns, row)) for row in old])
    argv = ["training_speed", "--tasks", "Run", "--csv", str(path), "--scripts", *speeds]
    monkeypatch.setattr("sys.argv", argv)
    training_speed.main()
    rows = [tuple(row.values()) for row in curves.rows_of(path)]
    assert rows[0] == (RUN, "peer, old", "7", "9", "0")
    assert rows[1:] == [(RUN, "scpo_continuous.py", "100", "1.00", "8.0"), (RUN, [*speeds][1], "50", "2.00", "8.0")]


def test_a_task_without_fast_settings_and_a_failure(tmp_path, monkeypatch):
    """--fast is left out where it isn't allowed. What was measured before a failure is in the file."""
    measured = []

    def ours(script, env_id, iterations):
        if env_id == "SafetyBallReach-v0":
            raise SystemExit("failed")
        measured.append((env_id, script))
        return 100, 8.0

    monkeypatch.setattr(training_speed, "ours", ours)
    path = tmp_path / "speed.csv"
    scripts = ["scpo_continuous.py", "scpo_continuous.py --fast"]
    argv = ["training_speed", "--rounds", "1", "--csv", str(path), "--scripts", *scripts]
    monkeypatch.setattr("sys.argv", [*argv, "--tasks", "Run", "Gather", "Reach"])
    with pytest.raises(SystemExit, match="failed"):
        training_speed.main()
    assert measured == [(RUN, scripts[0]), (RUN, scripts[1]), ("SafetyBallGather-v0", scripts[0])]
    assert [(row["task"], row["script"]) for row in curves.rows_of(path)] == measured
