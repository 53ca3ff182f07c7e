"""A disk that is full."""

import resource
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size):
    """As on a full disk, writes beyond it fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
