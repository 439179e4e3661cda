"""Milvus Lite behind its own server, in a process that a test may kill, and bundles whose index is there."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import numpy as np
import pytest

from bidmatch.base.files import atomic_dir
from export.bundle import format as fmt
from export.bundle.milvus_client import MilvusAccess, connect
from export.bundle.read import open_bundle
from export.bundle.write import finish

_RUN = "import sys; from milvus_lite.cmdline import main; sys.exit(main(sys.argv[1:]))"


class MilvusServer:
    """A deployment on a port of its own, which it keeps when it is started anew.

    Args:
        folder: of its data.
    """

    def __init__(self, folder: Path):
        pytest.importorskip("pymilvus", reason="pymilvus is not installed (extra `milvus`)")
        pytest.importorskip("milvus_lite", reason="milvus-lite is not installed (extra `dev`)")
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        arguments = [
            "server",
            "--data-dir",
            str(self._folder),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RUN, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 60
        while time.monotonic() < until:
            assert self._process.poll() is None
            try:
                connect(self.uri, None, 2).list_collections(timeout=2)
                return
            except Exception:
                # This process's connection may still be the one to the server before.
                time.sleep(0.2)
        raise AssertionError("Milvus Lite does not answer")

    def kill(self) -> None:
        """As a machine that is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)

    def pause(self, signal_number: int) -> None:
        """SIGSTOP, SIGCONT: as a machine that hangs."""
        assert self._process is not None
        self._process.send_signal(signal_number)

    def client(self):
        return connect(self.uri, None, 10)

    def __enter__(self) -> MilvusServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def in_milvus(bundle: Path, path: Path, uri: str, index_type: str = "HNSW") -> Path:
    """The same bundle with its index in Milvus, loaded by the export's own code."""
    from export.milvus import MilvusLoader, MilvusTarget

    target = MilvusTarget(uri=uri, index_type=index_type)
    with open_bundle(bundle) as opened:
        ours = {"format_version", "bundle_id", "files", "checksum"}
        fields = {name: value for name, value in opened.manifest if name not in ours}
        with atomic_dir(path) as folder:
            for name in opened.manifest.files:
                if name not in fmt.INDEX_FILES:
                    shutil.copy(bundle / name, folder / name)
            loader = MilvusLoader(folder, np.asarray(opened.vectors), target, MilvusAccess())
            loader.build(opened.manifest.index.M, opened.manifest.index.ef_construction)
            finish(folder, fields | {"milvus": target.record})
        loader.flip()
    return path
