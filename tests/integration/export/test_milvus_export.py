"""`bidmatch export --index milvus`: resumable, idempotent, and the alias leads to what is whole alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from milvus_server import MilvusServer

from bidmatch.base.errors import BidmatchError
from export.bundle.encoder import QueryEncoder
from export.bundle.format import VECTORS, collection_of
from export.bundle.milvus import MilvusIndex
from export.bundle.milvus_client import MilvusAccess
from export.bundle.read import open_bundle


@pytest.fixture(scope="module")
def milvus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusServer]:
    with MilvusServer(tmp_path_factory.mktemp("milvus")) as server:
        yield server


def bidmatch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bidmatch", *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


def test_export_serve_and_the_way_back(milvus: MilvusServer, small_run: Path, tmp_path: Path):
    out = tmp_path / "bundle"
    asked = ("export", "--checkpoint", small_run, "--index", "milvus", "--uri", milvus.uri, "--alias", "ads")
    done = bidmatch(*asked, "--out", out)
    assert done.returncode == 0, done.stderr
    assert not (out / "links.npy").exists()
    with open_bundle(out) as bundle:
        name = collection_of(bundle.manifest.files[VECTORS].sha256)
        index = MilvusIndex(bundle, MilvusAccess(timeout_ms=20_000))
        texts = bundle.phrases["text"].to_pylist()
        vectors = QueryEncoder(bundle).encode(texts).narrow
        assert np.allclose(index.search(vectors, 5).scores, index.exact(vectors, 5).scores, atol=1e-5)
        assert bundle.manifest.index.recall > 0.9
    client = milvus.client()
    assert client.list_aliases(name)["aliases"] == ["ads"]
    again = bidmatch(*asked, "--out", tmp_path / "again")
    assert again.returncode == 0, again.stderr
    assert "going on there" in again.stderr
    log = tmp_path / "log.tsv"
    log.write_text("query\nred running shoes\ncheap garden hose\n")
    scored = bidmatch("score", "--bundle", out, "--input", log, "--output", tmp_path / "scored.tsv")
    assert scored.returncode == 0, scored.stderr
    assert name in bidmatch("inspect", out).stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--index", "milvus"), "needs --uri"),
        (("--uri", "http://a:1"), "add --index milvus"),
        (("--index", "milvus", "--uri", "http://root:hush@a:1"), "BIDMATCH_MILVUS_TOKEN"),
    ],
)
def test_options_that_do_not_fit(small_run: Path, tmp_path: Path, flags: tuple[str, ...], reason: str):
    done = bidmatch("export", "--checkpoint", small_run, "--out", tmp_path / "none", *flags)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "hush" not in done.stderr


def test_an_export_goes_on_where_it_was_killed_and_only_then_flips_the_alias(
    milvus: MilvusServer, tmp_path: Path, monkeypatch
):
    from export import milvus as loading

    monkeypatch.setattr(loading, "_BATCH", 100)
    client = milvus.client()

    def loader(seed: int, uri: str = milvus.uri) -> loading.MilvusLoader:
        vectors = np.random.default_rng(seed).normal(size=(1_050, 16)).astype(np.float32)
        np.save(tmp_path / VECTORS, vectors)
        target = loading.MilvusTarget(uri=uri, alias="live")
        return loading.MilvusLoader(tmp_path, vectors, target, MilvusAccess(), call_seconds=5)

    first = loader(1)
    first.build(16, 200)
    first.flip()
    written: list[int] = []
    write = loading.MilvusLoader._write

    def counted(self, start: int, end: int) -> int:
        written.append(start)
        if len(written) == 5:
            milvus.kill()
        return write(self, start, end)

    monkeypatch.setattr(loading.MilvusLoader, "_write", counted)
    with pytest.raises(BidmatchError, match="failed"):
        loader(2).build(16, 200)
    milvus.start()
    client = milvus.client()
    assert client.list_aliases(first.collection)["aliases"] == ["live"]
    second = loader(2)
    graph = second.build(16, 200)
    # What was acknowledged is not written again.
    assert written[5:] == list(range(400, 1_050, 100))
    vectors = np.load(tmp_path / VECTORS)
    graph.set_ef(200)
    assert (graph.knn_query(vectors[:20], 1, 1)[0].shape) == (20, 1)
    second.flip()
    assert client.list_aliases(second.collection)["aliases"] == ["live"]
    assert client.has_collection(first.collection)
    # Other parameters: the index is built anew over the same rows.
    second.build(24, 300)
    found = client.describe_index(second.collection, "vector")
    assert found["index_type"] == "HNSW"


def test_where_no_milvus_is_nothing_is_exported(small_run: Path, tmp_path: Path, monkeypatch):
    from export import milvus as loading
    from export.bundle.index import IndexUnavailableError

    np.save(tmp_path / VECTORS, np.zeros((1, 4), np.float32))
    target = loading.MilvusTarget(uri="http://127.0.0.1:9")
    with pytest.raises(IndexUnavailableError, match="does not answer"):
        loading.MilvusLoader(tmp_path, np.zeros((1, 4), np.float32), target, MilvusAccess(), call_seconds=1)
