"""Whether a PromQL expression asks for what exists: metrics of our table, and labels they have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser

from baton.metrics import table

# Ours, of Prometheus itself and, beside each sample, of every scrape.
_SCRAPED = frozenset({"job", "instance"})
FOREIGN: Mapping[str, frozenset[str]] = {
    "up": _SCRAPED,
    "etcd_server_has_leader": _SCRAPED,
    "etcd_mvcc_db_total_size_in_bytes": _SCRAPED,
}
# What Grafana puts in before it asks.
_VARIABLES = {"$__rate_interval": "5m", "$job": "prefill", "$instance": ".*"}
_LIST = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")


def samples() -> dict[str, frozenset[str]]:
    """The labels of each name that a query may use."""
    known = dict(FOREIGN)
    for instrument in table.TABLE:
        labels = _SCRAPED | {name.replace(".", "_") for name in instrument.attributes}
        for name in instrument.samples:
            known[name] = labels | {"le"} if name.endswith("_bucket") else labels
    return known


def complaints(expr: str, known: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """What is wrong with an expression, a dashboard's variables and lists included."""
    for variable, value in _VARIABLES.items():
        expr = expr.replace(variable, value)
    if listed := _LIST.fullmatch(expr):
        yield from complaints(f"sum by ({listed['label']}) ({listed['selector']})", known)
        return
    try:
        tree = promql_parser.parse(expr)
    except ValueError as error:
        yield f"is not PromQL: {error}"
        return
    yield from _complaints(tree, known, set())


def _complaints(tree: Any, known: Mapping[str, frozenset[str]], wanted: set[str]) -> Iterator[str]:
    """`wanted` are the labels that what stands around this expression asks for."""
    match tree:
        case promql_parser.VectorSelector():
            labels = known.get(tree.name or "")
            if labels is None:
                yield f"asks for {tree.name}, which nobody measures"
                return
            used = wanted | {matcher.name for matcher in tree.matchers.matchers}
            if strange := sorted(used - labels):
                yield f"asks {tree.name} for {', '.join(strange)}, which it does not have"
        case promql_parser.AggregateExpr():
            grouped = set(tree.modifier.labels) if tree.modifier else set()
            if lost := sorted(wanted - grouped):
                yield f"needs {', '.join(lost)} of what is summed up without it"
            yield from _complaints(tree.expr, known, grouped)
        case promql_parser.BinaryExpr():
            yield from _complaints(tree.lhs, known, wanted)
            yield from _complaints(tree.rhs, known, wanted)
        case promql_parser.Call():
            inner = wanted | {"le"} if tree.func.name == "histogram_quantile" else wanted
            for argument in tree.args:
                yield from _complaints(argument, known, inner)
        case promql_parser.MatrixSelector():
            yield from _complaints(tree.vector_selector, known, wanted)
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            yield from _complaints(tree.expr, known, wanted)
