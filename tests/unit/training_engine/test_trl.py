"""TRL's trainers and ours on the same tiny model and rows: equal losses where the definitions
agree, and where not, why.

TRL is asked through its trainers' ``compute_loss``, on batches of their own data loaders.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from openrl.algorithms.batching import plan_pairs, plan_steps
from openrl.algorithms.masked import masked_mean, masked_sum
from openrl.algorithms.preference_losses import (
    DPOOptions,
    KTOOptions,
    ReferenceOptions,
    SimPOOptions,
    orpo,
    simpo,
    split_pairs,
)
from openrl.config.groups.data import PreferenceDataFlags, SupervisedDataFlags, TemplateFlags
from openrl.config.groups.model import ModelFlags
from openrl.data.loading import RowSource
from openrl.data.preference import (
    PairBuilder,
    RatedBuilder,
    add_ref_logprobs,
    collate_preferences,
)
from openrl.data.supervised import SupervisedBuilder, collate_rows
from openrl.experience import AnswerInputs
from openrl.models.causal_lm import Loading, load_causal_lm
from openrl.models.scalar_model import RewardModel, load_scalar_model
from openrl.training_engine.preference_updates import PairRewardUpdate, PreferenceUpdate
from openrl.training_engine.updates import SupervisedUpdate
from tests.tiny import PAD, tiny_model_dir, tiny_tokenizer

PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 0.5},
    {"prompt": "the sum of 4 and 5 is", "chosen": " 9", "rejected": " not known", "margin": 1.0},
    {"prompt": "2*3=", "chosen": "6 of course", "rejected": "5", "margin": 0.0},
    {"prompt": "9-9:", "chosen": "0", "rejected": "9 and 9", "margin": 2.0},
]
RATED = [
    {"prompt": p["prompt"], "completion": p["chosen"], "label": i % 3 != 0}
    for i, p in enumerate(PAIRS)
]
BETA = 0.7


@pytest.fixture(scope="module", autouse=True)
def no_launcher():
    """Other tests' process groups leave $LOCAL_RANK behind, by which accelerate takes this process
    for a launcher's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_RANK", raising=False)
        yield


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("trl")
    return SimpleNamespace(
        policy=tiny_model_dir(root), reference=tiny_model_dir(root, seed=1), out=root / "out"
    )


def trl_loss(trainer_class, config_class, places, rows, **options):
    """(loss, batch, trainer); ``options`` with a model in them go to the trainer, the others to its
    config."""
    of_trainer = {}
    if "ref_model" in options:
        reference = AutoModelForCausalLM.from_pretrained(
            options.pop("ref_model"), dtype=torch.float32
        )
        of_trainer = {"ref_model": reference}
    model = options.pop("model", str(places.policy))
    shared = {
        "output_dir": str(places.out),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
    }
    shared |= {
        "per_device_train_batch_size": len(rows),
        "max_length": 64,
        "gradient_checkpointing": False,
    }
    config = config_class(**shared | options)
    trainer = trainer_class(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
        **of_trainer,
    )
    trainer.model.eval()
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(rows))])
    return float(trainer.compute_loss(trainer.model, dict(batch)).detach()), batch, trainer


def ours(builder, rows, **changes):
    flags = PreferenceDataFlags(dataset="d", prompt_key="prompt", max_len=64, **changes)
    (examples,), _ = builder(flags, TemplateFlags(), tiny_tokenizer()).build(
        [RowSource("rows", "default", Dataset.from_list(rows))]
    )
    return examples


@pytest.fixture(scope="module")
def models(places):
    def load(path):
        flags = ModelFlags(pretrain=str(path), param_dtype="fp32")
        return load_causal_lm(str(path), Loading(flags, "cpu"), temperature=1.0, chunk_size=7)

    return SimpleNamespace(policy=load(places.policy), reference=load(places.reference))


@torch.no_grad()
def logprobs(model, batch):
    return model(batch.token_ids, batch.attention_mask)[0]


def answers(model, batch, reduced=masked_sum):
    return reduced(logprobs(model, batch), batch.loss_mask, -1)


def loss_of(update, model, batch, plan):
    with torch.no_grad():
        parts = [
            update(
                lambda b: model(b.token_ids, b.attention_mask),
                batch.select(rows),
                plan.steps[0][0].counts,
            )
            for rows in plan.steps[0][0].micro_batches
        ]
    return sum(float(loss) for loss, _ in parts)


@pytest.fixture(scope="module")
def pairs(models):
    """The batch of pairs with the reference's log-probs."""
    examples = ours(PairBuilder, PAIRS)
    reference = answers(models.reference, collate_preferences(examples, PAD))
    return collate_preferences(add_ref_logprobs(examples, reference), PAD)


def pair_loss(models, pairs, *update):
    return loss_of(PreferenceUpdate(*update), models.policy, pairs, plan_pairs(pairs, 1, 2))


def test_sft(places, models):
    rows = [{"prompt": p["prompt"], "completion": p["chosen"]} for p in PAIRS]
    expected, batch, _ = trl_loss(SFTTrainer, SFTConfig, places, rows, completion_only_loss=True)
    flags = SupervisedDataFlags(
        dataset="d", input_key="prompt", output_key="completion", max_len=64
    )
    (examples,), _ = SupervisedBuilder(flags, TemplateFlags(), tiny_tokenizer()).build(
        [RowSource("rows", "default", Dataset.from_list(rows))]
    )
    mine = collate_rows(examples, PAD)
    assert torch.equal(mine.token_ids, batch["input_ids"])
    assert torch.equal(mine.loss_mask, batch["labels"] != -100)
    assert loss_of(
        SupervisedUpdate(), models.policy, mine, plan_steps(mine, 1, 4, 2)
    ) == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def reward_model_dir(places):
    """A reward model with a head far from zero."""
    model = AutoModelForSequenceClassification.from_pretrained(
        places.policy, num_labels=1, dtype=torch.float32
    )
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(1, 64, generator=torch.Generator().manual_seed(0)) / 8)
    model.config.pad_token_id = PAD
    model.save_pretrained(places.out / "rm")
    return places.out / "rm"


@pytest.mark.parametrize("margin", [False, True])
def test_reward_model(places, reward_model_dir, margin):
    keys = (
        ("prompt", "chosen", "rejected", "margin") if margin else ("prompt", "chosen", "rejected")
    )
    rows = [{key: pair[key] for key in keys} for pair in PAIRS]
    expected, _, _ = trl_loss(
        RewardTrainer, RewardConfig, places, rows, model=str(reward_model_dir)
    )
    flags = ModelFlags(pretrain=str(reward_model_dir), param_dtype="fp32")
    model = load_scalar_model(RewardModel, str(reward_model_dir), Loading(flags, "cpu"), "score")
    batch = collate_preferences(ours(partial(PairBuilder, margins=margin), PAIRS), PAD)
    found = loss_of(PairRewardUpdate("sigmoid", margin), model, batch, plan_pairs(batch, 1, 3))
    assert found == pytest.approx(expected, abs=1e-5)


def test_dpo(places, models, pairs):
    expected, batch, _ = trl_loss(
        DPOTrainer, DPOConfig, places, PAIRS, ref_model=places.reference, beta=BETA
    )
    assert torch.equal(torch.cat(split_pairs(pairs.token_ids)), batch["input_ids"])
    assert pair_loss(models, pairs, "dpo", DPOOptions(), BETA) == pytest.approx(expected, abs=1e-5)


def test_label_smoothing_is_cdpo_here_and_ignored_by_trl(places, models, pairs):
    """TRL's sigmoid loss does not read label_smoothing; its "robust" loss is another one (it
    divides by 1 - 2 eps)."""
    trl, _, _ = trl_loss(
        DPOTrainer,
        DPOConfig,
        places,
        PAIRS,
        ref_model=places.reference,
        beta=BETA,
        label_smoothing=0.2,
    )
    plain, smoothed = (
        pair_loss(models, pairs, "dpo", DPOOptions(label_smoothing=eps), BETA) for eps in (0.0, 0.2)
    )
    assert trl == pytest.approx(plain, abs=1e-5)
    logits = BETA * torch.sub(*split_pairs(answers(models.policy, pairs) - pairs.ref_answers))
    # -log sigmoid of the flipped label
    flipped = float(torch.nn.functional.softplus(logits).mean())
    assert smoothed == pytest.approx(0.8 * plain + 0.2 * flipped, rel=1e-5)
    assert abs(smoothed - trl) > 0.01


def test_ipo_is_on_sums_as_in_the_paper_and_on_means_in_trl(places, models, pairs):
    expected, _, _ = trl_loss(
        DPOTrainer,
        DPOConfig,
        places,
        PAIRS,
        ref_model=places.reference,
        beta=BETA,
        loss_type=["ipo"],
    )
    ratios = answers(models.policy, pairs) - pairs.ref_answers
    lengths = pairs.loss_mask.sum(-1)
    by_mean = torch.sub(*split_pairs(ratios / lengths)) - 1 / (2 * BETA)
    assert float(by_mean.square().mean()) == pytest.approx(expected, abs=1e-5)
    by_sum = torch.sub(*split_pairs(ratios)) - 1 / (2 * BETA)
    assert pair_loss(models, pairs, "ipo", ReferenceOptions(), BETA) == pytest.approx(
        float(by_sum.square().mean()), rel=1e-5
    )


def test_nll_term_averages_answers_here_and_tokens_in_trl(places, models, pairs):
    expected, _, _ = trl_loss(
        DPOTrainer, DPOConfig, places, PAIRS, ref_model=places.reference, beta=BETA,
        loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.3],
    )  # fmt: skip
    chosen, mask = (
        split_pairs(column)[0] for column in (logprobs(models.policy, pairs), pairs.loss_mask)
    )
    plain = pair_loss(models, pairs, "dpo", DPOOptions(), BETA)
    assert plain - 0.3 * float(chosen[mask].mean()) == pytest.approx(expected, abs=1e-5)
    by_answer = masked_mean(chosen, mask, -1).mean()
    assert pair_loss(models, pairs, "dpo", DPOOptions(), BETA, 0.3) == pytest.approx(
        plain - 0.3 * float(by_answer)
    )


def test_kto(places, models):
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.6}
    expected, batch, _ = trl_loss(
        KTOTrainer, KTOConfig, places, RATED, ref_model=places.reference, beta=BETA, **weights
    )
    examples = ours(RatedBuilder, RATED, chosen_key="completion")
    batches = collate_preferences(examples, PAD)
    reference = answers(models.reference, batches)
    mine = collate_preferences(add_ref_logprobs(examples, reference), PAD).select([0, 2, 4, 6])
    assert torch.equal(mine.token_ids, batch["input_ids"])
    # TRL pairs each prompt with the answer of the row before in its batch; the KL of those very
    # pairs:
    ids, mask = batch["KL_input_ids"], batch["KL_completion_mask"].bool()
    with torch.no_grad():
        columns = [
            m(ids, batch["KL_attention_mask"].bool())[0] for m in (models.policy, models.reference)
        ]
    kl = masked_sum(columns[0] - columns[1], mask, -1).mean().clamp(min=0)
    mine = mine.replace(kl=kl.expand(4).clone())
    options = KTOOptions(desirable_loss_weight=1.3, undesirable_loss_weight=0.6)
    found = loss_of(
        PreferenceUpdate("kto", options, BETA), models.policy, mine, plan_steps(mine, 1, 4, 3)
    )
    assert found == pytest.approx(expected, abs=1e-5)


def test_orpo_and_simpo(models, pairs):
    """TRL keeps them under trl.experimental; asked through the method that computes the loss of
    given log-probs.

    TRL's ORPO adds the likelihood of prompt and answer together; the paper's is that of the answer,
    as here."""
    means = answers(models.policy, pairs, masked_mean)
    chosen, rejected = split_pairs(means)
    unread = torch.full_like(means, torch.nan)
    given = AnswerInputs(unread, means, unread, pairs.passed, BETA)
    trainer = SimpleNamespace(
        beta=BETA,
        accelerator=SimpleNamespace(device="cpu"),
        simpo_gamma=0.4,
        label_smoothing=0,
        loss_type="simpo",
    )
    ratio, *_ = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)
    torch.testing.assert_close(orpo(given, None).losses, -chosen - ratio, rtol=0, atol=1e-5)
    trainer.alpha = 0.0
    expected, *_ = CPOTrainer.cpo_loss(trainer, chosen, rejected)
    found = simpo(given, SimPOOptions(simpo_gamma=0.4)).losses
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
