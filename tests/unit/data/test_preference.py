"""Rows of compared and rated answers: what is learned, what is left out, and how pairs stay
together."""

import math
from functools import partial

import pytest
import torch
from datasets import Dataset

from openrl.algorithms.batching import plan_pairs
from openrl.config.groups.data import PreferenceDataFlags, TemplateFlags
from openrl.data.loading import RowSource
from openrl.data.preference import (
    PairBuilder,
    RatedBuilder,
    add_ref_logprobs,
    collate_preferences,
    pair_mismatched,
)
from openrl.data.supervised import SupervisedRow
from openrl.errors import UserError
from tests.tiny import PAD, tiny_tokenizer
from tests.unit.data.test_supervised import CHAT, learned, text

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
with_margins = partial(PairBuilder, margins=True)


def build(rows, builder=PairBuilder, template=None, max_len=50, **flags):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    flags = PreferenceDataFlags(dataset="d", max_len=max_len, **{"prompt_key": "prompt"} | flags)
    around = TemplateFlags(apply_chat_template=template is not None)
    sources = [RowSource("rows.jsonl", "default", Dataset.from_list(rows))]
    (examples,), (report,) = builder(flags, around, tokenizer).build(sources)
    return examples, report


def test_the_answers_of_a_pair_are_learned_and_the_prompt_is_not():
    (pair,), report = build([PAIR])
    assert [text(r) for r in pair.rows] == ["1+1=2<eos>", "1+1=3<eos>"]
    assert [learned(r) for r in pair.rows] == ["2<eos>", "3<eos>"]
    assert report == "rows.jsonl: 1 pairs, 4 tokens to train on"


def test_chats_with_and_without_a_column_of_prompts():
    user, good, bad = (
        {"role": r, "content": c}
        for r, c in (("user", "1"), ("assistant", "2"), ("assistant", "3"))
    )
    rows = [{"prompt": [user], "chosen": [good], "rejected": [bad]}]
    whole = [{"chosen": [user, good], "rejected": [user, bad]}]
    for examples, _ in (build(rows, template=CHAT), build(whole, template=CHAT, prompt_key=None)):
        assert [text(r) for r in examples[0].rows] == ["u(1)a(2<eos>", "u(1)a(3<eos>"]
        assert learned(examples[0].rows[0]) == "2<eos>"
    with pytest.raises(UserError, match="row 0: chosen does not end with an assistant message"):
        build([{"chosen": [good, user], "rejected": [user, bad]}], template=CHAT, prompt_key=None)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_an_answer_may_be_text_beside_a_chat_that_holds_the_other(side):
    """As ms-swift's column rejected_response."""
    user, good, bad = (
        {"role": r, "content": c}
        for r, c in (("user", "1"), ("assistant", "2"), ("assistant", "3"))
    )
    row = {"chosen": [user, good], "rejected": [user, bad]}
    row[side] = row[side][-1]["content"]
    (example,), _ = build([row], template=CHAT, prompt_key=None)
    assert [text(r) for r in example.rows] == ["u(1)a(2<eos>", "u(1)a(3<eos>"]
    assert [learned(r) for r in example.rows] == ["2<eos>", "3<eos>"]
    other = {"chosen": "rejected", "rejected": "chosen"}[side]
    row[other] = row[other][-1:]  # the chat has no prompt either
    with pytest.raises(UserError, match=r"(is text|asks before the answer): give --prompt_key"):
        build([row], template=CHAT, prompt_key=None)


DIALOGUE = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
DIALOGUES = {"chosen": DIALOGUE, "rejected": DIALOGUE}


@pytest.mark.parametrize("key", ["prompt", "chosen", "rejected"])
@pytest.mark.parametrize("empty", [None, "", []])
def test_an_empty_cell_is_named(key, empty):
    for template in (None, CHAT):
        with pytest.raises(UserError, match=f"row 0: {key}: empty"):
            build([PAIR | {key: empty}], template=template)
    if key != "prompt":
        with pytest.raises(UserError, match=f"row 0: {key}: empty"):
            build([DIALOGUES | {key: empty}], template=CHAT, prompt_key=None)


def test_an_answer_that_says_nothing_is_named():
    silent = [DIALOGUE[0], {"role": "assistant", "content": ""}]
    with pytest.raises(UserError, match="row 0: rejected: the last message is empty"):
        build([DIALOGUES | {"rejected": silent}], template=CHAT, prompt_key=None)


def test_pairs_that_cannot_be_told_apart_are_left_out_and_counted():
    rows = [
        PAIR,
        {**PAIR, "rejected": "2"},
        {**PAIR, "prompt": "1" * 20},
        {**PAIR, "chosen": "2 and more"},
    ]
    examples, report = build(rows, max_len=8)
    assert [text(e.rows[0]) for e in examples] == ["1+1=2<eos>", "1+1=2 an"]
    assert (
        report
        == "rows.jsonl: 2 pairs, 10 tokens to train on; 1 cut at --max_len 8; 1 of 4 left out"
        " because the prompt already fills --max_len 8; 1 of 4 left out because chosen and rejected"
        " answers are the same tokens"
    )
    with pytest.raises(UserError, match="no tokens are left to train on"):
        build([{**PAIR, "rejected": "2"}])


def test_margins_and_ratings_are_checked_row_by_row():
    assert build([{**PAIR, "margin": 1}], with_margins)[0][0].margin == 1.0
    with pytest.raises(UserError, match="row 1: margin is not a number"):
        build([{**PAIR, "margin": 1.0}, {**PAIR, "margin": None}], with_margins)
    with pytest.raises(UserError, match=r"--margin_loss: rows.jsonl has no key 'margin'"):
        build([PAIR], with_margins)
    rated = [
        {"prompt": str(i), "chosen": "a", "label": label}
        for i, label in enumerate(["true", "0", "False", "1"])
    ]
    assert [e.passed[0] for e in build(rated, RatedBuilder)[0]] == [1, 0, 0, 1]
    for label, kind in ((True, "good"), (False, "bad")):  # as TRL refuses them
        same = [{**row, "label": label} for row in rated]
        with pytest.raises(UserError, match=f"all answers are rated {kind}, and this loss learns"):
            build(same, RatedBuilder)
    with pytest.raises(UserError, match="row 0: label is neither true"):
        build([{"prompt": "1", "chosen": "a", "label": "good"}], RatedBuilder)


def test_pairs_and_rated_answers_lead_to_the_loss_that_reads_them():
    with pytest.raises(UserError, match=r"has pairs of answers.*\n.*try: train_dpo without --loss"):
        build([PAIR], RatedBuilder)
    rated = {"prompt": "1", "completion": "a", "label": True}  # as TRL's KTO
    with pytest.raises(UserError, match=r"single answers with a rating.*\n.*--loss kto"):
        build([rated])
    assert build([{**PAIR, "label": True}])[0]  # a pair may have a label besides
    assert build([{**PAIR, "label": 1}, {**PAIR, "prompt": "9", "label": 0}], RatedBuilder)[0]


def test_mismatched_answers_belong_to_other_prompts():
    rows = [
        {"prompt": p, "chosen": a, "label": a != "b"}
        for p, a in (("1", "a"), ("1", "b"), ("2", "cc"), ("3", "d"))
    ]
    examples, _ = build(rows, RatedBuilder)
    own = {"1": "ab", "2": "c", "3": "d"}
    for example, row in zip(examples, rows, strict=True):
        other = example.rows[1]
        assert text(other)[0] == row["prompt"] and learned(other).endswith("<eos>")
        assert learned(other)[0] not in own[row["prompt"]]
        assert math.isnan(example.passed[1])
    long = [
        SupervisedRow([5, 6, 7, 8], [False, True, True, True]),
        SupervisedRow([9, 9, 8], [False, False, True]),
    ]
    assert pair_mismatched(long, max_len=4)[1] == SupervisedRow(
        [9, 9, 6, 7], [False, False, True, True]
    )
    with pytest.raises(UserError, match="all prompts are equal"):
        build([{**row, "prompt": "1"} for row in rows], RatedBuilder)


def test_batches_keep_pairs_side_by_side():
    examples, _ = build(
        [{**PAIR, "margin": 0.5}, {**PAIR, "prompt": "2+2+2=", "margin": 2.0}], with_margins
    )
    examples = add_ref_logprobs(examples, torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    batch = collate_preferences(examples, PAD)
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.passed.tolist() == [1, 0, 1, 0]
    assert batch.margins.tolist() == [0.5, 0.5, 2, 2]
    assert batch.ref_answers.tolist() == [-1, -2, -3, -4]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 5), (2, 2), (3, 1), (4, 8)])
def test_plans_never_split_a_pair(ranks, micro):
    rows = [{**PAIR, "prompt": "1" * (1 + 7 * i % 11)} for i in range(5)]
    batch = collate_preferences(build(rows)[0], PAD)
    plan = plan_pairs(batch, ranks, micro)
    (step,) = plan.steps
    seen = []
    for shard, of_rank in zip(plan.shards, step, strict=True):
        assert of_rank.counts.trajectories == 5 and of_rank.counts.dp_size == ranks
        for micro_batch in of_rank.micro_batches:
            assert len(micro_batch) <= 2 * micro
            for first, second in zip(micro_batch[0::2], micro_batch[1::2], strict=True):
                assert (first, second) == (-1, -1) or (shard[first] % 2, shard[second]) == (
                    0,
                    shard[first] + 1,
                )
                seen += [shard[first], shard[second]] if first >= 0 else []
    assert sorted(seen) == list(range(10))
    # every rank runs as many collectives
    assert len({len(of_rank.micro_batches) for of_rank in step}) == 1
