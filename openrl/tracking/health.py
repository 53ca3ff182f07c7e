"""Health: what the metrics of a run say about it, in words, with what to do.

A ``Check`` is a pure function of the steps so far and of its limit, a flag of ``HealthFlags``. It
returns what it found, or None. ``find_alarms`` applies all of them to the records of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from statistics import fmean, median

from openrl.config.groups.health import HealthFlags

GAP_FLOOR = 0.01  # nats per token; a smaller gap is rounding, however fast it grows
SPIKE_STEPS = 5  # gradient norms before which no step is a spike

Record = Mapping[str, float]
"""The metrics of one step."""


@dataclass(frozen=True)
class Alarm:
    """One warning: its name, the step that it is due at, what was found and what to do."""

    name: str
    step: int
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} at step {self.step}: {self.found}. Try: {self.remedy}"


class History:
    """What the checks read of a run: of every metric the first and the last ``window`` values that
    were measured, and the lowest and the highest reward."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, deque[float]] = {}
        self.rewards: tuple[float, float] | None = None  # (lowest, highest)

    def add(self, record: Record) -> None:
        for name, value in record.items():
            first = self._first.setdefault(name, [])
            if len(first) < self.window:
                first.append(value)
            # one more than the window: a spike is compared with the steps before it
            self._last.setdefault(name, deque(maxlen=self.window + 1)).append(value)
        if "rollout/reward" in record:
            ends = [record[n] for n in ("rollout/reward_min", "rollout/reward_max") if n in record]
            ends += self.rewards or ()
            self.rewards = (min(ends), max(ends)) if ends else None

    def now(self, name: str) -> float | None:
        """Return the mean of the last ``window`` values; None while there are fewer."""
        last = list(self._last.get(name, ()))[-self.window :]
        return fmean(last) if len(last) == self.window else None

    def then(self, name: str) -> float | None:
        """Return the mean of the first ``window`` values, once later ones can be compared with
        it."""
        first, last = self._first.get(name, []), self._last.get(name, ())
        return fmean(first) if len(first) == self.window and len(last) > self.window else None

    def growth(self, name: str) -> float | None:
        """Return ``now`` divided by ``then``; None if that is unknown or not above 0."""
        now, then = self.now(name), self.then(name)
        return now / then if now is not None and then is not None and then > 0 else None

    def latest(self, name: str) -> float | None:
        last = self._last.get(name)
        return last[-1] if last else None

    def before(self, name: str) -> list[float]:
        """Return the values before the latest, at most ``window``."""
        last = self._last.get(name, ())
        return list(islice(last, max(len(last) - 1, 0)))

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._last if name.startswith(prefix)]

    def on_scale(self, reward: float | None) -> float | None:
        """Return where a reward lies between the lowest, 0, and the highest of the run, 1."""
        if reward is None or self.rewards is None or self.rewards[0] == self.rewards[1]:
            return None
        low, high = self.rewards
        return (reward - low) / (high - low)


@dataclass(frozen=True)
class Check:
    """One way in which a run goes wrong."""

    name: str
    flag: str  # field of HealthFlags that holds the limit
    look: Callable[[History, float], str | None]
    remedy: str


def above(metric: str, words: str) -> Callable[[History, float], str | None]:
    """Return a look at a mean that is too high. ``words`` describe it, e.g. "{:.2f} nats"."""

    def look(run: History, limit: float) -> str | None:
        now = run.now(metric)
        return words.format(now) if now is not None and now >= limit else None

    return look


def entropy(run: History, limit: float) -> str | None:
    now = run.now("actor/entropy")
    if now is None or now >= limit:
        return None
    return f"the policy's entropy is {now:.4f} nats per token: it samples the same answers again"


def saturated(run: History, limit: float) -> str | None:
    place = run.on_scale(run.now("rollout/reward"))
    if place is None or place < limit or run.rewards is None:
        return None
    return f"the mean reward is at {place:.0%} of the way to {run.rewards[1]:g}, the highest seen"


def length(run: History, limit: float) -> str | None:
    name = "rollout/response_length"
    growth = run.growth(name)
    if growth is None or growth < limit:
        return None
    return f"answers have {run.now(name):.0f} tokens, {growth:.1f} times as many as at the start"


def gap(run: History, limit: float) -> str | None:
    name = "actor/logprob_gap"
    now, growth = run.now(name), run.growth(name)
    if now is None or growth is None or now < GAP_FLOOR or growth < limit:
        return None
    return (
        f"engine and trainer differ by {now:.3f} nats per token, {growth:.1f} times as much as at"
        " the start"
    )


def spike(run: History, limit: float) -> str | None:
    for role in ("actor", "critic"):
        norm, before = run.latest(f"{role}/grad_norm"), run.before(f"{role}/grad_norm")
        if norm is None or len(before) < min(SPIKE_STEPS, run.window):
            continue
        usual = median(before)
        if usual > 0 and norm >= limit * usual:
            return f"the gradient norm of the {role} is {norm:.3g}, usually {usual:.3g}"
    return None


def correlation(run: History, limit: float) -> str | None:
    now = run.now("rollout/reward_length_correlation")
    if now is None or abs(now) < limit:
        return None
    which = "longer" if now > 0 else "shorter"
    return f"{which} answers get more reward, whatever they say (rank correlation {now:.2f})"


def watched(run: History, limit: float) -> str | None:
    """Find a watched source that is behind the reward by ``limit`` more than at the start. One that
    already was at the top, or rises with the reward, is not."""
    reward = "rollout/reward"
    now, then = run.on_scale(run.now(reward)), run.on_scale(run.then(reward))
    if now is None or then is None:
        return None
    for name in run.names("watch/"):
        seen, before = run.now(name), run.then(name)
        if name.endswith("/failed") or seen is None or before is None:
            continue
        if now - seen >= limit and (now - then) - (seen - before) >= limit:
            change = f"{run.then(reward):.2f} to {run.now(reward):.2f}"
            return (
                f"the reward went from {change} while {name}, which nothing is trained on, went"
                f" from {before:.2f} to {seen:.2f}: answers exploit the reward"
            )
    return None


def dead_engine(run: History, limit: float) -> str | None:
    count = run.latest("rollout/engines_replaced")
    return f"{count:.0f} engines died and were replaced" if count and count >= limit else None


def data_passes(run: History, limit: float) -> str | None:
    passes = run.latest("rollout/data_passes")
    if passes is None or passes < limit:
        return None
    return f"every prompt has been drawn {passes:.0f} times"


CHECKS = (
    Check(
        "entropy_collapse",
        "alarm_entropy",
        entropy,
        "--entropy_loss_coef 0.001, a lower --actor_learning_rate, --eps_clip_low_high 0.2 0.28",
    ),
    Check(
        "kl_explosion",
        "alarm_kl",
        above("actor/kl", "the policy is {:.2f} nats per token away from its reference"),
        "a lower --actor_learning_rate, or a higher --init_kl_coef",
    ),
    Check(
        "flat_groups",
        "alarm_flat_groups",
        above(
            "rollout/zero_variance_groups",
            "in {:.0%} of the groups all rewards are equal, and nothing is learnt from them",
        ),
        "harder or easier prompts, --dynamic_filtering, a higher --n_samples_per_prompt",
    ),
    Check(
        "reward_saturated",
        "alarm_saturated",
        saturated,
        "end the run, or harder prompts; read samples, since the reward may have a hole",
    ),
    Check(
        "length_explosion",
        "alarm_length_growth",
        length,
        "--overlong_buffer_len, --len_reward_coef, or a lower --generate_max_len",
    ),
    Check(
        "truncated",
        "alarm_truncated",
        above("rollout/truncated_share", "{:.0%} of the answers are cut off before they end"),
        "a higher --generate_max_len, or --mask_truncated",
    ),
    Check(
        "gap_grows",
        "alarm_gap_growth",
        gap,
        "--enable_vllm_is_correction, a lower --max_staleness, --vllm_dtype as --param_dtype",
    ),
    Check(
        "gradient_spike",
        "alarm_grad_spike",
        spike,
        "a lower --max_norm or --actor_learning_rate; read the step's samples",
    ),
    Check(
        "clipping",
        "alarm_clip_fraction",
        above("actor/clip_fraction", "the policy loss clips {:.0%} of the tokens"),
        "a lower --actor_learning_rate, a larger --train_batch_size, or --max_epochs 1",
    ),
    Check(
        "length_decides",
        "alarm_length_correlation",
        correlation,
        "a reward that reads the answer, or --loss_agg_mode seq-mean-token-sum-norm",
    ),
    Check(
        "reward_exploited",
        "alarm_watch_gap",
        watched,
        "read samples of high reward and mend the reward, or train on the watched source too",
    ),
    Check(
        "dead_engine",
        "alarm_dead_engines",
        dead_engine,
        "the engine's log in --logging_dir; often a lower --vllm_gpu_memory_utilization",
    ),
    Check(
        "data_exhausted",
        "alarm_data_passes",
        data_passes,
        "more prompts, or fewer --num_episodes and --max_steps",
    ),
)


class HealthMonitor:
    """Looks at every step and returns the alarms that it raises, each name once in a run.

    ``past`` are the records of the steps before, with their ``step``: what they raised is not
    raised again."""

    def __init__(self, flags: HealthFlags, past: Iterable[Mapping[str, float]] = ()) -> None:
        self.flags, self.history = flags, History(flags.alarm_window)
        self.raised: dict[str, Alarm] = {}
        for record in past:
            self.look(int(record["step"]), record)

    def look(self, step: int, record: Record) -> list[Alarm]:
        values = {name: float(value) for name, value in record.items()}
        self.history.add({name: value for name, value in values.items() if isfinite(value)})
        new = [
            Alarm(check.name, step, found, check.remedy)
            for check in CHECKS
            if check.name not in self.raised
            and (limit := getattr(self.flags, check.flag)) is not None
            and (found := check.look(self.history, limit)) is not None
        ]
        self.raised |= {alarm.name: alarm for alarm in new}
        return new


def find_alarms(records: Iterable[Mapping[str, float]], flags: HealthFlags) -> list[Alarm]:
    """Return the alarms of a run, in the order in which they were raised. ``records`` are those of
    metrics.jsonl."""
    return [*HealthMonitor(flags, records).raised.values()]
