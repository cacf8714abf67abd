"""Peer: Stable-Baselines3's PPO on a Ball task: the last line says "sps N".

    PYTHON reproduce/speed/peer_sb3.py ENV_ID ITERATIONS

ENV_ID is SafetyBallCircle-v0 and so on for our task, release/SafetyBallCircle-v0 for the task of PyPI's package
bullet-safety-gym. PYTHON is the Python of a separate environment:
pip install torch==2.13.0 stable-baselines3==2.0.0 bullet-safety-gym==1.4.0 "numpy<2"
The settings are SCPO's as far as PPO has them: 16 environments x 2,048 steps, minibatches of 64, 5 epochs, networks of
64 x 64.
"""

import sys
import time
from pathlib import Path

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
import scpo_envs  # noqa: E402, F401

env_id, iterations = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
networks = dict(net_arch=dict(pi=[64, 64], vf=[64, 64]))
settings = dict(n_steps=2048, batch_size=64, n_epochs=5, learning_rate=2e-4, ent_coef=0.01, device="cpu")
model = PPO("MlpPolicy", make_vec_env(env_id, n_envs=16), policy_kwargs=networks, **settings)
start = time.perf_counter()
model.learn(iterations * 16 * 2048)
print(f"Stable-Baselines3's PPO, {env_id}: sps {iterations * 16 * 2048 / (time.perf_counter() - start):.0f}")
