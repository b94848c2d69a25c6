"""Grafana's JSON from short Python calls: panels in rows, and a dashboard around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]
#: Grafana's grid has 24 columns.
GRID_WIDTH = 24
PANEL_HEIGHT = 8
STAT_HEIGHT = 4
DATASOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def target(expression: str, legend: str = "") -> Json:
    return {"expr": expression, "legendFormat": legend or "__auto", "datasource": DATASOURCE}


def quantile(share: float, histogram: str, by: str, where: str) -> str:
    """A quantile of a histogram over the time that one point of the graph stands for."""
    labels = f"{by}, le" if by else "le"
    rate = f"rate({histogram}_bucket{{{where}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by ({labels}) ({rate}))"


def quantiles(histogram: str, where: str) -> list[Json]:
    return [
        target(quantile(share, histogram, "", where), f"p{share * 100:g}")
        for share in (0.5, 0.9, 0.99)
    ]


def rate(counter: str, where: str, by: str = "") -> str:
    total = f"rate({counter}{{{where}}}[$__rate_interval])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def graph(
    title: str,
    targets: Sequence[Json],
    *,
    unit: str = "short",
    about: str = "",
    stacked: bool = False,
    maximum: float | None = None,
) -> Json:
    """Lines over time. `unit` is one of Grafana's ids: s, percentunit, bytes, reqps …"""
    defaults: Json = {
        "unit": unit,
        "min": 0,
        "custom": {
            "lineWidth": 1,
            "fillOpacity": 30 if stacked else 8,
            "showPoints": "never",
            "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        },
    }
    if maximum is not None:
        defaults["max"] = maximum
    return {
        "type": "timeseries",
        "title": title,
        "description": about,
        "datasource": DATASOURCE,
        "targets": list(targets),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def stat(
    title: str,
    expression: str,
    *,
    unit: str = "short",
    about: str = "",
    alarm_from: float | None = None,
) -> Json:
    """One number with its recent course; red from `alarm_from` on."""
    steps: list[Json] = [{"color": "text", "value": None}]
    if alarm_from is not None:
        steps.append({"color": "red", "value": alarm_from})
    return {
        "type": "stat",
        "title": title,
        "description": about,
        "datasource": DATASOURCE,
        "targets": [target(expression)],
        "fieldConfig": {
            "defaults": {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"},
    }


def heatmap(title: str, histogram: str, where: str, *, about: str = "", unit: str = "s") -> Json:
    """How many observations fell into which bucket, over time."""
    expression = f"sum by (le) (increase({histogram}_bucket{{{where}}}[$__rate_interval]))"
    return {
        "type": "heatmap",
        "title": title,
        "description": about,
        "datasource": DATASOURCE,
        "targets": [{**target(expression, "{{le}}"), "format": "heatmap"}],
        "options": {"calculate": False, "yAxis": {"unit": unit}, "cellGap": 1},
        "fieldConfig": {"defaults": {}, "overrides": []},
    }


def variable(name: str, label: str, query: str, *, multiple: bool = True) -> Json:
    """A choice that the viewer has, filled from a label's values."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": multiple,
        "includeAll": multiple,
        "allValue": ".*" if multiple else None,
        "sort": 1,
    }


def dashboard(
    uid: str,
    title: str,
    *,
    about: str,
    rows: Sequence[tuple[str, Sequence[Json]]],
    variables: Sequence[Json],
) -> Json:
    """A dashboard. Each row has a title and panels that share its width."""
    panels: list[Json] = []
    top = 0
    for row_title, row in rows:
        panels.append(
            {
                "type": "row",
                "title": row_title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": top, "w": GRID_WIDTH, "h": 1},
            }
        )
        top += 1
        height = STAT_HEIGHT if all(p["type"] == "stat" for p in row) else PANEL_HEIGHT
        width = GRID_WIDTH // len(row)
        for place, panel in enumerate(row):
            position = {"x": place * width, "y": top, "w": width, "h": height}
            panels.append({**panel, "gridPos": position})
        top += height
    return {
        "uid": uid,
        "title": title,
        "description": about,
        "tags": ["tokenmill"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource_variable(), *variables]},
        "links": [
            {"title": "Tokenmill", "type": "dashboards", "tags": ["tokenmill"], "keepTime": True}
        ],
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def _datasource_variable() -> Json:
    return {
        "name": "DS_PROMETHEUS",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
    }
