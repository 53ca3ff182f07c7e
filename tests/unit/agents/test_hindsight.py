"""What a teacher is told about answers that were scored: token by token, by hand."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from openrl.agents.chat import ChatFormat
from openrl.agents.files.user_code import read_scores
from openrl.agents.hindsight import tell_hindsight
from openrl.algorithms.privileged import privileged_contexts
from openrl.compat.openrlhf.instance import read as read_step
from openrl.config.groups.teacher import TeacherFlags
from openrl.data.privileged import Hints, is_open
from openrl.errors import UserError
from openrl.trainer.planning.other_models import longest_read
from openrl.types import FinishReason, PromptGroup, Score, Segment, Trajectory
from tests.flags import PPO, ppo
from tests.tiny import tiny_tokenizer
from tests.unit.data.test_overflow import CHAT
from tests.unit.data.test_privileged import build

BOTH = ("feedback", "solution")
TEMPLATE = "{prompt}\n\nright: {solution}\n\nbut: {feedback}"


def prompt_of(row, template, key=None, hindsight=BOTH, chat=False):
    (prompt,) = build([row], template, chat, teacher_prompt_key=key, teacher_hindsight=hindsight)
    return prompt


def group_of(prompt, *answers):
    """Answers with (text, passed, feedback), None for one that was never scored."""
    encode = tiny_tokenizer()
    played = [
        Trajectory(
            prompt,
            [Segment.answer(prompt.token_ids, encode(text).input_ids)],
            FinishReason.STOP,
            text,
            score=None if passed is None else Score(passed, passed, feedback=feedback),
        )
        for text, passed, feedback in answers
    ]
    return PromptGroup(prompt, played)


def told(group, template, key=None, hindsight=BOTH, chat=False, limit=99):
    """The text that the teacher reads before each answer, None without a teacher."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT if chat else None
    flags = TeacherFlags(
        teacher_prompt_key=key, teacher_hindsight=hindsight, teacher_template=template
    )
    form = ChatFormat(tokenizer, chat=chat, kwargs={})
    tell_hindsight(Hints.of(flags, chat), group.trajectories, form, limit)
    texts = []
    for context, trajectory in zip(privileged_contexts([group]), group.trajectories, strict=True):
        texts.append(context and tokenizer.decode(context.token_ids))
        if context:
            assert context.length == len(trajectory.prompt.token_ids)
            assert context.token_ids == tokenizer(texts[-1]).input_ids
    return texts


def test_each_answer_gets_its_own_feedback_and_a_sibling_that_passed():
    group = group_of(
        prompt_of({"input": "3+4"}, TEMPLATE),
        ("8", 0.0, "too big"),
        ("7", 1.0, ""),
        ("5", 0.0, ""),
        ("07", 1.0, "no zero"),
    )
    assert told(group, TEMPLATE) == [
        "3+4\n\nright: 7\n\nbut: too big",
        "3+4\n\nright: 07",  # never itself
        "3+4\n\nright: 7",
        "3+4\n\nright: 7\n\nbut: no zero",
    ]


def test_an_answer_about_which_nothing_is_told_has_no_teacher():
    group = group_of(
        prompt_of({"input": "3+4"}, TEMPLATE), ("8", 0.0, " "), ("7", 0.0, "far"), ("1", None, "")
    )
    assert told(group, TEMPLATE) == [None, "3+4\n\nbut: far", None]


def test_a_hint_of_the_row_is_told_to_all_and_hindsight_beside_it():
    template = "it is {hint}.\n\n{prompt}\n\n{feedback}"
    row = {"input": "3+4", "hint": "7"}
    hint = {"key": "hint", "hindsight": ("feedback",)}
    group = group_of(prompt_of(row, template, **hint), ("8", 0.0, "no"), ("7", 1.0, ""))
    assert told(group, template, **hint) == ["it is 7.\n\n3+4\n\nno", "it is 7.\n\n3+4"]
    group = group_of(prompt_of(row | {"hint": ""}, template, **hint), ("8", 0, "no"), ("7", 1, ""))
    assert told(group, template, **hint) == ["3+4\n\nno", None]


def test_a_chat_is_told_in_its_last_message_or_as_the_system():
    row = {"input": [{"role": "user", "content": "3+4"}]}
    answers = ("8", 0.0, "no"), ("7", 1.0, "")
    group = group_of(prompt_of(row, TEMPLATE, chat=True), *answers)
    assert told(group, TEMPLATE, chat=True) == [
        "u(3+4\n\nright: 7\n\nbut: no)a(",
        None,
    ]
    system = "{feedback}\n\nthink."
    group = group_of(prompt_of(row, system, hindsight=("feedback",), chat=True), *answers)
    assert told(group, system, hindsight=("feedback",), chat=True) == [
        "s(no\n\nthink.)u(3+4)a(",
        None,
    ]


def test_what_is_told_may_hold_the_places_of_the_template():
    hints = Hints.of(TeacherFlags(teacher_hindsight=BOTH, teacher_template=TEMPLATE), False)
    said = hints.finish(hints.fill(None, "q"), {"feedback": "{solution}", "solution": "{feedback}"})
    assert said == "q\n\nright: {feedback}\n\nbut: {solution}"


def test_what_is_told_is_cut_to_the_longest_answer():
    group = group_of(prompt_of({"input": "3+4"}, TEMPLATE), ("8", 0.0, "123456789"))
    assert told(group, TEMPLATE, limit=4) == ["3+4\n\nbut: 1234"]


def test_half_a_letter_of_what_is_cut_does_not_become_more_tokens_than_fit():
    """Three bytes of two letters that have two each are a letter and U+FFFD, which has three."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    form = ChatFormat(PreTrainedTokenizerFast(tokenizer_object=byte_level), chat=False, kwargs={})
    group = group_of(prompt_of({"input": "3+4"}, TEMPLATE), ("8", 0.0, "\u00e9\u00e9"))
    hints = Hints.of(TeacherFlags(teacher_hindsight=BOTH, teacher_template=TEMPLATE), False)
    tell_hindsight(hints, group.trajectories, form, 3)
    (context,) = privileged_contexts([group])
    assert context and form.tokenizer.decode(context.token_ids) == "3+4\n\nbut: \u00e9"


def test_no_row_is_longer_than_what_is_checked_before_the_start():
    template = "{prompt}\n\n" + "what a judge of answers says of yours: {feedback}"
    prompt = prompt_of({"input": "3+4"}, template, hindsight=("feedback",))
    words = f"{PPO} --teacher_pretrain t --prompt_max_len 3 --generate_max_len 8"
    words += " --teacher_hindsight feedback --teacher_template"
    checked = longest_read(ppo([*words.split(), template]), [prompt], tiny_tokenizer())
    group = group_of(prompt, ("8", 0.0, "1" * 99))
    tell_hindsight(
        Hints.of(TeacherFlags(teacher_hindsight=("feedback",), teacher_template=template), False),
        group.trajectories,
        ChatFormat(tiny_tokenizer(), chat=False, kwargs={}),
        8,
    )
    (context,) = privileged_contexts([group])
    assert context and context.token_ids[-8:] == tiny_tokenizer()("1" * 8).input_ids
    assert len(context.token_ids) + 8 <= checked < len(context.token_ids) + 8 + 40


def test_icons_of_a_text_are_no_marks():
    """They are characters for private use, as those of the marks."""
    icons = "".join(map(chr, range(0xE000, 0xE010)))
    hints = Hints.of(TeacherFlags(teacher_prompt_key="hint", teacher_hindsight=BOTH,
                                  teacher_template="{hint}\n\n" + TEMPLATE), False)  # fmt: skip
    said = hints.finish(hints.fill("H" + icons, "q" + icons), {"feedback": "F", "solution": ""})
    assert said == f"H{icons}\n\nq{icons}\n\nbut: F"
    assert hints.finish(hints.fill("H" + icons, "q"), {}) == f"H{icons}\n\nq"
    assert not is_open(icons) and is_open(hints.fill(None, "q"))


@pytest.mark.parametrize(
    "template, problem",
    [
        ("{prompt}\n\n{solution}", "no place for {feedback}"),
        ("{prompt} {solution}\n\n{feedback}", "left out if its place is empty"),
    ],
)
def test_templates_without_room_are_refused(template, problem):
    with pytest.raises(UserError, match=problem):
        Hints.of(TeacherFlags(teacher_hindsight=BOTH, teacher_template=template), False)


def test_what_agents_say_in_their_logs_is_feedback():
    """As in the extra_logs of rewards: the text is told, its numbers are metrics."""
    logs = {"feedback": "17 is odd", "steps": 2}
    played = read_scores({"reward": 0.5, "scores": 1, "extra_logs": logs})
    assert (played.feedback, dict(played.metrics)) == ("17 is odd", {"steps": 2.0})
    assert read_scores({"reward": 0.5, "extra_logs": {"feedback": 3}}).feedback == ""
    found = {"rewards": 0.5, "environment_feedback": "again", "done": True, "extra_logs": logs}
    step, _ = read_step(found)
    assert (step.feedback, step.metrics) == ("17 is odd", {"steps": 2.0})
