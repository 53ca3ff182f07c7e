"""Make a release: check, build, try the wheel in an empty environment, tag.

python release/make.py            everything
python release/make.py --no_tag   everything but the tag; the tree may have changes
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = "x86_64-manylinux_2_39"  # of the image in dockerfile/Dockerfile


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    """Return what a command printed. What it says on stderr goes to the terminal."""
    return subprocess.run(words, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def version_of(root: Path) -> str:
    found = re.search(r'version="([^"]+)"', (root / "setup.py").read_text("utf-8"))
    assert found, "setup.py has no version"
    return found[1]


def pythons(root: Path) -> list[str]:
    """Return the versions of Python that the classifiers promise."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))


def problems(root: Path) -> list[str]:
    """Return why this tree cannot be tagged."""
    version, found = version_of(root), []
    newest = re.search(r"^## (\S+)", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    if newest is None or newest[1] != version:
        what = newest[1] if newest else "nothing"
        found.append(f"CHANGELOG.md begins with {what}, setup.py says {version}")
    if run("git", "status", "--porcelain", cwd=root):
        found.append("there are changes that no commit holds")
    if run("git", "tag", "--list", f"v{version}", cwd=root):
        found.append(f"the tag v{version} exists: a release needs a new version in setup.py")
    return found


def resolve(root: Path, python: str) -> str:
    """Return the exact versions that the Dockerfile's requirements lead to under this Python.
    Raises CalledProcessError if there are none."""
    files = [root / "requirements" / f"{name}.txt" for name in ("gpu", "test")]
    python_flags = ("--python-version", python, "--python-platform", PLATFORM)
    return run("uv", "pip", "compile", "--quiet", *python_flags, *files)


def build(root: Path, out: Path) -> Path:
    """Build the source distribution and, from it, the wheel. Returns the wheel."""
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, root)
    (wheel,) = out.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel in a new environment that borrows this one's dependencies, but not its
    openrl. Returns the directory of its commands."""
    run(sys.executable, "-m", "venv", folder)
    # -I: an openrl on PYTHONPATH would pass for installed
    pip = (folder / "bin" / "python", "-I", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    # as a plain path, so that the .pth file of an editable openrl there is not read
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    return folder / "bin"


def dry_run(commands: Path, folder: Path) -> None:
    """Plan a run on a small model with the installed command, by both of its names."""
    make_model = ROOT / "examples" / "python" / "make_model.py"
    model, rows = folder / "model", folder / "rows.jsonl"
    run(commands / "python", make_model, "agents", "--output_dir", model, cwd=folder)
    rows.write_text('{"input": "1 + 1?", "label": "2"}\n' * 4, "utf-8")
    what = ("--pretrain", model, "--prompt_data", rows, "--label_key", "label")
    sizes = ("--rollout_batch_size", "4", "--n_samples_per_prompt", "2", "--train_batch_size", "8")
    lengths = ("--prompt_max_len", "16", "--generate_max_len", "16")
    more = ("--reward_funcs", "number", "--algo_preset", "grpo", "--device", "cpu", "--dry_run")
    for name in (("openrl", "train"), ("python", "-m", "openrl.cli.train_ppo_ray")):
        run(commands / name[0], *name[1:], *what, *sizes, *lengths, *more, cwd=folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--no_tag", action="store_true")
    no_tag = parser.parse_args().no_tag
    if not no_tag and (found := problems(ROOT)):
        print("\n".join(found), file=sys.stderr)
        return 1
    version = version_of(ROOT)
    run("make", "check")
    run(sys.executable, "docs/build.py", "--check")
    for python in pythons(ROOT):
        print(f"Python {python}: {resolve(ROOT, python).count('==')} packages")
    os.environ.pop("PYTHONPATH", None)  # the wheel is tried, not this tree
    wheel = build(ROOT, ROOT / "dist")
    with tempfile.TemporaryDirectory() as folder:
        commands = install(wheel, Path(folder) / "venv")
        said = run(commands / "openrl", "--version", cwd=Path(folder)).strip()
        assert said == f"openrl {version}", said
        dry_run(commands, Path(folder))
    if not no_tag:
        run("git", "tag", "--annotate", f"v{version}", "--message", f"openrl {version}")
        print(f"tagged; to publish: git push origin v{version} && twine upload dist/*")
    print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
