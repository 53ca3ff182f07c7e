"""Flags that say which prompts are played next, by what their answers have shown."""

from __future__ import annotations

from openrl.flags.schema import flag, given, group


@group("Curriculum")
class CurriculumFlags:
    curriculum_band: tuple[float, float] | None = flag(
        None,
        "Solve rates L and H of the prompts to play. A prompt is played with the probability that"
        " its rate lies between them, by the verdicts on its answers so far; otherwise it is passed"
        " over. None: every prompt.",
        bounds="[0, 1] and increasing",
    )
    curriculum_half_life: float = flag(
        100.0,
        "Training steps after which a verdict counts half, so that prompts that were too hard or"
        " too easy return. 0: verdicts count in full for ever.",
        bounds=">= 0",
        only_if=given("curriculum_band"),
    )
    curriculum_wait: int = flag(
        0, "Training steps before a prompt is played again, where others are left.", bounds=">= 0"
    )
    curriculum_mix: str | None = flag(
        None,
        "YAML or JSON file {step: {datasource: weight}}: shares of the data sources from that step"
        " on, which change evenly from one listed step to the next. None: as the data have them.",
    )

    @property
    def chooses(self) -> bool:
        """Whether anything but the plain order decides which prompt is next."""
        given = (self.curriculum_band, self.curriculum_mix, self.curriculum_wait or None)
        return any(value is not None for value in given)
