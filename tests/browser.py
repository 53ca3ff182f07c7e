"""A headless Chromium, by WebDriver's protocol. Tests skip where there is none (Debian: chromium,
chromium-driver)."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager

import httpx
import pytest

from tests.patience import PATIENCE

NEEDS = ("chromium", "chromedriver")


class Browser:
    """One window."""

    def __init__(self, client, session):
        self.client, self.url = client, f"/session/{session}"

    def post(self, path, **body):
        reply = self.client.post(self.url + path, json=body).json()["value"]
        assert not (isinstance(reply, dict) and "error" in reply), reply
        return reply

    def open(self, address):
        self.post("/url", url=address)

    def run(self, script, *args):
        """Return what a function body in the page returns."""
        return self.post("/execute/sync", script=script, args=[*args])

    def wait(self, script, *args):
        """Return what a function body returns as soon as it is true."""
        until = time.monotonic() + PATIENCE
        while not (found := self.run(script, *args)):
            assert time.monotonic() < until, f"never true: {script}"
        return found

    def errors(self):
        """Return the console's messages since the last call."""
        return [e["message"] for e in self.post("/se/log", type="browser")]

    def picture(self):
        return base64.b64decode(self.client.get(self.url + "/screenshot").json()["value"])


def _await_answer(client, driver):
    until = time.monotonic() + PATIENCE
    while True:
        try:
            client.get("/status")
        except httpx.TransportError:
            assert driver.poll() is None and time.monotonic() < until, "chromedriver did not start"
            time.sleep(0.05)  # there is no event to wait for
        else:
            return


@contextmanager
def browser(*arguments):
    """Start a browser. Skips the test where none is installed."""
    missing = [name for name in NEEDS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=address, timeout=PATIENCE, trust_env=False) as client:
            _await_answer(client, driver)
            wanted = {
                "goog:chromeOptions": {
                    "args": ["--headless=new", "--disable-gpu", *root, *arguments]
                },
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            body = {"capabilities": {"alwaysMatch": wanted}}
            reply = client.post("/session", json=body).json()["value"]
            assert "sessionId" in reply, reply
            try:
                yield Browser(client, reply["sessionId"])
            finally:
                client.delete(f"/session/{reply['sessionId']}")
    finally:
        driver.terminate()
        driver.wait(PATIENCE)
