"""A W&B host that takes everything: python -m tests.harness.wandb_host ADDRESS [RECORD]

Prints its URL, then serves until ended. What it is sent goes line by line into the file RECORD, as JSON.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LOCK = threading.Lock()
LINES: dict[str, dict[str, dict[int, str]]] = {}  # run -> file -> number -> line
VIEWER = {"id": "u", "entity": "e", "username": "u", "email": "e@e", "teams": {"edges": []}, "flags": "{}"}


class Host(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        sent = json.loads(body)
        if len(sys.argv) > 2:
            with LOCK, open(sys.argv[2], "a") as file:
                file.write(json.dumps({"path": self.path, "sent": sent}) + "\n")
        if self.path.endswith("/file_stream"):
            take(self.path.split("/")[-2], sent.get("files") or {})
        self.answer(reply(sent) if self.path == "/graphql" else {"exitcode": None, "limits": {}})

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


def read_sent(record: Path, part: str) -> list[Any]:
    """Return what was sent to addresses that hold `part`."""
    lines = record.read_text().splitlines() if record.exists() else []
    return [one["sent"] for one in map(json.loads, lines) if part in one["path"]]


def read_history(record: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of metrics that were sent, each with the place that it was sent for."""
    files = [sent.get("files") or {} for sent in read_sent(record, "file_stream")]
    parts = [each["wandb-history.jsonl"] for each in files if "wandb-history.jsonl" in each]
    return [(p["offset"] + i, json.loads(row)) for p in parts for i, row in enumerate(p["content"])]


def take(run: str, files: dict[str, Any]) -> None:
    """Keep the lines of a run's files, each at the place that it is sent for."""
    for name, part in files.items():
        lines = LINES.setdefault(run, {}).setdefault(name, {})
        lines |= dict(enumerate(part["content"], part["offset"]))


def bucket_of(run: str) -> dict[str, Any] | None:
    """What the host knows of a run when it is gone on with; None before it has heard of it."""
    if run not in LINES:
        return None
    history, events = (LINES[run].get(f"wandb-{kind}.jsonl", {}) for kind in ("history", "events"))
    tails = {"historyTail": history, "eventsTail": events}
    return {
        "id": "b",
        "name": run,
        "displayName": "",
        "config": "{}",
        "summaryMetrics": "{}",
        "tags": [],
        "notes": "",
        "wandbConfig": '{"t": 1}',
        "logLineCount": 0,
        "historyLineCount": len(history),
        "eventsLineCount": len(events),
        **{name: json.dumps([lines[max(lines)]] if lines else []) for name, lines in tails.items()},
    }


def reply(question: dict[str, Any]) -> dict[str, Any]:
    """What W&B's client needs to hear to begin an online run."""
    given = question.get("variables") or {}
    named = re.search(r"(?:query|mutation) (\w+)", question.get("query", ""))
    operation = question.get("operationName") or (named[1] if named else "")
    project = {"id": "p", "name": given.get("project") or "p", "entity": {"id": "e", "name": "e"}}
    bucket = {"id": "b", "name": given.get("name"), "displayName": "", "config": "{}", "project": project}
    files = {"runID": "b", "uploadHeaders": [], "files": []}
    return {
        "data": {
            "Viewer": {"viewer": VIEWER},
            "UpsertBucket": {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}},
            "RunResumeStatus": {"model": project | {"bucket": bucket_of(str(given.get("name")))}},
            "UpsertView2": {"upsertView": {"view": {"id": "v", "name": given.get("name")}, "inserted": True}},
            "CreateRunFiles": {"createRunFiles": files},
        }.get(operation, {"viewer": VIEWER})
    }


if __name__ == "__main__":
    server = ThreadingHTTPServer((sys.argv[1], 0), Host)
    print(f"http://{sys.argv[1]}:{server.server_address[1]}", flush=True)
    server.serve_forever()
