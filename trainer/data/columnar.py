"""Click logs as Parquet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source
from trainer.data.collect import Batch, Collector
from trainer.data.columns import Layout, log_layout
from trainer.data.numbers import parse_number
from trainer.data.options import ReadOptions

_BATCH_ROWS = 1 << 17


class ParquetLog:
    """A Parquet file with query, phrase and, if it has one, weight columns.

    Raises:
        InputError: the file is damaged, or its columns are not those of a click log.
    """

    def __init__(self, source: Source, options: ReadOptions):
        self.source = source
        try:
            with pq.ParquetFile(source.path) as file:
                self._schema = file.schema_arrow
                names = self._schema.names
        except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
            raise self._damaged(problem) from problem
        layout = log_layout(names, options, source.path)
        if layout is None:
            raise InputError(
                "no column is named as a query and a phrase (columns: " + ", ".join(names) + ")",
                file=source.path,
                hint="Say which columns to use with --query-column and --phrase-column.",
            )
        self.layout: Layout = layout
        texts = {layout.query, layout.phrase, *layout.extras.values()}
        texts |= {layout.match_type} if layout.match_type is not None else set()
        for at in (layout.query, layout.phrase):
            if not _is_text(self._schema.types[at]):
                raise InputError(
                    f"column {names[at]!r} holds {self._schema.types[at]}, not text",
                    file=source.path,
                    hint="Write the query and the phrase as string columns.",
                )
        self._wanted = sorted(texts | ({layout.weight} if layout.weight is not None else set()))

    def _damaged(self, problem: Exception) -> InputError:
        first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        return InputError(
            f"the Parquet file is damaged or cut short ({first})",
            file=self.source.path,
            hint="Write or copy it again.",
        )

    def read(self, collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:
        """Read all rows.

        Raises:
            InputError: a row is bad and bad lines stop, or a page is damaged.
        """
        names = self._schema.names
        row = 0
        try:
            with pq.ParquetFile(self.source.path, memory_map=False) as file:
                per_row = self.source.path.stat().st_size / max(file.metadata.num_rows, 1)
                for record in file.iter_batches(_BATCH_ROWS, columns=[names[at] for at in self._wanted]):
                    collector.add(self._batch(record, row), self.source.path, part)
                    row += record.num_rows
                    if advance is not None:
                        advance(int(record.num_rows * per_row))
        except UnicodeDecodeError:
            raise InputError(
                f"a text in rows {row + 1:,} to {row + _BATCH_ROWS:,} is not UTF-8", file=self.source.path
            ) from None
        except (pa.ArrowException, OSError) as problem:
            raise self._damaged(problem) from problem

    def _batch(self, record: pa.RecordBatch, row: int) -> Batch:
        layout, names = self.layout, self._schema.names

        def text(at: int) -> pa.Array:
            column = record.column(names[at])
            if _is_text(column.type):
                return column
            return column.cast(pa.string())

        weights = np.ones(record.num_rows)
        if layout.weight is not None:
            weights = self._weights(record.column(names[layout.weight]), row)
        return Batch(
            text(layout.query),
            text(layout.phrase),
            weights,
            np.arange(row + 1, row + 1 + record.num_rows),
            None if layout.match_type is None else text(layout.match_type),
            extras={name: text(at) for name, at in layout.extras.items()},
        )

    def _weights(self, column: pa.Array, row: int) -> np.ndarray:
        if _is_text(column.type):
            cells = column.cast(pa.string()).to_pylist()
            numbers = [None if cell is None else parse_number(cell, whole=False) for cell in cells]
            for at, (cell, number) in enumerate(zip(cells, numbers, strict=True)):
                if cell is not None and cell.strip() and number is None:
                    raise InputError(
                        f"the weight {cell[:40]!r} is not a number", file=self.source.path, line=row + at + 1
                    )
            column = pa.array(numbers, pa.float64())
        try:
            return pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy(zero_copy_only=False)
        except pa.ArrowException:
            raise InputError(
                f"the weight column holds {column.type}, not numbers", file=self.source.path
            ) from None


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)
