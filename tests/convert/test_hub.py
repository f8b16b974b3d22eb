"""Hub ids against a stand-in server named by HF_ENDPOINT: download, revision, and one line for each failure.

huggingface_hub reads its environment when it is imported, so each case is a process.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from jaxserve.checkpoint import open_checkpoint

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "org/tiny": {path.name: path.read_bytes() for path in (GOLDEN / "llama-sharded").iterdir() if not path.name.startswith("expected")}
    | {"modeling.py": b"raise SystemExit('code was run')", "pytorch_model.bin": b"pickle"},
    "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    "org/ggufs": {"model-q4.gguf": b"GGUF"},
}


class Hub(http.server.BaseHTTPRequestHandler):
    """The few routes of the hub that a snapshot needs."""

    asked: list[str] = []

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlparse(self.path).path)
        self.asked.append(path)
        is_api = path.startswith("/api/models/")
        words = path.removeprefix("/api/models/").strip("/").split("/")
        repo, rest = "/".join(words[:2]), words[2:]
        if repo == "org/broken":
            return self.answer(500, {"error": "the server is on fire"})
        if repo == "org/gated":
            return self.answer(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        if repo not in FILES:
            return self.answer(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", "v1", COMMIT):
            return self.answer(404, {"error": "no"}, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
        files = FILES[repo]
        if is_api and rest[:1] == ["tree"]:
            return self.answer(200, [{"type": "file", "path": n, "size": len(c), "oid": git_id(c)} for n, c in files.items()])
        if is_api:
            return self.answer(200, {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
        content = files[rest[2]]
        self.answer(200, content, {"ETag": f'"{git_id(content)}"', "X-Repo-Commit": COMMIT})

    def answer(self, status, content, headers=None):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/octet-stream" if isinstance(content, bytes) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture(scope="module")
def endpoint():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def run(tmp_path: Path, endpoint: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"} | environment
    command = [sys.executable, "-m", "jaxserve.convert", *arguments[:1], str(tmp_path / "out"), *arguments[1:]]
    return subprocess.run(command, env=base | environment, capture_output=True, text=True, timeout=60)


def error_of(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of a failure."""
    assert result.returncode == 2, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line]
    assert line.startswith("jaxserve: error: ")
    return line.removeprefix("jaxserve: error: ")


def test_download_convert_and_again_offline(tmp_path, endpoint):
    Hub.asked.clear()
    result = run(tmp_path, endpoint, "org/tiny", "--revision", "v1")
    assert result.returncode == 0, result.stderr
    manifest = open_checkpoint(tmp_path / "out").manifest
    assert (manifest.source, manifest.revision, manifest.num_tensors) == ("org/tiny", COMMIT, 21)
    assert not any(path.endswith((".py", ".bin")) for path in Hub.asked)
    # What is in the local cache needs no hub.
    code = "from jaxserve.convert.hub import download; print(*download('org/tiny', 'v1'))"
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    path, commit = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert commit == COMMIT and (Path(path) / "model-00002-of-00003.safetensors").is_file()


def test_gated(tmp_path, endpoint):
    assert error_of(run(tmp_path, endpoint, "org/gated")) == (
        f"org/gated is gated: accept its terms at {endpoint}/org/gated, then give a token of that account in HF_TOKEN."
    )


def test_missing(tmp_path, endpoint):
    message = error_of(run(tmp_path, endpoint, "org/nothing"))
    assert message == f"org/nothing is neither a path nor a model on {endpoint} (if it is private, set HF_TOKEN)."


def test_missing_revision(tmp_path, endpoint):
    assert error_of(run(tmp_path, endpoint, "org/tiny", "--revision", "v9")) == f"org/tiny has no revision 'v9' on {endpoint}."


def absent(tmp_path):
    """How a message begins about a name that is nowhere on this machine."""
    return f"org/tiny is neither a file or directory here nor in the hub's local cache ({tmp_path / 'hf' / 'hub'})"


def test_offline(tmp_path, endpoint):
    message = error_of(run(tmp_path, endpoint, "org/tiny", HF_HUB_OFFLINE="1"))
    assert message == f"{absent(tmp_path)}, and HF_HUB_OFFLINE is set."


def test_unreachable(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        message = error_of(run(tmp_path, endpoint, "org/tiny"))
    assert message == f"{absent(tmp_path)}, and {endpoint} cannot be reached."


def test_server_error(tmp_path, endpoint):
    message = error_of(run(tmp_path, endpoint, "org/broken"))
    assert message.startswith(f"org/broken cannot be downloaded: {endpoint} answered: ") and "500" in message


def test_repositories_without_safetensors(tmp_path, endpoint):
    Hub.asked.clear()
    assert "org/pickled holds only pickled weights (pytorch_model.bin)" in error_of(run(tmp_path, endpoint, "org/pickled"))
    assert "org/ggufs holds GGUF files (model-q4.gguf)" in error_of(run(tmp_path, endpoint, "org/ggufs"))
    assert not any("resolve" in path for path in Hub.asked)
