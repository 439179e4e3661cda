"""The `bidmatch` command. A subcommand's module, and so its stage, is imported only when it runs."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from typing import NoReturn

import click

from bidmatch import __version__
from bidmatch.base.console import complain, say
from bidmatch.base.errors import BidmatchError, MissingDependencyError
from bidmatch.base.processes import process_count

COMMANDS = {
    "data": "Read a click log or ads report and say what is in it (the dry run).",
    "train": "Train the dual encoder and the classifier table on a click log.",
    "distill": "Train a small encoder to stand in for a run's own.",
    "compare": "Train several methods on one log and compare them in one table.",
    "export": "Turn a training run into a bundle: ONNX encoder and HNSW index.",
    "inspect": "Print what is in a bundle.",
    "eval": "Measure P@k, PSP@k and recall@k of a bundle or a run.",
    "serve": "Answer POST /match from a bundle.",
    "score": "Match a whole query log offline.",
    "diff": "Compare two bundles, or another service's matches with one, on a query log.",
    "convert": "Write a public data set (Moby's thesaurus) as a folder to train on.",
    "simulate": "Write a simulated ads click log of any size.",
    "demo": "The whole chain on a simulated log, in minutes.",
}

TRAIN_PACKAGES = {
    "hnswlib",
    "huggingface_hub",
    "torch",
    "transformers",
    "sklearn",
    "onnx",
    "onnxscript",
    "jinja2",
    "matplotlib",
    "safetensors",
}


class LazyGroup(click.Group):
    """Imports `bidmatch.commands.<name>` when its command is run or its help is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command object, importing its module."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"bidmatch.commands.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done; 1 failed; 2 wrong option or setting; 3 input data; 4 damaged bundle or "
    "checkpoint; 5 a package is missing; 130 interrupted; 143 terminated.",
)
@click.version_option(__version__, prog_name="bidmatch")
def bidmatch() -> None:
    """Search queries to advertisers' bid phrases: train, export, serve, score."""


def _leave(code: str | int | None) -> NoReturn:
    """End with this exit code, also where torchrun started the process.

    Threads of the connection to the other processes are still running then, and Python's orderly end would
    abort over them, with an exit code of its own.
    """
    if process_count() > 1 and isinstance(code, int):
        for out in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                out.flush()
        os._exit(code)
    sys.exit(code)


def main() -> None:
    """Run the command line; errors a person can act on become a message and an exit code."""
    try:
        try:
            bidmatch.main(standalone_mode=False)
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] not in TRAIN_PACKAGES:
                raise
            raise MissingDependencyError(
                f"this command needs the package {missing.name}, which is not installed",
                hint="Install the training extra: pip install '.[train]' in bidmatch's folder",
            ) from missing
    except SystemExit as done:
        _leave(done.code)
    except click.exceptions.Abort:
        say("interrupted")
        _leave(130)
    except click.exceptions.Exit as done:
        _leave(done.exit_code)
    except click.ClickException as wrong:
        wrong.show()
        _leave(wrong.exit_code)
    except BidmatchError as error:
        complain(f"error: {error}")
        _leave(error.exit_code)
    except ValueError as wrong:
        from pydantic import ValidationError

        if not isinstance(wrong, ValidationError):
            raise
        for problem in wrong.errors():
            complain(f"error: {'.'.join(map(str, problem['loc']))}: {problem['msg']}")
        _leave(2)
    except BrokenPipeError:
        sys.stderr.close()
        _leave(1)
    except OSError as failure:
        where = "" if failure.filename is None else f"{failure.filename}: "
        complain(f"error: {where}{failure.strerror or failure}")
        _leave(1)


if __name__ == "__main__":
    main()
