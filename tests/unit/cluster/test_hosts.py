"""What a worker's process does before it builds its worker."""

import subprocess
import sys

BEGIN = """
import sys
from openrl.cluster.hosts import PlainHost
PlainHost().begin(*sys.argv[1:], None)
"""


def test_a_node_without_the_drivers_directory_says_where_relative_paths_begin(tmp_path):
    log = tmp_path / "actor-0.log"
    for directory in (tmp_path, tmp_path / "elsewhere"):
        words = [sys.executable, "-c", BEGIN, directory, log]
        subprocess.run(words, check=True, timeout=120)
    first, second = log.read_text().split("-- actor-0, ")[1:]
    assert "WARNING" not in first
    assert f"has no {tmp_path / 'elsewhere'}: relative paths begin at" in second
