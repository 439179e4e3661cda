from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest


class BundleCopy:
    """A bundle to damage; `reseal` makes its manifest consistent again, as a careful forger would."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def manifest(self) -> dict:
        return json.loads((self.path / "manifest.json").read_bytes())

    def _bytes(self, name: str) -> bytes | None:
        file = self.path / name
        return file.read_bytes() if file.is_file() else None

    def reseal(self, change=lambda manifest: None) -> None:
        """Apply `change` to the manifest, then correct sizes, digests, id and checksum."""
        from export.bundle.format import bundle_id

        manifest = self.manifest
        manifest["files"] = {
            name: {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
            for name in manifest["files"]
            if (raw := self._bytes(name)) is not None
        }
        index = manifest["index"]
        digests = {name: record["sha256"] for name, record in manifest["files"].items()}
        targets = {name: index[name] for name in ("target_recall", "k")}
        if manifest["rescore"] is not None:
            targets |= {name: manifest["rescore"][name] for name in ("candidates", "per_match")}
        manifest["bundle_id"] = bundle_id(digests, targets)
        change(manifest)
        if "checksum" in manifest:
            manifest["checksum"] = "0" * 64
        raw = (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode()
        if "checksum" in manifest:
            raw = raw.replace(b"0" * 64 + b'"\n}', hashlib.sha256(raw).hexdigest().encode() + b'"\n}')
        (self.path / "manifest.json").write_bytes(raw)


@pytest.fixture
def bundle_copy(small_bundle: Path, tmp_path: Path) -> BundleCopy:
    return BundleCopy(Path(shutil.copytree(small_bundle, tmp_path / "bundle")))


@pytest.fixture
def wide_copy(small_wide_bundle: Path, tmp_path: Path) -> BundleCopy:
    return BundleCopy(Path(shutil.copytree(small_wide_bundle, tmp_path / "wide")))


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a small real training: 400 queries, 48 phrases, two epochs of `bag`."""
    return train(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def small_wide_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with wide heads of 24 + 24 beside the narrow ones of 8 + 8."""
    return train(tmp_path_factory.mktemp("wide_run"), "wide_dim=48")


def train(folder: Path, *more: str) -> Path:
    from trainer.data.options import ReadOptions
    from trainer.data.read import read_dataset
    from trainer.run import run_training
    from trainer.settings import make_config

    log = folder / "clicks.tsv"
    products = ["garden hose", "running shoes", "led bulb", "ceiling fan", "cordless drill", "office chair"]
    attributes = ["red", "blue", "cheap", "outdoor", "steel", "10 ft", "kids", "wireless"]
    prefixes = ["buy", "best", "where to get", "discount", "new", "used", "", "big"]
    lines = [
        f"{prefix} {attribute} {product}\t{attribute} {product}\t{1 + len(prefix)}"
        for prefix in prefixes
        for attribute in attributes
        for product in products
    ]
    log.write_text("query\tphrase\tweight\n" + "\n".join(lines) + "\n", encoding="utf-8")
    settings = ["epochs=2", "dim=16", "threads=1", "validation_share=0.2", "batch.queries=64", *more]
    run_training(read_dataset([log], ReadOptions()), make_config("bag", settings), folder / "run")
    return folder / "run"


@pytest.fixture(scope="session")
def small_cascade_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same phrases with a cascade of label groups (`mhc`) as the classifier."""
    return train(tmp_path_factory.mktemp("cascade_run"), "classifier.kind=mhc")
