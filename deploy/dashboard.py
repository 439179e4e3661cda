"""What the dashboard's panels ask Prometheus, and which of it has no answer."""

from __future__ import annotations

import json
import math
import urllib.parse
import urllib.request
from pathlib import Path

DASHBOARD = Path(__file__).parent / "monitoring" / "dashboard.json"


def expressions(window: str) -> dict[str, str]:
    """The panels' queries by panel and letter; `window` stands in for Grafana's `$__rate_interval`."""
    variables = {"$job": "bidmatch", "$instance": ".*", "$__rate_interval": window, "$__range": "5m"}
    found = {}
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, value in variables.items():
                expression = expression.replace(name, value)
            found[f"{panel['title']} {target['refId']}"] = expression
    return found


def values(prometheus: str, expression: str) -> list[float]:
    """What a query comes to at this moment, a number a series.

    Raises:
        OSError: Prometheus does not answer, or refuses the query.
    """
    url = f"{prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(url, timeout=10) as answer:
        result = json.load(answer)["data"]["result"]
    return [float(series["value"][1]) for series in result]


def without_data(prometheus: str, wanted: dict[str, str]) -> dict[str, str]:
    """Those queries that no series answers with a finite number."""
    return {
        name: expression
        for name, expression in wanted.items()
        if not any(map(math.isfinite, values(prometheus, expression)))
    }
