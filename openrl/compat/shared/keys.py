"""Conversions that several systems share; each yields flags like a system's ``together``."""

from __future__ import annotations

from collections.abc import Iterator

from openrl.config.importing.convert import Computed, GivenKeys

KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
TRACKERS = ("swanlab", "mlflow", "trackio")


def trackers(keys: GivenKeys, key: str, directory: str = "") -> Iterator[Computed]:
    """The trackers that a key names. Lines on the console and metrics.jsonl need no flag."""
    names = keys.items(key)
    if "wandb" in names:
        yield Computed("use_wandb", True, (key,), "the key comes from WANDB_API_KEY")
    if "tensorboard" in names:
        yield Computed("use_tensorboard", directory or "./runs/tensorboard", (key,), "a directory")
    if others := [name for name in names if name in TRACKERS]:
        yield Computed("track_with", others, (key,))


def prompts_of_step(keys: GivenKeys, size: str, samples: str) -> Computed:
    """The samples of an optimizer step, where its size counts prompts."""
    prompts, n = keys.whole(size), keys.whole(samples, 1)
    note = f"{prompts} prompts x {n} samples"
    return Computed("train_batch_size", prompts * n, (size, samples), note)


def scheduler(keys: GivenKeys, kind: str, ratio: str, steps: str) -> Iterator[Computed]:
    """The schedule and its warm-up. Those systems warm a constant rate up too, which has a name of
    its own here."""
    name = keys.text(kind) or "constant"
    warm = keys.number(ratio) > 0 or keys.number(steps) > 0
    if name == "constant" and warm:
        yield Computed(
            "lr_scheduler", "constant_with_warmup", (kind, ratio, steps), "with a warm-up"
        )
    else:
        yield Computed("lr_scheduler", name, (kind,))
    if keys.number(steps) > 0:
        yield Computed("lr_warmup_steps", keys.whole(steps), (steps,))
    else:
        yield Computed("lr_warmup_ratio", keys.number(ratio), (ratio, steps))


def lowest_rate(keys: GivenKeys, least: str, rate: str) -> Iterator[Computed]:
    """The learning rate at the end, written as a rate."""
    if keys.given(least) and (peak := keys.number(rate)):
        share = keys.number(least) / peak
        yield Computed("min_lr_ratio", share, (least, rate), "a share of the peak")


def colocated(
    keys: GivenKeys, gpus: str, nodes: str, tensor: str, engine_flag: str = "vllm_num_engines"
) -> Iterator[Computed]:
    """One pool of GPUs, on which all roles take turns and as many engines run as fit."""
    per_node, count = keys.whole(gpus, 8), keys.whole(nodes, 1)
    size = max(1, keys.whole(tensor, 1))
    yield Computed("actor_num_gpus_per_node", per_node, (gpus,))
    yield Computed("colocate_all_models", True, (gpus,), "one pool for all roles")
    yield Computed("vllm_enable_sleep", True, (gpus,), "engines sleep while training runs")
    yield Computed("vllm_tensor_parallel_size", size, (tensor,))
    total = per_node * count
    how = f"{total} GPUs / {size}"
    yield Computed(engine_flag, max(1, total // size), (tensor, gpus, nodes), how)


def sleeping(
    keys: GivenKeys, params: str, optimizer: str, always: bool = False
) -> Iterator[Computed]:
    """Which parts of the training state leave the GPU while engines generate."""
    states = [
        *(["param"] if keys.on(params) else []),
        *(["optim", "grad"] if keys.on(optimizer) else []),
    ]
    if states or always:
        named = tuple(filter(None, (params, optimizer)))
        yield Computed("deepspeed_enable_sleep", True, named)
        yield Computed("deepspeed_sleep_states", states or ["grad"], named)


def data(keys: GivenKeys, key: str, data_flag: str, split_flag: str) -> Iterator[Computed]:
    """NAME@SPLIT, or a list of files."""
    items = keys.items(key)
    names = [item.partition("@")[0] for item in items]
    splits = {item.partition("@")[2] for item in items} - {""}
    if names:
        yield Computed(data_flag, ",".join(names), (key,))
    if splits:
        yield Computed(split_flag, sorted(splits)[0], (key,), "the part after @")
