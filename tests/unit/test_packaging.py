import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openrl.cli.main import COMMANDS, main, usage
from openrl.config.commands import COMMANDS as CONFIGS
from release.make import build, install, problems, pythons, resolve, version_of
from tests.e2e.runs import make_task, ppo_flags

ROOT = Path(__file__).parents[2]


def openrl(*words, **kwargs):
    line = [sys.executable, "-m", "openrl.cli.main", *words]
    return subprocess.run(line, cwd=ROOT, check=False, capture_output=True, text=True, **kwargs)


def test_the_script_has_every_command():
    """trace runs rescore itself."""
    modules = {m.stem for m in (ROOT / "openrl/cli").glob("*.py") if "__main__" in m.read_text()}
    assert modules - {"main"} == {module for module, _ in COMMANDS.values()}
    assert set(CONFIGS) - {"rescore"} <= modules


def test_a_command_runs_under_both_of_its_names():
    short, module = openrl("train", "--help"), openrl("train_ppo_ray", "--help")
    assert short.returncode == module.returncode == 0
    assert short.stdout == module.stdout
    assert short.stdout.startswith("usage: train_ppo_ray")


def test_exit_codes_pass_through():
    done = openrl("sft", "--max_stepps", "3")
    assert done.returncode == 2
    assert "--max_steps" in done.stderr


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["evalute"]) == 2
    assert "try: openrl evaluate" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == 2 * (usage() + "\n")


def test_bash_completes_commands_flags_and_choices(tmp_path):
    script = openrl("completion", "bash").stdout
    (tmp_path / "openrl.bash").write_text(script)

    def complete(*words):
        ask = f"COMP_WORDS=(openrl {' '.join(words)}); COMP_CWORD={len(words)}; _shtab_openrl"
        line = f'source openrl.bash; {ask}; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.split()

    assert complete("eva") == ["evaluate"]
    assert complete("train", "--kl_est") == ["--kl_estimator"]
    assert complete("train", "--policy_loss_type", "gspo") == ["gspo", "gspo_token"]
    assert complete("train", "--rollout_backend", "h") == ["hf"]
    assert complete("metrics", "actor/logprob_g")[0] == "actor/logprob_gap"
    assert complete("sft", "--pretrain", "openrl.b") == ["openrl.bash"]


def test_the_dockerfile_is_linted():
    hadolint = Path(sys.executable).with_name("hadolint")  # of the same environment
    if not hadolint.exists():
        pytest.skip("not installed: hadolint")
    subprocess.run([hadolint, "dockerfile/Dockerfile"], cwd=ROOT, check=True)


def test_the_pip_steps_of_the_dockerfile_read_files_that_exist():
    text = (ROOT / "dockerfile/Dockerfile").read_text()
    files = re.findall(r"requirements/\w+\.txt", text)
    assert files
    assert all((ROOT / file).exists() for file in files)


def test_what_keeps_a_tree_from_being_tagged(tmp_path):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "setup.py").write_text('setup(version="1.2.0")')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0\n\n## 1.1.0\n")
    git("init")
    assert problems(tmp_path) == ["there are changes that no commit holds"]
    git("add", ".")
    git("commit", "-m", "all")
    assert problems(tmp_path) == []
    git("tag", "v1.2.0")
    (tagged,) = problems(tmp_path)
    assert "v1.2.0 exists" in tagged
    (tmp_path / "setup.py").write_text('setup(version="1.3.0")')
    assert "begins with 1.2.0, setup.py says 1.3.0" in problems(tmp_path)[0]


@pytest.mark.full
def test_the_wheel_works_in_an_empty_environment(tmp_path):
    """It is built from the source distribution, which so holds all that a wheel needs."""
    wheel = build(ROOT, tmp_path / "dist")
    assert len([*(tmp_path / "dist").glob(f"*-{version_of(ROOT)}.tar.gz")]) == 1
    script = install(wheel, tmp_path / "venv") / "openrl"
    task = make_task(tmp_path)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*words):
        line = [script, *words]
        return subprocess.run(
            line, cwd=tmp_path, env=env, check=True, capture_output=True, text=True
        )

    assert run("--version").stdout == f"openrl {version_of(ROOT)}\n"
    for word in COMMANDS:
        assert run(word, "--help").stdout.startswith("usage: "), word
    assert run("metrics", "actor/kl").stdout
    planned = run("train", *ppo_flags(task, tmp_path / "out"), "--dry_run").stdout
    assert "actor" in planned
    where = [script.with_name("python"), "-c", "import openrl.cli as m; print(m.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    assert found.stdout.startswith(str(tmp_path))
    assert (Path(found.stdout.strip()).parents[1] / "py.typed").exists()


@pytest.mark.full
@pytest.mark.parametrize("python", pythons(ROOT))
def test_the_requirements_of_the_image_resolve(python):
    if shutil.which("uv") is None:
        pytest.skip("not installed: uv")
    try:
        found = resolve(ROOT, python)
    except subprocess.CalledProcessError:
        asked = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "shtab"]
        if subprocess.run(asked, cwd="/tmp", check=False, capture_output=True).returncode:
            pytest.skip("no package index answers")
        raise
    assert "torch==" in found
