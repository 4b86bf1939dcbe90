"""Preparing MNIST: reading, downloading, and the built-in digits instead of a missing set."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.data import prepare, sources
from common.data.prepare import PreparedDataset
from common.data.synthetic_digits import generate_digits
from common.system.errors import UserError
from configs.shared import Data


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a set of 100 training and 50 test images in the folders and formats of MNIST."""
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for prefix, part, count in (("train", "train", 100), ("t10k", "test", 50)):
        pixels, labels = generate_digits(count, 1, part)
        image_header = np.array([0x803, count, 28, 28], ">i4").tobytes()
        label_header = np.array([0x801, count], ">i4").tobytes()
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(image_header + pixels.tobytes())
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(label_header + labels.tobytes())
    monkeypatch.setattr(sources, "MNIST_FILES", {file.name: file.stat().st_size for file in folder.iterdir()})
    return folder


def make_settings(root: Path, download_timeout: float = 0) -> Data:
    return Data(root=str(root), cache=str(root / "cache"), download_timeout=download_timeout)


def check_dataset(prepared: PreparedDataset) -> None:
    """Check that a prepared set is the one that the fixture `raw` writes."""
    train_images, _ = generate_digits(100, 1, "train")
    _, test_labels = generate_digits(50, 1, "test")
    assert prepared.name == "mnist"
    assert not prepared.notice
    assert np.array_equal(prepared.map_array("train_images"), train_images)
    assert np.array_equal(prepared.map_array("test_labels"), test_labels)


def test_mnist_is_read_with_torchvision(raw: Path, tmp_path: Path) -> None:
    check_dataset(prepare.prepare_dataset(make_settings(tmp_path)))


def test_damaged_and_missing_files_are_refused(raw: Path, tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    prepare.prepare_dataset(settings)
    file = raw / "t10k-labels-idx1-ubyte"
    file.write_bytes(b"short")
    with pytest.raises(UserError, match="t10k-labels-idx1-ubyte is damaged: 5 bytes"):
        prepare.prepare_dataset(settings)
    file.unlink()
    with pytest.raises(UserError, match="t10k-labels-idx1-ubyte is missing"):
        prepare.prepare_dataset(settings)


def test_changed_files_are_prepared_again(raw: Path, tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    old = prepare.prepare_dataset(settings)
    file = raw / "train-labels-idx1-ubyte"
    content = bytearray(file.read_bytes())
    content[-1] = (content[-1] + 1) % 10
    file.write_bytes(content)
    new = prepare.prepare_dataset(settings)
    assert old.sha256["train_labels"] != new.sha256["train_labels"]
    assert old.sha256["train_images"] == new.sha256["train_images"]


def test_only_the_default_folder_may_be_missing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(tmp_path / "mistyped")
    settings = Data(root=root, cache=str(cache), download_timeout=0)
    with pytest.raises(UserError, match=f"data.root={root}: the folder does not exist; .* or set data.name=digits"):
        prepare.prepare_dataset(settings)
    empty_root_settings = Data(root=str(tmp_path), cache=str(cache), download_timeout=0)
    with pytest.raises(UserError, match=f"MNIST is not in the folder {tmp_path} .*; set data.root to .*MNIST/raw"):
        prepare.prepare_dataset(empty_root_settings)

    monkeypatch.setenv("DATA_ROOT", root)
    prepared = prepare.prepare_dataset(settings)
    assert prepared.name == "digits"
    assert "training on the built-in digits set instead" in prepared.notice
    assert not Path(root).exists()


@pytest.fixture
def requested_paths(raw: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve the files of `raw` as the only mirror of MNIST; return the list of requested paths."""
    from torchvision.datasets import MNIST

    archives = {f"{file.name}.gz": gzip.compress(file.read_bytes()) for file in raw.iterdir()}
    paths: list[str] = []

    class Mirror(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(archives[self.path.strip("/")])

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    resources = [(name, hashlib.md5(archive).hexdigest()) for name, archive in archives.items()]
    monkeypatch.setattr(MNIST, "resources", resources)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setattr(MNIST, "mirrors", [address])
        monkeypatch.setattr(prepare, "MNIST_MIRROR", address + resources[0][0])
        yield paths
        server.shutdown()


def test_a_missing_mnist_is_downloaded_once(requested_paths: list[str], tmp_path: Path) -> None:
    root = tmp_path / "new"
    root.mkdir()
    settings = make_settings(root, download_timeout=20)
    prepared = prepare.prepare_dataset(settings)
    check_dataset(prepared)
    paths_of_download = list(requested_paths)
    assert prepare.prepare_dataset(settings) == prepared
    assert requested_paths == paths_of_download
    assert not list(root.glob(".download-*"))


def test_a_failed_download_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        closed_address = f"http://127.0.0.1:{server.server_port}/"
    monkeypatch.setattr(prepare, "MNIST_MIRROR", closed_address)
    with pytest.raises(UserError, match=r"MNIST .* cannot be downloaded \(no connection: .*refused"):
        prepare.prepare_dataset(make_settings(tmp_path, download_timeout=20))
