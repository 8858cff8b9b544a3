"""Uploads, to a stand-in of the hub on this machine."""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import megabatch
from megabatch.cli import main
from megabatch.errors import UsageError
from megabatch.export import push_to_hub
from tests.export.runs import write_run
from tests.models.tiny import TINY

REPO = "someone/model"


class Hub(ThreadingHTTPServer):
    """A repository, and what was sent.

    files: of the repository; private: whether it is, None if there is none; refuses: the end of a
    path whose requests are refused; blobs: large files by their hash; tokens: that came.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.private: bool | None = None
        self.refuses, self.blobs, self.tokens = "nothing", dict[str, bytes](), set[str | None]()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, content: Any, code: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_one(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path.startswith("/blob/"):  # a storage elsewhere
            hub.blobs[path.removeprefix("/blob/")] = body
            return self.answer({})
        if self.command == "POST":
            hub.tokens.add(self.headers.get("Authorization"))
        if path.endswith(hub.refuses):
            return self.answer({"error": "you may not write here"}, 403)
        if path == "/api/repos/create":
            asked = json.loads(body)
            assert f"{asked['organization']}/{asked['name']}" == REPO
            private = bool(asked.get("private")) or asked.get("visibility") == "private"
            existed = hub.private is not None
            hub.private = hub.private if existed else private
            return self.answer({"url": f"{hub.url}/{REPO}"}, 409 if existed else 200)
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == f"/api/models/{REPO}":
            siblings = [{"rfilename": name} for name in hub.files]
            return self.answer({"id": REPO, "private": hub.private, "siblings": siblings})
        if path == f"/api/models/{REPO}/preupload/main":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self.answer({"files": modes})
        if path == f"/{REPO}.git/info/lfs/objects/batch":
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/blob/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if path == f"/api/models/{REPO}/commit/main":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.blobs[value["oid"]]
                elif line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
            return self.answer({"commitUrl": f"{hub.url}/{REPO}/commit/1", "commitOid": "1"})
        return self.answer({"error": f"the stand-in does not know {path}"}, 404)

    do_GET = do_POST = do_PUT = handle_one


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    for name, value in {
        "ENDPOINT": server.url,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    write_run(tmp_path / "run", TINY)
    out = str(tmp_path / "out")
    return ["export", str(tmp_path / "run"), "--to", "openclip", "--output", out]


def test_a_folder_is_uploaded_and_the_card_of_a_repository_stays(
    hub: Hub, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--push-to-hub", REPO, "--private"]) == 0
    out, told = tmp_path / "out", capsys.readouterr().out
    assert hub.files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert hub.files.keys() == {"README.md", "open_clip_config.json", "open_clip_model.safetensors"}
    again = told.partition("if that is interrupted: ")[2].partition("\n")[0]
    assert b"create_model_and_transforms('hf-hub:someone/model')" in hub.files["README.md"]
    assert hub.private
    assert hub.tokens == {"Bearer hf_secret"}
    hub.files["README.md"] = b"my own"
    (out / "new").write_text("new")
    [note] = eval(again, {"megabatch": megabatch})
    assert note == f"{REPO} keeps its README.md; the new one is in {out}"
    assert (hub.files["README.md"], hub.files["new"]) == (b"my own", b"new")


def test_a_failed_upload_leaves_the_folder_and_is_no_mistake_in_the_command(
    hub: Hub, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refuses = "/commit/main"
    assert main([*words, "--push-to-hub", REPO]) == 1
    told = capsys.readouterr().err
    assert f"{tmp_path / 'out'} is complete, but was not uploaded: " in told
    assert "you may not write here" in told
    assert len([*(tmp_path / "out").iterdir()]) == 3


def test_nothing_is_sent_to_a_public_repository_that_was_to_be_private(
    hub: Hub, tmp_path: Path
) -> None:
    hub.private = False
    (tmp_path / "weights").touch()
    with pytest.raises(UsageError, match=r"--private: someone/model exists and is public"):
        push_to_hub(tmp_path, REPO, private=True)
    assert not hub.files


def test_mistakes_are_told_before_the_run_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", TINY)
    words = ["export", str(tmp_path / "run"), "--to", "openclip", "--output", str(tmp_path / "out")]
    monkeypatch.setattr("megabatch.export.hub.get_token", lambda: None)
    cases = {
        "--private": "--private: expected with --push-to-hub",
        "--push-to-hub model": "--push-to-hub model: expected NAME/REPO",
        f"--push-to-hub {REPO}": "no token of the hub; hf auth login, or set HF_TOKEN",
    }
    for given, message in cases.items():
        assert main([*words, *given.split()]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(sys.modules, "megabatch.export.hub")
    monkeypatch.delattr("megabatch.export.hub")
    assert main([*words, "--push-to-hub", REPO]) == 2
    message = "huggingface_hub is not installed, which this needs: pip install 'megabatch[train]'"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
