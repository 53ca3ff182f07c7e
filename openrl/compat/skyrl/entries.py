"""SkyRL: its environments of text.

BaseTextEnv   __init__(env_config, extras), where extras are the row's columns and max_turns,
              init(prompt) -> (messages, metadata),
              step(action) -> {"observations", "reward", "done", "metadata"}"""

from openrl.agents.interfaces import AgentInterface
from openrl.extension_points import agent_interfaces, stand_ins
from openrl.processes.interfaces import Signature

HOME = "openrl.compat.skyrl.stand_ins"
stand_ins.add(
    "SkyRL",
    {
        "skyrl_gym": HOME,
        "skyrl_gym.core": HOME,
        "skyrl_gym.envs.base_text_env": HOME,
        "skyrl_gym.envs.registration": HOME,
        "skyrl_gym.tools": HOME,
        "skyrl_gym.tools.core": HOME,
        "omegaconf": HOME,
    },
)

agent_interfaces.add(
    "skyrl",
    AgentInterface(
        "SkyRL's BaseTextEnv: init(prompt), step(action)",
        "openrl.compat.skyrl.adapter:SkyRLAdapter",
        "openrl.agents.files.build:play_environment",
        {"init": (Signature(2),), "step": (Signature(2),)},
        offered=("env_config", "extras"),
    ),
)
