"""Virtual environments of the peers, each its own: their pins clash with ours and with each other's."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError

ROOT = Path(__file__).parents[2] / ".peers"


@dataclass(frozen=True)
class Environment:
    """A virtual environment and what is installed into it.

    Attributes:
        name: of its folder.
        requirements: for pip, exact versions.
        with_dependencies: whether pip also installs what these require. Without: the list is complete.
        inherits: whether the packages of the running environment are seen, too.
    """

    name: str
    requirements: tuple[str, ...]
    with_dependencies: bool = True
    inherits: bool = False

    @property
    def folder(self) -> Path:
        """Where it is."""
        return ROOT / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"


# libpecos asks for torch and transformers, which its linear models never import.
PECOS = Environment(
    "pecos",
    (
        "libpecos==1.2.8",
        "numpy==1.26.4",
        "scipy==1.13.1",
        "scikit-learn==1.5.2",
        "joblib==1.6.0",
        "threadpoolctl==3.8.0",
        "cloudpickle==3.1.3",
    ),
    with_dependencies=False,
)
OMIKUJI = Environment("omikuji", ("omikuji==0.5.2", "numpy==2.4.6", "scipy==1.17.1"))
NAPKINXC = Environment(
    "napkinxc", ("napkinxc==0.7.2", "numpy==2.4.6", "scipy==1.17.1"), with_dependencies=False
)
SENTENCE_TRANSFORMERS = Environment(
    "sentence-transformers", ("accelerate==1.15.0", "datasets==5.2.0"), inherits=True
)


def prepare(environment: Environment) -> Path:
    """Make the environment unless it is there and whole; its interpreter.

    Raises:
        BidmatchError: pip could not install a package; with the end of what it said.
    """
    marker = environment.folder / ".installed"
    wanted = "\n".join(environment.requirements)
    if marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
        return environment.python
    say(f"installing {', '.join(environment.requirements)} into {environment.folder}")
    ROOT.mkdir(exist_ok=True)
    (ROOT / ".gitignore").write_text("*\n", encoding="utf-8")
    venv.create(environment.folder, with_pip=True, clear=True)
    if environment.inherits:
        seen = sysconfig.get_path("purelib")
        (environment.packages / "_inherited.pth").write_text(f"{seen}\n", encoding="utf-8")
    alone = [] if environment.with_dependencies else ["--no-deps"]
    command = [str(environment.python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    done = subprocess.run(
        [*command, *alone, *environment.requirements], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BidmatchError(
            f"pip could not install {' '.join(environment.requirements)}:\n{done.stderr[-2000:]}",
            hint="A package without a wheel for this machine needs a C++ or Rust compiler.",
        )
    marker.write_text(wanted, encoding="utf-8")
    return environment.python
