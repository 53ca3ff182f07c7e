"""The flags of each command: one dataclass per command, made of flag groups; --help begins with its
docstring. Its properties are what the conditions of flags read; ``derived`` has what else follows
from several groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openrl.config.conditions import CRITIC
from openrl.config.groups.agent import AgentFlags, EnvironmentFlags, EnvironmentTagFlags
from openrl.config.groups.algorithm import (
    AlgorithmFlags,
    KLFlags,
    MixtureFlags,
    PairRewardFlags,
    PreferenceFlags,
    PtxFlags,
    RoutingFlags,
)
from openrl.config.groups.asynchrony import AsyncFlags
from openrl.config.groups.batch import (
    DynamicBatchFlags,
    InferenceBatchFlags,
    PackingFlags,
    RolloutBatchFlags,
    RolloutDynamicBatchFlags,
    SharedPackingFlags,
    SupervisedBatchFlags,
)
from openrl.config.groups.checkpoint import (
    CheckpointFlags,
    FaultFlags,
    RLCheckpointFlags,
    RolloutFaultFlags,
)
from openrl.config.groups.curriculum import CurriculumFlags
from openrl.config.groups.data import (
    PLAIN_DIALOGUE,
    AnswerDataFlags,
    BatchDataFlags,
    EvaluateDataFlags,
    OrderFlags,
    PreferenceDataFlags,
    PromptDataFlags,
    SupervisedDataFlags,
    TemplateFlags,
)
from openrl.config.groups.deepspeed import DeepSpeedFlags, ParallelFlags
from openrl.config.groups.evaluation import EvaluateFlags, PromptEvalFlags, SupervisedEvalFlags
from openrl.config.groups.health import HealthFlags
from openrl.config.groups.inference import (
    BatchTaskFlags,
    ModelCheckFlags,
    RescoreFlags,
    RewardModelFlags,
    ServerFlags,
)
from openrl.config.groups.logging import (
    DebugFlags,
    LoggingFlags,
    PlanFlags,
    PluginFlags,
    RLLoggingFlags,
    SeedFlags,
    TraceFlags,
)
from openrl.config.groups.lora import LoRAFlags, MergeFlags, PolicyLoRAFlags, QuantizationFlags
from openrl.config.groups.model import (
    LoadFlags,
    ModelChangeFlags,
    ModelFlags,
    OtherModelFlags,
    ReferenceFlags,
    ScalarHeadFlags,
    WeightFlags,
)
from openrl.config.groups.optimizer import LearningRateFlags, OptimizerFlags
from openrl.config.groups.placement import DeviceFlags, HybridFlags, PlacementFlags, RankFlags
from openrl.config.groups.replay import ReplayFlags
from openrl.config.groups.reward import RewardFlags, RewardSourceFlags
from openrl.config.groups.reward_shaping import NormScope, RewardShapingFlags
from openrl.config.groups.rollout_correction import DynamicFilteringFlags, RolloutCorrectionFlags
from openrl.config.groups.rollout_engine import (
    ChosenEngineFlags,
    CollectFlags,
    EngineFlags,
    OneEngineFlags,
)
from openrl.config.groups.sampling import InferenceSamplingFlags, SamplingFlags
from openrl.config.groups.teacher import AnswerTeacherFlags, TeacherFlags
from openrl.config.groups.vision import ImageFlags, PixelFlags, VisionFlags
from openrl.config.teacher_plan import teacher_plan
from openrl.flags.schema import absent, given, part
from openrl.registry import Entry


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """``python -m openrl.cli.train_ppo_ray``: reinforcement learning on Ray, DeepSpeed, vLLM."""

    model: ModelFlags
    changes: ModelChangeFlags
    others: OtherModelFlags
    data: PromptDataFlags
    templates: TemplateFlags
    order: OrderFlags
    curriculum: CurriculumFlags
    vision: VisionFlags
    placement: PlacementFlags
    hybrid: HybridFlags
    device: DeviceFlags
    engine: EngineFlags
    collecting: CollectFlags
    asynchrony: AsyncFlags
    replay: ReplayFlags
    sampling: SamplingFlags
    batch: RolloutBatchFlags
    packing: SharedPackingFlags
    dynamic: RolloutDynamicBatchFlags
    deepspeed: DeepSpeedFlags
    parallel: ParallelFlags
    actor_optim: LearningRateFlags = part(prefix="actor_")
    critic_optim: LearningRateFlags = part(prefix="critic_", only_if=CRITIC, learning_rate=9e-6)
    optim: OptimizerFlags
    lora: PolicyLoRAFlags
    algorithm: AlgorithmFlags
    mixture: MixtureFlags
    routing: RoutingFlags
    ptx: PtxFlags
    kl: KLFlags
    teacher: TeacherFlags
    reward: RewardFlags
    agents: AgentFlags
    environments: EnvironmentFlags
    shaping: RewardShapingFlags
    filtering: DynamicFilteringFlags
    correction: RolloutCorrectionFlags
    evaluation: PromptEvalFlags
    health: HealthFlags
    checkpoint: RLCheckpointFlags = part(ckpt_path="./ckpt/checkpoints_ppo_ray")
    faults: RolloutFaultFlags
    logging: LoggingFlags
    rl_logging: RLLoggingFlags
    trace: TraceFlags
    debug: PlanFlags
    options: dict[str, Any]

    @property
    def model_roles(self) -> tuple[str, ...]:
        """The models that run, by the names that placement and metrics use."""
        wanted = {
            "actor": True,
            "critic": self.algorithm.needs_critic,
            "reference": self.kl.needs_reference and not self.policy_is_reference,
            "reward": self.others.reward_pretrain is not None and not self.collecting.replays,
            "teacher": bool(teacher_plan(self.teacher).of("model")),
        }
        return tuple(role for role, needed in wanted.items() if needed)

    @property
    def policy_is_reference(self) -> bool:
        """Whether the reference is the policy itself, with its adapters off."""
        return self.kl.needs_reference and self.lora.adapts and self.others.ref_pretrain is None

    @property
    def reward_norm_scopes(self) -> tuple[NormScope, NormScope]:
        """The scopes of mean and std that the flags or else the estimator say, or else none."""
        return self.norm_scopes_for(self.algorithm.estimator)

    def norm_scopes_for(self, estimator: Entry[Any]) -> tuple[NormScope, NormScope]:
        suggests = estimator.suggests
        mean = self.shaping.reward_norm_mean or suggests.get("reward_norm_mean", "none")
        return mean, self.shaping.reward_norm_std or suggests.get("reward_norm_std", "none")


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """What the commands that train one model on given rows have in common; each brings its own
    ``data`` and loss."""

    model: ModelFlags
    changes: ModelChangeFlags
    data: AnswerDataFlags
    templates: TemplateFlags
    vision: VisionFlags
    order: OrderFlags
    device: DeviceFlags
    ranks: RankFlags
    batch: SupervisedBatchFlags
    packing: PackingFlags
    dynamic: DynamicBatchFlags
    deepspeed: DeepSpeedFlags
    parallel: ParallelFlags
    learning_rate: LearningRateFlags
    optim: OptimizerFlags
    lora: LoRAFlags
    mixture: MixtureFlags
    evaluation: SupervisedEvalFlags
    checkpoint: CheckpointFlags
    faults: FaultFlags
    logging: LoggingFlags
    debug: DebugFlags
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """``python -m openrl.cli.train_sft``: supervised fine-tuning."""

    data: SupervisedDataFlags = part(max_len=2048)
    templates: TemplateFlags = part(only_if=absent("pretrain_mode"), input_template=PLAIN_DIALOGUE)
    teacher: AnswerTeacherFlags
    learning_rate: LearningRateFlags = part(learning_rate=5e-6)
    checkpoint: CheckpointFlags = part(ckpt_path="./ckpt/checkpoints_sft")


@dataclass(frozen=True, kw_only=True)
class RMConfig(SupervisedConfig):
    """``python -m openrl.cli.train_rm``: a reward model from pairs of answers."""

    head: ScalarHeadFlags
    data: PreferenceDataFlags
    reward_loss: PairRewardFlags
    batch: SupervisedBatchFlags = part(max_epochs=1, micro_train_batch_size=1)
    packing: SharedPackingFlags
    learning_rate: LearningRateFlags = part(learning_rate=9e-6)
    checkpoint: CheckpointFlags = part(ckpt_path="./ckpt/checkpoints_rm")


@dataclass(frozen=True, kw_only=True)
class DPOConfig(SupervisedConfig):
    """``python -m openrl.cli.train_dpo``: learning from preferences without a reward model."""

    reference: ReferenceFlags
    data: PreferenceDataFlags
    preference: PreferenceFlags
    batch: SupervisedBatchFlags = part(max_epochs=1)
    packing: SharedPackingFlags
    learning_rate: LearningRateFlags = part(learning_rate=1e-5)
    evaluation: SupervisedEvalFlags = part(eval_split="test")
    checkpoint: CheckpointFlags = part(ckpt_path="./ckpt/checkpoints_dpo")

    @property
    def reference_pretrain(self) -> str | None:
        """The frozen model that log-probs are compared with; None if the loss needs none."""
        options = self.options["loss"]
        free = hasattr(options, "reference_free") and options.reference_free
        if free or not self.preference.needs_reference:
            return None
        return self.reference.ref_pretrain or self.model.pretrain


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """``python -m openrl.cli.serve_rm``: rewards over HTTP."""

    rm: RewardModelFlags
    reward: RewardSourceFlags
    model: LoadFlags
    weights: QuantizationFlags = part(only_if=given("reward_pretrain"))
    device: DeviceFlags
    server: ServerFlags
    packing: PackingFlags = part(only_if=given("reward_pretrain"))
    vision: PixelFlags = part(only_if=given("reward_pretrain"))
    debug: PluginFlags
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class AnsweringConfig:
    """What the commands that answer prompts have in common; each brings its own ``task``."""

    task: BatchTaskFlags | EvaluateFlags
    model: ModelFlags
    data: EvaluateDataFlags
    templates: TemplateFlags
    vision: ImageFlags
    device: DeviceFlags
    engine: OneEngineFlags
    sampling: InferenceSamplingFlags
    batch: InferenceBatchFlags
    rm: RewardModelFlags
    reward: RewardFlags
    debug: SeedFlags = part(seed=1234)
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BatchInferenceConfig(AnsweringConfig):
    """``python -m openrl.cli.batch_inference``: responses or rewards for a dataset."""

    task: BatchTaskFlags
    data: BatchDataFlags
    engine: OneEngineFlags = part(only_if=given("eval_task", "generate_vllm"))


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(AnsweringConfig):
    """``python -m openrl.cli.evaluate``: mean@k, pass@k and maj@k of a model."""

    task: EvaluateFlags
    engine: ChosenEngineFlags
    agents: AgentFlags
    environments: EnvironmentTagFlags


@dataclass(frozen=True, kw_only=True)
class RescoreConfig:
    """``python -m openrl.cli.trace rescore RUN``: what another reward would have given."""

    task: RescoreFlags
    reward: RewardFlags
    debug: PluginFlags
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """``python -m openrl.cli.lora_combiner``: merge a LoRA adapter into its base model."""

    merge: MergeFlags
    model: WeightFlags
    debug: PluginFlags
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CheckModelConfig:
    """``python -m openrl.cli.check_model``: whether a model can be trained here, check by check."""

    check: ModelCheckFlags
    model: ModelFlags = part(param_dtype="fp32")
    device: DeviceFlags
    engine: ChosenEngineFlags
    debug: PluginFlags
    options: dict[str, Any]


TrainingConfig = PPOConfig | SupervisedConfig
COMMANDS: dict[str, type] = {
    "train_ppo_ray": PPOConfig,
    "train_sft": SFTConfig,
    "train_rm": RMConfig,
    "train_dpo": DPOConfig,
    "serve_rm": ServeConfig,
    "batch_inference": BatchInferenceConfig,
    "evaluate": EvaluateConfig,
    "rescore": RescoreConfig,
    "lora_combiner": MergeConfig,
    "check_model": CheckModelConfig,
}
"""Every command and its config."""
