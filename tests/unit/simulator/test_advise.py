"""`baton advise`: disaggregates where that serves more, and only there."""

import json
from dataclasses import replace

import pytest

from baton.bench.workload import Lengths, Workload
from baton.cli import main as cli
from baton.config import SimulatedSpeed
from baton.config.slo import Slo
from baton.errors import ConfigError
from baton.simulator.advise import Advisor, Load, coarse
from baton.simulator.settings import AdviseConfig, parse_roles
from baton.simulator.worker import WorkerSpec

SPEC = WorkerSpec(SimulatedSpeed.parse("8000,10,0.5"), num_blocks=8192, token_bytes=1000)


def advise(slo, rate, prompt, output, spec=SPEC, count=150, **fields):
    workload = Workload(
        rate=rate,
        count=count,
        prompt_lengths=Lengths(prompt, prompt),
        output_lengths=Lengths(output, output),
    )
    config = AdviseConfig(workload=workload, slo=Slo.parse(slo), **fields)
    return Advisor(config, Load.from_workload(workload), spec).advise()


def test_mixed_workers_divide_prompts_and_streams_where_a_tight_limit_asks_for_it():
    """Each chunk would delay streams by 60 ms: the router hands over, as with fixed roles."""
    advice = advise("ttft=2,tpot=0.014", rate=1.5, prompt=3000, output=100, workers=2)
    split = next(one for one in advice.tried if one.roles == {"prefill": 1, "decode": 1})
    assert advice.best.roles == {"mixed": 2}
    assert advice.best.share == pytest.approx(split.share, abs=0.01)
    assert advice.best.stats["handed_over_share"] > 0.9


def test_short_prompts_are_not_disaggregated():
    """Prompts hardly disturb streams, and two decode workers have twice the batch of one."""
    advice = advise("ttft=1,tpot=0.025", rate=14, prompt=32, output=120, workers=2)
    assert advice.best.roles == {"mixed": 2}
    assert not advice.best.is_disaggregated
    assert advice.meets


def test_as_few_workers_as_meet_the_limits_are_asked_for():
    small, large = (
        advise("ttft=1,tpot=0.05", rate=rate, prompt=256, output=16, count=60) for rate in (2, 40)
    )
    assert small.best.num_workers == 1
    assert large.best.num_workers > 1
    assert small.meets and large.meets
    fewer = [one for one in large.tried if one.num_workers < large.best.num_workers]
    assert fewer and all(one.share < 0.95 for one in fewer)


def test_what_cannot_be_met_is_said():
    advice = advise("ttft=0.1,tpot=0.05", 1, prompt=4000, output=2, count=20, max_workers=2)
    assert not advice.meets
    assert "more or faster workers are needed" in advice.why


@pytest.mark.parametrize("kv_tokens", [10, 1000])
def test_a_load_of_which_nothing_fits_the_kv_cache_is_refused(kv_tokens):
    spec = replace(SPEC, num_blocks=kv_tokens // SPEC.block_size)
    with pytest.raises(ConfigError, match=r"no request of the load fits the KV .*--kv-tokens"):
        advise("ttft=1", rate=1, prompt=1000, output=10, spec=spec)


def test_given_arrangements_are_the_only_ones():
    roles = parse_roles("prefill=2,decode=1"), parse_roles("mixed=3")
    advice = advise("ttft=1", rate=4, prompt=256, output=2, count=20, arrangements=roles)
    assert {one.name for one in advice.tried} == {"2 prefill + 1 decode", "3 mixed"}


@pytest.mark.parametrize("text", ["prefill=2", "decode", "mixed=x", "mixed=1,mixed=2", "other=1"])
def test_nonsense_arrangements_are_refused(text):
    with pytest.raises(ConfigError, match="--arrangement"):
        parse_roles(text)


def test_long_prompts_are_simulated_in_larger_blocks_of_the_same_pool():
    spec = coarse(SPEC, 8000)
    assert spec.block_size == 512
    assert spec.num_blocks * spec.block_size == SPEC.num_blocks * SPEC.block_size
    assert coarse(SPEC, 100) == SPEC


ARGUMENTS = [
    "advise", "--simulate", "8000,10,0.5", "--rate", "4", "--count", "60",
    "--prompt-tokens", "128", "--output-tokens", "20", "--workers", "2",
]  # fmt: skip


def test_the_command_prints_a_table_and_the_advice_or_json_alone(capsys):
    assert cli.main([*ARGUMENTS, "--slo", "ttft=1,tpot=0.05"]) == 0
    text = capsys.readouterr().out
    for part in ("TTFT p50", "1 prefill + 1 decode", "Do not disaggregate: 2 mixed"):
        assert part in text
    assert cli.main([*ARGUMENTS, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["advice"]["roles"] == {"mixed": 2}
    assert found["advice"]["disaggregate"] is False
    assert len(found["tried"]) >= 2
    assert "load: 60 requests" in captured.err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--concurrency", "4"], "--concurrency is no load to plan for"),
        (["--trace", "/nowhere.jsonl"], "--trace /nowhere.jsonl cannot be read"),
        (["--simulate", "fast"], "--simulate 'fast'"),
    ],
)
def test_wrong_arguments_are_errors_that_say_what_to_do(arguments, error, capsys):
    assert cli.main([*ARGUMENTS, *arguments]) == 1
    assert error in capsys.readouterr().err
