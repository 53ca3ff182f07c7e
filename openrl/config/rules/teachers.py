"""Rules of teachers."""

from __future__ import annotations

from openrl.config.commands import PPOConfig
from openrl.flags.checks import Problems, check, problem


@check
def teachers_can_act(config: PPOConfig) -> Problems:
    flags, algorithm = config.teacher, config.algorithm
    if not flags.used:
        return
    if flags.teacher_mode == "advantage" and algorithm.rl_loss_coef == 0:
        message = "the teacher's advantage acts through the policy loss, whose weight is 0"
        yield problem(("teacher_mode", "rl_loss_coef"), message, "--teacher_mode reverse_kl")
