"""What is checked of the models of other roles against the policy's tokens, before a run starts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from openrl.config.commands import PPOConfig, SFTConfig
from openrl.config.teacher_plan import teacher_plan
from openrl.data.privileged import GAP, Hints
from openrl.errors import UserError, short
from openrl.models.stored import check_language_model, check_length, load_config
from openrl.trainer.learning.teacher_server import check_teacher_server
from openrl.types import Prompt
from openrl.vision.processor import sees


def check_teachers(
    config: PPOConfig, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise UserError if a teacher cannot give log-probs of the policy's tokens, or if a data
    source of --teacher_routing has no rows."""
    flags, plan = config.teacher, teacher_plan(config.teacher)
    for path in plan.of("model"):
        check_teacher(config, path, tokenizer)
    flag = "teacher_url" if flags.teacher_url else "teacher_routing"
    for url in plan.of("server"):
        check_teacher_server(flag, url, flags, longest_read(config, prompts, tokenizer), tokenizer)
    check_sources("teacher_routing", {t.source for t in plan.teachers if t.source}, prompts)


def check_sources(flag: str, named: Iterable[str], prompts: list[Prompt]) -> None:
    """Raise UserError if ``flag`` names a data source that no prompt is of."""
    there = {prompt.source for prompt in prompts}
    if there and (absent := sorted({*named} - there)):
        message = f"--{flag}: no row is of the data source {absent[0]}"
        raise UserError(message, f"one of {', '.join(sorted(there))}, by --datasource_key")


def check_teacher(
    config: PPOConfig | SFTConfig, path: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise UserError if the model at ``path`` cannot give log-probs of the policy's tokens: if it
    has other tokens, or fewer, or does not see the images."""
    trusted = config.model.trust_remote_code
    flag = "teacher_pretrain" if config.teacher.teacher_pretrain else "teacher_routing"
    check_language_model(path, trusted)
    fix = "a teacher of the policy's family: it is asked about tokens, not about text"
    check_same_tokens(path, tokenizer, trusted, flag, fix)
    if config.vision.max_images_per_prompt and not sees(load_config(path, trusted)):
        message = f"--{flag}: {path} reads only text, but prompts have images"
        raise UserError(message, "a vision-language teacher")
    teacher_size, policy_size = (
        load_config(name, trusted).get_text_config().vocab_size
        for name in (path, config.model.pretrain)
    )
    if (highest := max(tokenizer.get_vocab().values())) >= teacher_size:
        raise UserError(
            f"--{flag}: {path} knows {teacher_size} tokens, but the policy's tokenizer has"
            f" token {highest}",
            fix,
        )
    if config.teacher.top_k == 0 and teacher_size != policy_size:
        raise UserError(
            f"--teacher_topk 0: the output head of {path} has {teacher_size} tokens, that of the"
            f" policy {policy_size}",
            "--teacher_topk 128",
        )


def longest_read(
    config: PPOConfig, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase
) -> int:
    """Return the most tokens of a row as a teacher reads it, with what it is told. The marks and
    places in the template count, too: that leaves room for tokens that end where texts meet."""
    told = [p for p in prompts if p.privileged]
    added = [len(p.privileged.token_ids) - len(p.token_ids) for p in told if p.privileged]
    hints = Hints.of(config.teacher, config.templates.apply_chat_template)
    late = GAP.join(hints.late.values()) if hints else ""
    places = sum(late.count(f"{{{name}}}") for name in config.teacher.teacher_hindsight)
    hindsight = places * config.sampling.lengths.response
    hindsight += len(tokenizer(late, add_special_tokens=False).input_ids)
    return config.sampling.lengths.both + max([0, *added]) + hindsight


def check_privileged(
    config: PPOConfig, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise UserError if no prompt has a hint for the teacher, or if an answer after the longest
    prompt with one would be too long for the model that reads it."""
    key, told = config.teacher.teacher_prompt_key, [p.privileged for p in prompts if p.privileged]
    if not config.teacher.privileged:
        return
    if not told:
        raise UserError(
            f"--teacher_prompt_key: {key!r} is empty in every row, so no row has a teacher",
            "a column with hints",
        )
    longest = longest_read(config, prompts, tokenizer)
    flag = "teacher_prompt_key" if key else "teacher_hindsight"
    rows = f"--{flag}: prompt with the longest hint and response"
    plan, policy = teacher_plan(config.teacher), config.model.pretrain
    readers = plan.of("model") + ([policy] if plan.own else [])
    for path in readers:
        trusted = config.model.trust_remote_code
        overrides = config.changes.model_config_overrides if path == policy else {}
        check_length(path, longest, trusted, rows, "shorter hints or answers".format, overrides)
    dynamic, name = config.dynamic, "rollout_max_tokens_per_gpu"
    cap = dynamic.rollout_max_tokens_per_gpu or dynamic.train_max_tokens_per_gpu
    cap *= config.parallel.sequence_size
    if readers and dynamic.use_dynamic_batch and cap < longest:
        raise UserError(
            f"--{flag}: with the longest hint, prompt and answer may have {longest}"
            f" tokens, more than the {cap} of a micro-batch",
            f"--{name} {longest}",
        )


def check_same_tokens(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool = False,
    flag: str = "reward_pretrain",
    fix: str = (
        "a reward model of the policy's family, or serve_rm and --remote_rm_url: a server reads"
        " text"
    ),
) -> None:
    """Raise UserError if the policy's token ids mean other tokens to the model at ``path``, which
    ``flag`` names. Ids that only one of them uses are not compared, nor is that of padding, which
    no text holds. Warns if there is no tokenizer to compare."""
    try:
        actual = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code
        ).get_vocab()
    except Exception as error:  # there is no tokenizer, or none that loads
        warnings.warn(
            f"--{flag}: {path} has no tokenizer that loads, so nobody compares its tokens"
            f" with the policy's: {short(error)}",
            stacklevel=2,
        )
        return
    expected = tokenizer.get_vocab()
    there = {number: token for token, number in actual.items()}
    differing = [
        token
        for token, number in expected.items()
        if actual.get(token, number) != number
        or (there.get(number, token) != token and number != tokenizer.pad_token_id)
    ]
    if differing:
        token, number = min(differing), expected[min(differing)]
        said = f"{token!r} is token {actual.get(token)} there and {number} here"
        if token not in actual:
            said = f"token {number} is {there[number]!r} there and {token!r} here"
        raise UserError(
            f"--{flag}: {path} and the policy have different tokenizers: {said}"
            f" ({len(differing)} tokens differ)",
            fix,
        )
