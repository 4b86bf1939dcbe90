"""A W&B host that accepts every request: python -m tests.harness.runs.wandb_host ADDRESS [RECORD]

It prints its URL and serves until it is killed. Each request is appended to the file RECORD, as a line of JSON.
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

RECORD_LOCK = threading.Lock()
STORED_LINES: dict[str, dict[str, dict[int, str]]] = {}  # by run, file and line number
VIEWER_REPLY = {"id": "u", "entity": "e", "username": "u", "email": "e@e", "teams": {"edges": []}, "flags": "{}"}


class WandbRequestHandler(BaseHTTPRequestHandler):
    """Records each request, stores the lines of files, and sends the answers that the client needs."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        content = json.loads(body)
        if len(sys.argv) > 2:
            with RECORD_LOCK, open(sys.argv[2], "a") as file:
                file.write(json.dumps({"path": self.path, "body": content}) + "\n")
        if self.path.endswith("/file_stream"):
            store_lines(self.path.split("/")[-2], content.get("files") or {})
        if self.path == "/graphql":
            self.answer(make_reply(content))
        else:
            self.answer({"exitcode": None, "limits": {}})

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


def read_requests(record: Path, path_part: str) -> list[Any]:
    """Return the bodies of requests whose path contains `path_part`."""
    lines = record.read_text().splitlines() if record.exists() else []
    requests = [json.loads(line) for line in lines]
    return [request["body"] for request in requests if path_part in request["path"]]


def read_received_metrics(record: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the received rows of metrics, each with its line number."""
    rows = []
    for content in read_requests(record, "file_stream"):
        files = content.get("files") or {}
        if "wandb-history.jsonl" in files:
            part = files["wandb-history.jsonl"]
            for number, line in enumerate(part["content"], part["offset"]):
                rows.append((number, json.loads(line)))
    return rows


def store_lines(run: str, files: dict[str, Any]) -> None:
    """Store the lines of a run's files by their line numbers."""
    for name, part in files.items():
        lines = STORED_LINES.setdefault(run, {}).setdefault(name, {})
        lines |= dict(enumerate(part["content"], part["offset"]))


def make_resumed_bucket(run: str) -> dict[str, Any] | None:
    """Return the host's record of a run that is resumed, or None for an unknown run."""
    if run not in STORED_LINES:
        return None
    history = STORED_LINES[run].get("wandb-history.jsonl", {})
    events = STORED_LINES[run].get("wandb-events.jsonl", {})
    summaries = STORED_LINES[run].get("wandb-summary.json", {})
    return {
        "id": "b",
        "name": run,
        "displayName": "",
        "config": "{}",
        "summaryMetrics": summaries[max(summaries)] if summaries else "{}",
        "tags": [],
        "notes": "",
        "wandbConfig": '{"t": 1}',
        "logLineCount": 0,
        "historyLineCount": len(history),
        "eventsLineCount": len(events),
        "historyTail": format_last_line(history),
        "eventsTail": format_last_line(events),
    }


def format_last_line(lines: dict[int, str]) -> str:
    """Return a JSON list of the line with the highest number."""
    return json.dumps([lines[max(lines)]] if lines else [])


def make_reply(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer that W&B's client needs to start an online run."""
    variables = request.get("variables") or {}
    operation = request.get("operationName")
    if not operation:
        match = re.search(r"(?:query|mutation) (\w+)", request.get("query", ""))
        operation = match[1] if match else ""
    return {"data": make_reply_data(operation, variables.get("name"), variables.get("project") or "p")}


def make_reply_data(operation: str, run: Any, project_name: str) -> dict[str, Any]:
    """Return the data of the answer to a GraphQL operation."""
    project = {"id": "p", "name": project_name, "entity": {"id": "e", "name": "e"}}
    match operation:
        case "UpsertBucket":
            bucket = {"id": "b", "name": run, "displayName": "", "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}}
        case "RunResumeStatus":
            return {"model": project | {"bucket": make_resumed_bucket(str(run))}}
        case "UpsertView2":
            return {"upsertView": {"view": {"id": "v", "name": run}, "inserted": True}}
        case "CreateRunFiles":
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
    return {"viewer": VIEWER_REPLY}


if __name__ == "__main__":
    server = ThreadingHTTPServer((sys.argv[1], 0), WandbRequestHandler)
    print(f"http://{sys.argv[1]}:{server.server_address[1]}", flush=True)
    server.serve_forever()
