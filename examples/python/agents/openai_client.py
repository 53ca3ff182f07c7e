"""An agent that knows OpenAI's client alone: it has the policy answer, and then check the answer.

    --agent_command "python examples/python/agents/openai_client.py"

starts it for every episode. self_check.py is the same agent without a program and a server."""

import json
import os

from openai import OpenAI

CHECK = "Check it. What is your final answer?"

client = OpenAI()  # it reads OPENAI_BASE_URL and OPENAI_API_KEY
messages = json.loads(os.environ["OPENRL_MESSAGES"])
for follow_up in (CHECK, None):
    reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    if follow_up:
        messages.append({"role": "user", "content": follow_up})
