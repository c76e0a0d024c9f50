"""Whether compose files obey the compose specification and start our services with valid options.

The schema beside this file is the specification's own: compose-spec/compose-spec at 170098ba
(Apache-2.0), `schema/compose-spec.json`.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from baton.cli import parser
from baton.cli.services import router_config, worker_config
from baton.errors import BatonError

SCHEMA = json.loads((Path(__file__).parent / "compose-spec.json").read_text())
COMMANDS = ("router", "prefill-worker", "decode-worker")
_OPTION = "BATON_OPT_"
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")


def loaded(file: Path) -> dict[str, Any]:
    """A compose file with the defaults of its variables put in."""
    text = _VARIABLE.sub(lambda match: match["default"] or "", file.read_text())
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def complaints(base: Path, overlays: Sequence[Path]) -> Iterator[str]:
    """What is wrong with a compose file and what is laid over it, each overlay by itself."""
    under = loaded(base)
    yield from _about(base.name, under, under)
    for overlay in overlays:
        over = loaded(overlay)
        yield from _about(overlay.name, over, _merged(under, over))
    together = under
    for overlay in overlays:
        together = _merged(together, loaded(overlay))
    yield from _of_services("all together", together)


def _about(name: str, one: Mapping[str, Any], merged: Mapping[str, Any]) -> Iterator[str]:
    for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(one):
        yield f"{name}: {'.'.join(map(str, error.absolute_path))}: {error.message}"
    yield from _of_services(name, merged)
    for service, settings in one["services"].items():
        yield from _of_mounts(f"{name}: {service}", settings)


def _of_services(name: str, merged: Mapping[str, Any]) -> Iterator[str]:
    for service, settings in merged["services"].items():
        where = f"{name}: {service}"
        if not settings.get("image"):
            yield f"{where}: has no image"
        for secret in settings.get("secrets", ()):
            if secret not in merged.get("secrets", {}):
                yield f"{where}: secret {secret} is not declared"
        for other in settings.get("depends_on", ()):
            if other not in merged["services"]:
                yield f"{where}: depends on {other}, which is not there"
        if service in ("prefill", "decode") and settings.get("ports"):
            yield f"{where}: several cannot share a published port"
        if settings.get("container_name"):
            yield f"{where}: a fixed name prevents --scale"
        yield from (f"{where}: {wrong}" for wrong in _of_options(settings))


def _of_options(settings: Mapping[str, Any]) -> Iterator[str]:
    """What the program says of the options that service.sh would make of the environment."""
    command = settings.get("command") or [""]
    if command[0] not in COMMANDS:
        return
    argv = [*command, "--host", "0.0.0.0", "--port", "7700"]
    for name, value in settings.get("environment", {}).items():
        if name.startswith(_OPTION) and value not in (None, ""):
            argv += ["--" + name.removeprefix(_OPTION).lower().replace("_", "-"), str(value)]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = parser().parse_args(argv)
        (router_config if command[0] == "router" else worker_config)(args)
    except SystemExit:
        yield said.getvalue().splitlines()[-1]
    except BatonError as error:
        yield str(error)


def _of_mounts(where: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Files of ours that a service is given must be there."""
    compose = Path(__file__).parents[2] / "compose"
    for volume in settings.get("volumes", ()):
        source = volume.partition(":")[0]
        if source.startswith("./") and not (compose / source).exists():
            yield f"{where}: mounts {source}, which is not there"


def _merged(under: Any, over: Any) -> Any:
    """As compose merges: mappings by key, most lists one after the other, other things replaced."""
    if isinstance(under, dict) and isinstance(over, dict):
        keys = under.keys() | over.keys()
        return {
            key: over[key]
            if key in ("command", "entrypoint") and key in over
            else _merged(under[key], over[key])
            if key in under and key in over
            else over.get(key, under.get(key))
            for key in sorted(keys)
        }
    if isinstance(under, list) and isinstance(over, list):
        return [*under, *over]
    return over
