"""Writes what is generated in docs/; `--check`, as in `make lint`, only compares it.

In each page it is what lies between two marks: metrics, models and tool formats from their tables,
options from the command line's parser, gRPC's services and messages from protos/.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec
import transformers
from anthropic.types import message_create_params
from openai import types
from openai.types import chat

from baton.cli import main as cli
from baton.cli.options import HelpFormatter
from baton.config import TOOL_PARSERS
from baton.engine.backends.backend import unsupported
from baton.engine.backends.cpu.native_model import lacking
from baton.engine.backends.gpu.backend import LEAST_CAPABILITY, refused
from baton.engine.models.architectures import ARCHITECTURES, WRAPPERS, Architecture, ExpertNames
from baton.engine.models.model_config import ModelConfig
from baton.gateway import messages, openai, responses
from baton.telemetry.metrics import instruments
from baton.text.reasoning import REASONING_FORMATS
from baton.text.tool_parsers import FORMATS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
END = "<!-- generated: end -->"
BLOCK_SIZE = 16
GAP = "—"  # no test runs it


def metrics() -> Iterator[str]:
    """The table of metrics, and the histograms' buckets."""
    for title, process in (
        ("The router", instruments.ROUTER),
        ("Workers", instruments.WORKERS),
        ("The planner", instruments.PLANNER),
        ("Every process", instruments.EVERYBODY),
    ):
        yield f"## {title}\n"
        yield "| name in Prometheus, in OpenTelemetry | kind, unit | attributes | |"
        yield "|---|---|---|---|"
        processes = process if isinstance(process, tuple) else (process,)
        for one in instruments.INSTRUMENTS:
            if one.processes == processes:
                attributes = ", ".join(f"`{name}`" for name in one.attributes)
                series = one.samples[0] if one.kind == instruments.COUNTER else one.series
                names = f"`{series}`<br>`{one.name}`"
                yield f"| {names} | {one.kind}, `{one.unit}` | {attributes} | {one.text} |"
        yield ""
    yield "## Buckets\n\n| histogram | upper bounds |\n|---|---|"
    for one in instruments.INSTRUMENTS:
        if one.buckets:
            yield f"| `{one.name}` | {', '.join(f'{bound:g}' for bound in one.buckets)} |"
    yield ""


def commands() -> Iterator[str]:
    """Each command's options, as its parser has them."""
    for name, parser in _parsers("", cli.parser()):
        yield f"## baton {name}\n\n{_outside_code(parser.description)}\n"
        for group in parser._action_groups:
            shown = [one for one in group._group_actions if one.help != argparse.SUPPRESS]
            rows = [_option_row(one) for one in shown if "--help" not in one.option_strings]
            if rows:
                yield "\n".join([f"| {group.title} | |", "|---|---|", *rows, ""])
        examples = parser.epilog.partition("\n")[2]
        yield f"```sh\n{textwrap.dedent(examples).strip()}\n```\n"


def _parsers(prefix: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    """All commands with their parsers, `bench serve` for a command of a command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            first = {command: name for name, command in reversed(action.choices.items())}
            for command, name in reversed(first.items()):  # each once, whatever its aliases
                inner = list(_parsers(f"{prefix}{name} ", command))
                yield from inner or [(f"{prefix}{name}", command)]


def _outside_code(description: str) -> str:
    """Indented lines, as tables of terms, become code blocks."""
    lines: list[str] = []
    for line in description.splitlines():
        if line.startswith("  ") and not (lines and lines[-1].startswith("  ")):
            lines.append("")
        lines.append(f"  {line}" if line.startswith("  ") else line)
    return "\n".join(lines)


def _option_row(one: argparse.Action) -> str:
    formatter = HelpFormatter("")
    value = "" if one.nargs == 0 else " " + formatter._format_args(one, (one.dest or "").upper())
    names = " / ".join(one.option_strings)
    usage = f"{names}{value}" if names else value.strip()
    return f"| `{usage.replace('|', chr(92) + '|')}` | {formatter._expand_help(one)} |"


def grpc() -> Iterator[str]:
    """The commented protos, callers' services first."""
    callers = ("inference", "fleet", "route", "trace", "planner", "externalscaler")
    names = (*callers, "dispatch", "prefill", "decode", "handoff", "worker", "common")
    files = {path.stem: path for path in (ROOT / "protos/baton/v1").glob("*.proto")}
    assert files.keys() == {*names, "etcd"}, "a proto without a place"
    for name in names:
        yield f"## {name}.proto\n\n```proto\n{files[name].read_text().strip()}\n```\n"


def model_names() -> Iterator[str]:
    """The models of the table of architectures, in one line."""
    names = [one.models for one in ARCHITECTURES.values()]
    names += [one.models for one in WRAPPERS.values()]
    yield f"{', '.join(dict.fromkeys(names))}."


def models() -> Iterator[str]:
    """The table of architectures, as transformers configures each if nothing else is said."""
    yield "| models | `architectures` in config.json | unlike Llama | native | Triton |"
    yield "|---|---|---|---|---|"
    for name, config in _usual_configs().items():
        one = config.arch
        reasons = unsupported(config, BLOCK_SIZE, "native"), _refused_on_gpus(config)
        cells = " | ".join("no" if reason else "yes" for reason in reasons)
        yield f"| {one.models} | `{name}` | {', '.join(_differences(one))} | {cells} |"
    yield "\n| multimodal models, text only | `architectures` | their text part |\n|---|---|---|"
    for name, wrapper in WRAPPERS.items():
        parts = ", ".join(f"`{part}`" for part in dict.fromkeys(wrapper.text.values()))
        yield f"| {wrapper.models} | `{name}` | {parts if parts != f'`{name}`' else 'its own'} |"
    yield ""


@cache
def _usual_configs() -> dict[str, ModelConfig]:
    """Each architecture as transformers configures it if nothing else is said."""
    configs = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        for name in ARCHITECTURES:
            usual = getattr(transformers, name).config_class().to_dict()
            usual = {key: value for key, value in usual.items() if value is not None}
            file.write_text(json.dumps({**usual, "architectures": [name]}))
            configs[name] = ModelConfig.load(file)
    return configs


def _refused_on_gpus(config: ModelConfig) -> str:
    return refused(config, BLOCK_SIZE, LEAST_CAPABILITY["none"])


def tested_models() -> Iterator[str]:
    """What tests run of each architecture, and of each kind of KV, from their own tables."""
    cases = runpy.run_path(str(ROOT / "tests/unit/engine/model_cases.py"))
    kinds, adapted, with_layer = cases["KINDS"], cases["ADAPTED"], cases["PREDICTING"]
    compared = {architecture for architecture, _ in cases["VARIANTS"].values()}
    clustered = {kind.architecture for kind in kinds.values()}
    yield "| `architectures` | KV | logits | 64 tokens | cluster | LoRA | `--tp-backend shm` |"
    yield "|---|---|---|---|---|---|---|"
    by_kind = dict[str, list[str]]()
    for name, config in _usual_configs().items():
        by_kind.setdefault(kind := _kv_kind(config), []).append(name)
        kernels = ["torch", "native", *([] if _refused_on_gpus(config) else ["Triton"])]
        logits = ", ".join(kernels) if name in compared else GAP
        greedy = ", ".join(kernels[:2]) if name in cases["GREEDY"] else GAP
        as_kind = f"as {kinds[kind].architecture}" if kind in kinds else GAP
        cells = (
            *("yes" if name in some else as_kind for some in (clustered, adapted)),
            "no" if unsupported(config, BLOCK_SIZE, "native") or lacking(config) else "yes",
        )
        yield f"| `{name}` | {kind} | {logits} | {greedy} | {' | '.join(cells)} |"
    yield "\n| KV | its model | in a cluster | in one engine |\n|---|---|---|---|"
    for kind, names in by_kind.items():
        if kind not in kinds:
            yield f"| {kind} | {GAP} | {GAP} | {GAP} |"
            continue
        engine = ["cached prefix", "n-grams", "draft model"]
        engine += ["LoRA"] * any(name in adapted for name in names)
        engine += ["layer for further tokens"] * any(name in with_layer for name in names)
        cluster = "handoff, failover, TP 2 → 1, 1 → 2, 2 → 2"
        yield f"| {kind} | `{kinds[kind].architecture}` | {cluster} | {', '.join(engine)} |"
    yield ""


def _kv_kind(config: ModelConfig) -> str:
    """The kind of KV of a model, as tests name it."""
    if config.latent is not None:
        return "latent"
    if config.delta_rule is not None:
        return "states"
    if config.layer_heads:
        return "heads of two sizes"
    if config.arch.chunked:
        return "chunks"
    has_windows = isinstance(config.arch.windows, int) or any(config.windows)
    return "windows" if has_windows else "all tokens"


def _differences(one: Architecture) -> Iterator[str]:
    yield from _attention_differences(one)
    if one.attention_norm:
        yield f"norms {'around' if one.input_norm else 'behind'} attention and MLP"
    if one.windows in ("all", "always", "from"):
        yield "sliding windows"
    elif isinstance(one.windows, int):
        yield f"sliding windows but in each {one.windows}th layer".replace("2th", "2nd")
    if "no_rope_layers" in one.defaults or one.rotates == "sliding":
        yield "layers without rotation"
    if "partial_rotary_factor" in one.defaults:
        yield "partial rotation"
    if one.defaults.get("attn_logit_softcapping"):
        yield "softcaps"
    if one.scaled_embedding or "embedding_multiplier" in one.defaults:
        yield "scaled embeddings"
    if one.experts:
        yield from _moe_differences(one.experts)


def _attention_differences(one: Architecture) -> Iterator[str]:
    if one.qkv_bias is True:
        yield "biases of queries, keys and values"
    if one.qk_norm != "none":
        of = "all heads" if one.qk_norm == "row" else "each head"
        yield f"norms of queries and keys ({of}{', rotated' if one.norms_rotated else ''})"
    if "global_head_dim" in one.defaults:
        yield "heads of two sizes, layers that share KV, embeddings for each layer"
    if one.chunked:
        yield "attention by chunks but in each 4th layer, queries scaled by position"
    if one.sinks:
        yield "sinks"
    if one.latent or one.delta_rule:
        yield "latent KV (MLA)" if one.latent else "gated attention in each 4th layer, else linear"


def _moe_differences(experts: ExpertNames) -> Iterator[str]:
    yield "mixture of experts"
    if experts.shared_size:
        yield "one of them for all tokens"
    if experts.sigmoid:
        yield "sigmoid scores"
    if experts.correction:
        yield "corrected scores"
    if experts.group_top:
        yield "groups of experts"


def tool_formats() -> Iterator[str]:
    """The formats of tool calls, in the order of the option's names."""
    yield "| `--tool-parser` | models | output |\n|---|---|---|"
    for name in TOOL_PARSERS[2:]:
        for one in (form for form in FORMATS if form.name == name):
            written = " ".join(one.written.replace("|", "\\|").split())
            quote = "````" if "`" in written else "`"
            yield f"| `{name}` | {one.models} | {quote}{written}{quote} |"
    yield "\n| `--reasoning-parser` | models | reasoning and answer | markers |\n|---|---|---|---|"
    for name, form in sorted(REASONING_FORMATS.items()):
        before, behind = form.answer or ("", "")
        written = f"{form.begin}\u2026{form.end}{before}\u2026{behind}".replace("|", "\\|")
        kind = "texts" if form.is_text else "tokens"
        yield f"| `{name}` | {form.models} | `{written}` | {kind} |"


PUBLISHED: dict[str, tuple[Any, type]] = {
    "/v1/chat/completions": (chat.completion_create_params, openai.ChatRequest),
    "/v1/completions": (types.completion_create_params, openai.CompletionRequest),
    "/v1/responses": (types.responses.response_create_params, responses.ResponsesRequest),
    "/v1/embeddings": (types.embedding_create_params, openai.EmbeddingRequest),
    "/v1/messages": (message_create_params, messages.MessagesRequest),
}
"""The requests of a path, as its maker's client and as the gateway have them."""


def compatibility() -> Iterator[str]:
    """The published fields of each path, and those that are added."""
    yield "| path | taken | refused with a 400 | without effect | added |\n|---|---|---|---|---|"
    for path, (published, own) in PUBLISHED.items():
        names = {
            name
            for kind in vars(published).values()
            if isinstance(kind, type) and re.match(r"\w+CreateParams", kind.__name__)
            for name in kind.__annotations__
        }
        refused = openai.unsupported_in(own).keys()
        fields = {one.name for one in msgspec.structs.fields(own) if one.type is not NoneType}
        taken = (fields | {"stream"} & names) - refused
        yield (
            "| "
            + " | ".join(
                (
                    f"`{path}`",
                    _names(names & taken),
                    _names(names & refused),
                    _names(names - taken - refused),
                    _names(taken - names),
                )
            )
            + " |"
        )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


PAGES = {
    "gateway.md": tool_formats,
    "metrics.md": metrics,
    "models.md": models,
    "reference/models.md": tested_models,
    "reference/cli.md": commands,
    "reference/compatibility.md": compatibility,
    "reference/grpc.md": grpc,
    "../README.md": model_names,
}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    check = parser.parse_args().check
    for name, lines in PAGES.items():
        path = DOCS / name
        before, generated = path.read_text(), "\n".join(lines()) + "\n"
        head, mark, rest = before.partition(" by scripts/reference.py -->\n")
        assert END in rest, f"docs/{name} has no marks"
        page = f"{head}{mark}{generated}{END}{rest.partition(END)[2]}"
        if not check:
            path.write_text(page)
        elif page != before:
            sys.exit(f"docs/{name} is stale: run scripts/reference.py")
    print(f"{', '.join(PAGES)}: {'up to date' if check else 'written'}")


if __name__ == "__main__":
    main()
