"""From a config to a finished supervised run, for train_sft, train_rm and train_dpo alike. Its
ranks are this process alone, the processes of a launcher, or Ray workers."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrl.algorithms.partition import RowCost
from openrl.cluster.fork_server import Preload
from openrl.cluster.group import LocalGroup, RankGroup, WorkerDied
from openrl.cluster.hosts import GroupSettings
from openrl.cluster.launcher_group import LauncherGroup
from openrl.cluster.planner import RoleRequest, check_address
from openrl.cluster.ray_group import RayGroup, reserved_cluster
from openrl.config.commands import DPOConfig, RMConfig, SFTConfig, SupervisedConfig
from openrl.config.derived import logging_directory, shards_divide
from openrl.config.groups.placement import RankFlags
from openrl.data.tokenizer import policy_tokenizer
from openrl.errors import ErrorCollector, UserError, raise_together
from openrl.flags.dump import effective_flags
from openrl.models.cost import row_cost
from openrl.models.device import Device, resolve_device
from openrl.models.stored import (
    check_backbone,
    check_language_model,
    check_length,
    check_tokens,
)
from openrl.report.finish import closing_table
from openrl.tracking.console import PlainConsole
from openrl.tracking.loggers import Trackers, build_trackers, run_name
from openrl.tracking.progress import Column, Progress, Stage
from openrl.tracking.summary import RunSummary
from openrl.trainer.learning.nonfinite import NonFiniteMonitor
from openrl.trainer.learning.rows import supervised_batching
from openrl.trainer.planning.other_models import check_teacher
from openrl.trainer.planning.prepare import (
    check_models_split,
    check_saved_beside,
    check_training,
)
from openrl.trainer.planning.start_lines import split_lines, write_config
from openrl.trainer.saving.checkpoints import Checkpoints, step_of
from openrl.trainer.supervised.model import SupervisedModel
from openrl.trainer.supervised.tasks import Examples, Task, load_examples, task_of
from openrl.trainer.supervised.trainer import SupervisedTrainer
from openrl.trainer.watching.supervision import (
    StopRequest,
    explain_end,
    supervise,
)
from openrl.training_engine.build import ModelSpec
from openrl.training_engine.distributed import Launch
from openrl.training_engine.optimizers import OptimSpec
from openrl.waiting import in_daemon
from openrl.workers.model_worker import ModelWorker, import_training
from openrl.workers.roles import model_spec

ROLE = "model"


@dataclass(frozen=True)
class SupervisedInputs:
    """The checked inputs of a supervised run."""

    device: Device
    tokenizer: PreTrainedTokenizerBase
    task: Task
    examples: Examples
    steps: int  # optimizer steps
    launch: Launch | None  # this process, rank 0, if a launcher started it
    row_cost: RowCost

    def ranks(self, flags: RankFlags) -> int:
        """Return the training ranks. Without --num_gpus_per_node a node counts as one."""
        if self.launch:
            return self.launch.world_size
        return flags.num_nodes * (flags.num_gpus_per_node or 1)


def prepare(config: Any) -> SupervisedInputs:
    """Read tokenizer and data. Raises one UserError that lists all problems."""
    launch = launched(config.ranks)
    joined = config.ranks.under_ray and config.ranks.address is not None
    device = resolve_device(config.device, joined or config.debug.dry_run)
    path, trusted = config.model.pretrain, config.model.trust_remote_code
    collector = ErrorCollector()
    check_training(config, device, collector)
    with collector:
        if config.ranks.under_ray:
            check_address(config.ranks.address)
    collector.run(check_model, config)
    with collector:
        tokenizer = policy_tokenizer(config.model, config.templates.tokenizer_chat_template)
        task = task_of(config, tokenizer)
        check_saved_beside(tokenizer, task.builder.images)
        examples = load_examples(config, task)
        check_models_split(config, [path, *([task.reference] if task.reference else [])])
        token_ids = [row.token_ids for example in examples.all for row in example.rows]
        check_tokens(path, tokenizer, token_ids, trusted)
        longest = max(map(len, token_ids))
        rows, overrides = "--max_len: a row of the data", config.changes.model_config_overrides
        check_length(path, longest, trusted, rows, overrides=overrides)
        if isinstance(config, SFTConfig) and task.teacher is not None:
            check_teacher(config, task.teacher, tokenizer)
            own = overrides if task.teacher == path else {}
            check_length(task.teacher, longest, trusted, rows, overrides=own)
            check_models_split(config, [task.teacher])
    collector.raise_all()
    steps = config.batch.total_steps(len(examples.train))
    cost = row_cost(path, trusted)
    inputs = SupervisedInputs(device, tokenizer, task, examples, steps, launch, cost)
    raise_together(shards_divide(config.parallel, inputs.ranks(config.ranks), "model"))
    return inputs


def launched(flags: RankFlags) -> Launch | None:
    """Return this process's identity if a launcher started it, else None. Raises UserError if flags
    also ask Ray to start the ranks."""
    launch = Launch.from_environment(flags.local_rank)
    if launch is not None and flags.under_ray:
        raise UserError(
            "a launcher started this process as one of several ranks, but --num_gpus_per_node"
            " asks Ray to start them",
            "run python -m without a launcher, or leave --num_gpus_per_node out",
        )
    return launch


def check_model(config: SupervisedConfig) -> None:
    """Raise UserError if --pretrain or --ref_pretrain is no complete model of the kind needed."""
    path, trusted = config.model.pretrain, config.model.trust_remote_code
    if isinstance(config, RMConfig):
        check_backbone(path, trusted, config.head.value_head_prefix)
        return
    check_language_model(path, trusted, config.changes.model_config_overrides)
    if isinstance(config, DPOConfig) and (other := config.reference.ref_pretrain):
        check_language_model(other, trusted)


def describe(config: SupervisedConfig, inputs: SupervisedInputs) -> str:
    """Describe what was read from the data, and how many steps that gives."""
    lines = [*split_lines(config), *inputs.examples.reports]
    lines.append(f"{inputs.steps} optimizer steps of {config.batch.train_batch_size}")
    if config.evaluation.eval_steps > 0:
        epoch = len(inputs.examples.train) / config.batch.train_batch_size
        lines[-1] += (
            f", an evaluation every {config.evaluation.eval_steps}"
            f" ({config.evaluation.eval_steps / epoch:.2f} epochs)"
        )
    return "\n".join(lines)


async def train(config: SupervisedConfig, inputs: SupervisedInputs) -> RunSummary:
    """Train, save and report, see ``supervise``."""
    return await supervise(config, partial(train_once, inputs=inputs))


async def serve(config: SupervisedConfig, launch: Launch) -> None:
    """On a rank of a launcher other than 0: do what rank 0 asks until the run ends. A signal is
    passed on to rank 0, which ends the run."""
    stop = StopRequest(math.inf)
    stop.saves = True
    with stop.listening():
        device = resolve_device(config.device)
        await in_daemon(launch.join, device, config.deepspeed.dist_timeout)
        try:
            LauncherGroup(ROLE, launch).serve(lambda: stop.signal)
        except WorkerDied as error:
            raise UserError(str(error), "look at the output of the other ranks") from error


async def train_once(
    config: SupervisedConfig, stop: StopRequest, inputs: SupervisedInputs
) -> RunSummary:
    run_dir = Path(config.checkpoint.save_path)
    console = PlainConsole(quiet=config.logging.quiet)
    task = inputs.task
    console.print(describe(config, inputs))
    write_config(config, run_dir)
    checkpoints = Checkpoints(config.checkpoint, effective_flags(config))
    name, done = run_name(config.logging, task.name), checkpoints.saved
    columns = (Column("loss", "loss {:.3f}"), *task.columns, Column("lr", "lr {:.1e}"))
    every = config.logging.lines_every
    trained = trained_spec(config, task, inputs.device, inputs.steps)
    specs = [trained, *teacher_specs(config, task, inputs.device)]
    with (
        Progress(name, inputs.steps, columns, done=done, every=every) as progress,
        explain_end(progress, checkpoints, stop),
    ):
        async with start_ranks(config, inputs.launch, specs, progress.stage, stop) as group:
            monitor = NonFiniteMonitor(config.optim.max_nonfinite_steps, run_dir)
            pad_id = inputs.tokenizer.pad_token_id
            model = SupervisedModel(
                group, task, pad_id, supervised_batching(config, inputs.row_cost), monitor
            )
            examples = await start_model(config, inputs, model, progress.stage)
            trainer = SupervisedTrainer(
                model,
                examples,
                inputs.tokenizer,
                config,
                checkpoints=checkpoints,
                trackers=trackers_of(config, name, checkpoints),
                progress=progress,
                stop=stop,
            )
            summary = await trainer.fit()
    console.print(closing_table(run_dir, summary))
    return summary


async def start_model(
    config: SupervisedConfig, inputs: SupervisedInputs, model: SupervisedModel, stage: Stage
) -> Examples:
    """Start the trained model. If the loss needs a reference model, first start that one for a
    single pass over all examples. Returns the examples, in that case with reference log-probs."""
    task, examples = inputs.task, inputs.examples
    if task.reference is not None:
        own = {"kind": task.kind, "optim": None, "lora": task.reference_lora}
        frozen = model_spec(config, task.reference, inputs.device, **own)
        with stage("reference") as tell:
            known = await model.add_reference(frozen, examples.all, tell)
        count = len(examples.train)
        examples = replace(examples, train=known[:count], evaluation=known[count:])
    with stage("start"):
        await model.group.call("start")
    return examples


def trained_spec(config: SupervisedConfig, task: Task, device: Device, steps: int) -> ModelSpec:
    compared: dict[str, Any] = {}
    if isinstance(config, SFTConfig) and task.teacher is not None:
        top_k = {"teacher": config.teacher.teacher_topk}
        compared = {"top_k": top_k, "others": {"teacher": task.teacher}}
    return model_spec(
        config,
        config.model.pretrain,
        device,
        kind=task.kind,
        optim=OptimSpec(config.learning_rate.learning_rate, config.optim, steps),
        value_head=task.value_head,
        fp32_head=task.fp32_head,
        lora=config.lora,
        **compared,
    )


def teacher_specs(config: SupervisedConfig, task: Task, device: Device) -> list[ModelSpec]:
    """Return the frozen model that stands beside the trained one, if there is one."""
    if not isinstance(config, SFTConfig) or task.teacher is None:
        return []
    top_k, policy = {"teacher": config.teacher.teacher_topk}, config.model.pretrain
    own = {"kind": task.kind, "optim": None, "vocabulary_of": policy, "top_k": top_k}
    return [model_spec(config, task.teacher, device, **own)]


def trackers_of(config: SupervisedConfig, name: str, checkpoints: Checkpoints) -> Trackers:
    return build_trackers(
        config.logging,
        Path(config.checkpoint.save_path),
        name=name,
        config=checkpoints.run_flags,
        keep_until=step_of(checkpoints.start_from),
    )


@asynccontextmanager
async def start_ranks(
    config: SupervisedConfig,
    launch: Launch | None,
    specs: Sequence[ModelSpec],
    stage: Stage,
    stop: StopRequest,
) -> AsyncIterator[RankGroup]:
    """Yield a group whose workers have loaded no model yet; it ends with the with block. The first
    of ``specs`` is trained."""
    spec = specs[0]
    if config.ranks.under_ray:
        flags = config.ranks
        request = RoleRequest(ROLE, flags.num_nodes, flags.num_gpus_per_node)
        async with reserved_cluster(flags, [request], spec.device, stage) as reserved:
            cluster, reservation, started = reserved
            settings = GroupSettings(
                flags.rpc_timeout,
                spec.parallel.ranks_per_shard,
                config.debug.plugin,
                log_dir=str(logging_directory(config)),
                stall_timeout=config.faults.stall_timeout,
                preload=Preload(import_training),
            )
            with stage("start"):
                group = await RayGroup.create(
                    cluster, reservation, ROLE, settings, ModelWorker, *specs
                )
            started.append(group)
            yield group
    elif launch is not None:
        # a signal ends the wait for ranks that do not come
        await in_daemon(launch.join, spec.device, spec.deepspeed.dist_timeout)
        ranks = LauncherGroup(ROLE, launch, spec.parallel.ranks_per_shard, stop.act_on)
        try:
            await ranks.build(ModelWorker, *specs)
            yield ranks
        finally:
            await ranks.close()
    else:
        yield LocalGroup.create(ROLE, 1, ModelWorker, *specs)
