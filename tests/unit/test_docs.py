import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pages_show_the_present_flags_and_point_at_files_that_exist():
    done = subprocess.run(
        [sys.executable, "docs/build.py", "--check"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
