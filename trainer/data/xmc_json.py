"""The extreme classification repository's raw texts: `trn.json.gz`, `tst.json.gz` and `lbl.json.gz`.

Each line of the first two is an object with `uid`, `title`, in some sets `content`, `target_ind` (numbers of
lines of `lbl.json.gz`, from 0) and in some `target_rel` (a weight of each); each line of the third is a label
with `uid`, `title` and maybe `content`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source
from trainer.data.collect import Collector
from trainer.data.filters import filter_beside
from trainer.data.jsonlines import LabelledFields, read_label_objects, read_labelled
from trainer.data.options import ReadOptions
from trainer.data.recognised import LabelLists, Recognised, packed

LABEL_NAMES = ("lbl.json", "lbl.json.gz")
TITLE = ("title",)


def is_xmc_object(value: dict[str, Any]) -> bool:
    """Whether a JSON object is a line of `trn.json.gz` or `tst.json.gz`."""
    return "target_ind" in value


def find_json(folder: Path) -> tuple[list[tuple[Path, int]], list[Path]] | None:
    """The data files of a folder in this layout with their parts, and the label list; else None."""
    labels = [path for name in LABEL_NAMES if (path := folder / name).is_file()]
    train, test = (
        next(
            (path for name in (f"{stem}.json", f"{stem}.json.gz") if (path := folder / name).is_file()), None
        )
        for stem in ("trn", "tst")
    )
    if train is None or not labels:
        return None
    return [(train, 0)] + ([(test, 1)] if test is not None else []), labels[:1]


def recognise_xmc_json(source: Source, options: ReadOptions, lists: LabelLists) -> Recognised:
    """A data file with the label list beside it.

    Raises:
        InputError: there is no label list, or it cannot be read.
    """
    folder = source.path.parent
    beside = next((path for name in LABEL_NAMES if (path := folder / name).is_file()), None)
    if beside is None:
        raise InputError(
            "refers to labels by number, and there is no lbl.json.gz beside it",
            file=source.path,
            hint="Put the label list of the download into the same folder.",
        )
    fields = options.text_fields or TITLE
    labels = lists.get(beside, lambda: read_label_objects(beside, fields, "uid", options)[0])
    filter_file = filter_beside(source.path)
    named = LabelledFields(fields, "target_ind", "target_rel")

    def read(collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:
        read_labelled(source, named, labels, filter_file, collector, part, advance)

    name = f"extreme classification repository, raw texts (JSONL with {beside.name}{packed(source)})"
    columns = {"query": " + ".join(fields), "phrase": f"target_ind: {' + '.join(fields)} of {beside.name}"}
    return Recognised(source, name, read, columns, labels.notes(), labels)
