"""Tenants: their file and its mistakes, keys, limits that refuse with a time, salts, refunds."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError, InvalidRequest, Overloaded, Unauthenticated
from router.admission.tenants import Tenants, TokenBucket

from .conftest import Clock


def digest(key):
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def bearer(key):
    return (("user-agent", "x"), ("authorization", f"Bearer {key}"))


KEYS = f'keys = ["{digest("k")}"]'


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
    return lambda fields: tenants_of(f"[tenants.a]\n{KEYS}\n{fields}").of(bearer("k"))


def test_without_a_file_all_callers_are_one_unlimited_tenant():
    tenants = Tenants.load(None)
    tenant = tenants.of(())
    assert tenant.name == "default"
    assert tenants.of(bearer("whatever")) is tenants.of((("authorization", "odd"),)) is tenant
    assert tenant.salt("") == "" and tenant.salt("s") == "s"
    for _ in range(1000):
        tenant.enter(10**9, 10**9, 1.0)


def test_keys_name_tenants(tenants_of, tmp_path):
    (tmp_path / "b.key").write_text("key b\n")
    tenants = tenants_of(
        f'[tenants.a]\nkeys = ["{digest("a1")}", "{digest("a2").upper().replace("SHA", "sha")}"]\n'
        '[tenants.b]\nkey_files = ["b.key"]\n[default]\nweight = 0.5'
    )
    assert [tenants.of(bearer(key)).name for key in ("a1", "a2", "key b")] == ["a", "a", "b"]
    assert tenants.of(bearer("a1")) is tenants.of((("Authorization", b"bearer a2"),))
    assert (tenants.of(()).name, tenants.of(()).config.weight) == ("default", 0.5)
    with pytest.raises(Unauthenticated, match="unknown"):  # a default takes no wrong key
        tenants.of(bearer("wrong"))
    found = [tenants.of(bearer("a1")), tenants.of(bearer("key b")), tenants.of(())]
    salts = {tenant.salt(own) for tenant in found for own in ("", "a", "a/", "b/a", "default/")}
    assert len(salts) == 15, "no two tenants share cached prefixes"


@pytest.mark.parametrize(
    "metadata",
    [(), (("x", "y"),), bearer("other"), bearer(""), (("authorization", "k"),),
     (("authorization", "Basic k"),)],
)  # fmt: skip
def test_without_a_known_key_a_caller_is_refused(tenants_of, metadata):
    with pytest.raises(Unauthenticated) as caught:
        tenants_of(f"[tenants.a]\n{KEYS}").of(metadata)
    assert "other" not in str(caught.value), "a key is never shown"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no tenant"),
        ("x = [", "is not TOML"),
        ("colour = 3\n[default]", "the file has an unknown field 'colour'"),
        ("tenants = 3", "tenants of the file must be a table"),
        ("[tenants]\na = 3", "a of tenants must be a table"),
        ("default = 3", "default of the file must be a table"),
        ("[tenants.a]", "keys of [tenants.a] must be given"),
        (f'[tenants."a/b"]\n{KEYS}', "name of [tenants.a/b] must be letters"),
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
        (f"[tenants.a]\n{KEYS}\nmax_prompt_tokens = 1.5", "max_prompt_tokens of [tenants.a] must"),
        (f"[tenants.a]\n{KEYS}\nrequests_per_minute = 0.5", "burst_seconds bring at least one"),
        ("[default]\nburst_seconds = -1", "burst_seconds of [default] must be a number above 0"),
        ("[default]\nkeys = []", "[default] has an unknown field 'keys'"),
        (f"[tenants.default]\n{KEYS}\n[default]", "give [default] or [tenants.default]"),
        (f"[tenants.a]\n{KEYS}\n[tenants.b]\n{KEYS}", "[tenants.a] and [tenants.b] must differ"),
    ],
)
def test_a_mistake_names_file_tenant_and_field(tenants_of, tmp_path, text, said):
    (tmp_path / "two.key").write_text("one\ntwo\n")
    (tmp_path / "empty.key").touch()
    with pytest.raises(ConfigError) as caught:
        tenants_of(text)
    assert said in str(caught.value)
    assert str(tmp_path / "tenants.toml") in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml cannot be read: No such file"):
        Tenants.load(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("fields", "entered", "refused", "after_s", "fits"),
    [
        # (prompt tokens, output tokens)
        ("requests_per_minute = 60\nburst_seconds = 2", [(1, 1)] * 2, (1, 1), 1.0, None),
        ("tokens_per_minute = 600", [(300, 200)], (100, 50), 5.0, (50, 50)),
        ("max_running = 2", [(1, 1)] * 2, (1, 1), 1.0, None),
    ],
)
def test_a_limit_refuses_with_the_time_until_it_fits(
    tenant_with, clock, fields, entered, refused, after_s, fits
):
    tenant = tenant_with(fields)
    leases = [tenant.enter(*tokens, 0.0) for tokens in entered]
    with pytest.raises(Overloaded, match="this tenant") as caught:
        tenant.enter(*refused, 0.0)
    assert caught.value.retry_after_s == pytest.approx(after_s)
    if fits:
        tenant.enter(*fits, 0.0)  # what was refused cost nothing
        return
    with pytest.raises(Overloaded):
        tenant.check()
    with leases[0]:
        clock.now += after_s
    tenant.enter(*refused, 0.0)


@pytest.mark.parametrize(
    ("fields", "entering", "why", "field"),
    [
        ("tokens_per_minute = 600\nburst_seconds = 30", (100, 201), "gets 300 at once",
         "sampling.max_tokens"),
        ("tokens_per_minute = 6000", (100, 1000, 6), "gets 6000 at once", "sampling.max_tokens"),
        ("max_running = 8", (1, 1, 9), "9 choices run at once", "n"),
    ],
)  # fmt: skip
def test_what_never_fits_is_invalid(tenant_with, fields, entering, why, field):
    tenant, (prompt, output, *choices) = tenant_with(fields), entering
    with pytest.raises(InvalidRequest, match=why) as caught:
        tenant.enter(prompt, output, 0.0, choices=choices[0] if choices else 1)
    assert caught.value.field == field


def level(tenant):
    """Tokens and requests that may be taken now."""
    return tenant._tokens.level, tenant._requests.level


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
    with tenant.enter(100, 5900, 0.0) as lease, tenant.enter(100, 5900, 0.0) as other:
        before = level(tenant)[0]
        lease.delivered(4000)
        assert level(tenant)[0] < before
        other.delivered(4000)
    with pytest.raises(Overloaded, match="tokens a minute") as caught:
        tenant.enter(1, 1, 0.0)
    assert caught.value.retry_after_s == pytest.approx(22.02)  # 8,200 of 6,000 are used


def test_further_choices_cost_their_output_and_no_request(tenant_with):
    tenant = tenant_with("tokens_per_minute = 6000\nrequests_per_minute = 60\nmax_running = 100")
    with tenant.enter(100, 10, 0.0, choices=100) as first:
        first.delivered(10)
        for _ in range(99):
            with tenant.enter(0, 10, 0.0, choices=0) as further:
                further.delivered(10)
        with pytest.raises(Overloaded):  # all of them must be able to run
            tenant.enter(1, 1, 0.0, choices=100)
    assert level(tenant) == pytest.approx((6000 - 100 - 1000, 59))


def test_a_lease_holds_its_place_until_the_prompt_is_computed(tenant_with, clock):
    tenant = tenant_with("")
    first, second = tenant.enter(100, 10, 1.0), tenant.enter(100, 10, 1.0)
    assert first.virtual_finish < second.virtual_finish
    with second:
        pass
    first.delivered(1)
    first.delivered(1)
    clock.now += 100.0
    third = tenant.enter(100, 10, 1.0)
    assert third.virtual_finish == pytest.approx(clock.now + 1.0)  # none is before it any more


@settings(deadline=None)
@given(
    st.floats(1, 1e6),
    st.floats(1, 600),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), max_size=50),
)
def test_a_bucket_never_gives_more_than_it_got_and_tells_the_exact_time(per_minute, burst_s, asks):
    clock = Clock()
    bucket = TokenBucket(per_minute, burst_s, clock)
    taken, begun = 0.0, clock.now
    for pause, part in asks:
        clock.now += pause
        amount = part * bucket.size
        wait_s = bucket.wait_s(amount)
        if wait_s > 0:
            clock.now += wait_s * 0.999 - 1e-5
            assert bucket.wait_s(amount) > 0 or wait_s * per_minute / 60 < 2e-3  # rounding
            clock.now += wait_s * 0.001 + 2e-5
        assert bucket.wait_s(amount) == 0.0
        bucket.take(amount)
        taken += amount
        assert taken <= bucket.size + (clock.now - begun) * per_minute / 60 + 1e-3
    bucket.take(-2 * bucket.size)  # it holds no more than its size
    assert bucket.wait_s(bucket.size) == 0.0
    bucket.take(bucket.size)
    assert bucket.wait_s(bucket.size) == pytest.approx(burst_s)
