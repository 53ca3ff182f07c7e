"""OpenEnv: its servers of environments."""

from openrl.agents.interfaces import AgentServer
from openrl.extension_points import agent_servers

agent_servers.add(
    "openenv",
    AgentServer(
        ("ws://", "wss://", "http://", "https://"),
        "openenv:URL",
        open="openrl.compat.openenv.agent:open_agent",
        check="openrl.compat.openenv.agent:find_server",
    ),
)
