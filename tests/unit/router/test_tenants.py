"""Tenants: their file and its mistakes, keys, limits that refuse with a time, salts, refunds."""

import asyncio
import contextlib
import hashlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError, InvalidRequest, Overloaded, Unauthenticated
from router import shared_state
from router.admission import tenants as module
from router.admission.rate_limit import TokenBucket
from router.admission.tenants import Tenants
from router.shared_state import SharedState
from tests.waiting import eventually

from .conftest import Clock


def digest(key):
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def bearer(key):
    return (("user-agent", "x"), ("authorization", f"Bearer {key}"))


KEYS = f'keys = ["{digest("k")}"]'


@pytest.fixture
def tenants_of(tmp_path, clock):
    def load(text, **fields):
        path = tmp_path / "tenants.toml"
        path.write_text(text)
        return Tenants(path, clock, **fields)

    return load


@pytest.fixture
def tenant_with(tenants_of):
    """tenant_with("field = value") is a tenant with these limits."""
    return lambda fields: tenants_of(f"[tenants.a]\n{KEYS}\n{fields}").tenant_for(bearer("k"))


def test_without_a_file_all_callers_are_one_unlimited_tenant():
    tenants = Tenants(None)
    tenant = tenants.tenant_for(())
    assert tenant.name == "default"
    for metadata in (bearer("whatever"), (("authorization", "odd"),)):
        assert tenants.tenant_for(metadata) is tenant
    assert tenant.salt("") == "" and tenant.salt("s") == "s"
    for _ in range(1000):
        tenant.enter(10**9, 10**9, 1.0)


def test_keys_name_tenants(tenants_of, tmp_path):
    (tmp_path / "b.key").write_text("key b\n")
    tenants = tenants_of(
        f'[tenants.a]\nkeys = ["{digest("a1")}", "{digest("a2").upper().replace("SHA", "sha")}"]\n'
        '[tenants.b]\nkey_files = ["b.key"]\n[default]\nweight = 0.5'
    )
    found = [tenants.tenant_for(one) for one in (bearer("a1"), bearer("key b"), ())]
    assert [tenant.name for tenant in found] == ["a", "b", "default"]
    assert found[0] is tenants.tenant_for((("Authorization", b"bearer a2"),))
    assert found[2].config.weight == 0.5
    with pytest.raises(Unauthenticated, match="unknown"):  # a default takes no wrong key
        tenants.tenant_for(bearer("wrong"))
    salts = {tenant.salt(own) for tenant in found for own in ("", "a", "a/", "b/a", "default/")}
    assert len(salts) == 15, "no two tenants share cached prefixes"


@pytest.mark.parametrize(
    "metadata",
    [(), (("x", "y"),), bearer("other"), bearer(""), (("authorization", "k"),),
     (("authorization", "Basic k"),)],
)  # fmt: skip
def test_without_a_known_key_a_caller_is_refused(tenants_of, metadata):
    with pytest.raises(Unauthenticated) as caught:
        tenants_of(f"[tenants.a]\n{KEYS}").tenant_for(metadata)
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
        ("[default]\n[admin]", "keys of [admin] must be given, or key_files"),
        ("[default]\n[admin]\nweight = 1", "[admin] has an unknown field 'weight'"),
        (f"[admin]\n{KEYS}", "there is no tenant"),
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


async def until(is_so):
    async def look():
        return is_so()

    await eventually(look, bool, "not taken up")


@contextlib.asynccontextmanager
async def followed(tenants, monkeypatch):
    """While `tenants` follow their files, ten times a second."""
    monkeypatch.setattr(module, "_RELOAD_S", 0.1)
    following = asyncio.create_task(tenants.follow())
    yield
    assert not following.done()
    following.cancel()


async def test_a_changed_file_keeps_what_its_tenants_use(
    tenants_of, tmp_path, clock, monkeypatch, caplog
):
    caplog.set_level("INFO", "baton.audit")
    file, limits = tmp_path / "tenants.toml", "tokens_per_minute = 600\nmax_running = 2"
    tenants = tenants_of(f"[tenants.a]\n{KEYS}\n{limits}\n[tenants.b]\nkeys = ['{digest('b')}']")
    a, b = tenants.tenant_for(bearer("k")), tenants.tenant_for(bearer("b"))
    async with followed(tenants, monkeypatch):
        with a.enter(300, 100, 1.0) as lease, b.enter(10, 10, 1.0) as of_b:
            less = "tokens_per_minute = 360\nmax_running = 1"
            file.write_text(f"[tenants.a]\n{KEYS}\n{less}\n[default]")
            await until(lambda: a.config.max_running == 1)
            (line,) = (one for one in caplog.records if one.name == "baton.audit")
            assert (line.fields["keys_added"], line.fields["keys_removed"]) == (0, 1)
            assert line.fields["limits_changed"] == "a", "b has gone, and default is new"
            assert tenants.tenant_for(bearer("k")) is a and tenants.tenant_for(()).name == "default"
            with pytest.raises(Overloaded, match="1 requests of this tenant run already"):
                a.enter(1, 1, 0.0)
            with pytest.raises(Unauthenticated, match="unknown"):
                tenants.tenant_for(bearer("b"))
            of_b.delivered(10)  # what runs ends as if nothing had happened
            lease.delivered(100)
        assert (a._usage.running, b._usage.running) == (0, 0)
        assert level(a)[0] == pytest.approx(360 - 400)  # what was spent is not forgotten
        with pytest.raises(Overloaded) as caught:
            a.enter(300, 1, 0.0)
        assert caught.value.retry_after_s == pytest.approx((301 + 40) / 6)  # at the new rate
        file.write_text(f"[tenants.a]\n{KEYS}\n[tenants.b]\nkeys = ['{digest('b')}']")
        await until(lambda: a.config.max_running > 1)
        assert tenants.tenant_for(bearer("b")) is b, "it came back"
        a.enter(10**9, 10**9, 0.0)


async def test_a_file_with_a_mistake_is_logged_once_and_the_old_one_stays(
    tenants_of, tmp_path, monkeypatch, caplog
):
    (tmp_path / "b.key").write_text("old")
    good = f"[tenants.a]\n{KEYS}\n[tenants.b]\nkey_files = ['b.key']"
    tenants, file = tenants_of(good), tmp_path / "tenants.toml"

    async with followed(tenants, monkeypatch):
        for text, cause in (
            ("[tenants.a", "is not TOML"),
            (f"[tenants.a]\n{KEYS}\nweight = 0", "weight of [tenants.a] must be a number above 0"),
            ("[tenants.a]\nkey_files = ['c.key']", "key_files of [tenants.a] must be readable: c"),
            ('[tenants.a]\nkey_files = ["\\u0000"]', "embedded null byte"),
        ):
            file.write_text(text)
            await until(lambda cause=cause: cause in caplog.text)
        file.unlink()
        await until(lambda: "No such file" in caplog.messages[-1])
        await asyncio.sleep(0.3)
        assert (
            [text.partition(":")[0] for text in caplog.messages].count("tenants stay as they were")
            == len(caplog.messages)
            == 5
        )
        assert (name_of(tenants, "k"), name_of(tenants, "old")) == ("a", "b")
        file.write_text(good)
        (tmp_path / "b.key").write_text("new")
        await until(lambda: name_of(tenants, "new") == "b" and not name_of(tenants, "old"))
        (tmp_path / "b.key").write_text("newer")  # the file itself is as it was
        await until(lambda: name_of(tenants, "newer") == "b" and not name_of(tenants, "new"))


async def test_a_tenant_more_than_processes_can_share_changes_nothing(
    tenants_of, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(shared_state, "MAX_TENANTS", 1)
    parent = SharedState("", 1)
    tenants = tenants_of(f"[tenants.a]\n{KEYS}", shared=SharedState(parent.path, 1))
    async with followed(tenants, monkeypatch):
        more = f"[tenants.b]\nkeys = ['{digest('b')}']"
        (tmp_path / "tenants.toml").write_text(f"{more}\n[tenants.a]\n{KEYS}\nmax_running = 1")
        await until(lambda: "tenants stay as they were" in caplog.text)
    tenant = tenants.tenant_for(bearer("k"))
    assert (tenant.name, tenant.config.max_running) == ("a", math.inf)
    parent.close()


async def test_names_that_come_and_go_are_forgotten_and_those_with_requests_kept(
    tenants_of, tmp_path, monkeypatch
):
    monkeypatch.setattr(shared_state, "MAX_TENANTS", 4)
    parent = SharedState("", 1)
    tenants = tenants_of(f"[tenants.a]\n{KEYS}", shared=SharedState(parent.path, 1))
    running = tenants.tenant_for(bearer("k")).enter(10, 10, 0.0)
    async with followed(tenants, monkeypatch):
        for number in range(8):  # twice as many as there is room for
            keys = f"keys = ['{digest(f'k{number}')}']"
            (tmp_path / "tenants.toml").write_text(f"[tenants.t{number}]\n{keys}")
            await until(lambda key=f"k{number}": name_of(tenants, key))
            with tenants.tenant_for(bearer(f"k{number}")).enter(1, 1, 0.0) as lease:
                lease.delivered(1)
        assert tenants._known.keys() == {"a", "t7"} == tenants.fair_queue("")._tenants.keys()
        with running:
            running.delivered(10)
        (tmp_path / "tenants.toml").write_text(f"[tenants.b]\n{KEYS}")
        await until(lambda: name_of(tenants, "k"))
    assert tenants._known.keys() == {"b"}
    parent.close()


def name_of(tenants, key):
    with contextlib.suppress(Unauthenticated):
        return tenants.tenant_for(bearer(key)).name


class CountingLock(contextlib.nullcontext):
    """How often it was taken."""

    taken = 0

    def __enter__(self):
        self.taken += 1


@pytest.mark.parametrize(("limits", "most"), [("", 0), ("tokens_per_minute = 60000", 12)])
def test_a_streamed_token_costs_no_charge_of_its_own(tenant_with, limits, most):
    """None where there is no limit, and one for many tokens where there is."""
    tenant = tenant_with(limits)
    with tenant.enter(100, 5000, 0.0) as lease:
        tenant._usage.lock = lock = CountingLock()
        for _ in range(1000):
            lease.delivered(1)
        assert lock.taken <= most
        tenant._usage.lock = contextlib.nullcontext()
    if limits:
        assert level(tenant)[0] == pytest.approx(60_000 - 1100)


def test_an_api_key_without_a_file_is_that_of_everybody(tmp_path):
    """Of requests and of operators; there is one tenant, without limits, and its cache is its."""
    tenants = Tenants(api_keys=[digest("k"), digest("l")])
    for key in ("k", "l"):
        assert tenants.tenant_for(bearer(key)).name == Tenants().tenant_for(()).name
        tenants.check_admin(bearer(key))
    for metadata in ((), bearer("x")):
        with pytest.raises(Unauthenticated, match="API key"):
            tenants.tenant_for(metadata)
        with pytest.raises(Unauthenticated, match="for operators: send the API key"):
            tenants.check_admin(metadata)
    with pytest.raises(ConfigError, match="--api-key and --tenants do not go together"):
        Tenants(tmp_path / "tenants.toml", api_keys=[digest("k")])


def test_operators_have_keys_of_their_own(tenants_of, tmp_path):
    Tenants().check_admin(())  # without tenants everybody is an operator
    tenants = tenants_of(f"[tenants.a]\n{KEYS}")
    with pytest.raises(Unauthenticated, match=r"a key of \[admin\] .* which has none yet"):
        tenants.check_admin(bearer("k"))
    assert Tenants(tmp_path / "tenants.toml", admin_keys=[digest("o")]).is_admin(bearer("o"))
    with pytest.raises(ConfigError, match="--admin-key must be"):
        Tenants(admin_keys=["o"])
    (tmp_path / "o.key").write_text("p")
    tenants = tenants_of(
        f"[tenants.a]\n{KEYS}\n[admin]\nkeys = ['{digest('o')}']\nkey_files = ['o.key']"
    )
    for key in ("o", "p"):
        tenants.check_admin(bearer(key))
        assert tenants.tenant_for_operator(bearer(key)).name == ""
        with pytest.raises(Unauthenticated, match="an operator's: requests need a tenant's"):
            tenants.tenant_for(bearer(key))
    for metadata in ((), bearer("k"), bearer("x")):
        assert not tenants.is_admin(metadata)
        with pytest.raises(Unauthenticated, match=r"\[admin\] .*BATON_API_KEY or --api-key-file"):
            tenants.check_admin(metadata)
    assert tenants.tenant_for_operator(bearer("k")).name == "a"


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml cannot be read: No such file"):
        Tenants(tmp_path / "nothing.toml")


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
        with pytest.raises(Overloaded):  # all of them run from now on
            tenant.enter(1, 1, 0.0)
        for _ in range(99):
            with tenant.enter(0, 10, 0.0, choices=0) as further:
                further.delivered(10)
        with pytest.raises(Overloaded):
            tenant.enter(1, 1, 0.0, choices=100)
    assert level(tenant) == pytest.approx((6000 - 100 - 1000, 59))


def test_a_lease_holds_its_place_until_the_prompt_is_computed(tenant_with, clock):
    tenant = tenant_with("")
    first, second = tenant.enter(100, 10, 1.0), tenant.enter(100, 10, 1.0)
    assert first.prompt.fair_wait_s < second.prompt.fair_wait_s
    with second:
        pass
    first.delivered(1)
    first.delivered(1)
    third = tenant.enter(100, 10, 1.0)
    assert third.prompt.fair_wait_s == pytest.approx(1.0)  # none is before it any more


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
        bucket.spend(amount)
        taken += amount
        assert taken <= bucket.size + (clock.now - begun) * per_minute / 60 + 1e-3
    bucket.spend(-2 * bucket.size)  # it holds no more than its size
    assert bucket.wait_s(bucket.size) == 0.0
    bucket.spend(bucket.size)
    assert bucket.wait_s(bucket.size) == pytest.approx(burst_s)
