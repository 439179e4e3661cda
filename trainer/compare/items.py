"""What is to be compared: rows as a person writes them, each with the whole configuration it stands for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from bidmatch.base.errors import ConfigError
from trainer.config import TrainConfig
from trainer.settings import make_config

# A name is a folder's name and a chart's legend: no separators, no control characters, no mathematics.
_NAME = re.compile(r"[^\W_][^/\\$\x00-\x1f]*")
_LONGEST_NAME = 120
# File systems bound a folder's name by its bytes, most of them at 255.
_MOST_BYTES = 240
_RESERVED = {"compare.json", "compare.html"}


@dataclass(frozen=True)
class Item:
    """One row to train.

    Attributes:
        name: of the row.
        given: the item as it was written.
        folder: of its runs, inside the comparison's folder.
        config: all settings; the seed is put in for each run.
    """

    name: str
    given: str
    folder: str
    config: TrainConfig


def parse_items(texts: Sequence[str], base: str | None, assignments: Sequence[str]) -> list[Item]:
    """Rows from comma-separated items `[NAME=]PRESET[:KEY=VALUE;KEY=VALUE...]`.

    Args:
        texts: such lists. PRESET is a shipped name or a YAML file. Commas inside brackets belong to a value.
        base: the preset that each row stands on, see `make_config`.
        assignments: `KEY=VALUE` for all rows; a row's own hold before them.

    Raises:
        ConfigError: an item that can't be read, a setting that does not fit, or two rows of one name.
    """
    items = [_parse(given, base, assignments) for text in texts for given in _split(text)]
    refuse_equal_names([item.name for item in items])
    for folder, count in Counter(item.folder for item in items).items():
        if count > 1:
            names = ", ".join(item.name for item in items if item.folder == folder)
            raise ConfigError(
                f"rows {names} would share the folder {folder}",
                hint="Name them apart: --presets NAME=PRESET:KEY=VALUE.",
            )
    constants = {(item.config.propensity_a, item.config.propensity_b) for item in items}
    if len(constants) > 1:
        raise ConfigError(
            f"rows with different propensities cannot be compared: A and B are {sorted(constants)}",
            hint="Set propensity_a and propensity_b for all rows, with --set.",
        )
    return items


def refuse_equal_names(names: Sequence[str]) -> None:
    """Refuse two rows of one name.

    Raises:
        ConfigError: names the first.
    """
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(
                f"{count} rows are called {name}", hint="Name them apart: NAME=PRESET, or NAME=FILE.npz."
            )


def checked_name(name: str) -> str:
    """`name`, where it can be a row's.

    Raises:
        ConfigError: it can't.
    """
    # Bytes of the command line that are no UTF-8 arrive as lone surrogates, which no JSON can hold.
    size = len(name.encode("utf-8", "surrogatepass"))
    is_text = not any("\ud800" <= character <= "\udfff" for character in name)
    fits = is_text and len(name) <= _LONGEST_NAME and size <= _MOST_BYTES
    if not _NAME.fullmatch(name) or not fits or name in _RESERVED:
        raise ConfigError(
            f"{name!r} cannot name a row: a name is UTF-8, begins with a letter or digit, holds none of "
            f"/ \\ $ and has at most {_LONGEST_NAME} characters and {_MOST_BYTES} bytes",
            hint="Give the row one: NAME=PRESET:KEY=VALUE.",
        )
    return name


def _split(text: str) -> Iterator[str]:
    """Items between the commas that stand in no bracket."""
    depth, start = 0, 0
    for at, character in enumerate(text):
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            yield text[start:at].strip()
            start = at + 1
    yield text[start:].strip()


def _parse(given: str, base: str | None, assignments: Sequence[str]) -> Item:
    head, _, tail = given.partition(":")
    label, named, preset = (part.strip() for part in head.partition("="))
    if not named:
        preset = label
    own = [part.strip() for part in tail.split(";") if part.strip()]
    if not preset:
        raise ConfigError(
            f"--presets: {given!r} names no preset", hint="Write NAME=PRESET:KEY=VALUE;KEY=VALUE, or PRESET."
        )
    if not named:
        stem = PurePath(preset).stem if preset.endswith((".yaml", ".yml")) else preset
        label = ":".join([stem, ";".join(own)]) if own else stem
    changes = [*assignments, *own]
    if any(change.partition("=")[0].strip() == "seed" for change in changes):
        raise ConfigError("seed cannot be set here: runs have the seeds 0, 1, 2, ... up to --seeds")
    name = checked_name(label)
    config = make_config(preset, changes, base)
    return Item(name, given, re.sub(r"[^\w.=+\- ]", "_", name), config)
