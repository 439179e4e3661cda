"""Starts `bidmatch` commands in processes of their own without paying for the imports each time.

Run as a program, it imports what training needs, then forks a child for each request. A child is an ordinary
process: it has its own memory, runs `bidmatch.cli.main`, and can be killed.

Requests are JSON lines on stdin, each answered by one on stdout: a process id for
{"start": {"arguments": [...], "environment": {...}, "stdout": file, "stderr": file}}; for {"poll": pid} and
{"wait": pid} its exit status, null while it runs.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path


def _child(arguments: list[str], environment: dict[str, str], stdout: str, stderr: str) -> None:
    os.environ.update(environment)
    for descriptor, file in ((1, stdout), (2, stderr)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv = ["bidmatch", *arguments]
    from bidmatch.cli import main

    main()


def _serve() -> None:
    # torch imports `_dynamo` when an optimiser is made.
    for name in ("torch._dynamo", "bidmatch.commands.train", "trainer.run"):
        importlib.import_module(name)
    from transformers import BertModel  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    done: dict[int, int] = {}
    for line in sys.stdin:
        ((name, value),) = json.loads(line).items()
        if name == "start":
            pid = os.fork()
            if pid == 0:
                sys.stdin.close()
                answers.close()
                _child(**value)
                sys.exit(0)
            answer = pid
        else:
            if value not in done:
                ended, status = os.waitpid(value, os.WNOHANG if name == "poll" else 0)
                if ended:
                    done[value] = os.waitstatus_to_exitcode(status)
            answer = done.get(value)
        print(json.dumps(answer), file=answers, flush=True)


@dataclass
class Started:
    """A running command."""

    server: Server
    pid: int
    stdout: Path
    stderr: Path

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self.server.ask({"poll": self.pid})

    def kill(self) -> bool:
        """SIGKILL; whether it was still running."""
        if self.poll() is not None:
            return False
        os.kill(self.pid, 9)
        return self.server.ask({"wait": self.pid}) == -9

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end."""
        status = self.server.ask({"wait": self.pid})
        texts = [file.read_text(encoding="utf-8") for file in (self.stdout, self.stderr)]
        return subprocess.CompletedProcess(["bidmatch"], status, *texts)


@dataclass
class Server:
    """The process that forks; use as a context."""

    folder: Path
    started: int = 0
    process: subprocess.Popen = field(init=False)

    def __enter__(self) -> Server:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def ask(self, request: dict) -> int | None:
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def start(self, arguments: list[str], environment: dict[str, str] | None = None) -> Started:
        """Begin `bidmatch ARGUMENTS...`, with these environment variables besides its own."""
        self.started += 1
        files = [self.folder / f"{self.started}.{name}" for name in ("stdout", "stderr")]
        request = {"arguments": arguments, "environment": environment or {}}
        request |= {"stdout": str(files[0]), "stderr": str(files[1])}
        return Started(self, self.ask({"start": request}), *files)


if __name__ == "__main__":
    _serve()
