"""`bidmatch serve`: answer requests from a bundle."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from bidmatch.base.errors import ConfigError
from service.settings import Settings

_EPILOG = """\b
Examples:
  bidmatch serve --bundle runs/demo/bundle
  bidmatch serve --bundle runs/demo/bundle --host 0.0.0.0 --port 8080 --deadline-ms 50 --api-keys-file keys
  curl -s localhost:8000/match -H 'Content-Type: application/json' -d '{"query": "red running shoes", "k": 5}'

Every option is also an environment variable, such as BIDMATCH_PORT; the option wins.
A page to try queries in is at /, the API's documentation at /docs, metrics at /metrics.
"""


def _option(name: str, field: FieldInfo) -> click.Option:
    """The flag of one setting; what isn't given stays None, so that the environment can speak."""
    flag = "--" + name.replace("_", "-")
    kinds = [kind for kind in typing.get_args(field.annotation) if kind is not types.NoneType]
    kind = kinds[0] if isinstance(field.annotation, types.UnionType) else field.annotation
    description = f"{field.description}  [env: BIDMATCH_{name.upper()}"
    if field.default_factory is not None:
        description += f"; default here: {field.get_default(call_default_factory=True, validated_data={})}"
    elif not field.is_required() and field.default is not None:
        description += f"; default: {field.default}"
    description += "]"
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}"], default=None, help=description)
    click_type: Any = click.STRING
    if typing.get_origin(kind) is typing.Literal:
        click_type = click.Choice(list(typing.get_args(kind)))
    elif kind in (int, float):
        click_type = kind
    elif kind is Path:
        click_type = click.Path(path_type=Path)
    return click.Option([flag], type=click_type, default=None, help=description)


def _serve(**flags: Any) -> None:
    from service.server import serve

    try:
        settings = Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as wrong:
        error = wrong.errors()[0]
        name = str(error["loc"][0]) if error["loc"] else ""
        where = f"--{name.replace('_', '-')} (or BIDMATCH_{name.upper()}): " if name else ""
        reason = str(error["msg"]).removeprefix("Value error, ")
        raise ConfigError(where + reason, hint="See bidmatch serve --help.") from None
    serve(settings)


command = click.Command(
    "serve",
    callback=_serve,
    params=[_option(name, field) for name, field in Settings.model_fields.items()],
    help="Answer POST /match from a bundle.",
    short_help="Answer POST /match from a bundle.",
    epilog=_EPILOG,
)
