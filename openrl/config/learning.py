"""Flags of batches, optimizer, DeepSpeed and the algorithm."""

from __future__ import annotations

from typing import Any, Literal

from openrl.config.conditions import (
    CRITIC,
    FULL_KL,
    KL_CONTROLLED,
    KL_ESTIMATED,
    KL_STARTS,
    KL_TERM,
    LOGITS,
    NO_KL_TERM,
    NORM_CONST,
    PAIRS,
    REFERENCE,
    RL_LOSS,
    SEVERAL_STEPS,
    SIBLINGS,
    WHITENED,
)
from openrl.config.derived import FLOORED_SCHEDULES
from openrl.config.presets import PRESETS
from openrl.extension_points import advantage_estimators, policy_losses, preference_losses
from openrl.flags.schema import absent, flag, given, group

Scheduler = Literal[
    "cosine_with_min_lr", "cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt",
    "polynomial", "cosine_with_restarts", "warmup_stable_decay",
]  # fmt: skip
OptimizerName = Literal["adamw", "adamw_bf16", "adamw_8bit", "muon"]
LossAggMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@group("Batch")
class RolloutBatchFlags:
    rollout_batch_size: int = flag(
        1024, "Prompts per step; samples = this * n_samples_per_prompt.", bounds="> 0"
    )
    n_samples_per_prompt: int = flag(
        1, "Responses generated for each prompt: the group size.", bounds="> 0"
    )
    train_batch_size: int = flag(
        128, "Samples per optimizer step over all ranks; never prompts.", bounds="> 0"
    )
    micro_train_batch_size: int = flag(
        4,
        "Samples per rank in one forward and backward pass.",
        bounds="> 0",
        only_if=absent("use_dynamic_batch"),
    )
    micro_rollout_batch_size: int = flag(
        8,
        "Samples per rank in forward-only passes.",
        bounds="> 0",
        only_if=absent("use_dynamic_batch"),
    )
    num_episodes: int = flag(
        1, "Passes over the prompts.", bounds="> 0", only_if=absent("eval_only")
    )
    max_epochs: int = flag(1, "Passes over each rollout batch, actor and critic.", bounds="> 0")
    shuffle_mini_batch: bool = flag(
        True,
        "Shuffle a rollout's samples before they are cut into optimizer steps, anew each pass; off:"
        " in the data's order.",
        only_if=SEVERAL_STEPS,
    )
    max_steps: int = flag(
        -1,
        "Stop after this many steps; the learning-rate schedule ends there too. -1: from episodes.",
        bounds="-1 or > 0",
        only_if=absent("eval_only"),
    )


@group("Batch")
class SupervisedBatchFlags:
    train_batch_size: int = flag(
        128, "Rows, or pairs, per optimizer step over all ranks.", bounds="> 0"
    )
    micro_train_batch_size: int = flag(
        8,
        "Rows, or pairs, per rank in one forward and backward pass.",
        bounds="> 0",
        only_if=absent("use_dynamic_batch"),
    )
    max_epochs: int = flag(2, "Passes over the data.", bounds="> 0")
    max_steps: int = flag(
        -1,
        "Stop after this many optimizer steps; the schedule ends there too. -1: from epochs.",
        bounds="-1 or > 0",
    )


@group("Batch")
class PackingFlags:
    packing_samples: bool = flag(
        False,
        "Run each micro-batch as one row without padding; attention never crosses samples. Needs"
        " layers of attention alone.",
    )


@group("Batch")
class SharedPackingFlags(PackingFlags):
    prefix_grouper: bool = flag(
        False,
        "Compute what the answers to a prompt begin with, the prompt and maybe more, once for those"
        " in a micro-batch, forward and backward: the same gradient from fewer tokens. Turns"
        " --packing_samples on; runs --attn_implementation varlen.",
        only_if=SIBLINGS,
    )


@group("Batch", only_if=given("use_dynamic_batch"))
class DynamicBatchFlags:
    use_dynamic_batch: bool = flag(
        False,
        "Cut micro-batches by tokens instead of samples, and deal each optimizer step to the ranks"
        " by what its rows cost. Turns --packing_samples on.",
    )
    train_max_tokens_per_gpu: int = flag(
        16384, "Most tokens per rank in one forward and backward pass; a true cap.", bounds="> 0"
    )


@group("Batch", only_if=given("use_dynamic_batch"))
class RolloutDynamicBatchFlags(DynamicBatchFlags):
    rollout_max_tokens_per_gpu: int | None = flag(
        None,
        "Most tokens per rank in one forward-only pass. None: train_max_tokens_per_gpu.",
        bounds="> 0",
    )


@group("Algorithm")
class PairRewardFlags:
    loss: Literal["sigmoid", "logexp"] = flag(
        "sigmoid",
        "Loss of a pair: -log sigmoid(chosen - rejected), or log(1 + exp(rejected - chosen)), the"
        " same by another formula.",
    )
    margin_loss: bool = flag(False, "Subtract the row's margin column inside the loss.")
    compute_fp32_loss: bool = flag(
        False,
        "Compute rewards, from the scalar head on, in fp32.",
        only_if=absent("param_dtype", "fp32"),
    )


@group("Algorithm")
class PreferenceFlags:
    loss: str = flag(
        "dpo", "Preference loss.", registry=preference_losses, shorthands={"ipo": "ipo"}
    )
    beta: float = flag(
        0.1,
        "Pull to the reference (orpo: weight of the odds ratio; simpo: scale of rewards).",
        bounds="> 0",
    )
    nll_loss_coef: float = flag(
        0.0,
        "Adds this times the mean negative log-likelihood of chosen answers.",
        bounds=">= 0",
        only_if=PAIRS,
    )


@group("DeepSpeed", only_if=given("gradient_checkpointing"))
class RecomputeFlags:
    gradient_checkpointing: bool = flag(
        False, "Recompute activations in the backward pass instead of keeping them."
    )
    gradient_checkpointing_method: Literal["uniform", "block", "selective", "moe"] = flag(
        "uniform",
        "What is recomputed: uniform every layer, block the first layers alone, selective attention"
        " alone, moe blocks of experts alone.",
    )
    gradient_checkpointing_num_layers: int | None = flag(
        None,
        "Layers that block recomputes. None: all.",
        bounds="> 0",
        only_if=given("gradient_checkpointing_method", "block"),
    )
    gradient_checkpointing_use_reentrant: bool = flag(
        False, "Recompute by torch's older, reentrant implementation; of whole layers only."
    )


@group("DeepSpeed")
class DeepSpeedFlags(RecomputeFlags):
    zero_stage: Literal[0, 1, 2, 3] = flag(
        2, "ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also parameters."
    )
    logits_chunk_size: int = flag(
        1024,
        "Tokens per chunk in which log-probs are computed, so full logits never exist; 0: all at"
        " once.",
        bounds=">= 0",
        only_if=LOGITS,
    )
    adam_offload: bool = flag(
        False,
        "Masters, gradients' sums and moments of Adam live in host memory, and its step runs on the"
        " CPU.",
    )
    param_offload: bool = flag(
        False,
        "Trained parameters live in host memory and are fetched layer by layer. Needs"
        " --zero_stage 3.",
    )
    overlap_comm: bool | None = flag(
        None,
        "Reduce gradients while the backward pass runs; more buffers. None: in stage 3, as"
        " DeepSpeed.",
        only_if=absent("zero_stage", 0),
    )
    zpg: int = flag(
        1,
        "Ranks that keep a whole copy of the parameters among themselves, such as those of a node,"
        " from which the backward pass gathers (ZeRO++ hpZ). 1: off. Needs --zero_stage 3.",
        bounds="> 0",
    )
    grad_accum_dtype: Literal["bf16", "fp16", "fp32"] | None = flag(
        None,
        "Type in which micro-batches' gradients add up. None: fp32; with --optimizer adamw_bf16"
        " bf16.",
    )
    ds_config_overrides: dict[str, Any] = flag(
        {},
        'Any other setting of DeepSpeed, merged last, e.g. {"zero_optimization":'
        ' {"reduce_bucket_size": 5e7}}.',
    )
    dist_timeout: int = flag(
        1800, "Seconds a collective may take before its process group aborts.", bounds="> 0"
    )


@group("Optimizer")
class LearningRateFlags:
    """Given once per trained role, with its prefix: actor_, critic_, or none where one model is
    trained."""

    learning_rate: float = flag(1e-6, "Peak learning rate.", bounds="> 0")


@group("Optimizer")
class OptimizerFlags:
    optimizer: OptimizerName = flag(
        "adamw",
        "adamw: fp32 masters and moments; adamw_bf16: bf16 weights, gradients and moments with"
        " Kahan compensation, 10 bytes a parameter; adamw_8bit: 8-bit moments of bitsandbytes;"
        " muon: Muon for the matrices of layers, adamw for the rest.",
    )
    lr_scheduler: Scheduler = flag(
        "cosine_with_min_lr",
        "Learning-rate schedule, by its transformers name, in optimizer steps.",
    )
    lr_warmup_ratio: float = flag(
        0.03,
        "Share of all optimizer steps with rising learning rate.",
        bounds="[0, 1]",
        only_if=absent("lr_scheduler", "constant"),
    )
    lr_warmup_steps: int | None = flag(
        None,
        "Optimizer steps with rising learning rate. None: by --lr_warmup_ratio.",
        bounds=">= 0",
        only_if=absent("lr_scheduler", "constant"),
    )
    min_lr_ratio: float = flag(
        0.1,
        "Lowest learning rate as a share of the peak; only schedules with a floor.",
        bounds="[0, 1]",
        only_if=given("lr_scheduler", *FLOORED_SCHEDULES),
    )
    l2: float = flag(0.0, "Decoupled weight decay; biases and norms excluded.", bounds=">= 0")
    adam_betas: tuple[float, float] = flag((0.9, 0.95), "Adam's beta1 and beta2.", bounds="[0, 1)")
    max_norm: float = flag(
        1.0, "Clip the global gradient norm to this; 0: no clipping.", bounds=">= 0"
    )
    max_nonfinite_steps: int = flag(
        5,
        "A step with a non-finite gradient is skipped and counted; the run stops after this many in"
        " a row and saves the batch. 0: stops at the first.",
        bounds=">= 0",
    )


@group("Algorithm")
class AlgorithmFlags:
    algo_preset: str | None = flag(
        None,
        f"Flags of a published recipe in the place of the defaults: {', '.join(PRESETS)}.",
        presets=PRESETS,
    )
    advantage_estimator: str = flag(
        "gae", "How rewards become advantages.", registry=advantage_estimators
    )
    policy_loss_type: str = flag("ppo", "Policy objective.", registry=policy_losses)
    loss_agg_mode: LossAggMode | None = flag(
        None,
        "How token losses become one number, counted over the whole optimizer step on all ranks."
        " None: as loss and estimator suggest, else token-mean.",
    )
    whiten_advantages: bool | None = flag(
        None,
        "Subtract mean and divide by std over all trained tokens of the rollout batch. None: as the"
        " estimator suggests.",
    )
    no_advantage_std_norm: bool = flag(
        False, "Whitening subtracts the mean only.", only_if=WHITENED
    )
    loss_agg_norm_const: float | None = flag(
        None,
        "Tokens by which seq-mean-token-sum-norm divides each sequence's sum. None:"
        " generate_max_len.",
        bounds="> 0",
        only_if=NORM_CONST,
    )
    rl_loss_coef: float = flag(
        1.0,
        "Multiplies policy loss and KL loss, not the entropy and the supervised term.",
        bounds=">= 0",
    )
    entropy_loss_coef: float = flag(
        0.0,
        "Subtracts this times the entropy at the sampling temperature. 0: only logged, without"
        " gradient.",
    )
    sft_loss_coef: float = flag(
        0.0, "Adds this times the negative log-likelihood of good samples. 0: off.", bounds=">= 0"
    )
    sft_pos_threshold: float = flag(
        0.0,
        "A sample is good if its unshaped reward is above this.",
        only_if=given("sft_loss_coef"),
    )
    freezing_actor_steps: int = flag(
        -1,
        "Critic warm-up: steps up to this number, counted from 0, train the critic only. -1: none.",
        bounds="-1 or >= 0",
        only_if=CRITIC,
    )
    value_clip: float = flag(
        0.5,
        "New values are clipped to old value +- this in the value loss; 0: off.",
        bounds=">= 0",
        only_if=CRITIC,
    )


@group("Algorithm")
class MixtureFlags:
    aux_loss_coef: float = flag(
        0.0,
        "Adds this times the load-balancing loss of a mixture of experts. 0: off.",
        bounds=">= 0",
    )


@group("Algorithm", only_if=given("ptx_data"))
class PtxFlags:
    ptx_data: str | None = flag(
        None,
        "Rows with answers that join every optimizer step of the actor, as many as it has samples"
        " (PPO-ptx); sources as for --prompt_data, prompts in --input_key.",
    )
    output_key: str | None = flag(None, "Column of --ptx_data with the answer.")
    ptx_coef: float = flag(
        0.05, "Adds this times the mean negative log-likelihood of these answers.", bounds="> 0"
    )


@group("KL")
class KLFlags:
    init_kl_coef: float = flag(
        0.01,
        "KL coefficient, start value with --kl_target: on the rewards, or on the loss with"
        " --use_kl_loss. 0: no reference model, unless --kl_loss_coef or --log_ref_kl asks for"
        " one.",
        bounds=">= 0",
        only_if=KL_STARTS,
    )
    use_kl_loss: bool = flag(
        False, "Put the KL term in the loss instead of the reward.", only_if=(KL_TERM, RL_LOSS)
    )
    kl_loss_coef: float | None = flag(
        None,
        "Coefficient of the KL loss. None: init_kl_coef, adapted by --kl_target.",
        bounds="> 0",
        only_if=(given("use_kl_loss"), RL_LOSS),
    )
    kl_estimator: Literal[
        "k1", "k2", "k3", "abs", "full", "k1+", "k3+", "kl", "mse", "low_var_kl"
    ] = flag(
        "k1",
        "Per token, d = logp - ref_logp: k1 d, k2 d^2/2, k3 exp(-d)-1+d, abs |d|, full the KL of"
        " the distributions; k1+ and k3+ have the gradient of k2; kl is k1, mse k2, low_var_kl k3.",
        only_if=(REFERENCE, KL_ESTIMATED),
    )
    kl_loss_estimator: (
        Literal["k2", "k3", "abs", "full", "k1+", "k3+", "mse", "low_var_kl"] | None
    ) = flag(
        None,
        "Estimator of the KL loss; not k1, whose expected gradient is zero. None: --kl_estimator.",
        only_if=(given("use_kl_loss"), RL_LOSS),
    )
    add_token_level_kl: bool = flag(
        False,
        "With --use_kl_loss: subtract init_kl_coef times the KL from the token rewards as well.",
        only_if=(given("use_kl_loss"), given("init_kl_coef")),
    )
    kl_full_topk: int = flag(
        128,
        "What full looks at: the reference's K likeliest tokens and all others as one; 8 K bytes a"
        " token travel with the rollout. 0: the whole vocabulary, by hidden states of the reference"
        " and a copy of its output head.",
        bounds=">= 0",
        only_if=FULL_KL,
    )
    log_ref_kl: bool = flag(
        False,
        "Load the reference and log the KL to it although no term uses it.",
        only_if=NO_KL_TERM,
    )
    kl_target: float | None = flag(
        None,
        "KL that the adaptive controller steers to. None: the coefficient is fixed.",
        bounds="> 0",
        only_if=(KL_TERM, KL_CONTROLLED),
    )
    kl_horizon: int = flag(
        10000,
        "Samples over which the adaptive controller corrects.",
        bounds="> 0",
        only_if=given("kl_target"),
    )
