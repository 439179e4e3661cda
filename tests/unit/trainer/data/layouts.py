"""One small data set, written in every layout that is read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy.sparse as sp

LABELS = ["Red Shoes", "hat", "wool scarf", "Ärmel lang", "never clicked"]
TRAIN = [("Shoes, red\u2028leather", [0]), ("a hat", [1]), ("warm things: 1,2", [1, 2]), ("sleeve", [3])]
TEST = [("crimson shoe", [0]), ("scarf & hat", [1, 2])]
TRAIN_FILTER = [(1, 2)]
TEST_FILTER = [(0, 1), (1, 3)]

Write = Callable[[Path], None]


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def _lines(rows: list[str], end: str = "\n") -> str:
    return "".join(row + end for row in rows)


def _matrix(part: list[tuple[str, list[int]]]) -> str:
    rows = [" ".join(f"{label}:1.00000" for label in labels) for _, labels in part]
    return _lines([f"{len(part)} {len(LABELS)}", *rows])


def labelled(folder: Path) -> None:
    _put(folder / "labels.txt", _lines(LABELS))
    for name, part in (("trn", TRAIN), ("tst", TEST)):
        _put(
            folder / f"{name}.jsonl",
            _lines([json.dumps({"query": query, "labels": labels}) for query, labels in part]),
        )


def xmc_json(folder: Path, end: str = ".gz", line_end: str = "\n", weights: bool = False) -> None:
    def item(uid: str, title: str, **more: object) -> str:
        return json.dumps({"uid": uid, "title": title, "content": f"about {title}", **more})

    for name, part in (("trn", TRAIN), ("tst", TEST)):
        rows = []
        for at, (query, labels) in enumerate(part):
            more = {"target_rel": [1.0] * len(labels)} if weights else {}
            rows.append(item(f"{name}{at}", query, target_ind=labels, **more))
        _put(folder / f"{name}.json{end}", _lines(rows, line_end))
    _put(
        folder / f"lbl.json{end}", _lines([item(f"B0{at}", text) for at, text in enumerate(LABELS)], line_end)
    )


def xmc_texts(folder: Path) -> None:
    _put(folder / "Y.txt", _lines(LABELS))
    for name, part in (("trn", TRAIN), ("tst", TEST)):
        _put(folder / f"{name}_X.txt", _lines([query for query, _ in part]))
        _put(folder / f"{name}_X_Y.txt", _matrix(part))


def xmc_raw_data(folder: Path) -> None:
    """The texts in a folder of their own, with an id before each and Windows line ends, packed."""
    names = {"train": TRAIN, "test": TEST}
    _put(
        folder / "raw_data" / "label.raw.txt.gz", _lines([f"L{at}->{text}" for at, text in enumerate(LABELS)])
    )
    for name, part in names.items():
        rows = [f"{name}{at}->{query}" for at, (query, _) in enumerate(part)]
        _put(folder / "raw_data" / f"{name}.raw.txt.gz", _lines(rows, "\r\n"))
    _put(folder / "trn_X_Y.txt", _matrix(TRAIN).replace("\n", "\r\n"))
    _put(folder / "tst_X_Y.txt", _matrix(TEST))


def xmc_npz(folder: Path) -> None:
    _put(folder / "raw" / "Y.txt", _lines(LABELS))
    for name, part in (("trn", TRAIN), ("tst", TEST)):
        _put(folder / "raw" / f"{name}_X.txt", _lines([query for query, _ in part]) + "\n\n")
        rows = np.repeat(np.arange(len(part)), [len(labels) for _, labels in part])
        columns = np.concatenate([labels for _, labels in part])
        shape = (len(part), len(LABELS))
        sp.save_npz(folder / f"Y.{name}.npz", sp.csr_matrix((np.ones(len(rows)), (rows, columns)), shape))


def text2text(folder: Path, relevance: bool = False) -> None:
    _put(folder / "output-labels.txt", _lines(LABELS) + "\n\n")
    for name, part in (("training-data", TRAIN), ("test-data", TEST)):
        rows = [
            ",".join(f"{label}::1.0" if relevance else str(label) for label in labels) + f"\t{query}"
            for query, labels in part
        ]
        _put(folder / f"{name}.txt", _lines(rows, "\r\n" if relevance else "\n") + "\n\n")


def beir(folder: Path, end: str = "") -> None:
    rows = [{"_id": f"d{at}", "title": text, "text": ""} for at, text in enumerate(LABELS)]
    _put(folder / f"corpus.jsonl{end}", _lines([json.dumps(row) for row in rows]))
    queries = {f"q{at}": query for at, (query, _) in enumerate(TRAIN + TEST)}
    _put(
        folder / f"queries.jsonl{end}",
        _lines([json.dumps({"_id": name, "text": query, "metadata": {}}) for name, query in queries.items()]),
    )
    judged = [(f"q{at}", f"d{label}") for at, (_, labels) in enumerate(TRAIN + TEST) for label in labels]
    split = sum(len(labels) for _, labels in TRAIN)
    for name, pairs in (("train", judged[:split]), ("test", judged[split:])):
        rows = [f"{query}\t{document}\t1" for query, document in pairs]
        _put(
            folder / "qrels" / f"{name}.tsv",
            _lines(["query-id\tcorpus-id\tscore", *rows, f"{pairs[0][0]}\td4\t0"]) + "\n",
        )


LAYOUTS: dict[str, Write] = {
    "labelled": labelled,
    "xmc json, packed": xmc_json,
    "xmc json": lambda folder: xmc_json(folder, "", "\r\n", weights=True),
    "xmc texts": xmc_texts,
    "xmc raw_data": xmc_raw_data,
    "xmc npz": xmc_npz,
    "text2text": text2text,
    "text2text with relevance": lambda folder: text2text(folder, relevance=True),
    "beir": beir,
    "beir, packed": lambda folder: beir(folder, ".gz"),
}


def write_filters(
    folder: Path, spelling: str = "filter_labels_{}.txt", names: tuple[str, str] = ("train", "test")
) -> None:
    for name, pairs in zip(names, (TRAIN_FILTER, TEST_FILTER), strict=True):
        _put(folder / spelling.format(name), _lines([f"{row} {label}" for row, label in pairs]))
