"""The files of compose/, as compose reads them."""

import re
from pathlib import Path

import yaml

COMPOSE = Path(__file__).parents[3] / "compose"
BASE = COMPOSE / "compose.yaml"
OVERLAYS = sorted(COMPOSE.glob("compose.*.yaml"))
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")


def load(file, **variables):
    """A YAML file with compose's variables put in, and defaults for those that are not given."""
    return yaml.safe_load(
        _VARIABLE.sub(
            lambda match: variables.get(match["name"]) or match["default"] or "", file.read_text()
        )
    )


def merge(under, over):
    """As compose merges: mappings by key, most lists one after the other, other things replaced."""
    if isinstance(under, dict) and isinstance(over, dict):
        merged = {**under, **over}
        for key in (under.keys() & over.keys()) - {"command", "entrypoint"}:
            merged[key] = merge(under[key], over[key])
        return merged
    return [*under, *over] if isinstance(under, list) and isinstance(over, list) else over
