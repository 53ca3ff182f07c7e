"""The flags of each command: one dataclass per command, made of flag groups."""

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
from openrl.config.groups.inference import BatchTaskFlags, RewardModelFlags, ServerFlags
from openrl.config.groups.logging import (
    DebugFlags,
    LoggingFlags,
    PlanFlags,
    PluginFlags,
    RLLoggingFlags,
    SeedFlags,
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
from openrl.config.groups.reward import RewardFlags, RewardSourceFlags
from openrl.config.groups.reward_shaping import RewardShapingFlags
from openrl.config.groups.rollout_correction import DynamicFilteringFlags, RolloutCorrectionFlags
from openrl.config.groups.rollout_engine import (
    ChosenEngineFlags,
    CollectFlags,
    EngineFlags,
    OneEngineFlags,
)
from openrl.config.groups.sampling import InferenceSamplingFlags, SamplingFlags
from openrl.config.groups.vision import ImageFlags, PixelFlags, VisionFlags
from openrl.flags.schema import absent, chosen_options, given, part


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """``python -m openrl.cli.train_ppo_ray``"""

    model: ModelFlags = part(ModelFlags)
    changes: ModelChangeFlags = part(ModelChangeFlags)
    others: OtherModelFlags = part(OtherModelFlags)
    data: PromptDataFlags = part(PromptDataFlags)
    templates: TemplateFlags = part(TemplateFlags)
    order: OrderFlags = part(OrderFlags)
    vision: VisionFlags = part(VisionFlags)
    placement: PlacementFlags = part(PlacementFlags)
    hybrid: HybridFlags = part(HybridFlags)
    device: DeviceFlags = part(DeviceFlags)
    engine: EngineFlags = part(EngineFlags)
    collecting: CollectFlags = part(CollectFlags)
    asynchrony: AsyncFlags = part(AsyncFlags)
    sampling: SamplingFlags = part(SamplingFlags)
    batch: RolloutBatchFlags = part(RolloutBatchFlags)
    packing: SharedPackingFlags = part(SharedPackingFlags)
    dynamic: RolloutDynamicBatchFlags = part(RolloutDynamicBatchFlags)
    deepspeed: DeepSpeedFlags = part(DeepSpeedFlags)
    parallel: ParallelFlags = part(ParallelFlags)
    actor_optim: LearningRateFlags = part(LearningRateFlags, prefix="actor_")
    critic_optim: LearningRateFlags = part(
        LearningRateFlags, prefix="critic_", only_if=CRITIC, learning_rate=9e-6
    )
    optim: OptimizerFlags = part(OptimizerFlags)
    lora: PolicyLoRAFlags = part(PolicyLoRAFlags)
    algorithm: AlgorithmFlags = part(AlgorithmFlags)
    mixture: MixtureFlags = part(MixtureFlags)
    ptx: PtxFlags = part(PtxFlags)
    kl: KLFlags = part(KLFlags)
    reward: RewardFlags = part(RewardFlags)
    agents: AgentFlags = part(AgentFlags)
    environments: EnvironmentFlags = part(EnvironmentFlags)
    shaping: RewardShapingFlags = part(RewardShapingFlags)
    filtering: DynamicFilteringFlags = part(DynamicFilteringFlags)
    correction: RolloutCorrectionFlags = part(RolloutCorrectionFlags)
    evaluation: PromptEvalFlags = part(PromptEvalFlags)
    checkpoint: RLCheckpointFlags = part(RLCheckpointFlags, ckpt_path="./ckpt/checkpoints_ppo_ray")
    faults: RolloutFaultFlags = part(RolloutFaultFlags)
    logging: LoggingFlags = part(LoggingFlags)
    rl_logging: RLLoggingFlags = part(RLLoggingFlags)
    debug: PlanFlags = part(PlanFlags)
    options: dict[str, Any] = chosen_options()


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """What the commands that train one model on given rows have in common; each brings its own
    ``data`` and loss."""

    model: ModelFlags = part(ModelFlags)
    changes: ModelChangeFlags = part(ModelChangeFlags)
    data: AnswerDataFlags = part(AnswerDataFlags)
    templates: TemplateFlags = part(TemplateFlags)
    vision: VisionFlags = part(VisionFlags)
    order: OrderFlags = part(OrderFlags)
    device: DeviceFlags = part(DeviceFlags)
    ranks: RankFlags = part(RankFlags)
    batch: SupervisedBatchFlags = part(SupervisedBatchFlags)
    packing: PackingFlags = part(PackingFlags)
    dynamic: DynamicBatchFlags = part(DynamicBatchFlags)
    deepspeed: DeepSpeedFlags = part(DeepSpeedFlags)
    parallel: ParallelFlags = part(ParallelFlags)
    learning_rate: LearningRateFlags = part(LearningRateFlags)
    optim: OptimizerFlags = part(OptimizerFlags)
    lora: LoRAFlags = part(LoRAFlags)
    mixture: MixtureFlags = part(MixtureFlags)
    evaluation: SupervisedEvalFlags = part(SupervisedEvalFlags)
    checkpoint: CheckpointFlags = part(CheckpointFlags)
    faults: FaultFlags = part(FaultFlags)
    logging: LoggingFlags = part(LoggingFlags)
    debug: DebugFlags = part(DebugFlags)
    options: dict[str, Any] = chosen_options()


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """``python -m openrl.cli.train_sft``"""

    data: SupervisedDataFlags = part(SupervisedDataFlags, max_len=2048)
    templates: TemplateFlags = part(
        TemplateFlags, only_if=absent("pretrain_mode"), input_template=PLAIN_DIALOGUE
    )
    learning_rate: LearningRateFlags = part(LearningRateFlags, learning_rate=5e-6)
    checkpoint: CheckpointFlags = part(CheckpointFlags, ckpt_path="./ckpt/checkpoints_sft")


@dataclass(frozen=True, kw_only=True)
class RMConfig(SupervisedConfig):
    """``python -m openrl.cli.train_rm``"""

    head: ScalarHeadFlags = part(ScalarHeadFlags)
    data: PreferenceDataFlags = part(PreferenceDataFlags)
    reward_loss: PairRewardFlags = part(PairRewardFlags)
    batch: SupervisedBatchFlags = part(SupervisedBatchFlags, max_epochs=1, micro_train_batch_size=1)
    packing: SharedPackingFlags = part(SharedPackingFlags)
    learning_rate: LearningRateFlags = part(LearningRateFlags, learning_rate=9e-6)
    checkpoint: CheckpointFlags = part(CheckpointFlags, ckpt_path="./ckpt/checkpoints_rm")


@dataclass(frozen=True, kw_only=True)
class DPOConfig(SupervisedConfig):
    """``python -m openrl.cli.train_dpo``"""

    reference: ReferenceFlags = part(ReferenceFlags)
    data: PreferenceDataFlags = part(PreferenceDataFlags)
    preference: PreferenceFlags = part(PreferenceFlags)
    batch: SupervisedBatchFlags = part(SupervisedBatchFlags, max_epochs=1)
    packing: SharedPackingFlags = part(SharedPackingFlags)
    learning_rate: LearningRateFlags = part(LearningRateFlags, learning_rate=1e-5)
    evaluation: SupervisedEvalFlags = part(SupervisedEvalFlags, eval_split="test")
    checkpoint: CheckpointFlags = part(CheckpointFlags, ckpt_path="./ckpt/checkpoints_dpo")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """``python -m openrl.cli.serve_rm``"""

    rm: RewardModelFlags = part(RewardModelFlags)
    reward: RewardSourceFlags = part(RewardSourceFlags)
    model: LoadFlags = part(LoadFlags)
    weights: QuantizationFlags = part(QuantizationFlags, only_if=given("reward_pretrain"))
    device: DeviceFlags = part(DeviceFlags)
    server: ServerFlags = part(ServerFlags)
    packing: PackingFlags = part(PackingFlags, only_if=given("reward_pretrain"))
    vision: PixelFlags = part(PixelFlags, only_if=given("reward_pretrain"))
    debug: PluginFlags = part(PluginFlags)
    options: dict[str, Any] = chosen_options()


@dataclass(frozen=True, kw_only=True)
class AnsweringConfig:
    """What the commands that answer prompts have in common; each brings its own ``task``."""

    task: BatchTaskFlags | EvaluateFlags = part(EvaluateFlags)
    model: ModelFlags = part(ModelFlags)
    data: EvaluateDataFlags = part(EvaluateDataFlags)
    templates: TemplateFlags = part(TemplateFlags)
    vision: ImageFlags = part(ImageFlags)
    device: DeviceFlags = part(DeviceFlags)
    engine: OneEngineFlags = part(OneEngineFlags)
    sampling: InferenceSamplingFlags = part(InferenceSamplingFlags)
    batch: InferenceBatchFlags = part(InferenceBatchFlags)
    rm: RewardModelFlags = part(RewardModelFlags)
    reward: RewardFlags = part(RewardFlags)
    debug: SeedFlags = part(SeedFlags, seed=1234)
    options: dict[str, Any] = chosen_options()


@dataclass(frozen=True, kw_only=True)
class BatchInferenceConfig(AnsweringConfig):
    """``python -m openrl.cli.batch_inference``"""

    task: BatchTaskFlags = part(BatchTaskFlags)
    data: BatchDataFlags = part(BatchDataFlags)
    engine: OneEngineFlags = part(OneEngineFlags, only_if=given("eval_task", "generate_vllm"))


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(AnsweringConfig):
    """``python -m openrl.cli.evaluate``"""

    task: EvaluateFlags = part(EvaluateFlags)
    engine: ChosenEngineFlags = part(ChosenEngineFlags)
    agents: AgentFlags = part(AgentFlags)
    environments: EnvironmentTagFlags = part(EnvironmentTagFlags)


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """``python -m openrl.cli.lora_combiner``"""

    merge: MergeFlags = part(MergeFlags)
    model: WeightFlags = part(WeightFlags)
    debug: PluginFlags = part(PluginFlags)
    options: dict[str, Any] = chosen_options()


SUPERVISED = (SFTConfig, RMConfig, DPOConfig)
TRAINING = (PPOConfig, *SUPERVISED)
TrainingConfig = PPOConfig | SupervisedConfig
COMMANDS: dict[str, type] = {
    "train_ppo_ray": PPOConfig,
    "train_sft": SFTConfig,
    "train_rm": RMConfig,
    "train_dpo": DPOConfig,
    "serve_rm": ServeConfig,
    "batch_inference": BatchInferenceConfig,
    "evaluate": EvaluateConfig,
    "lora_combiner": MergeConfig,
}
"""Every command and its config."""
