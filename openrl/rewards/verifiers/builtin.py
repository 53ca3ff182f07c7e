"""The built-in verifiers: importing this module registers them all. It loads the standard library only."""

from openrl.rewards.verifiers import countdown as countdown
