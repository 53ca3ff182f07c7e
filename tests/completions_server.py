"""A server that speaks vLLM's completions with ``prompt_logprobs``, on a real model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Refuse = Callable[[dict[str, Any], int], int | None]


@contextlib.contextmanager
def completions_server(
    path: Path,
    refuse: Refuse = lambda request, number: None,
    shift: int = 0,
    most: int = 20,
) -> Iterator[str]:
    """Yield its address. ``refuse(request, number)`` may return a status to answer with instead;
    ``shift`` is added to the ids that it takes tokens for; ``most`` is its --max-logprobs."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    lock, seen = Lock(), [0]

    def said(prompt: list[int], count: int) -> list[dict[str, Any] | None]:
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        found: list[dict[str, Any] | None] = [None]
        for place, token in enumerate(prompt[1:]):
            row = logprobs[place]
            shown = [token, *(i for i in row.topk(count).indices.tolist() if i != token)]
            found.append(
                {
                    str(i): {
                        "logprob": row[i].item(),
                        "rank": int((row > row[i]).sum()) + 1,
                        "decoded_token": tokenizer.decode([(i + shift) % len(tokenizer)]),
                    }
                    for i in shown
                }
            )
        return found

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                seen[0] += 1
                status = refuse(request, seen[0])
                if self.path != "/v1/completions":
                    status = 404
                elif request["prompt_logprobs"] > most:
                    status = 400
                if status is None:
                    entries = said(request["prompt"], request["prompt_logprobs"])
                    choice = {"index": 0, "text": "x", "prompt_logprobs": entries}
                    reply: dict[str, Any] = {"object": "text_completion", "choices": [choice]}
                else:
                    reply = {"error": {"message": "refused", "code": status}}
            body = json.dumps(reply).encode()
            self.send_response(status or 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
