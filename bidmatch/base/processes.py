"""How many processes of one command there are."""

from __future__ import annotations

import os


def process_count() -> int:
    """Processes that `torchrun` started together with this one; 1 where it did not start this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
