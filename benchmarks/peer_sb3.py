"""PPO of stable-baselines3, for `ppo.py` and `atari.py`; runs in a Python that has it.

Its environments are Gymnasium's, stepped one after another in Python, as its users have them.
Nothing of podracer is imported here.
"""

from __future__ import annotations

import torch
from peer_common import flags, take_turns
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack


def main() -> None:
    options = flags(__doc__).parse_args()
    activations = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}
    batch = options.envs * options.length
    if options.environment.endswith("NoFrameskip-v4"):  # the Nature network on Atari's pictures
        import ale_py  # noqa: F401  # which makes the environments known

        processes = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "fork"}}
        games = make_atari_env(options.environment, options.envs, **processes)
        policy, env, networks = "CnnPolicy", VecFrameStack(games, 4), {}
    else:
        policy, env = "MlpPolicy", make_vec_env(options.environment, options.envs, seed=0)
        networks = {
            "net_arch": {"pi": [64, 64], "vf": [64, 64]},
            "activation_fn": activations[options.activation],
        }
    agent = PPO(
        policy,
        env,
        learning_rate=2.5e-4,
        n_steps=options.length,
        batch_size=batch // options.minibatches,
        n_epochs=4,
        ent_coef=0.01,
        policy_kwargs=networks,
        device="cpu",
    )
    steps = batch * options.updates
    agent.learn(steps)
    take_turns(
        lambda: agent.learn(steps, reset_num_timesteps=False),
        options,
        0.0,
        ["stable_baselines3", "torch", "gymnasium"],
    )


if __name__ == "__main__":
    main()
