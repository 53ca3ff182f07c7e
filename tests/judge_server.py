"""A service that judges ask, over real HTTP."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openrl.rewards.verifiers.judge_service import connect


@contextmanager
def judge_server(answer: Callable[[BaseHTTPRequestHandler, dict], None]) -> Iterator[str]:
    """Yield the address of a server. ``answer`` gets each request with its body, and sends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        connect.cache_clear()


def send(request: BaseHTTPRequestHandler, status: int, text: str, headers: dict | None = None):
    body = text.encode()
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)
