"""OpenRLHF's keys that several flags of ours share, or that act by what else is given."""

from collections.abc import Iterator

from openrl.config.importing.convert import Computed, GivenKeys


def together(keys: GivenKeys, command: str) -> Iterator[Computed]:
    """Its length of prompt and answer together came when --prompt_max_len went. A student's loss is
    kd_coef of the cross-entropy with the teacher, and the rest of that with the answers."""
    whole = "data.max_len"
    if keys.given(whole) or not any(
        keys.given(f"{part}_max_len") for part in ("prompt", "generate")
    ):
        yield Computed("max_len", keys.whole(whole), (whole,))
    if keys.given("kd_coef"):
        weight = keys.number("kd_coef")
        yield Computed("teacher_mode", "forward_kl", ("kd_coef",))
        yield Computed("teacher_coef", weight, ("kd_coef",))
        yield Computed("sft_loss_coef", round(1 - weight, 6), ("kd_coef",))
