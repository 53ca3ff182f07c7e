"""Flags of estimators, losses and the KL to the reference."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from openrl.config.conditions import (
    CRITIC,
    FULL_KL,
    KL_CONTROLLED,
    KL_ESTIMATED,
    KL_STARTS,
    KL_TERM,
    NO_KL_TERM,
    NORM_CONST,
    PAIRS,
    REFERENCE,
    RL_LOSS,
    WHITENED,
)
from openrl.config.presets import PRESETS
from openrl.extension_points import advantage_estimators, policy_losses, preference_losses
from openrl.flags.schema import absent, flag, given, group
from openrl.registry import Entry

STEERED = given("entropy_target")

LossAggMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@group("Algorithm")
class PairRewardFlags:
    loss: Literal["sigmoid", "logexp"] = flag(
        "sigmoid",
        "Loss of a pair: sigmoid is -log sigmoid(chosen - rejected); logexp, log(1 + exp(rejected"
        " - chosen)), is the same value.",
    )
    margin_loss: bool = flag(False, "Subtract the row's margin column inside the loss.")
    compute_fp32_loss: bool = flag(
        False,
        "Compute the scalar head's output and the loss in fp32.",
        only_if=absent("param_dtype", "fp32"),
    )


@group("Algorithm")
class PreferenceFlags:
    loss: str = flag(
        "dpo", "Preference loss.", registry=preference_losses, shorthands={"ipo": "ipo"}
    )
    beta: float = flag(
        0.1,
        "Strength of the pull towards the reference (orpo: weight of the odds ratio; simpo: scale"
        " of rewards).",
        bounds="> 0",
    )
    nll_loss_coef: float = flag(
        0.0,
        "Adds this times the mean negative log-likelihood of chosen answers.",
        bounds=">= 0",
        only_if=PAIRS,
    )

    @property
    def needs_reference(self) -> bool:
        return "reference" in preference_losses[self.loss].needs

    @property
    def rated(self) -> bool:
        """Whether answers are rated one by one instead of compared in pairs."""
        return "ratings" in preference_losses[self.loss].needs


@group("Algorithm")
class AlgorithmFlags:
    algo_preset: str | None = flag(
        None,
        f"Use the flags of a published recipe as defaults: {', '.join(PRESETS)}.",
        presets=PRESETS,
    )
    advantage_estimator: str = flag(
        "gae", "How rewards become advantages.", registry=advantage_estimators
    )
    algo_routing: str | None = flag(
        None,
        "YAML or JSON file {datasource: {advantage_estimator: NAME, rl_weight: X, kl_weight: X}}"
        " that says how rows of these sources are learned from: by which estimator, with its"
        " options, and with which weights of their policy loss and their KL. Options that the file"
        " leaves out have their defaults, whatever the flags say. None: all alike.",
    )
    policy_loss_type: str = flag("ppo", "Policy objective.", registry=policy_losses)
    loss_agg_mode: LossAggMode | None = flag(
        None,
        "How token losses are averaged, over the whole optimizer step on all ranks. None: as loss"
        " or estimator suggest, else token-mean.",
    )
    whiten_advantages: bool | None = flag(
        None,
        "Subtract the mean and divide by the std over all trained tokens of the rollout batch."
        " None: as the estimator suggests.",
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
        "Multiplies the policy loss and the KL loss, but not the entropy and supervised terms.",
        bounds=">= 0",
    )
    entropy_loss_coef: float = flag(
        0.0,
        "Subtracts this times the entropy at the sampling temperature from the loss. 0: entropy"
        " is only logged.",
    )
    entropy_target: float | None = flag(
        None,
        "Steer the entropy coefficient from --entropy_loss_coef on: up by --entropy_coef_delta"
        " after a step whose mean entropy per token is at most this, else down. It acts only after"
        " a step at or below the target. None: the coefficient is fixed.",
        bounds="> 0",
    )
    entropy_coef_delta: float = flag(
        0.005, "Change of the entropy coefficient in a step.", bounds="> 0", only_if=STEERED
    )
    entropy_coef_range: tuple[float, float] = flag(
        (0.0, 1.0),
        "Smallest and largest entropy coefficient.",
        bounds=">= 0 and increasing",
        only_if=STEERED,
    )
    top_entropy_quantile: float = flag(
        1.0,
        "Share of the rollout batch's tokens that the policy loss trains: those of highest entropy"
        " before the update. 1: all.",
        bounds="(0, 1]",
        only_if=RL_LOSS,
    )
    sft_loss_coef: float = flag(
        0.0,
        "Adds this times the negative log-likelihood of good samples to the loss. 0: off.",
        bounds=">= 0",
    )
    sft_pos_threshold: float = flag(
        0.0,
        "A sample is good if its unshaped reward is above this.",
        only_if=given("sft_loss_coef"),
    )
    observation_loss_coef: float = flag(
        0.0,
        "Adds this times the negative log-likelihood of what environments and tools answered, so"
        " that the policy learns to predict it (ECHO). 0: off.",
        bounds=">= 0",
    )
    freezing_actor_steps: int = flag(
        -1,
        "Critic warm-up: steps up to this number, counted from 0, train the critic only. -1: none.",
        bounds="-1 or >= 0",
        only_if=CRITIC,
    )
    value_clip: float = flag(
        0.5,
        "The value loss clips new values to old value +- this. 0: off.",
        bounds=">= 0",
        only_if=CRITIC,
    )

    @property
    def estimator(self) -> Entry[Any]:
        """The chosen --advantage_estimator."""
        return advantage_estimators[self.advantage_estimator]

    @property
    def policy_loss(self) -> Entry[Any]:
        """The chosen --policy_loss_type."""
        return policy_losses[self.policy_loss_type]

    @property
    def needs_critic(self) -> bool:
        return "values" in self.estimator.needs

    @property
    def aggregation(self) -> LossAggMode:
        """--loss_agg_mode, or what policy loss or estimator suggests, or else token-mean."""
        suggested = (e.suggests.get("loss_agg_mode") for e in (self.policy_loss, self.estimator))
        return next(filter(None, (self.loss_agg_mode, *suggested)), "token-mean")

    @property
    def whitens(self) -> bool:
        """--whiten_advantages, or else what the estimator suggests, or else False."""
        return self.whitens_for(self.estimator)

    def whitens_for(self, estimator: Entry[Any]) -> bool:
        if self.whiten_advantages is None:
            return estimator.suggests.get("whiten_advantages", False)
        return self.whiten_advantages

    @property
    def frozen_actor_steps(self) -> int:
        """Number of steps at the start of a run that train only the critic, if there is one."""
        return self.freezing_actor_steps + 1 if self.needs_critic else 0


@group("Algorithm")
class MixtureFlags:
    aux_loss_coef: float = flag(
        0.0,
        "Adds this times the load-balancing loss of a mixture of experts. 0: off.",
        bounds=">= 0",
    )


@group("Algorithm")
class RoutingFlags:
    routing_replay: bool = flag(
        False,
        "The policy's passes send each token to the experts that the engine chose for it, which"
        " travel with the tokens (R3): routers of engine and trainer disagree otherwise wherever"
        " two experts are about equally good. The weights of these experts are the trainer's.",
    )


of_ptx = partial(flag, only_if=given("ptx_data"))


@group("Algorithm")
class PtxFlags:
    ptx_data: str | None = of_ptx(
        None,
        "Rows with answers for a supervised term: as many as samples in each optimizer step of"
        " the actor (PPO-ptx). Sources as for --prompt_data; prompts in --input_key.",
    )
    output_key: str | None = of_ptx(None, "Column of --ptx_data with the answer.")
    ptx_coef: float = of_ptx(
        0.05,
        "Adds this times the mean negative log-likelihood of the --ptx_data answers.",
        bounds="> 0",
    )


@group("KL")
class KLFlags:
    init_kl_coef: float = flag(
        0.01,
        "KL coefficient, applied to rewards, or to the loss with --use_kl_loss; with --kl_target"
        " its start value. 0: no reference model, unless --kl_loss_coef or --log_ref_kl needs"
        " one.",
        bounds=">= 0",
        only_if=KL_STARTS,
    )
    use_kl_loss: bool = flag(
        False, "Put the KL term in the loss instead of the reward.", only_if=(KL_TERM, RL_LOSS)
    )
    kl_loss_coef: float | None = flag(
        None,
        "Coefficient of the KL loss. None: init_kl_coef, which --kl_target adapts.",
        bounds="> 0",
        only_if=(given("use_kl_loss"), RL_LOSS),
    )
    kl_estimator: Literal[
        "k1", "k2", "k3", "abs", "full", "k1+", "k3+", "kl", "mse", "low_var_kl"
    ] = flag(
        "k1",
        "Per token, d = logp - ref_logp: k1 d, k2 d^2/2, k3 exp(-d)-1+d, abs |d|, full the KL"
        " between whole distributions; k1+ and k3+ use the gradient of k2; kl is k1, mse k2,"
        " low_var_kl k3.",
        only_if=(REFERENCE, KL_ESTIMATED),
    )
    kl_loss_estimator: (
        Literal["k2", "k3", "abs", "full", "k1+", "k3+", "mse", "low_var_kl"] | None
    ) = flag(
        None,
        "Estimator of the KL loss; not k1, whose expected gradient is zero. None: --kl_estimator.",
        only_if=(given("use_kl_loss"), RL_LOSS),
    )
    use_unbiased_kl: bool = flag(
        False,
        "Multiply the KL loss of each token by its ratio of new to old policy, gradient included:"
        " k1 and k3 then have the unbiased gradient, also in later optimizer steps of a rollout.",
        only_if=(given("use_kl_loss"), RL_LOSS),
    )
    add_token_level_kl: bool = flag(
        False,
        "With --use_kl_loss: also subtract init_kl_coef times the KL from the token rewards.",
        only_if=(given("use_kl_loss"), given("init_kl_coef")),
    )
    kl_full_topk: int = flag(
        128,
        "full compares the reference's K likeliest tokens and all others as one; each token"
        " carries 8 K bytes. 0: the whole vocabulary, from hidden states of the reference and a"
        " copy of its output head.",
        bounds=">= 0",
        only_if=FULL_KL,
    )
    log_ref_kl: bool = flag(
        False, "Load the reference only to log the KL to it.", only_if=NO_KL_TERM
    )
    kl_target: float | None = flag(
        None,
        "Target of the adaptive KL controller. None: the coefficient is fixed.",
        bounds="> 0",
        only_if=(KL_TERM, KL_CONTROLLED),
    )
    kl_horizon: int = flag(
        10000,
        "Samples over which the adaptive controller corrects.",
        bounds="> 0",
        only_if=given("kl_target"),
    )

    @property
    def in_reward(self) -> bool:
        return self.init_kl_coef > 0 and (self.add_token_level_kl or not self.use_kl_loss)

    @property
    def in_loss(self) -> bool:
        return self.use_kl_loss and (self.kl_loss_coef or self.init_kl_coef) > 0

    @property
    def controlled(self) -> bool:
        """Whether a term takes its coefficient from the controller, from --init_kl_coef on."""
        return self.in_reward or (self.in_loss and self.kl_loss_coef is None)

    @property
    def loss_estimator(self) -> str:
        return self.kl_loss_estimator or self.kl_estimator

    @property
    def measured_estimator(self) -> str:
        """The estimator that `actor/kl` shows: the loss's if the KL is only there."""
        only_in_loss = self.in_loss and not self.in_reward
        return self.loss_estimator if only_in_loss else self.kl_estimator

    @property
    def needs_reference(self) -> bool:
        return self.in_reward or self.in_loss or self.log_ref_kl

    @property
    def full_top_k(self) -> int | None:
        """--kl_full_topk if some estimator compares whole distributions, else None."""
        used = {self.measured_estimator} if self.needs_reference else set()
        used |= {self.loss_estimator} if self.in_loss else set()
        return self.kl_full_topk if "full" in used else None
