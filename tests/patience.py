"""How long a test waits for what comes for certain: a slow machine is no failure."""

PATIENCE = 600  # seconds
