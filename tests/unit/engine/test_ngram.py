"""N-gram proposals: what followed the last time, as many as pay, and what rejections teach."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.speculative import ngram
from baton.engine.speculative.cost import RowCost, worthwhile
from baton.engine.speculative.ngram import LENGTHS, NgramIndex
from baton.engine.speculative.verify import verify

CHEAP = 1e-6  # a price at which everything is drafted
few_tokens = st.lists(st.integers(0, 2), max_size=60)


def expected(tokens, most):
    """Prompt lookup as one would write it down: the slow way, over the whole text."""
    for length in LENGTHS:
        end = tokens[-length:]
        for at in range(len(tokens) - 1, length - 1, -1):
            if len(end) == length and tokens[at - length : at] == end:
                grown = list(tokens)
                for i in range(most):
                    grown.append(grown[at + i])
                return tuple(grown[len(tokens) :])
    return ()


class TestLookup:
    @given(tokens=few_tokens, most=st.integers(1, 6), data=st.data())
    def test_is_the_slow_ways_however_the_tokens_came(self, tokens, most, data):
        proposer, known = NgramIndex(), 0
        while known < len(tokens):
            known = data.draw(st.integers(known + 1, len(tokens)))
            assert proposer.propose(tokens[:known], most, CHEAP) == expected(tokens[:known], most)

    def test_memory_is_bounded_and_what_is_recent_is_kept(self, monkeypatch):
        monkeypatch.setattr(ngram, "MAX_NGRAMS", 300)
        proposer = NgramIndex()
        numbers = random.Random(3)
        tokens = [numbers.randrange(100_000) for _ in range(5000)]
        tokens += tokens[-50:-45]
        for known in range(1, len(tokens) + 1, 7):
            proposer.propose(tokens[:known], 4, CHEAP)
            assert len(proposer._places) + len(proposer._older_places) <= 2 * (300 + 7 * 3)
            if known > 60:
                assert proposer._find(tokens[known - 60 : known - 56]) == (4, known - 56)
        assert proposer.propose(tokens, 4, CHEAP) == tuple(tokens[-50:-46])
        forgotten = [*tokens, *tokens[10:14]]
        assert proposer.propose(forgotten, 4, CHEAP) == ()

    def test_a_long_prompt_is_read_in_parts(self):
        proposer = NgramIndex()
        tokens = list(range(2 * ngram.CATCH_UP_TOKENS + 100))
        tokens += tokens[-9:-5]
        assert proposer.propose(tokens, 2, CHEAP) == ()
        assert proposer.propose(tokens, 2, CHEAP) == ()
        assert proposer.propose(tokens, 2, CHEAP) == (tokens[-9], tokens[-8])


class TestAdapting:
    def follow(self, text, known, price):
        """Drafted tokens at each step of a sequence that turns out to be `text`."""
        proposer, counts = NgramIndex(), []
        while known < len(text):
            proposed = proposer.propose(text[:known], min(4, len(text) - known - 1), price)
            sampled = text[known : known + len(proposed) + 1]
            new = sampled[: verify(proposed, sampled)]
            proposer.learn(new)
            counts.append(len(proposed))
            known += len(new)
        return counts

    def test_text_that_repeats_itself_is_drafted_in_full(self):
        counts = self.follow([1, 2, 3, 4, 5, 6, 7, 8] * 40, 16, price=0.1)
        assert set(counts[10:-2]) == {4}
        assert len(counts) < (40 * 8 - 16) / 4

    def test_text_that_never_does_what_it_did_stops_drafts_and_looking_goes_on(self):
        """Every pair occurs again, always followed by something else; then the text repeats."""
        numbers = random.Random(1)
        noise = [numbers.randrange(12) for _ in range(1500)]
        counts = self.follow([*noise, *noise[-100:] * 20], 2, price=0.2)
        assert sum(counts[200:1400]) < 0.05 * 1200
        assert sum(counts[-100:]) > 300

    def test_a_length_of_text_that_misleads_does_not_stop_another(self):
        proposer, tokens = NgramIndex(), [1, 2]
        for other in range(10, 70):  # what follows the pair is another token each time
            tokens += [other, 1, 2]
            last = proposer.propose(tokens, 4, 0.3)
            proposer.learn([other + 1])
        assert last == ()
        tokens += [5, 6, 7, 8, 9, 5, 6, 7, 8]
        assert proposer.propose(tokens, 4, 0.3) == (9,)

    def test_what_was_not_tried_does_not_count_as_rejected(self):
        """Of four drafts whose first is wrong, one is known to be wrong."""
        one, four = NgramIndex(), NgramIndex()
        tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
        one.propose(tokens, 1, CHEAP)
        four.propose(tokens, 4, CHEAP)
        one.learn([7])
        four.learn([7])
        chances = [[chance.value for chance in each._rates.values()] for each in (one, four)]
        assert chances[0] == chances[1]

    @given(
        chance=st.floats(0, 1),
        price=st.floats(0.001, 1),
        most=st.integers(1, 12),
    )
    def test_the_number_is_the_best_one(self, chance, price, most):
        def rate(count):
            return sum(chance**i for i in range(count + 1)) / (1 + count * price)

        best = max(rate(count) for count in range(most + 1))
        assert rate(worthwhile(chance, price, most)) == pytest.approx(best)


class TestRowCost:
    def test_is_the_usual_before_anything_has_run(self):
        assert RowCost().price(1) == pytest.approx(1 / 17)
        assert RowCost().price(16) == pytest.approx(0.5)

    @pytest.mark.parametrize("rows", [1, 8, 32])
    @pytest.mark.parametrize("price", [0.05, 0.3, 0.9])
    def test_follows_the_machine(self, rows, price):
        costs, numbers = RowCost(), random.Random(2)
        for _ in range(400):
            ngram = numbers.randint(0, 3 * rows)
            seconds = 1e-3 * (1 + price * ngram / rows) * numbers.uniform(0.95, 1.05)
            costs.record_step(rows, ngram, seconds)
        usual = RowCost().price(rows)
        assert costs.price(rows) == pytest.approx(max(price, usual / 4), rel=0.3)
        assert costs.price(rows + 1) == RowCost().price(rows + 1)  # others tell nothing of it

    def test_is_the_usual_again_when_nothing_is_drafted_any_more(self):
        """What was learned wrong is not believed for ever."""
        costs = RowCost()
        for step in range(100):
            costs.record_step(8, 8 * (step % 2), 0.02 * (1 + step % 2))
        assert costs.price(8) > 0.5
        for _ in range(1000):
            costs.record_step(8, 0, 0.02)
        assert costs.price(8) == pytest.approx(8 / 24, rel=0.1)

    def test_a_stall_is_not_a_price(self):
        costs, numbers = RowCost(), random.Random(4)
        for step in range(600):
            ngram = numbers.randint(0, 4)
            stalled = step % 50 == 49
            costs.record_step(1, ngram, 5.0 if stalled else 1e-3 * (1 + 0.1 * ngram))
            costs.record_step(512, 0, 5.0)
        assert costs.price(1) == pytest.approx(0.1, rel=0.8)
        assert costs.price(512) == pytest.approx(512 / 528)

    @settings(max_examples=200)
    @given(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.floats(1e-6, 10)), max_size=60)
    )
    def test_is_always_a_price(self, steps):
        costs = RowCost()
        for step in steps:
            costs.record_step(*step)
        for rows in (1, 2, 3, 64, 600):
            assert 0 < costs.price(rows) <= 1


@pytest.mark.parametrize(
    ("proposed", "sampled", "count"),
    [
        ((), (5,), 1),
        ((5,), (5, 6), 2),
        ((5,), (4, 6), 1),
        ((5, 6, 7), (5, 6, 7, 8), 4),
        ((5, 6, 7), (5, 9, 7, 8), 2),
        ((5, 6, 7), (9, 6, 7, 8), 1),
    ],
)
def test_verify_ends_with_the_first_that_was_not_proposed(proposed, sampled, count):
    assert verify(proposed, sampled) == count
