"""Pages given back: the process gets smaller, addresses stay, contents are zeros."""

import psutil
import torch

from openrl.models.process_memory import free_pages


def test_freed_pages_leave_the_process_and_read_as_zeros():
    cache = torch.ones(2, 32 * 2**20, dtype=torch.uint8)
    views, process = [cache[0], cache[1]], psutil.Process()
    before = process.memory_info().rss
    freed = free_pages(views)  # two views of one storage count once
    assert 64 * 2**20 - 2 * 4096 <= freed <= 64 * 2**20
    assert before - process.memory_info().rss > 32 * 2**20  # others in this process may grow
    whole = cache.view(-1)
    assert not whole[4096:-4096].any()  # all but what other memory shares a page with
    cache.fill_(3)
    assert int(cache[1, 1000]) == 3


def test_what_fills_no_page_stays():
    small = torch.ones(100, dtype=torch.uint8)
    assert free_pages([small]) == 0 and small.all()
