"""What pairs cost a request, term by term, and that no term outgrows its bounds."""

import itertools
from dataclasses import replace

import pytest

from router.fleet.snapshot import AssignedPrompt
from router.placement.placement import pick, rank_all

from .snapshots import BLOCK, fleet, needs, worker

RATE = {"prefill_tokens_per_s": 1000}
POOL = {"blocks_total": 10_000, "blocks_free": 10_000}
HANDOFF_S = 0.003


def only(prefill, decode, request=None):
    (choice,) = rank_all(fleet([prefill], [decode]), request or needs(100))
    return choice


def best(prefill, decode, request=None):
    return pick(fleet(prefill, decode), request or needs(100)).names


# Time to first token.


def test_ttft_is_the_tokens_ahead_and_the_own_ones_at_the_measured_rate():
    choice = only(worker("p0", queue_tokens=300, **RATE), worker("d0", **POOL))
    assert choice.ttft_s == pytest.approx(0.4 + HANDOFF_S)
    assert choice.on_prefill.queue_tokens == 300
    fast = only(worker("p0", queue_tokens=300, prefill_tokens_per_s=4000), worker("d0", **POOL))
    assert fast.ttft_s == pytest.approx(0.1 + HANDOFF_S)


def test_half_a_chunk_of_what_goes_later_may_be_running():
    for queue, chunk, running in ((900, 200, 100), (60, 200, 60), (900, 0, 256)):
        later = worker("p0", queue_tokens=queue, chunk_tokens=chunk, **RATE)
        later = replace(later, assigned=(AssignedPrompt(queue, 7.0),))
        choice = only(later, worker("d0", **POOL), needs(100, virtual_finish=6.0))
        assert choice.on_prefill.queue_tokens == 0
        assert choice.ttft_s == pytest.approx((100 + running) / 1000 + HANDOFF_S)


def test_what_prefill_caches_is_not_computed():
    prompt = tuple(range(100))
    choice = only(worker("p0", caches=prompt[:81], **RATE), worker("d0", **POOL), needs(prompt))
    assert choice.on_prefill.cached == 80, "whole blocks"
    assert choice.ttft_s == pytest.approx(0.02 + HANDOFF_S)


def test_another_tenants_cache_is_of_no_use():
    prompt = tuple(range(100))
    prefill = worker("p0", caches=prompt, salt="theirs", **RATE)
    decode = worker("d0", **POOL)
    assert only(prefill, decode, needs(prompt, cache_salt="ours")).on_prefill.cached == 0
    assert only(prefill, decode, needs(prompt, cache_salt="theirs")).on_prefill.cached == 96


def test_what_decode_caches_saves_prefill_nothing():
    """The prefill worker has to compute over those tokens all the same."""
    prompt = tuple(range(100))
    choice = only(worker("p0", **RATE), worker("d0", caches=prompt[:80], **POOL), needs(prompt))
    assert choice.on_decode.cached == 80 and choice.ttft_s == pytest.approx(0.1 + HANDOFF_S)


def test_a_worker_that_has_measured_nothing_is_like_the_others():
    prefill = [
        worker("p0", queue_tokens=100),
        worker("p1", queue_tokens=100, prefill_tokens_per_s=500),
    ]
    first, second = rank_all(fleet(prefill, [worker("d0", **POOL)]), needs(100))
    assert first.ttft_s == second.ttft_s == pytest.approx(0.4 + HANDOFF_S)


def test_rates_that_differ_by_noise_are_equal_and_others_are_not():
    def two(rate, queue):
        prefill = [
            worker("p0", prefill_tokens_per_s=1000, queue_tokens=queue),
            worker("p1", prefill_tokens_per_s=rate),
        ]
        return best(prefill, [worker("d0", **POOL)])[0]

    assert two(rate=850, queue=0) == "p0"
    assert two(rate=850, queue=1) == "p1", "not kept busy for its noise"
    assert two(rate=300, queue=100) == "p0", "a slow worker has to be much emptier"
    assert two(rate=300, queue=400) == "p1"


@pytest.mark.parametrize(("ahead", "taken"), [(79, "cached"), (81, "idle")])
def test_affinity_is_bounded_by_load(ahead, taken):
    """A cached prefix is worth the tokens that it saves: 80 here, and not one more."""
    prompt = tuple(range(100))
    prefill = [
        worker("cached", caches=prompt[:80], queue_tokens=ahead, **RATE),
        worker("idle", **RATE),
    ]
    assert best(prefill, [worker("d0", **POOL)], needs(prompt))[0] == taken


def test_a_burst_of_one_prefix_does_not_pile_up_where_it_is_cached():
    """100 tokens of which 80 are cached: after five or so it is quicker to compute them anew."""
    prompt = tuple(range(100))
    queues = {"cached": (), "p1": (), "p2": ()}
    for _ in range(24):
        prefill = [
            replace(
                worker(name, caches=prompt[:80] if name == "cached" else (), **RATE),
                assigned=assigned,
            )
            for name, assigned in queues.items()
        ]
        choice = pick(fleet(prefill, [worker("d0", **POOL)]), needs(prompt))
        left = AssignedPrompt(100 - choice.on_prefill.cached, 0.0)
        queues[choice.prefill.incarnation] += (left,)
    waits = {name: sum(item.num_tokens for item in queue) for name, queue in queues.items()}
    assert len(queues["cached"]) > len(queues["p1"]), "it does get more"
    assert max(waits.values()) - min(waits.values()) <= 100, waits


# Time per output token.


def test_tpot_is_the_step_with_one_more_sequence():
    """Steps are as if eight sequences were there before the first."""
    alone = only(worker("p0"), worker("d0", step_ms=9, **POOL))
    assert alone.on_decode.tpot_s == pytest.approx(0.009)
    busy = only(worker("p0"), worker("d0", step_ms=18, running=10, **POOL))
    assert busy.on_decode.tpot_s == pytest.approx(0.019)
    coming = only(worker("p0"), worker("d0", step_ms=18, running=10, sequences=15, **POOL))
    assert coming.on_decode.tpot_s == pytest.approx(0.024)


def test_a_slow_decode_worker_gets_fewer_sequences():
    def two(slow_runs, fast_runs):
        slow = worker("slow", step_ms=30 * (8 + slow_runs) / 9, running=slow_runs, **POOL)
        fast = worker("fast", step_ms=10 * (8 + fast_runs) / 9, running=fast_runs, **POOL)
        return best([worker("p0")], [slow, fast])[1]

    assert two(slow_runs=1, fast_runs=5) == "fast"
    assert two(slow_runs=1, fast_runs=25) == "slow"


def test_what_an_idle_worker_measured_with_a_batch_long_gone_does_not_keep_it_idle():
    decode = [worker("idle", step_ms=60, **POOL), worker("busy", step_ms=10, running=2, **POOL)]
    assert best([worker("p0")], decode)[1] == "idle"


def test_tokens_that_are_expected_weigh_tpot_up_to_a_limit():
    decode = worker("d0", step_ms=10, **POOL)
    scores = {n: only(worker("p0", **RATE), decode, needs(100, new_tokens=n)).score_ms
              for n in (1, 10, 64, 256, 4000, 0)}  # fmt: skip
    assert scores[10] - scores[1] == pytest.approx(90)
    assert scores[4000] == scores[256] and scores[0] == scores[64]


def test_a_pool_that_runs_full_costs_more_the_fuller_it_is():
    def scored(free):
        pool = {"blocks_total": 100, "blocks_free": free, "blocks_held": 100 - free}
        return only(worker("p0"), worker("d0", **pool), needs(8)).score_ms

    scores = [scored(free) for free in (100, 70, 40, 10)]
    steps = [after - before for before, after in itertools.pairwise(scores)]
    assert 0 < steps[0] < steps[1] < steps[2]
    decode = [
        worker("d0", blocks_total=100, blocks_free=10, blocks_held=90),
        worker("d1", blocks_total=100, blocks_free=60, blocks_held=40),
    ]
    assert best([worker("p0")], decode, needs(8))[1] == "d1"


# Distance.


def test_the_same_host_goes_first():
    prefill = [worker("p0", host_id="a", **RATE), worker("p1", host_id="b", **RATE)]
    decode = [worker("d0", host_id="b", **POOL)]
    choice = pick(fleet(prefill, decode), needs(100))
    assert choice.names == ("p1", "d0") and choice.same_host
    far = rank_all(fleet(prefill, decode), needs(100))[1]
    assert far.transfer_s == pytest.approx(4 * choice.transfer_s) and not far.same_host


def test_only_what_decode_does_not_cache_is_sent():
    prompt = tuple(range(100))
    none, most = (
        only(worker("p0"), worker("d0", caches=prompt[:n], **POOL), needs(prompt)) for n in (0, 80)
    )
    assert none.transfer_s == pytest.approx(100 * 40_000 / 4e9)
    assert most.transfer_s == pytest.approx(20 * 40_000 / 4e9)
    half = only(worker("p0", dtype="bfloat16"), worker("d0", dtype="bfloat16", **POOL))
    assert half.transfer_s == pytest.approx(none.transfer_s / 2)
    int8 = only(worker("p0", dtype="int8"), worker("d0", dtype="int8", **POOL))
    # Heads of 125 elements of a byte, and their scale of four.
    assert int8.transfer_s == pytest.approx(none.transfer_s / 4 * 129 / 125)
    decode = [worker("d0", **POOL), worker("d1", caches=prompt[:80], **POOL)]
    assert best([worker("p0")], decode, needs(prompt))[1] == "d1"


# Equals.


def test_equals_are_told_apart_by_what_they_were_given_then_by_name():
    decode = [worker("d1", **POOL), worker("d0", **POOL)]
    assert best([worker("p1"), worker("p0")], decode) == ("p0", "d0")
    used = [worker("p0", steps=9), worker("p1", steps=8)]
    assert best(used, decode) == ("p1", "d0"), "its cache has room"
    given = replace(worker("p1"), assigned=(AssignedPrompt(0, 9.0),))
    assert best([given, worker("p0", steps=9)], decode) == ("p0", "d0")


# Decode computes the prompt itself.


@pytest.mark.parametrize(
    ("left", "most", "alone"), [(16, 16, True), (17, 16, False), (1, 0, False), (100, 200, True)]
)
def test_decode_computes_the_little_that_is_left(left, most, alone):
    prompt = tuple(range(100 - left)) + tuple(range(500, 500 + left))
    decode = worker("d0", running=50, sequences=50, **POOL)
    request = needs(left, local_prefill_max_tokens=most)
    assert only(worker("p0"), decode, request).decode_prefills is alone
    if left % BLOCK == 0:
        decode = worker("d0", running=50, caches=prompt[:-left], **POOL)
        request = needs(prompt, local_prefill_max_tokens=most)
        assert only(worker("p0"), decode, request).decode_prefills is alone


def choice_of(*, left=40, ahead=0, running=0, most=16, prefill_caches=0, chunk=512, rate=1000):
    """A prompt of 1000 tokens of which decode caches all but `left`."""
    prompt = tuple(range(1000))
    rates = {"prefill_tokens_per_s": rate}
    prefill = worker("p0", queue_tokens=ahead, caches=prompt[:prefill_caches], **rates, **POOL)
    decode = worker(
        "d0", running=running, caches=prompt[: 1000 - left], chunk_tokens=chunk, step_ms=1,
        **rates, **POOL,
    )  # fmt: skip
    return only(prefill, decode, needs(prompt, local_prefill_max_tokens=most))


def test_decode_computes_what_costs_less_there_than_a_whole_prompt_elsewhere():
    choice = choice_of()
    assert choice.decode_prefills and choice.local_prefill_max_tokens == 40
    assert choice.ttft_s == pytest.approx(0.04, abs=0.002) and choice.transfer_s == 0


def test_each_running_sequence_waits_as_long_as_decode_computes():
    """40 tokens of 1000 are left: worth it while twice that, for all there, costs less."""
    assert choice_of(running=10).decode_prefills
    assert not choice_of(running=15).decode_prefills
    assert choice_of(running=15, ahead=500).decode_prefills, "the prefill worker is busy too"
    assert not choice_of(prefill_caches=936).decode_prefills, "it has not much more to compute"


def test_what_the_others_wait_is_part_of_the_cost():
    quiet, busy = choice_of(running=0), choice_of(running=10)
    own_ms = (
        2 * (busy.ttft_s - quiet.ttft_s) + 64 * (busy.on_decode.tpot_s - quiet.on_decode.tpot_s)
    ) * 1e3
    assert busy.score_ms - quiet.score_ms - own_ms == pytest.approx(2 * 10 * 40, rel=0.01)


def test_a_busy_prefill_worker_is_no_reason_to_compute_on_decode_while_another_is_idle():
    """40 tokens on decode count as 80; an idle worker that caches the rest needs 67 ms."""
    prompt = tuple(range(1000))
    prefill = [
        worker("p0", queue_tokens=500, **RATE, **POOL),
        worker("p1", caches=prompt[:936], **RATE, **POOL),
    ]
    decode = worker("d0", caches=prompt[:960], step_ms=1, **RATE, **POOL)
    choice = pick(fleet(prefill, [decode]), needs(prompt, local_prefill_max_tokens=16))
    assert choice.names == ("p1", "d0") and not choice.decode_prefills


def test_decode_never_computes_more_than_a_chunk_or_when_told_not_to():
    assert choice_of(left=40, chunk=40).decode_prefills
    assert not choice_of(left=40, chunk=36).decode_prefills
    assert not choice_of(most=0).decode_prefills


def test_a_prompt_that_nobody_caches_is_handed_over_by_an_idle_decode_worker_too():
    """Or an idle cluster would compute prompts on decode, where the next stream meets them."""
    prefill, decode = worker("p0", **RATE), worker("d0", **RATE, **POOL)
    assert not only(prefill, decode, needs(100, local_prefill_max_tokens=16)).decode_prefills


def test_reserve_is_told_what_was_reckoned_with():
    """If less is cached than it seemed, more is left, and the prompt is handed over after all."""
    assert choice_of(left=40).local_prefill_max_tokens == 40
    assert choice_of(left=8).local_prefill_max_tokens == 16
    assert choice_of(left=40, running=90).local_prefill_max_tokens == 16


def test_the_prefill_worker_that_is_not_needed_is_the_emptiest():
    """It may be needed after all."""
    prompt = tuple(range(8))
    prefill = [worker("p0", queue_tokens=50), worker("p1", queue_tokens=5)]
    request = needs(prompt, local_prefill_max_tokens=16)
    choice = pick(fleet(prefill, [worker("d0")]), request)
    assert choice.decode_prefills and choice.names == ("p1", "d0")
