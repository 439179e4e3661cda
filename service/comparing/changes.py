"""The comparison query by query, for a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from bidmatch.base.errors import ConfigError
from bidmatch.base.files import refuse_existing, refuse_inside, refuse_name_not_utf8
from service.comparing.answers import Answers, Pair
from service.scoring.writers import OutputFormat, format_of, name_end

_JOINT = " | "


def change_schema(form: OutputFormat) -> pa.Schema:
    """The columns of the file. Phrases are lists where the format has lists, else texts, joined by ` | `."""
    phrases = pa.large_string() if form.kind in ("csv", "tsv") else pa.large_list(pa.large_string())
    return pa.schema(
        [
            ("query", pa.large_string()),
            ("count", pa.int64()),
            ("matches_a", pa.int64()),
            ("matches_b", pa.int64()),
            ("common", pa.int64()),
            ("same_first", pa.bool_()),
            ("lost", phrases),
            ("gained", phrases),
        ]
    )


def change_table(pair: Pair, queries: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    """A row for each query; `same_first` is null where A or B has no match.

    Args:
        pair: the answers.
        queries: columns `query` and `count`.
        schema: of `change_schema`.
    """
    either_empty = (pair.many_a == 0) | (pair.many_b == 0)
    n = queries.num_rows
    columns = [
        queries.column("query"),
        queries.column("count"),
        pair.many_a,
        pair.many_b,
        pair.common,
        pa.array(pair.same_first, mask=either_empty),
        _lists(pair.a, pair.lost, n),
        _lists(pair.b, pair.gained, n),
    ]
    if not pa.types.is_large_list(schema.field("lost").type):
        columns[-2:] = [
            pa.array([_JOINT.join(texts) for texts in lists.to_pylist()], pa.large_string())
            for lists in columns[-2:]
        ]
    return pa.table(columns, schema=schema)


def check_output(output: Path, inputs: list[Path], bundles: list[Path], *, overwrite: bool) -> OutputFormat:
    """The format of the file to be written, after making sure that it may be.

    Args:
        output: the file.
        inputs: files that are read.
        bundles: folders of bundles.
        overwrite: whether it may replace one that is there.

    Raises:
        ConfigError: its name says no format, or it is a folder or an input.
        BidmatchError: it is there already, or inside a bundle.
    """
    refuse_name_not_utf8(output)
    if output.is_dir():
        raise ConfigError(f"{output} is a folder", hint="Name the file to write.")
    end = name_end(output)
    if end is None:
        raise ConfigError(
            f"{output}: what format is that to be?",
            hint="Its name must end with .parquet, .csv, .tsv or .jsonl; text also with .gz or .zst.",
        )
    if output.exists() and any(file.exists() and file.samefile(output) for file in inputs):
        raise ConfigError(f"{output} is an input", hint="Name another output.")
    for bundle in bundles:
        refuse_inside(output, bundle, "bundle")
    refuse_existing(output, overwrite=overwrite)
    return format_of(end)


def _lists(answers: Answers, chosen: np.ndarray, n: int) -> pa.Array:
    ends = np.searchsorted(answers.rows[chosen], np.arange(n + 1))
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), answers.phrases.take(chosen))
