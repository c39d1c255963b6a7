"""Reading a release's files off an index: a local one, with ranges and without."""

import hashlib
import io
import json
import random
import re
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from truetap.harness.errors import CouldNotRun, IntegrityError, TruetapError, UsageError
from truetap.harness.surface import package_index, wheel

KERNELS = random.Random(0).randbytes(3 << 20)
FILES = {
    "vllm/_C.abi3.so": KERNELS,
    "vllm/envs.py": b"# environment\n",
    "vllm/v1/request.py": b"class Request: ...\n",
    "vllm/v1/executor/multiproc_executor.py": b"class MultiprocExecutor: ...\n" * 100,
    "vllm/benchmarks/serve.py": b"# not of interest\n",
    "vllm/v1/executor/notes.txt": b"not Python\n",
    "vllm/../../outside.py": b"# must not be written\n",
    "vllm/_moe_C.abi3.so": KERNELS,
}
KEPT = {"vllm/envs.py", "vllm/v1/request.py", "vllm/v1/executor/multiproc_executor.py"}
NAME = "vllm-0.11.0-cp38-abi3-manylinux1_x86_64.whl"


def packed(files: dict[str, bytes] = FILES) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)  # the date must not vary
    return buffer.getvalue()


class Index:
    """A package index on this machine. Tests set what it lists and how it misbehaves."""

    def __init__(self) -> None:
        self.files: list[dict[str, Any]] = []
        self.bodies: dict[str, bytes] = {}
        self.ranges = True
        self.cut_after: int | None = None
        self.page: bytes | None = None
        self.sent = 0
        self.requests = 0
        self.on_request: Callable[[], None] = lambda: None
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def add(self, name: str, body: bytes = b"", **more: Any) -> None:
        self.bodies[f"/files/{name}"] = body
        digest = {"sha256": hashlib.sha256(body).hexdigest()}
        # The address is relative to the page, as PEP 691 allows.
        self.files.append({"filename": name, "url": f"../../files/{name}", "hashes": digest} | more)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.on_request()
        if handler.path == "/simple/vllm/":
            body = self.page or json.dumps({"files": self.files}).encode()
            handler.send_response(200)
        elif handler.path not in self.bodies:
            handler.send_error(404)
            return
        else:
            self.requests += 1
            body = self.bodies[handler.path]
            asked = re.fullmatch(r"bytes=(\d*)-(\d*)", handler.headers.get("Range", ""))
            if asked and self.ranges:
                first, last = asked[1], asked[2]
                start = int(first) if first else max(0, len(body) - int(last))
                stop = min(int(last) + 1 if first and last else len(body), len(body))
                handler.send_response(206)
                handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(body)}")
                body = body[start:stop]
            else:
                handler.send_response(200)
            self.sent += len(body)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: self.cut_after])


@pytest.fixture
def index() -> Iterator[Index]:
    index = Index()
    yield index
    index.server.shutdown()
    index.server.server_close()


def on_disk(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*.py")}


@pytest.mark.parametrize("ranges", [True, False])
def test_only_the_python_files_that_matter_are_kept(
    index: Index, tmp_path: Path, ranges: bool
) -> None:
    index.add(NAME, packed())
    index.ranges = ranges
    source = wheel.fetch("0.11.0", index=index.url, cache=tmp_path / "cache")
    assert on_disk(source.root) == KEPT == set(source.paths("vllm"))
    assert source.text("vllm/v1/request.py") == "class Request: ...\n"
    assert source.text("vllm/v1/no_such.py") is None
    assert source.version == "0.11.0"
    digest = hashlib.sha256(packed()).hexdigest()
    assert source.wheel == {"file": NAME, "sha256": digest}
    assert not list(tmp_path.rglob("outside.py"))
    if ranges:
        assert index.sent < 2 << 20, "the kernels were fetched too"
    else:
        assert index.sent >= len(packed())


def test_reading_ahead_keeps_the_requests_few(index: Index, tmp_path: Path) -> None:
    many = {f"vllm/v1/core/part_{i}.py": b"x = 1\n" * i for i in range(200)}
    index.add(NAME, packed({"vllm/_C.so": KERNELS, **many}))
    source = wheel.fetch("0.11.0", index=index.url, cache=tmp_path)
    assert len(source.paths("vllm")) == 200
    assert source.text("vllm/v1/core/part_150.py") == "x = 1\n" * 150
    assert index.requests < 10


def test_a_release_is_fetched_once(index: Index, tmp_path: Path) -> None:
    index.add(NAME, packed())
    first = wheel.fetch("0.11.0", index=index.url, cache=tmp_path)
    index.server.shutdown()
    index.server.server_close()
    assert wheel.fetch("0.11", index=index.url, cache=tmp_path) == first


def test_a_cache_that_lost_a_file_is_filled_again(index: Index, tmp_path: Path) -> None:
    index.add(NAME, packed())
    root = wheel.fetch("0.11.0", index=index.url, cache=tmp_path).root
    (root / "vllm/v1/request.py").unlink()
    assert wheel.fetch("0.11.0", index=index.url, cache=tmp_path).root == root
    assert on_disk(root) == KEPT


def test_the_folder_appears_complete_or_not_at_all(index: Index, tmp_path: Path) -> None:
    index.add(NAME, packed())
    seen: set[str] = set()
    index.on_request = lambda: seen.update(path.name for path in tmp_path.iterdir())
    wheel.fetch("0.11.0", index=index.url, cache=tmp_path)
    assert seen
    assert all(name.startswith(".") for name in seen)
    assert [path.name[0] for path in tmp_path.iterdir()] == ["v"], "temporary files were left"


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_transfer_leaves_nothing(index: Index, tmp_path: Path, ranges: bool) -> None:
    index.add(NAME, packed())
    index.ranges, index.cut_after = ranges, 40_000
    with pytest.raises(TruetapError) as caught:
        wheel.fetch("0.11.0", index=index.url, cache=tmp_path)
    assert isinstance(caught.value, CouldNotRun | IntegrityError)
    assert NAME in str(caught.value)
    assert not list(tmp_path.iterdir())
    index.cut_after = None
    assert on_disk(wheel.fetch("0.11.0", index=index.url, cache=tmp_path).root) == KEPT


def test_damaged_bytes_are_noticed(index: Index, tmp_path: Path) -> None:
    damaged = packed().replace(b"class Request: ...", b"class Request: ..?")
    index.add(NAME, damaged)
    with pytest.raises(IntegrityError, match="damaged"):
        wheel.fetch("0.11.0", index=index.url, cache=tmp_path)
    index.ranges = False
    index.files[0]["hashes"] = {"sha256": hashlib.sha256(packed()).hexdigest()}
    with pytest.raises(IntegrityError, match="sha256"):
        wheel.fetch("0.11.0", index=index.url, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_newest_build_for_linux_is_taken(index: Index, tmp_path: Path) -> None:
    for name in (
        "vllm-0.11.0-cp38-abi3-manylinux1_x86_64.whl",
        "vllm-0.11.0-2-cp38-abi3-manylinux1_x86_64.whl",
        "vllm-0.11.0-10-cp38-abi3-manylinux1_x86_64.whl",
        "vllm-0.11.0-11-cp38-abi3-manylinux2014_aarch64.whl",
        "vllm-0.11.1-cp38-abi3-macosx_11_0_arm64.whl",
    ):
        index.add(name, packed())
    fetched = [
        wheel.fetch(v, index=index.url, cache=tmp_path).wheel["file"] for v in ("0.11.0", "0.11.1")
    ]
    assert fetched == [
        "vllm-0.11.0-10-cp38-abi3-manylinux1_x86_64.whl",
        "vllm-0.11.1-cp38-abi3-macosx_11_0_arm64.whl",
    ]


def test_releases_are_final_and_from_0_8_5_on(index: Index) -> None:
    for version in ("0.10.0", "0.9.2", "0.8.4", "0.8.5", "0.8.5.post1", "0.12.0rc1", "0.10.1.1"):
        index.add(f"vllm-{version}-cp38-abi3-manylinux1_x86_64.whl")
    index.add("vllm-0.13.0-cp38-abi3-manylinux1_x86_64.whl", yanked="broken")
    index.add("vllm-0.14.0.tar.gz")
    assert package_index.releases(index.url) == ["0.8.5", "0.9.2", "0.10.0", "0.10.1.1"]


@pytest.mark.parametrize("version", ["0.8.4", "1.0.0rc1", "0.8.5.post1", "0.11.0+cpu", "eleven"])
def test_only_final_releases_can_be_asked_for(version: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        wheel.fetch(version, index="http://127.0.0.1:9/", cache=tmp_path)


def test_what_the_index_cannot_give_is_said(index: Index, tmp_path: Path) -> None:
    index.add("vllm-0.13.0-cp38-abi3-manylinux1_x86_64.whl", yanked="wrong torch")
    index.add("vllm-0.14.0.tar.gz")
    index.add("vllm-0.15.0-cp38-abi3-manylinux1_x86_64.whl")
    del index.bodies["/files/vllm-0.15.0-cp38-abi3-manylinux1_x86_64.whl"]
    index.add("vllm-0.16.0-cp38-abi3-manylinux1_x86_64.whl", packed({"vllm/a.so": b"x"}))
    for version, error, words in (
        ("0.12.0", UsageError, "no wheel of vllm 0.12.0"),
        ("0.13.0", UsageError, "withdrawn.*wrong torch"),
        ("0.14.0", UsageError, "no wheel of vllm 0.14.0"),
        ("0.15.0", CouldNotRun, "could not be fetched: 404"),
        ("0.16.0", CouldNotRun, "none of vllm's Python files"),
    ):
        with pytest.raises(error, match=words) as caught:
            wheel.fetch(version, index=index.url, cache=tmp_path)
        assert caught.value.remedy
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("page", [b"<html></html>", b'{"projects": []}', b"[1]"])
def test_an_index_without_json_is_said(index: Index, tmp_path: Path, page: bytes) -> None:
    index.page = page
    with pytest.raises(CouldNotRun, match="PEP 691"):
        wheel.fetch("0.11.0", index=index.url, cache=tmp_path)


def test_no_network_is_said_without_the_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple/")
    with pytest.raises(CouldNotRun, match=r"127\.0\.0\.1:9/simple/vllm/") as caught:
        wheel.fetch("0.11.0", cache=tmp_path)
    assert "secret" not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_said(index: Index, tmp_path: Path) -> None:
    index.add(NAME, packed())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CouldNotRun, match="could not be written"):
        wheel.fetch("0.11.0", index=index.url, cache=tmp_path / "file")
