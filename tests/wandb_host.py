"""A W&B host that takes everything: python -m tests.wandb_host ADDRESS (prints its URL, then serves until ended)."""

from __future__ import annotations

import gzip
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VIEWER = {"id": "u", "entity": "e", "username": "u", "email": "e@e", "teams": {"edges": []}, "flags": "{}"}


class Host(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.answer(reply(json.loads(body)) if self.path == "/graphql" else {"exitcode": None, "limits": {}})

    def do_GET(self) -> None:
        self.answer({})

    def answer(self, value: dict[str, Any]) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def reply(question: dict[str, Any]) -> dict[str, Any]:
    """What W&B's client needs to hear to begin an online run."""
    given = question.get("variables", {})
    project = {"id": "p", "name": given.get("project") or "p", "entity": {"id": "e", "name": "e"}}
    bucket = {"id": "b", "name": given.get("name"), "displayName": "", "config": "{}", "project": project}
    files = {"runID": "b", "uploadHeaders": [], "files": []}
    return {
        "data": {
            "Viewer": {"viewer": VIEWER},
            "UpsertBucket": {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}},
            "CreateRunFiles": {"createRunFiles": files},
        }.get(question.get("operationName", ""), {"viewer": VIEWER})
    }


if __name__ == "__main__":
    server = ThreadingHTTPServer((sys.argv[1], 0), Host)
    print(f"http://{sys.argv[1]}:{server.server_address[1]}", flush=True)
    server.serve_forever()
