# SPDX-License-Identifier: Apache-2.0
"""A small OpenAI-compatible server whose answers follow from the prompt, with faults on request."""

import json
import random
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "small"


def answer(prompt, count, fault):
    """`count` tokens with the log probabilities of the five likeliest.

    Faults: "token" and "tie" choose the second likeliest at place 2, the latter from near candidates, as "near" has
    them too; "drift" changes only a probability.
    """
    draw = random.Random(json.dumps(prompt))
    for place in range(count):
        likeliest = draw.sample(range(100, 1000), 5)
        gap = 0.01 if fault in ("near", "tie") else 3.0
        levels = [-0.1, -0.1 - gap, -7.0, -8.0, -9.0]
        chosen = 0
        if place == 2 and fault in ("tie", "token"):
            chosen = 1
            levels[0], levels[1] = levels[1], levels[0]
        if fault == "drift":
            levels[0] = -2.0
        tops = {f"token_id:{token}": level for token, level in zip(likeliest, levels, strict=True)}
        yield f"token_id:{likeliest[chosen]}", levels[chosen], tops


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def reply(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/health":
            self.reply({})
        elif self.path == "/v1/models":
            self.reply({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 700}]})
        else:
            self.reply({}, 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if self.path == "/tokenize":
            self.reply({"tokens": [2, *range(1000, 1000 + len(body["prompt"].split()))]})
            return
        if self.server.fault == "error":
            self.reply({"error": {"message": "out of cards", "code": 500}}, 500)
            return
        chat = self.path == "/v1/chat/completions"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        fault = self.server.fault if "max_tokens" in body and body["max_tokens"] > 1 else None
        for token, logprob, tops in answer(body.get("messages") or body["prompt"], body["max_tokens"], fault):
            if chat:
                likely = [{"token": t, "logprob": p, "bytes": None} for t, p in tops.items()]
                content = [{"token": token, "logprob": logprob, "bytes": None, "top_logprobs": likely}]
                choice = {"index": 0, "delta": {"content": "x"}, "logprobs": {"content": content}}
            else:
                found = {"tokens": [token], "token_logprobs": [logprob], "top_logprobs": [tops], "text_offset": [0]}
                choice = {"index": 0, "text": "x", "logprobs": found, "finish_reason": None}
            chunk = {"id": "1", "object": "chunk", "created": 0, "model": MODEL, "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def serving(fault=None, port=0):
    """The URL of a server in this process, and what it was asked."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.fault, server.asked = fault, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    import sys

    with serving(sys.argv[2] if len(sys.argv) > 2 else None, int(sys.argv[1])):
        threading.Event().wait()
