"""Prime Intellect's verifiers package: its servers of environments."""

from openrl.agents.interfaces import AgentServer
from openrl.extension_points import agent_servers

agent_servers.add(
    "verifiers",
    AgentServer(
        ("tcp://",),
        "verifiers:tcp://HOST:PORT",
        open="openrl.compat.prime_verifiers.agent:open_agent",
        check="openrl.compat.prime_verifiers.agent:check_address",
        plays_alone=True,
    ),
)
