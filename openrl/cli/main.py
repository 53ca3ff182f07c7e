"""``openrl COMMAND ...``: the same as ``python -m openrl.cli.MODULE ...``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version

from openrl.errors import printable

COMMANDS = {  # word -> (module of openrl.cli, what it does)
    "train": ("train_ppo_ray", "reinforcement learning: PPO, GRPO, RLOO, REINFORCE++, ..."),
    "sft": ("train_sft", "supervised fine-tuning"),
    "rm": ("train_rm", "a reward model from pairs of answers"),
    "dpo": ("train_dpo", "learning from preferences without a reward model"),
    "evaluate": ("evaluate", "mean@k, pass@k and maj@k of a model"),
    "batch_inference": ("batch_inference", "responses or rewards for a dataset"),
    "serve_rm": ("serve_rm", "rewards over HTTP"),
    "report": ("report", "what happened in a run, as a page to browse"),
    "trace": ("trace", "what a run played and learned, token by token"),
    "metrics": ("metrics", "what a metric means"),
    "check_model": ("check_model", "whether a model can be trained here, check by check"),
    "import_config": ("import_config", "another system's configuration as a file for --config"),
    "lora_combiner": ("lora_combiner", "merge an adapter into its base"),
    "completion": ("completion", "a script with which the shell completes commands and flags"),
}

USAGE = """usage: openrl COMMAND [--flag value ...]

{commands}

openrl COMMAND --help shows the flags of a command; openrl --version the version. The names of the
modules are taken too: openrl train_ppo_ray is openrl train."""


def usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    return USAGE.format(
        commands="\n".join(f"  {word:<{width}}{what}" for word, (_, what) in COMMANDS.items())
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code, unless the command ends the process itself."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"openrl {version('openrl-trainer')}")
        return 0
    modules = {word: module for word, (module, _) in COMMANDS.items()}
    modules |= {module: module for module in modules.values()}
    if words[0] not in modules:
        near = get_close_matches(words[0], modules, n=1)
        fix = f"openrl {near[0]}" if near else "openrl --help"
        print(
            printable(f"openrl: no such command: {words[0]}\n   try: {fix}"),
            file=sys.stderr,
        )
        return 2
    sys.argv = [sys.argv[0], *words[1:]]
    # as ``python -m`` does, so that processes which are started later find the same __main__
    runpy.run_module(f"openrl.cli.{modules[words[0]]}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
