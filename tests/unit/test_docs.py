import ast
import asyncio
import functools
import json
import re
import shlex
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from openrl.agents.build import open_agent
from openrl.agents.setup import AgentSetup
from openrl.cli import metrics, report, trace
from openrl.config.commands import PPOConfig, RescoreConfig
from openrl.config.groups.agent import AgentFlags, EnvironmentFlags
from openrl.config.groups.data import TemplateFlags
from openrl.flags.parser import load, read_words, resolve
from openrl.flags.schema import collect_flags
from openrl.tracking.health import CHECKS
from openrl.tracking.metric_rows import row_of
from openrl.types import FinishReason, Prompt, Sampling
from tests.browser import browser
from tests.endpoint import hermes_chat, policy_of

ROOT = Path(__file__).parents[2]


def run(*args: str | Path, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, check=False, capture_output=True, text=True, **kwargs
    )


def test_pages_show_the_present_flags_and_point_at_files_that_exist():
    done = run("docs/build.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_plugin_of_the_adding_page_works_as_printed(tmp_path):
    """Its flag reaches its loss; -log p * A is left where log p is above the floor."""
    block = re.search(
        r"```python\n# my_project/losses.py\n(.*?)```",
        (ROOT / "docs/adding.md").read_text(),
        re.DOTALL,
    )
    assert block
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "losses.py").write_text(block[1])
    use = """
import sys, torch
from openrl.config.commands import PPOConfig
from openrl.extension_points import policy_losses
from openrl.flags.parser import load
from openrl.experience import LossInputs

argv = "--pretrain some/model --prompt_data some/data --remote_rm_url {reward} --plugin my_project.losses --init_kl_coef 0"
argv += " --advantage_estimator group_norm --n_samples_per_prompt 8 --policy_loss_type plain_reinforce --reinforce_floor -2"
config = load(PPOConfig, argv.format(reward=sys.argv[1]).split(), prog="train_ppo_ray")
options = config.options["policy_loss_type"]
column = torch.tensor([[-1.0, -3.0]])
inputs = LossInputs(
    logprobs=column, old_logprobs=column, rollout_logprobs=column, advantages=2 * torch.ones(1, 2),
    loss_mask=column < 0, turn_ids=column.long(), rewards=torch.ones(1),
)
print(policy_losses["plain_reinforce"].component(inputs, options).per_token.tolist())
"""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def reward_func(queries, prompts, labels, **kwargs):\n    return [0.0 for _ in queries]\n"
    )
    done = run(
        "-c",
        use,
        reward,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "HOME": str(tmp_path), "PATH": ""},
    )
    assert done.stdout.strip() == "[[2.0, 0.0]]", done.stdout + done.stderr


# -- the page about agents -------------------------------------------------------------------------

AGENTS = (ROOT / "docs/agents.md").read_text(encoding="utf-8")
ASKED = {"role": "user", "content": "How many people live in Oslo?"}
QUESTION = Prompt("train:0", [1], ASKED["content"], label="720000", messages=(ASKED,))
CALL = '<tool_call>\n{"name": "population", "arguments": {"city": "Oslo"}}\n</tool_call>'


FILES: dict[str, tuple[dict[str, str], list[str], int | None]] = {  # flags, replies, turns
    "guess.py": ({"agent_func_path": "FILE"}, [str(n) for n in range(10)], None),
    "tools.py": ({"tools": "FILE,python"}, [CALL, "720000"], 2),
    "self_check.py": ({"agent_func_path": "FILE"}, ["700000", "720000"], 2),
    "their_game.py": ({"agent_func_path": "FILE"}, ["700000", "720000"], 2),
    "my_agent.py": ({"agent_command": f"{sys.executable} FILE"}, ["700000", "7", "720000"], 3),
}


@pytest.mark.parametrize("file", FILES)
def test_the_agents_of_the_page_play(file, tmp_path):
    flags, replies, turns = FILES[file]
    block = re.search(rf"```python\n# {file}\n(.*?)```", AGENTS, re.DOTALL)
    assert block
    (tmp_path / file).write_text(block[1])
    given = {name: text.replace("FILE", str(tmp_path / file)) for name, text in flags.items()}
    how = AgentSetup(
        AgentFlags(**given), EnvironmentFlags(), TemplateFlags(apply_chat_template=True)
    )
    policy = policy_of(*replies)

    async def main():
        async with open_agent(how, hermes_chat().tokenizer) as agent:
            return await agent.run(QUESTION, policy, Sampling(max_tokens=4000))

    played = asyncio.run(main())
    assert played.finish_reason is FinishReason.STOP
    assert played.turns == turns or played.score.passed == 1.0  # the number was among the guesses
    assert [s.sampled_ids for s in played.segments] == [[i for ids in policy.given for i in ids]]


def test_every_block_of_the_page_is_run():
    """Each is the file of an agent or a command, which the tests beside this one run."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", AGENTS, re.DOTALL)
    files = {text.partition("\n")[0] for kind, text in blocks if kind == "python"}
    assert files == {f"# {file}" for file in FILES}
    others = [text.split() for kind, text in blocks if kind != "python"]
    (make,) = [words for words in others if words[:2] != ["python", "-m"]]
    subprocess.run([*make, "--dry-run"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "command", re.findall(r"```bash\n(python -m openrl.cli.train_.*?)```", AGENTS, re.DOTALL)
)
def test_the_commands_of_the_page_are_accepted(command, tmp_path):
    words = shlex.split(command.replace("\\\n", " "))
    argv = [*words[words.index("openrl.cli.train_ppo_ray") + 1 :], "--dump_config"]
    argv.append(str(tmp_path / "config.yaml"))
    with pytest.raises(SystemExit) as ended:
        load(PPOConfig, argv, prog="train_ppo_ray")
    assert ended.value.code == 0


# -- every page, and the site ----------------------------------------------------------------------

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, kind):
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_blocks_of_code_can_be_read():
    for page in PAGES:
        for text in blocks(page, "python"):
            compile(text, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for text in blocks(page, "json"):
            rows = text.splitlines() if text.count("\n{") else [text]
            assert all(isinstance(json.loads(row), dict) for row in rows)
        script = "\n".join(blocks(page, "bash"))
        done = subprocess.run(
            ["bash", "-n"], input=script, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, (page.name, done.stderr)


LOOKS = {"report": report.parser, "trace": trace.parser, "metrics": metrics.parser}


def test_commands_that_look_at_a_run_are_accepted():
    found = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name, rest in re.findall(r"openrl(?:\.cli\.| )(report|trace|metrics)( [^`\n]*)", text):
            words = shlex.split(rest.replace("STEP/NUMBER", "50/13"), comments=True)
            if words[:1] == ["rescore"]:
                flags = {word[2:] for word in words if word.startswith("--")}
                assert flags <= {spec.name for spec in collect_flags(RescoreConfig)}, rest
            else:
                LOOKS[name]().parse_args(words)
            found.add(name)
    assert found == LOOKS.keys()


def test_the_readme_repeats_the_quickstart_without_an_engine(tmp_path):
    script = (ROOT / "examples/scripts/quickstart.sh").read_text().replace("\\\n", " ")
    words = shlex.split(re.search(r"openrl.cli.train_ppo_ray (.*)", script)[1])
    config = tmp_path / "config.yaml"
    with pytest.raises(SystemExit) as ended:
        seeded = [word.replace("$SEED", "0") for word in words]
        load(PPOConfig, [*seeded, "--dump_config", str(config)], prog="train_ppo_ray")
    assert ended.value.code == 0
    readme = (ROOT / "README.md").read_text().replace("\\\n", " ")
    again = shlex.split(re.search(r"bin/openrl train (.*--rollout_replay_dir .*)", readme)[1])
    again[again.index("--config") + 1] = str(config)
    settings, _, problems = read_words(again)
    resolved, found = resolve(PPOConfig, collect_flags(PPOConfig), settings, environment=False)
    assert [str(p) for p in [*problems, *found] if p.fatal] == []
    assert resolved.collecting.replays and resolved.batch.rollout_batch_size == 64


def test_the_rewards_of_the_tutorial():
    (text,) = [b for b in blocks(ROOT / "docs/tutorial.md", "python") if "# reward.py" in b]
    names = {}
    exec(text, names)
    found = names["reward_func"]([], [], ["5"] * 4, ["5<eos>", "4<eos>", "+<eos>", "99"])
    assert found == {"rewards": [1.0, 0.45, 0.0, 0.0], "scores": [1.0, 0.0, 0.0, 0.0]}


def test_every_warning_has_its_place_on_the_page_of_symptoms():
    text = (ROOT / "docs/troubleshooting.md").read_text()
    named = set(re.findall(r"`([\w/]+)`", text))
    elsewhere = {"clipping", "data_exhausted"}  # no symptom that somebody would come with
    assert {check.name for check in CHECKS} - elsewhere <= named
    prefixes = ("rollout/", "actor/", "perf/", "reward/", "time/", "watch/")
    unknown = [n for n in named if n.startswith(prefixes) and row_of(n) is None]
    assert unknown == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    done = run(*words)  # strict: a link or an anchor that leads nowhere fails
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.full
def test_the_site_holds_every_page_and_fetches_nothing(site):
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages <= {page.stem for page in site.glob("*.html")}
    assert not [*site.rglob("*.py")]
    fetched = re.compile(
        r"""<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=["']?(https?://[^"' >]+)"""
    )
    for page in site.glob("*.html"):
        assert fetched.findall(page.read_text()) == [], page.name


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.full
def test_the_site_opens_in_a_browser_without_an_error(site):
    handler = functools.partial(QuietHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser() as window:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}"
        for name in ("index", "concepts", "tutorial", "flags"):
            window.open(f"{root}/{name}.html")
            window.wait("return document.readyState === 'complete'")
            assert window.run("return document.querySelector('h1').textContent")
            broken = "return [...document.images].filter((i) => !i.naturalWidth).map((i) => i.src)"
            assert window.run(broken) == []
            asked = "return performance.getEntriesByType('resource').map((e) => e.name)"
            assert all(at.startswith(root) for at in window.run(asked))
        assert window.errors() == []
        server.shutdown()
