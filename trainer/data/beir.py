"""BEIR: `corpus.jsonl`, `queries.jsonl` and `qrels/{train,dev,test}.tsv`. The documents are the phrases.

A line of `qrels` is query id, document id and score; at a score of 0 or less the document is not relevant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source, detect_encoding, open_source, undecodable
from trainer.data.collect import Collector
from trainer.data.jsonlines import read_label_objects
from trainer.data.labels import Labels
from trainer.data.lines import line_blocks
from trainer.data.numbered import Block, NumberedReader
from trainer.data.options import ReadOptions
from trainer.data.recognised import Recognised, packed
from trainer.data.rows import SURROGATE

_TITLE_AND_TEXT = ("title", "text")
# Ids are looked up in whole columns, whose hash table is made anew for each block of lines.
_LINES_AT_ONCE = 1 << 19
_DEV = ("dev", "val", "valid", "validation")


@dataclass(frozen=True)
class Qrels:
    """One file of relevance judgements.

    Attributes:
        path: the file.
        part: 0 training (or undivided), 1 test.
        note: what to say of its part, or "".
    """

    path: Path
    part: int
    note: str = ""


class BeirFolder:
    """A folder in this layout.

    Attributes:
        corpus: the documents' file.
        queries: the queries' file.
        qrels: the judgements, in order.
        options: how to read them.
    """

    def __init__(self, corpus: Path, queries: Path, qrels: list[Qrels], options: ReadOptions):
        self.corpus, self.queries, self.qrels, self.options = corpus, queries, qrels, options

    @cached_property
    def documents(self) -> tuple[Labels, pa.Array]:
        """The documents as a label list, and the id of each line.

        Raises:
            InputError: the file cannot be read, or an id is there twice.
        """
        fields = self.options.text_fields or _TITLE_AND_TEXT
        labels, ids = read_label_objects(self.corpus, fields, "_id", self.options)
        _refuse_twice(ids, self.corpus)
        return labels, ids

    @cached_property
    def query_texts(self) -> tuple[pa.Array, pa.Array]:
        """Text and id of each query.

        Raises:
            InputError: the file cannot be read, or an id is there twice.
        """
        texts, ids = read_label_objects(self.queries, ("text",), "_id", self.options)
        _refuse_twice(ids, self.queries)
        return texts.texts, ids


def _refuse_twice(ids: pa.Array, path: Path) -> None:
    encoded = ids.dictionary_encode()
    codes = encoded.indices.to_numpy()
    seen = np.bincount(codes, minlength=len(encoded.dictionary))
    seen[[at for at in [pc.index(encoded.dictionary, "").as_py()] if at >= 0]] = 0
    if seen.max(initial=0) > 1:
        twice = int(np.argmax(seen > 1))
        lines = np.flatnonzero(codes == twice)
        raise InputError(
            f"the id {encoded.dictionary[twice]} is there twice", file=path, line=int(lines[1]) + 1
        )


def find_beir(folder: Path, options: ReadOptions) -> BeirFolder | None:
    """The files of a folder in this layout; None for another layout.

    `test` is the held-out part, `dev` where there is no `test`; all others train, and `dev` with them, since
    validation queries are chosen from the training part. Where nothing is left to train on, the split is not
    given.

    Raises:
        InputError: there are corpus and queries, and no judgements.
    """
    corpus, queries = (
        next((path for end in ("", ".gz") if (path := folder / f"{name}.jsonl{end}").is_file()), None)
        for name in ("corpus", "queries")
    )
    if corpus is None or queries is None:
        return None
    found = sorted(
        path for path in (folder / "qrels").glob("*.tsv*") if path.name.endswith((".tsv", ".tsv.gz"))
    )
    if not found:
        raise InputError("holds a corpus and queries, and no qrels/*.tsv", file=folder)
    names = {path.name.split(".", 1)[0].casefold(): path for path in found}
    held = "test" if "test" in names else next((name for name in _DEV if name in names), None)
    if held is None or len(names) == 1:
        only = ", ".join(path.name for path in found)
        return BeirFolder(
            corpus, queries, [Qrels(path, 0, f"qrels/{only} gives no split") for path in found], options
        )
    qrels = []
    for name, path in names.items():
        if name == held:
            qrels.append(Qrels(path, 1))
        else:
            qrels.append(Qrels(path, 0, f"qrels/{path.name} is training data, too" if name in _DEV else ""))
    return BeirFolder(corpus, queries, qrels, options)


def recognise_beir(folder: BeirFolder, qrels: Qrels) -> Recognised:
    """One file of judgements, with the folder's documents and queries.

    Raises:
        InputError: documents or queries cannot be read.
    """
    source = open_source(qrels.path)
    labels, _ = folder.documents

    def read(collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:
        _read(source, folder, collector, part, advance)

    fields = " + ".join(folder.options.text_fields or _TITLE_AND_TEXT)
    columns = {
        "query": f"text of {folder.queries.name}",
        "phrase": f"{fields} of {folder.corpus.name}",
        "weight": "score",
    }
    notes = labels.notes() + ([qrels.note] if qrels.note else [])
    name = f"BEIR (qrels with {folder.queries.name} and {folder.corpus.name}{packed(source)})"
    return Recognised(source, name, read, columns, notes, labels)


def _read(
    source: Source,
    folder: BeirFolder,
    collector: Collector,
    part: int,
    advance: Callable[[int], None] | None,
) -> None:
    labels, document_ids = folder.documents
    query_texts, query_ids = folder.query_texts
    reader = NumberedReader(collector, source.path, labels, part)
    encoding = detect_encoding(source, folder.options.encoding)
    line = 1
    try:
        with source.open(advance) as stream:
            for lines in line_blocks(stream, encoding, _LINES_AT_ONCE):
                cells = _judgements(lines, line, source, encoding, query_ids, collector)
                line += len(lines)
                if not cells:
                    continue
                numbers, queries, documents, scores = (list(column) for column in zip(*cells, strict=True))
                query = _places(queries, query_ids)
                document = _places(documents, document_ids)
                for known, names, file in (
                    (query, queries, folder.queries),
                    (document, documents, folder.corpus),
                ):
                    lost = np.flatnonzero(known < 0)
                    first = f"the id {names[lost[0]][:40]!r} is not in {file.name}" if len(lost) else None
                    lines_of = [numbers[at] for at in lost]
                    collector.bad_rows(f"the id is not in {file.name}", source.path, lines_of, first)
                good = (query >= 0) & (document >= 0)
                reader.add(
                    Block(
                        np.array(numbers, dtype=np.int64)[good],
                        query_texts.take(pa.array(query[good])),
                        np.ones(int(good.sum()), dtype=np.int64),
                        document[good],
                        np.array(scores, dtype=np.float64)[good],
                    )
                )
    except UnicodeDecodeError:
        raise undecodable(source, encoding) from None


def _judgements(
    lines: list[str], start: int, source: Source, encoding: str, query_ids: pa.Array, collector: Collector
) -> list[tuple[int, str, str, float]]:
    """(line, query id, document id, score) of the lines that say a document is relevant."""
    path = source.path
    cells = []
    for line, text in enumerate(lines, start):
        if not text.strip():
            continue
        if SURROGATE.search(text):
            if collector.options.bad_lines == "stop":
                raise undecodable(source, encoding)
            collector.bad("the text is not UTF-8", path, line)
            continue
        if line == 1 and _is_header(text, query_ids):
            continue
        parts = [part.strip() for part in text.split("\t")]
        # TREC's own files have an iteration between the ids.
        if len(parts) == 4:
            parts = [parts[0], *parts[2:]]
        if len(parts) != 3:
            collector.bad("the line is not query id, document id and score, set off by tabs", path, line)
            continue
        try:
            score = float(parts[2])
        except ValueError:
            collector.bad("the score is not a number", path, line)
            continue
        if score <= 0:
            collector.leave_out("the score is 0 or less: not relevant")
        else:
            cells.append((line, parts[0], parts[1], score))
    return cells


def _is_header(text: str, query_ids: pa.Array) -> bool:
    """Whether a first line names its columns; a judgement, good or bad, begins with a query's id."""
    cells = [cell.strip() for cell in text.split("\t")]
    known = pc.index(query_ids, pa.scalar(cells[0], query_ids.type)).as_py() >= 0
    return "query" in text.casefold() and not _is_number(cells[-1]) and not known


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _places(names: list[str], ids: pa.Array) -> np.ndarray:
    """Position of each id, int64, -1 for none."""
    found = pc.index_in(pa.array(names, pa.large_string()), value_set=ids)
    return pc.fill_null(found, -1).to_numpy().astype(np.int64)
