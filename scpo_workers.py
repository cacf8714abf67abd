"""Environments in processes of their own, for tasks whose steps take longer than the updates: `--num-workers N`.

It doesn't matter which worker an environment is in. Each one has a seed of its own, so a run is the same for any N, to
the last bit. Only tasks that draw from the global generators of Python or NumPy differ. For a given N they too do the
same in every run. A worker gets all its actions before its answers are read. With many environments both pipes could be
full, and both sides would wait for ever, so scpo_run.py allows 32 a worker.
"""

import atexit
import functools
import itertools
import multiprocessing
import os
import random
import signal
import threading
from types import SimpleNamespace

import numpy as np


class RemoteEnv:
    """Stands for an environment in a worker. Raises ValueError if it can't be made, ChildProcessError if it fails.

    `step` and `reset` send and return at once. Unpacking what they return waits for the answer, so that all workers are
    at work at the same time. What was asked for first must be unpacked first.
    """

    def __init__(self, connection, number, *task):
        self.connection, self.number = connection, number
        self.observation_space, self.action_space, longest, self.wrappers = self.ask("make", task)
        self.spec = SimpleNamespace(max_episode_steps=longest)

    def __str__(self):
        return self.wrappers

    def ask(self, name, argument):
        try:
            self.connection.send((self.number, name, argument))
        except OSError:
            pass  # the worker has died, as the missing answer will tell
        return self.answer()

    def answer(self):
        try:
            answer, self.first_obs = self.connection.recv()
        except (EOFError, OSError):
            raise ChildProcessError("a worker has died; it was killed, or memory ran out") from None
        if isinstance(answer, Exception):
            raise answer
        yield from answer

    def step(self, action):
        return self.ask("step", action)

    cost_limit = property(fset=lambda self, limit: [*self.ask("cost_limit", limit)])  # only SCPO changes it

    def reset(self, seed=None):
        """Without a seed only after an episode's end: the worker has begun the next one by itself."""
        return (self.first_obs, {}) if seed is None else self.ask("reset", seed)


def work(connection, make_env, seed):
    """Does what the environments of one worker are asked for, in that order, as long as the parent lives."""
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  some tasks draw from it
    envs = {}
    while True:
        try:
            number, name, argument = connection.recv()
        except (EOFError, ConnectionError):  # the parent has gone
            return
        first_obs = None
        try:
            if name == "make":
                env = envs[number] = make_env(*argument)
                answer = env.observation_space, env.action_space, env.spec.max_episode_steps, str(env)
            elif name == "reset":
                answer = envs[number].reset(seed=argument)[0], {}
            elif name == "cost_limit":
                envs[number].cost_limit, answer = argument, ()
            else:
                *answer, info = envs[number].step(argument)
                answer.append({key: info[key] for key in ("cost", "safe", "episode") if key in info})
                if answer[2] or answer[3]:
                    first_obs, _ = envs[number].reset()
        except Exception as error:
            reason = f"environment {number} failed in its worker: {error!r} (--num-workers 1 shows where)"
            answer = ValueError(str(error)) if name == "make" else ChildProcessError(reason)
        connection.send((answer, first_obs))


def with_workers(train, args):
    """Returns `train` with a make_env whose environments live in args.num_workers workers in turn."""

    def turns():
        """Starts the workers, once train has checked the flags and asks for an environment; yields these in turn."""
        context = multiprocessing.get_context("spawn")
        # Ctrl-C reaches all processes, but the parent decides. What it ignores here a worker ignores from its birth on
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        connections = []
        for worker in range(args.num_workers):
            connection, other_end = context.Pipe()
            seed = np.random.SeedSequence([args.seed, worker]).generate_state(1).item()  # not another seed's
            job = (other_end, train.__globals__["make_env"], seed)
            process = context.Process(target=work, args=job, daemon=True)
            process.start()
            other_end.close()
            atexit.register(process.kill)
            connections.append(connection)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        yield from zip(itertools.cycle(connections), itertools.count())

    turn = turns()
    return functools.partial(train, make_env=lambda *task: RemoteEnv(*next(turn), *task))
