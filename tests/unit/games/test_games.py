"""Our own environments: equal seeds make equal games, every game can be won, and rewards are those
of the rules."""

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter, deque
from fractions import Fraction
from itertools import permutations, product

import pytest

from openrl.errors import UserError
from openrl.extension_points import environments
from openrl.flags.settings import read_settings
from openrl.games import base
from openrl.games.base import INVALID, InvalidAction, read_action
from openrl.games.search import search, world

GAMES = {name: {} for name in environments.names()} | {"reasoning_gym": {"task": "chain_sum"}}
DIRECTIONS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}

EPISODES = """
import json
from openrl.extension_points import environments
from openrl.flags.settings import read_settings
shown = {}
for name, settings in json.loads('GAMES').items():
    game = environments[name].component(read_settings(name, environments[name].options, settings))
    actions = ["Up", "Left", "1", "Dragon"]
    for seed in range(5):
        shown[f"{name} {seed}"] = [game.reset(seed)] + [
            game.step(f"<answer>{action}</answer>") for action in actions
        ]
print(json.dumps(shown))
"""


def made(name, **settings):
    entry = environments[name]
    return entry.component(read_settings(name, entry.options, GAMES[name] | settings))


def answer(game, said):
    """(reward, over, success) of a valid action."""
    _, reward, terminated, truncated, info = game.step(f"<answer>{said}</answer>")
    assert info["action_is_valid"]
    return pytest.approx(reward), terminated or truncated, info["success"]


@pytest.mark.full
def test_a_seed_gives_the_same_game_in_every_process():
    program = EPISODES.replace("GAMES", json.dumps(GAMES))
    shown = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]
    assert shown[0] == shown[1]
    first = {name: [turn[0] for turn in turns] for name, turns in json.loads(shown[0]).items()}
    for name in GAMES:
        assert first[f"{name} 3"][0] == made(name).reset(3)[0]
        assert len({first[f"{name} {seed}"][0] for seed in range(5)}) > 1


@pytest.mark.parametrize("name", GAMES)
def test_what_cannot_be_read_leaves_the_game_as_it_was(name):
    game = made(name, max_steps=2)
    shown, info = game.reset(1)
    assert info["state"] == shown and info["env_instruction"] == game.rules
    text, reward, terminated, truncated, info = game.step("I do not know.")
    assert (text, reward, terminated, truncated) == (f"{INVALID}\n{shown}", 0, False, False)
    assert info == {"action_is_valid": False, "success": False, "state": shown, "metrics": {}}
    *_, truncated, info = game.step("<answer></answer>")  # the second of two steps
    assert truncated and (name == "reasoning_gym" or not info["action_is_valid"])


# -- actions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, action",
    [
        ("<answer>Up</answer>", ("answer", "Up")),
        ("so <answer>\n Up </answer> it is", ("answer", "Up")),
        ("<think>no <answer>Down</answer></think><answer>Up</answer>", ("answer", "Up")),
        ("<search>x</search> found it: <answer>y</answer>", ("search", "x")),
        ("<answer>1 < 2</answer>", ("answer", "1 < 2")),
        ("<answer>Up", None),
        ("Up</answer>", None),
        ("<answer>Up <search>x</search>", None),
        ("<tool>Up</tool>", None),
    ],
)
def test_an_action_stands_in_the_first_tag_behind_the_thinking(text, action):
    if action is None:
        with pytest.raises(InvalidAction):
            read_action(text, ("answer", "search"))
    else:
        assert read_action(text, ("answer", "search")) == action


def test_thinking_can_be_asked_for():
    game = made("frozen_lake", think=True, instruction="Think first.")
    assert game.reset(0)[1]["env_instruction"] == "Think first."
    assert not game.step("<answer>Up</answer>")[4]["action_is_valid"]
    assert game.step("<think>hm</think><answer>Up</answer>")[4]["action_is_valid"]
    assert game.step("hm</think><answer>Up</answer>")[4]["action_is_valid"]  # opened by a template


def test_the_system_message_says_the_rules_more_or_nothing():
    def told(**settings):
        return made("frozen_lake", **settings).reset(0)[1]["env_instruction"]

    rules = told()
    assert rules and told(instruction="") == ""
    assert told(instruction="{rules} Be brief.") == f"{rules} Be brief."


def test_unknown_settings_are_named_together():
    with pytest.raises(UserError) as error:
        read_settings(
            "environment frozen_lake",
            environments["frozen_lake"].options,
            {"siez": 5, "frozen": 2, "max_steps": "many"},
        )
    for words in ("'siez', did you mean 'size'?", "frozen: must be (0, 1]", "max_steps: expected"):
        assert words in error.value.message
    with pytest.raises(UserError, match="no task 'chain_some'"):
        made("reasoning_gym", task="chain_some")
    with pytest.raises(UserError, match="config: "):
        made("reasoning_gym", config={"min_terms": 9, "max_terms": 2})


def test_the_example_of_a_game_works():
    indented = [line for line in base.__doc__.split("\n") if not line or line.startswith("    ")]
    names = dict(vars(base), environments=environments)
    exec(textwrap.dedent("\n".join(indented)), names)
    try:
        game = environments["coin"].component(base.GameOptions())
        assert game.reset(0)[0] == "The coin lies under a cup."
        assert game.step("<answer>edge</answer>")[0].startswith("heads or tails?\n")
        assert answer(game, game.side) == (1, True, True)
    finally:
        del environments._entries["coin"]


# -- games on a grid -------------------------------------------------------------------------------


def board(game):
    return [list(row) for row in game.look().split("\n")]


def lake(*rows):
    game = made("frozen_lake", size=len(rows))
    game.reset(0)
    cells = {(r, c): mark for r, row in enumerate(rows) for c, mark in enumerate(row)}
    game.player, game.goal = (next(at for at, m in cells.items() if m == mark) for mark in "PG")
    game.ice = {at for at, mark in cells.items() if mark != "O"}
    return game


def test_every_lake_can_be_crossed():
    lengths = Counter()
    for seed in range(200):
        rows = board_of = [*made("frozen_lake", frozen=0.6).reset(seed)[0].split("\n")]
        start = next((r, row.index("P")) for r, row in enumerate(rows) if "P" in row)
        queue, seen = deque([(start, 0)]), {start}
        while queue:
            (r, c), steps = queue.popleft()
            if board_of[r][c] == "G":
                lengths[steps] += 1
                break
            for dr, dc in DIRECTIONS.values():
                to = (r + dr, c + dc)
                inside = 0 <= to[0] < 4 and 0 <= to[1] < 4
                if inside and rows[to[0]][to[1]] != "O" and to not in seen:
                    seen.add(to)
                    queue.append((to, steps + 1))
        else:
            pytest.fail("no way:\n" + "\n".join(rows))
    assert lengths.total() == 200 and len(lengths) > 3


def test_an_episode_on_the_ice():
    game = lake("P_", "OG")
    assert answer(game, "Left") == (0, False, False)  # the edge
    assert game.step("<answer>left</answer>")[4]["metrics"] == {"action_is_effective": 0}
    assert answer(game, "Right") == (0, False, False)
    assert game.look() == "_P\nOG"
    assert answer(game, "down") == (1, True, True)
    assert game.look() == "__\nO√"
    game = lake("P_", "OG")
    assert answer(game, "Down") == (0, True, False)
    assert game.look() == "__\nXG"


def test_slippery_ice_leads_aside_two_times_of_three():
    game, seen = made("frozen_lake", size=3, slippery=True, max_steps=10_000), Counter()
    game.reset(0)
    game.ice = set(product(range(3), range(3)))
    for _ in range(3000):
        game.player, game.goal = (1, 1), (0, 0)
        game.step("<answer>Right</answer>")
        seen[game.player] += 1
    assert set(seen) == {(1, 2), (0, 1), (2, 1)}
    assert all(900 < count < 1100 for count in seen.values())


def pushes(rows):
    """The fewest moves that bring all boxes onto targets, by trying all."""
    cells = {(r, c): mark for r, row in enumerate(rows) for c, mark in enumerate(row)}
    targets = {at for at, mark in cells.items() if mark in "O√S"}
    player = next(at for at, mark in cells.items() if mark in "PS")
    start = (player, frozenset(at for at, mark in cells.items() if mark in "X√"))
    queue, seen = deque([(start, 0)]), {start}
    while queue:
        ((r, c), boxes), moves = queue.popleft()
        if boxes == targets:
            return moves
        for dr, dc in DIRECTIONS.values():
            to, behind = (r + dr, c + dc), (r + 2 * dr, c + 2 * dc)
            if cells[to] == "#" or (to in boxes and (cells[behind] == "#" or behind in boxes)):
                continue
            state = (to, boxes - {to} | {behind} if to in boxes else boxes)
            if state not in seen:
                seen.add(state)
                queue.append((state, moves + 1))
    return None


@pytest.mark.parametrize("settings", [{}, {"boxes": 2, "moves": 15, "walls": 0.2, "columns": 7}])
def test_every_room_has_a_solution_that_is_short_enough(settings):
    game, lengths = made("sokoban", **settings), Counter()
    for seed in range(100):
        rows = game.reset(seed)[0].split("\n")
        assert Counter("".join(rows))["X"] == settings.get("boxes", 1)  # none is there already
        lengths[pushes(rows)] += 1
    assert None not in lengths and min(lengths) >= 1 and max(lengths) <= settings.get("moves", 10)
    assert len(lengths) > 3


def test_a_room_in_which_nothing_fits_is_refused():
    with pytest.raises(ValueError, match="no room was found"):
        made("sokoban", rows=4, columns=4, boxes=4).reset(0)


def test_an_episode_in_a_room():
    game = made("sokoban", rows=4, columns=6, boxes=2)
    game.reset(0)
    game.floor = {(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 3), (2, 4)}
    game.player, game.boxes, game.targets = (1, 1), {(1, 2), (2, 2)}, frozenset({(1, 3), (2, 3)})
    assert game.look() == "######\n#PXO_#\n#_XO_#\n######"
    assert answer(game, "Up") == (-0.1, False, False)  # a wall
    assert game.step("<answer>Up</answer>")[4]["metrics"] == {"action_is_effective": 0}
    assert answer(game, "Right") == (0.9, False, False)  # onto a target
    assert answer(game, "Right") == (-1.1, False, False)  # and off again
    assert game.look() == "######\n#__SX#\n#_XO_#\n######"
    assert answer(game, "Right") == (-0.1, False, False)  # a box against the wall
    game.boxes, game.player = {(1, 3), (2, 2)}, (2, 1)
    assert answer(game, "Right") == (10.9, True, True)


def test_pictures_have_a_square_for_each_cell():
    game = lake("P_", "OG")
    assert (picture := game.render()).shape == (48, 48, 3) and picture.dtype == "uint8"
    assert len({tuple(picture[r, c]) for r, c in product((12, 36), repeat=2)}) == 4


# -- games of words and numbers --------------------------------------------------------------------


def test_countdown_tells_what_an_expression_makes():
    game = made("countdown", max_steps=4)
    game.reset(0)
    game.numbers, game.target = [3, 8, 1], 24
    shown = "Numbers: 3 8 1\nTarget: 24"
    assert game.step("<answer>3+8*1</answer>")[:4] == (f"It makes 11.\n{shown}", 0, False, False)
    assert game.step("<answer>3*8</answer>")[0] == f"It uses 3 8.\n{shown}"
    assert game.step("<answer>8/(3-3)+1</answer>")[0] == f"It uses 8 3 3 1.\n{shown}"
    assert answer(game, "8 * 3 * 1 = 24") == (1, True, True)
    game.reset(0)
    game.options = made("countdown").options  # one attempt
    game.numbers, game.target = [3, 8, 1], 24
    assert answer(game, "3+8+1") == (0.1, True, False)


def test_every_countdown_has_a_solution():
    game = made("countdown")
    for seed in range(50):
        game.reset(seed)
        found = {
            value
            for a, b, c in permutations(map(Fraction, game.numbers))
            for first, second in product("+-*", repeat=2)
            for value in (
                apply(apply(a, first, b), second, c),
                apply(a, first, apply(b, second, c)),
            )
        }
        assert game.target in found


def apply(a, sign, b):
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def test_the_number_game():
    game = made("number_game", rounds=2)
    game.reset(0)
    game.cards, game.light = [4, 9, 2], "YELLOW"
    assert game.look() == "Light: YELLOW\nCards: 4 9 2"
    assert answer(game, "0") == (0.5, False, False)
    game.cards, game.light = [4, 9, 2], "GREEN"
    assert game.step("<answer>3</answer>")[0].startswith(INVALID)
    text, reward, over, _, info = game.step("<answer>2</answer>")
    assert (reward, over, info["success"], info["metrics"]) == (-0.5, True, False, {"right": 0})
    assert text.startswith("Wrong, it was 9.\n")
    game = made("number_game")
    game.reset(0)
    game.cards, game.light = [4, 9, 2], "RED"
    assert answer(game, "2") == (1, True, True)


def test_the_arms_of_the_bandit():
    game, paid = made("bandit", risky_chance=0.5), []
    for seed in range(400):
        game.reset(seed)
        assert answer(game, "phoenix") == (0.1, True, False)
        game.reset(seed)
        reward, over, success = answer(game, "Dragon")
        assert over and success
        paid.append(reward.expected)
    assert set(paid) == {0.0, 1.0} and 160 < sum(paid) < 240
    with pytest.raises(UserError, match="both arms"):
        made("bandit", risky_arm="phoenix")


def test_the_calculator():
    game = made("calculator")
    game.reset(0)
    game.problem = "12*7-3"
    assert game.look() == "What is 12*7-3?"
    text, reward, *over, info = game.step("<calculator>12*7</calculator><answer>81</answer>")
    assert (text, reward, over) == ("12*7 = 84", 0, [False, False])
    assert info["metrics"] == {"calls": 1}
    assert game.step("<calculator>7/2</calculator>")[0] == "7/2 = 7/2"
    assert game.step("<calculator>1/0</calculator>")[0] == "It divides by zero.\n7/2 = 7/2"
    assert not game.step("<answer>12*7-3</answer>")[4]["action_is_valid"]  # the problem again
    assert answer(game, "81") == (1, True, True)
    assert answer(game, "80") == (0, True, False)
    for seed in range(50):
        shown = game.reset(seed)[0].removeprefix("What is ").removesuffix("?")
        assert answer(game, eval(shown)) == (1, True, True)


def test_two_searches_answer_every_question():
    documents, questions = world()
    assert len(questions) == len({text for text, _ in questions}) > 100
    for text, answer in questions:
        title = next(title for title in documents if f" {title} " in f" {text[:-1]} ")
        (first,) = search(title, 1)
        assert first == documents[title] and answer not in text
        names = [other for other in documents if other in first and other != title]
        (second,) = search(names[0], 1)
        assert second == documents[names[0]] and answer in second
        assert answer not in first


def test_an_episode_of_searching():
    game = made("search")
    game.reset(0)
    _, questions = world()
    game.question, game.answer = next(q for q in questions if "country was Ada Arvik" in q[0])
    town = search("Ada Arvik", 1)[0].split()[-1].rstrip(".")
    text, *_, info = game.step("<search>Where was Ada Arvik born?</search>")
    assert f"Ada Arvik was born in {town}." in text and info["metrics"] == {"searches": 1}
    assert game.answer in game.step(f"<search>{town}</search>")[0]
    assert game.step("<search>!</search>")[0] == "Nothing was found."
    assert answer(game, game.answer.upper() + ".") == (1, True, True)
    assert answer(game, "nowhere") == (0, True, False)


def test_tasks_of_reasoning_gym():
    game = made("reasoning_gym", max_steps=2, config={"min_terms": 2, "max_terms": 2})
    question = game.reset(4)[0]
    right = eval(question.partition(": ")[2].removesuffix(" ="))
    text, reward, *over, info = game.step("<answer>none</answer>")
    assert text == f"This is not right.\n{question}"
    assert (reward, over, info["success"]) == (0, [False, False], False)
    assert answer(game, right) == (1, True, True)
