"""User Behavior Insights (OpenSearch and others): click events joined to queries and to object texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source, decode_head, detect_encoding, open_source, undecodable
from trainer.data.collect import Collector
from trainer.data.columns import canonical
from trainer.data.delimited import DELIMITERS, split_rows, text_lines
from trainer.data.jsonlines import is_utf8_json, objects
from trainer.data.options import ReadOptions
from trainer.data.rows import RowBuffer

_ID = ("id", "objectid", "phraseid", "docid", "productid", "sku", "asin", "isbn", "ean")
_TEXT = ("text", "phrase", "keyword", "title", "name", "description")


def is_event(value: dict[str, Any]) -> bool:
    """Whether a JSON object is a line of `ubi_events`."""
    return "action_name" in value and (
        "event_attributes" in value or "query_id" in value or "user_query" in value
    )


def is_query(value: dict[str, Any]) -> bool:
    """Whether a JSON object is a line of `ubi_queries`."""
    return "query_id" in value and "user_query" in value and "action_name" not in value


class UbiJoin:
    """What the files of one call share: query texts by query id, object texts by object id.

    Attributes:
        queries: `query_id` -> what the user typed.
        files: `ubi_queries` files read.
    """

    def __init__(self, options: ReadOptions):
        self._options = options
        self._texts: dict[str, str] | None = None
        self.queries: dict[str, str] = {}
        self.files = 0

    def texts(self) -> dict[str, str] | None:
        """Object id -> text from `--phrases`, read once; None where no such file was given."""
        if self._texts is None and self._options.phrases is not None:
            self._texts = read_phrase_file(self._options.phrases, self._options)
        return self._texts

    def read_queries(
        self, source: Source, collector: Collector, advance: Callable[[int], None] | None = None
    ) -> None:
        """Remember the queries of a `ubi_queries` file."""
        rows = RowBuffer(collector, source, 0)
        self.files += 1
        for line, value in objects(source, rows, advance):
            query_id, query = value.get("query_id"), value.get("user_query")
            if isinstance(query_id, str) and isinstance(query, str):
                self.queries[query_id] = query
            else:
                rows.bad('the fields "query_id" and "user_query" are not both texts', line)

    def read_events(
        self, source: Source, collector: Collector, part: int, advance: Callable[[int], None] | None = None
    ) -> None:
        """Read the clicks of a `ubi_events` file; every click weighs one.

        Raises:
            InputError: a line is bad and bad lines stop, or nothing says what the clicked objects' texts are.
        """
        rows = RowBuffer(collector, source, part)
        texts = self.texts()
        actions = {canonical(action) for action in self._options.actions}
        for line, value in objects(source, rows, advance):
            action = value.get("action_name")
            if not isinstance(action, str):
                rows.bad('the field "action_name" is missing or is no text', line)
                continue
            if canonical(action) not in actions:
                collector.leave_out(f"event is no click (action {action[:40]})")
                continue
            query = value.get("user_query") or self.queries.get(str(value.get("query_id")))
            if not isinstance(query, str) or not query.strip():
                collector.leave_out("click whose query is not known (its query_id is in no ubi_queries file)")
                continue
            attributes = value.get("event_attributes")
            thing = attributes.get("object") if isinstance(attributes, dict) else None
            object_id = thing.get("object_id") if isinstance(thing, dict) else None
            if not isinstance(thing, dict) or object_id is None or object_id == "":
                rows.bad("the click names no event_attributes.object.object_id", line)
                continue
            text = _own_text(thing) if texts is None else texts.get(str(object_id))
            if text is not None:
                rows.add(line, query, text, phrase_id=str(object_id))
            elif texts is None:
                raise InputError(
                    f"the click names object {object_id}, and nothing says what its text is",
                    file=source.path,
                    line=line,
                    hint="Give a file of id and text (TSV, CSV or JSONL) with --phrases FILE.",
                )
            else:
                collector.leave_out("click on an object that is not in the --phrases file")
        rows.flush()


def _own_text(thing: dict[str, Any]) -> str | None:
    for name in ("name", "title", "description"):
        if isinstance(thing.get(name), str) and thing[name].strip():
            return str(thing[name])
    return None


def read_phrase_file(path: Path, options: ReadOptions) -> dict[str, str]:
    """Id -> text from TSV, CSV or JSONL with a header (or fields) such as `id,text`, or two bare columns.

    Raises:
        InputError: it cannot be read, or an id has two texts.
    """
    source = open_source(path)
    encoding = detect_encoding(source, options.encoding)
    head = decode_head(source, encoding)
    texts: dict[str, str] = {}
    json = head.lstrip().startswith("{") or is_utf8_json(source)
    pairs = _json_pairs(source, options) if json else _cell_pairs(source, head, encoding)
    for line, object_id, text in pairs:
        if texts.setdefault(object_id, text) != text:
            raise InputError(f"id {object_id} has two texts", file=path, line=line)
    return texts


def _pick(names: list[str], known: tuple[str, ...]) -> int | None:
    keys = [canonical(name) for name in names]
    return next((keys.index(name) for name in known if name in keys), None)


def _json_pairs(source: Source, options: ReadOptions) -> list[tuple[int, str, str]]:
    rows = RowBuffer(Collector(options), source, 0)
    pairs = []
    for line, value in objects(source, rows):
        names = list(value)
        at_id, at_text = _pick(names, _ID), _pick(names, _TEXT)
        text = None if at_text is None else value[names[at_text]]
        if at_id is None or not isinstance(text, str):
            rows.bad('the object has no "id" and "text"', line)
            continue
        pairs.append((line, str(value[names[at_id]]), text))
    return pairs


def _cell_pairs(source: Source, head: str, encoding: str) -> list[tuple[int, str, str]]:
    first = head.lstrip().partition("\n")[0]
    delimiter = max(DELIMITERS, key=first.count)
    pairs: list[tuple[int, str, str]] = []
    columns: tuple[int, int] | None = None
    try:
        with source.open() as stream:
            for line, cells in split_rows(text_lines(stream, encoding), delimiter, delimiter != "\t"):
                if isinstance(cells, str):
                    raise InputError(cells, file=source.path, line=line)
                if columns is None:
                    at_id, at_text = _pick(cells, _ID), _pick(cells, _TEXT)
                    if at_id is not None and at_text is not None:
                        columns = (at_id, at_text)
                        continue
                    if len(cells) != 2:
                        raise InputError(
                            "no columns are named id and text",
                            file=source.path,
                            line=line,
                            hint="Add a header line.",
                        )
                    columns = (0, 1)
                if len(cells) <= max(columns):
                    raise InputError(f"the line has {len(cells)} columns only", file=source.path, line=line)
                pairs.append((line, cells[columns[0]].strip().removeprefix("\ufeff"), cells[columns[1]]))
    except UnicodeDecodeError:
        raise undecodable(source, encoding) from None
    return pairs
