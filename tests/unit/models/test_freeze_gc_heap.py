"""What a process has built at its start costs the garbage collector nothing afterwards."""

import subprocess
import sys

CODE = """
import atexit, gc, weakref
atexit.register(lambda: print(gc.get_freeze_count()))  # runs last
from openrl.models.process_memory import freeze_gc_heap

class Node:
    pass

def ring():
    node = Node()
    node.self = node
    return weakref.ref(node)

freeze_gc_heap()
print(gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 1_000)
later = ring()
gc.collect()
print(later() is None)
before = ring()
freeze_gc_heap()
print(before() is None)
"""


def test_objects_of_the_start_are_left_alone_until_the_end():
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True", "True", "True", "0"]
