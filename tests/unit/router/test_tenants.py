"""Tenants: their file and its mistakes, keys, limits that refuse with a time, salts, refunds."""

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError, InvalidRequest, Overloaded, Unauthenticated
from baton.v1 import common_pb2
from router.admission.rate_limit import TokenBucket
from router.admission.tenants import Tenants


class Hands:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def digest(key):
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def bearer(key):
    return (("user-agent", "x"), ("authorization", f"Bearer {key}"))


@pytest.fixture
def clock():
    return Hands()


@pytest.fixture
def tenants_of(tmp_path, clock):
    def load(text):
        path = tmp_path / "tenants.toml"
        path.write_text(text)
        return Tenants.load(path, clock)

    return load


@pytest.fixture
def tenant_with(tenants_of):
    """tenant_with("field = value") is a tenant with these limits."""

    def load(fields):
        return tenants_of(f'[tenants.a]\nkeys = ["{digest("k")}"]\n{fields}').of(bearer("k"))

    return load


def test_without_a_file_everybody_is_one_unlimited_tenant():
    tenants = Tenants.load(None)
    tenant = tenants.of(None)
    assert tenant.name == "default"
    assert tenants.of(bearer("whatever")) is tenants.of((("authorization", "odd"),)) is tenant
    assert tenant.salt("") == "" and tenant.salt("s") == "s"
    for _ in range(1000):
        tenant.enter(10**9, 10**9, 1.0)


def test_keys_name_tenants(tenants_of, tmp_path):
    (tmp_path / "b.key").write_text("key b\n")
    tenants = tenants_of(
        f'[tenants.a]\nkeys = ["{digest("a1")}", "{digest("a2").upper().replace("SHA", "sha")}"]\n'
        '[tenants.b]\nkey_files = ["b.key"]\n'
    )
    assert [tenants.of(bearer(key)).name for key in ("a1", "a2", "key b")] == ["a", "a", "b"]
    assert tenants.of(bearer("a1")) is tenants.of((("Authorization", b"bearer a2"),))


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        (),
        (("x", "y"),),
        bearer("other"),
        bearer(""),
        (("authorization", "a1"),),
        (("authorization", "Basic a1"),),
    ],
)
def test_without_a_known_key_nobody_enters(tenants_of, metadata):
    tenants = tenants_of(f'[tenants.a]\nkeys = ["{digest("a1")}"]\n')
    with pytest.raises(Unauthenticated) as caught:
        tenants.of(metadata)
    assert "a1" not in str(caught.value) and "other" not in str(caught.value)


def test_a_default_takes_callers_without_a_key_but_no_wrong_key(tenants_of):
    tenants = tenants_of(f'[tenants.a]\nkeys = ["{digest("a1")}"]\n[default]\nweight = 0.5\n')
    assert tenants.of(()).name == "default"
    assert tenants.of(()).limits.weight == 0.5
    with pytest.raises(Unauthenticated, match="unknown"):
        tenants.of(bearer("wrong"))


KEYS = f'keys = ["{digest("k")}"]'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no tenant"),
        ("x = [", "is not TOML"),
        ("colour = 3\n[default]", "the file has an unknown field 'colour'"),
        ("tenants = 3", "tenants of the file must be tables of their own"),
        ("[tenants]\na = 3", "[tenants.a] must be a table"),
        ("default = 3", "default of the file must be a table"),
        ("[tenants.a]", "keys of [tenants.a] must be given"),
        ('[tenants."a/b"]\n' + KEYS, "NAME of [tenants.a/b] must be letters"),
        ('[tenants.a]\nkeys = "x"', "keys of [tenants.a] must be a list of texts"),
        ("[tenants.a]\nkeys = [3]", "keys of [tenants.a] must be a list of texts"),
        ('[tenants.a]\nkeys = ["secret"]', 'keys of [tenants.a] must be "sha256:"'),
        ('[tenants.a]\nkeys = ["sha256:1"]', 'keys of [tenants.a] must be "sha256:"'),
        ('[tenants.a]\nkey_files = ["no"]', "key_files of [tenants.a] must be readable: no"),
        ('[tenants.a]\nkey_files = ["two.key"]', "one key each; two.key has"),
        ('[tenants.a]\nkey_files = ["empty.key"]', "one key each; empty.key has"),
        (f"[tenants.a]\n{KEYS}\nwieght = 1", "[tenants.a] has an unknown field 'wieght'"),
        (f"[tenants.a]\n{KEYS}\nweight = 0", "weight of [tenants.a] must be a number above 0"),
        (f"[tenants.a]\n{KEYS}\nweight = inf", "weight of [tenants.a] must be a number above 0"),
        (f"[tenants.a]\n{KEYS}\nweight = true", "weight of [tenants.a] must be a number above 0"),
        (f"[tenants.a]\n{KEYS}\npriority = 'top'", "priority of [tenants.a] must be one of low"),
        (f"[tenants.a]\n{KEYS}\npriority = [1]", "priority of [tenants.a] must be one of low"),
        (f"[tenants.a]\n{KEYS}\ntokens_per_minute = '9'", "tokens_per_minute of [tenants.a]"),
        (f"[tenants.a]\n{KEYS}\nmax_prompt_tokens = 1.5", "max_prompt_tokens of [tenants.a] must"),
        (f"[tenants.a]\n{KEYS}\nmax_running = 0", "max_running of [tenants.a] must be a whole"),
        (f"[tenants.a]\n{KEYS}\nrequests_per_minute = 0.5", "burst_seconds bring at least one"),
        ("[default]\nburst_seconds = -1", "burst_seconds of [default] must be a number above 0"),
        ("[default]\nkeys = []", "[default] has an unknown field 'keys'"),
        (f"[tenants.default]\n{KEYS}\n[default]", "there is a [tenants.default] too"),
        (f"[tenants.a]\n{KEYS}\n[tenants.b]\n{KEYS}", "[tenants.a] and [tenants.b] must differ"),
    ],
)
def test_mistakes_are_told_with_file_tenant_and_field(tenants_of, tmp_path, text, told):
    (tmp_path / "two.key").write_text("one\ntwo\n")
    (tmp_path / "empty.key").touch()
    with pytest.raises(ConfigError) as caught:
        tenants_of(text)
    assert told in str(caught.value)
    assert str(tmp_path / "tenants.toml") in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml cannot be read: No such file"):
        Tenants.load(tmp_path / "nothing.toml")


def test_tenants_never_share_prefixes(tenants_of):
    tenants = tenants_of(
        f'[tenants.a]\nkeys = ["{digest("a")}"]\n[tenants.b]\nkeys = ["{digest("b")}"]\n[default]'
    )
    people = [tenants.of(bearer("a")), tenants.of(bearer("b")), tenants.of(())]
    salts = {tenant.salt(own) for tenant in people for own in ("", "a", "a/", "b/a", "default/")}
    assert len(salts) == 15


def test_requests_a_minute(tenant_with, clock):
    tenant = tenant_with("requests_per_minute = 60\nburst_seconds = 2")
    for _ in range(2):
        tenant.enter(1, 1, 0.0)
    with pytest.raises(Overloaded, match="a minute") as caught:
        tenant.enter(1, 1, 0.0)
    assert caught.value.retry_after_s == pytest.approx(1.0)
    clock.now += caught.value.retry_after_s
    tenant.enter(1, 1, 0.0)


def test_tokens_a_minute_count_prompt_and_output(tenant_with, clock):
    tenant = tenant_with("tokens_per_minute = 600")
    tenant.enter(300, 200, 0.0)
    with pytest.raises(Overloaded, match="a minute") as caught:
        tenant.enter(100, 50, 0.0)
    assert caught.value.retry_after_s == pytest.approx(5.0)
    tenant.enter(50, 50, 0.0)  # what was refused cost nothing


def test_more_than_fits_at_once_can_never_work(tenant_with):
    tenant = tenant_with("tokens_per_minute = 600\nburst_seconds = 30")
    with pytest.raises(InvalidRequest, match="gets 300 at once") as caught:
        tenant.enter(100, 201, 0.0)
    assert caught.value.field == "sampling.max_tokens"
    tenant.enter(100, 200, 0.0)


def test_so_many_run_at_a_time(tenant_with):
    tenant = tenant_with("max_running = 2")
    visits = [tenant.enter(1, 1, 0.0) for _ in range(2)]
    with pytest.raises(Overloaded, match="2 requests of this tenant run already") as caught:
        tenant.enter(1, 1, 0.0)
    assert caught.value.retry_after_s > 0
    with pytest.raises(Overloaded):
        tenant.check_requests()
    with visits[0]:
        pass
    tenant.enter(1, 1, 0.0)


def level(tenant):
    """Tokens that may be taken now."""
    return tenant._tokens._level, tenant._requests._level


@pytest.mark.parametrize(
    ("delivered", "error", "tokens", "requests"),
    [
        (0, Overloaded("cannot make it"), 600, 60),  # refused: as if it had not come
        (0, ConnectionError(), 500, 59),  # its prompt was worked on
        (0, None, 500, 59),
        (150, None, 350, 59),
        (150, Overloaded("x"), 350, 59),
        (200, None, 300, 59),
    ],
)
def test_what_is_not_used_is_given_back(tenant_with, delivered, error, tokens, requests):
    tenant = tenant_with("tokens_per_minute = 600\nrequests_per_minute = 60")
    try:
        with tenant.enter(100, 200, 0.0) as lease:
            assert level(tenant) == pytest.approx((300, 59))
            lease.delivered(delivered) if delivered else None
            if error:
                raise error
    except (Overloaded, ConnectionError):
        pass
    assert level(tenant) == pytest.approx((tokens, requests))


def test_output_beyond_what_was_reserved_is_charged_as_it_comes(tenant_with):
    """A chat that may fill the context does not hold the whole bucket from its start."""
    tenant = tenant_with("tokens_per_minute = 6000")
    with tenant.enter(100, 5900, 0.0) as lease, tenant.enter(100, 5900, 0.0):
        before = level(tenant)[0]
        lease.delivered(1000)
        assert level(tenant)[0] < before
    assert level(tenant)[0] == pytest.approx(6000 - 200 - 1000)


def test_more_output_than_the_bucket_has_makes_the_next_ones_wait(tenant_with):
    tenant = tenant_with("tokens_per_minute = 6000")
    for _ in range(2):
        with tenant.enter(100, 5900, 0.0) as lease:
            lease.delivered(4000)
    with pytest.raises(Overloaded, match="tokens a minute") as caught:
        tenant.enter(1, 1, 0.0)
    assert caught.value.retry_after_s == pytest.approx(22.02)  # 8,200 of 6,000 are used


def test_a_further_choice_costs_no_request_and_its_own_output(tenant_with):
    tenant = tenant_with("tokens_per_minute = 6000\nrequests_per_minute = 60")
    with tenant.enter(100, 10, 0.0, choices=100) as first:
        first.delivered(10)
        for _ in range(99):
            with tenant.enter(0, 10, 0.0, choices=0) as further:
                further.delivered(10)
    assert level(tenant) == pytest.approx((6000 - 100 - 1000, 59))


def test_choices_that_do_not_fit_together_are_refused_before_the_first(tenant_with):
    tenant = tenant_with("tokens_per_minute = 6000\nmax_running = 8")
    with pytest.raises(InvalidRequest, match="gets 6000 at once"):
        tenant.enter(100, 1000, 0.0, choices=6)
    with pytest.raises(InvalidRequest, match="9 choices run at once") as caught:
        tenant.enter(1, 1, 0.0, choices=9)
    assert caught.value.field == "n"
    tenant.enter(1, 1, 0.0)
    with pytest.raises(Overloaded):
        tenant.enter(1, 1, 0.0, choices=8)


def test_a_visit_takes_its_turn_until_its_prompt_is_computed(tenant_with, clock):
    tenant = tenant_with("priority = 'high'")
    clock.now += 1000.0
    first = tenant.enter(100, 10, 1.0)
    second = tenant.enter(100, 10, 1.0)
    assert first.virtual_finish < second.virtual_finish
    with second:
        pass
    first.delivered(1)
    first.delivered(1)
    clock.now += 100.0
    third = tenant.enter(100, 10, 1.0)
    assert third.virtual_finish == pytest.approx(
        first.virtual_finish + 100.0
    )  # nobody in front any more
    low = tenant.enter(100, 10, 1.0, common_pb2.PRIORITY_LOW)
    assert low.virtual_finish > third.virtual_finish


@given(
    st.floats(1, 1e6),
    st.floats(1, 600),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), max_size=50),
)
def test_a_bucket_never_gives_more_than_it_got_and_tells_the_exact_time(per_minute, burst_s, asks):
    clock = Hands()
    bucket = TokenBucket(per_minute, burst_s, clock)
    taken, begun = 0.0, clock.now
    for pause, part in asks:
        clock.now += pause
        amount = part * bucket.size
        wait_s = bucket.wait_s(amount)
        if wait_s > 0:
            clock.now += wait_s * 0.999 - 1e-5
            assert bucket.wait_s(amount) > 0 or wait_s < 1e-3
            clock.now += wait_s * 0.001 + 2e-5
        assert bucket.wait_s(amount) == 0.0
        bucket.take(amount)
        taken += amount
        assert taken <= bucket.size + (clock.now - begun) * per_minute / 60 + 1e-3


def test_a_bucket_holds_no_more_than_its_size():
    clock = Hands()
    bucket = TokenBucket(60.0, 10.0, clock)
    for _ in range(2):
        bucket.take(10.0)
        clock.now += 1e6
    bucket.take(10.0)
    assert bucket.wait_s(10.0) == pytest.approx(10.0)
    bucket.give(random.Random(1).uniform(50, 100))
    assert bucket.wait_s(bucket.size) == 0.0
    bucket.take(10.0)
    assert bucket.wait_s(1.0) == pytest.approx(1.0)
