import json

import pytest
import torch

from openrl.algorithms.collate import turn_ids
from openrl.errors import UserError
from openrl.experience import ExperienceBatch, StepCounts
from openrl.trainer.planning.other_models import check_privileged, check_teacher
from openrl.training_engine.updates import PolicyUpdate
from openrl.types import Prompt
from tests.flags import ppo
from tests.tiny import tiny_model_dir, tiny_tokenizer

OWN = torch.tensor([[0.0, -1.0, -2.0], [0.0, -0.5, 0.0]])
TEACHER = torch.tensor([[0.0, -0.5, -4.0], [0.0, -1.5, float("nan")]])


def a_batch():
    mask = torch.tensor([[False, True, True], [False, True, False]])
    return ExperienceBatch(
        token_ids=torch.ones(2, 3, dtype=torch.long),
        attention_mask=torch.ones(2, 3, dtype=torch.bool),
        loss_mask=mask,
        trajectory_ids=torch.arange(2),
        group_ids=torch.zeros(2, dtype=torch.long),
        rollout_logprobs=OWN,
        rewards=torch.zeros(2),
        truncated=torch.zeros(2, dtype=torch.bool),
        passed=torch.full((2,), float("nan")),
        turn_ids=turn_ids(mask),
        sources=["", ""],
        advantages=torch.tensor([[0.0, 1.0, 1.0], [0.0, -1.0, 0.0]]),
        teacher_logprobs=TEACHER,
    )


def gradient_of(update, batch):
    """d loss / d log-prob of each token, and the metrics."""
    logprobs = OWN.clone().requires_grad_()

    def forward(batch, *outputs):
        return logprobs, dict.fromkeys(outputs, logprobs * 3)

    loss, metrics = update(forward, batch, StepCounts(3, 2, 1))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return gradient, metrics


def test_the_teachers_advantage_by_hand():
    """log q - log p is 0.5, -2 and -1; with half of it, advantages are 1.25, 0 and -1.5. The loss
    is minus their mean product with log p, and nothing reads what is not trained."""
    update = PolicyUpdate("gpg", None, "token-mean", teacher_coef=0.5, teacher_mode="advantage")
    gradient, metrics = gradient_of(update, a_batch())
    expected = torch.tensor([[0.0, -1.25, 0.0], [0.0, 1.5, 0.0]]) / 3
    torch.testing.assert_close(gradient, expected)
    assert metrics["teacher_kl"].value == pytest.approx((-0.5 + 2 + 1) / 3)


def test_weights_of_rows_scale_what_they_learn():
    weights = torch.tensor([2.0, 0.0])
    update = PolicyUpdate("gpg", None, "token-mean", teacher_coef=0.5, teacher_mode="advantage")
    gradient, _ = gradient_of(update, a_batch().replace(teacher_weights=weights))
    torch.testing.assert_close(gradient[0], torch.tensor([0.0, -1.5, 1.0]) / 3)
    torch.testing.assert_close(gradient[1], torch.tensor([0.0, 1.0, 0.0]) / 3)


def test_a_divergence_is_a_term_beside_the_policy_loss():
    """It is 3 log p here, so 0.5 times its mean adds 1.5 / 3 to each trained token."""
    update = PolicyUpdate("gpg", None, "token-mean", teacher_coef=0.5, teacher_mode="jsd")
    gradient, metrics = gradient_of(update, a_batch())
    expected = torch.tensor([[0.0, 0.5, 0.5], [0.0, 2.5, 0.0]]) / 3
    torch.testing.assert_close(gradient, expected)
    assert metrics["teacher_loss"].value == pytest.approx(3 * (-1 - 2 - 0.5) / 3)


def test_rows_without_a_reward_are_computed_for_their_teacher():
    still = a_batch().replace(advantages=torch.zeros(2, 3))
    update = PolicyUpdate("gpg", None, "token-mean", teacher_mode="advantage", teacher_coef=1.0)
    assert update.gradient_rows(still).tolist() == [True, True]
    weighed = still.replace(teacher_weights=torch.tensor([0.0, 1.0]))
    assert update.gradient_rows(weighed).tolist() == [False, True]


def config_of(student, teacher, *words):
    """No reward source is asked for."""
    models = f"--pretrain {student} --teacher_pretrain {teacher} --prompt_data d"
    return ppo(" ".join([models, *words]))


def test_a_teacher_knows_the_policys_tokens(tmp_path):
    student = tiny_model_dir(tmp_path, seed=1)
    tokenizer = tiny_tokenizer()
    check_teacher(config_of(student, student), str(student), tokenizer)
    more = tiny_model_dir(tmp_path, seed=2, vocab_size=tokenizer.vocab_size + 40)
    check_teacher(config_of(student, more), str(more), tokenizer)
    whole = ("--teacher_mode", "jsd", "--teacher_topk", "0")
    with pytest.raises(UserError, match="output head"):
        check_teacher(config_of(student, more, *whole), str(more), tokenizer)
    stranger = tiny_model_dir(tmp_path, seed=4)
    tokens = (stranger / "tokenizer.json").read_text().replace('"z": 40', '"Z": 40')
    (stranger / "tokenizer.json").write_text(tokens)
    with pytest.raises(UserError, match="token 40 is 'Z' there and 'z' here") as caught:
        check_teacher(config_of(student, stranger), str(stranger), tokenizer)
    assert "it is asked about tokens, not about text" in caught.value.remedy
    fewer = tiny_model_dir(tmp_path, seed=3, vocab_size=8)
    with pytest.raises(UserError, match="knows 8 tokens"):
        check_teacher(config_of(student, fewer), str(fewer), tokenizer)


@pytest.mark.parametrize("code, fits", [("start", False), ("http://host:1/v1", True)])
def test_hints_fit_all_models_that_read_them(tmp_path, code, fits):
    """32 tokens of prompt and answer, and 8 of the hint: too many for the policy, which reads them
    only where it is a teacher itself."""
    policy = tiny_model_dir(tmp_path, seed=1, max_position_embeddings=36)
    teacher = tiny_model_dir(tmp_path, seed=2, max_position_embeddings=64)
    routes = tmp_path / "routes.json"
    routes.write_text(json.dumps({"math": {str(teacher): 1}, "code": {code: 1}}))
    words = f"--pretrain {policy} --prompt_data d --teacher_routing {routes}"
    words += " --teacher_prompt_key hint --prompt_max_len 16 --generate_max_len 16"
    told = Prompt("0", [1] * 10, "")
    prompts = [Prompt("0", [1] * 2, "", privileged=told)]
    if fits:
        check_privileged(ppo(words), prompts, tiny_tokenizer())
        return
    with pytest.raises(UserError, match=f"40 tokens in all, and {policy} knows 36"):
        check_privileged(ppo(words), prompts, tiny_tokenizer())
    stretched = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    for name, value in {"max_position_embeddings": 40, "rope_parameters": stretched}.items():
        changed = ppo([*words.split(), "--model_config_overrides", json.dumps({name: value})])
        check_privileged(changed, prompts, tiny_tokenizer())


def test_the_length_of_what_a_server_reads_is_the_servers(tmp_path):
    policy = tiny_model_dir(tmp_path, seed=1, max_position_embeddings=36)
    words = f"--pretrain {policy} --prompt_data d --teacher_url http://host:1/v1"
    words += " --teacher_prompt_key hint --prompt_max_len 16 --generate_max_len 16"
    prompts = [Prompt("0", [1] * 2, "", privileged=Prompt("0", [1] * 10, ""))]
    check_privileged(ppo(words), prompts, tiny_tokenizer())
