"""Dashboards in Grafana's JSON, and back: the queries that a file of it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from deployment.panels import Dashboard, Panel, Row

COLUMNS = 24
_HEIGHTS = {"timeseries": 8, "stat": 4}
_SOURCE = {"type": "prometheus", "uid": "prometheus"}
_SCHEMA = 39  # Grafana 10 and later read it; they migrate it to theirs when they load it


def written(dashboard: Dashboard) -> str:
    """The file's text; the same for the same dashboard."""
    return json.dumps(_page(dashboard), indent=1) + "\n"


def queries(page: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(panel's title, expression) of everything that a page asks Prometheus."""
    for panel in page["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def _page(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": ["baton"],
        "schemaVersion": _SCHEMA,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["baton"], "asDropdown": False, "keepTime": True,
             "title": "Baton"},
        ],
        "templating": {"list": [_variable(*one) for one in dashboard.variables]},
        "panels": list(_laid_out(dashboard.rows)),
    }  # fmt: skip


def _variable(name: str, query: str) -> dict[str, Any]:
    several = name == "instance"
    return {
        "name": name, "type": "query", "datasource": _SOURCE, "refresh": 2, "sort": 1,
        "query": {"query": query, "refId": name}, "definition": query,
        "multi": several, "includeAll": several,
        **({"allValue": ".*", "current": {"text": "All", "value": "$__all"}} if several else {}),
    }  # fmt: skip


def _laid_out(rows: tuple[Row, ...]) -> Iterator[dict[str, Any]]:
    """Rows below each other, panels from left to right, and ids for all."""
    number = top = 0
    for row in rows:
        number += 1
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False,
               "panels": [], "gridPos": place}  # fmt: skip
        top, left, height = top + 1, 0, 0
        for panel in row.panels:
            number += 1
            if left + panel.width > COLUMNS:
                top, left, height = top + height, 0, 0
            tall = _HEIGHTS[panel.kind]
            place = {"x": left, "y": top, "w": panel.width, "h": tall}
            yield _picture(panel, number, place)
            left, height = left + panel.width, max(height, tall)
        top += height


def _picture(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.limits:
        (_, lowest), *others = panel.limits
        steps: list[dict[str, Any]] = [{"color": lowest, "value": None}]
        steps += [{"color": colour, "value": value} for value, colour in others]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 25 if panel.stacked else 5,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.text,
        "datasource": _SOURCE, "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query.expr,
             "legendFormat": query.legend or "__auto", "exemplar": query.exemplars}
            for index, query in enumerate(panel.queries)
        ],
    }  # fmt: skip


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduced, "colorMode": "value", "graphMode": "area"}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
