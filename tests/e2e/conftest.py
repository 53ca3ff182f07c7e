"""What runs of the main command share."""

from collections.abc import Iterator

import pytest

from tests.ray_forks import forking_cluster


@pytest.fixture(scope="package")
def ray_address() -> Iterator[str]:
    """A cluster for runs whose proof is not the start of Ray or of a process."""
    with forking_cluster({"num_cpus": 16}) as cluster:
        yield cluster.address
