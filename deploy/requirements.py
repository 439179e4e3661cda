"""Prints what the package depends on: python deploy/requirements.py [EXTRA,EXTRA].

For images, whose layers of packages then do not change with the source.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
wanted = list(project["dependencies"])
for extra in filter(None, ",".join(sys.argv[1:]).split(",")):
    if extra not in project["optional-dependencies"]:
        sys.exit(f"no extra {extra!r}; there are {', '.join(project['optional-dependencies'])}")
    wanted += project["optional-dependencies"][extra]
print(*wanted, sep="\n")
