"""The reading options that several commands share, as one decorator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bidmatch.base.errors import ConfigError
from trainer.data.fingerprint import MATCH_TYPE
from trainer.data.options import RESERVED_COLUMNS, ReadOptions

_NUMBER = ":number"
_OPTIONS = (
    click.option(
        "--query-column", metavar="NAME", help="Column of the query: its name, or its position from 1."
    ),
    click.option("--phrase-column", metavar="NAME", help="Column of the bid phrase: name or position."),
    click.option("--weight-column", metavar="NAME", help="Column of the weight: name or position."),
    click.option(
        "--weight",
        type=click.Choice(["clicks", "impressions"]),
        default="clicks",
        show_default=True,
        help="Which figure weighs a pair.",
    ),
    click.option(
        "--phrase-columns",
        metavar="A,B",
        default="",
        help="Further columns to keep with each phrase, such as market,bid:number; text unless said.",
    ),
    click.option(
        "--encoding", metavar="NAME", help="Text encoding, such as cp1252; default: BOM, else UTF-8."
    ),
    click.option(
        "--quoted",
        is_flag=True,
        help='In a tab-separated log, " quotes fields (in CSV and ads reports it does).',
    ),
    click.option(
        "--bad-lines",
        type=click.Choice(["stop", "skip"]),
        default="stop",
        show_default=True,
        help="Stop at the first bad line, or skip and count them.",
    ),
    click.option(
        "--phrases",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="File of id and text for the object ids of User Behavior Insights events.",
    ),
    click.option(
        "--text-fields",
        metavar="A,B",
        default="",
        help="Fields that make up a text, such as title,content; default: the title (BEIR: title,text).",
    ),
    click.option(
        "--action",
        "actions",
        multiple=True,
        default=("click", "item_click"),
        show_default=True,
        metavar="NAME",
        help="User Behavior Insights event that counts as a click; may be repeated.",
    ),
    click.option(
        "--test-share",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.1,
        show_default=True,
        help="Share of queries held out where the data has no test part.",
    ),
    click.option(
        "--split-seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of that choice."
    ),
)


def read_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a click command the reading options; it receives them as one `read_options: ReadOptions`."""

    @functools.wraps(command)
    def with_options(*args: Any, **kwargs: Any) -> Any:
        values = {name: kwargs.pop(name) for name in ReadOptions.model_fields if name in kwargs}
        named = [name.strip() for name in values["phrase_columns"].split(",") if name.strip()]
        columns = tuple(name.removesuffix(_NUMBER) for name in named)
        numbers = tuple(name.removesuffix(_NUMBER) for name in named if name.endswith(_NUMBER))
        taken = sorted(set(columns) & RESERVED_COLUMNS)
        if taken:
            raise ConfigError(
                f"--phrase-columns {taken[0]}: the phrase table has a column of that name of its own",
                hint="Rename the column in the log.",
            )
        if MATCH_TYPE in numbers:
            raise ConfigError(
                f"--phrase-columns {MATCH_TYPE}{_NUMBER}: match types are texts, and kept anyway",
                hint="Leave it out.",
            )
        fields = tuple(name.strip() for name in values["text_fields"].split(",") if name.strip())
        lists = {"phrase_columns": columns, "number_columns": numbers, "text_fields": fields}
        options = ReadOptions(**{**values, **lists})
        return command(*args, read_options=options, **kwargs)

    for option in reversed(_OPTIONS):
        with_options = option(with_options)
    return with_options
