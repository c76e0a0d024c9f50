"""Tickets for resuming a stream: good at each router of a cluster, for one use, not for long."""

from array import array

import pytest

from router.admission.resume_ticket import ResumeTickets

PROMPT = array("I", [1, 2, 3])


@pytest.fixture
def routers(clock):
    """Two routers of a cluster."""
    return [ResumeTickets(b"k" * 32, clock) for _ in range(2)]


def test_a_ticket_is_good_at_another_router_for_its_tenant_and_prompt_only(routers):
    one, other = routers
    ticket = one.issue("a", PROMPT, "a/", 10.0)
    with other.use(ticket, "a") as good:
        assert good and other.is_for(ticket, list(PROMPT), "a/")
        assert not other.is_for(ticket, [1, 2, 3, 4], "a/")
        assert not other.is_for(ticket, PROMPT, "a/salt")
    with other.use(ticket, "b") as good:
        assert not good
    with ResumeTickets().use(ticket, "a") as good:
        assert not good, "of another cluster"


def test_a_ticket_is_good_for_one_request_at_a_time(routers):
    ticket = routers[0].issue("a", PROMPT, "", 10.0)
    with routers[1].use(ticket, "a") as good, routers[1].use(ticket, "a") as again:
        assert (good, again) == (True, False)
    with routers[1].use(ticket, "a") as good:
        assert good


def test_a_ticket_ends_soon_after_its_request_would_have(routers, clock):
    ticket = routers[0].issue("a", PROMPT, "", 10.0)
    for later_s, expected in ((65.0, True), (10.0, False)):
        clock.now += later_s
        with routers[1].use(ticket, "a") as good:
            assert good == expected


@pytest.mark.parametrize("change", ["cut", "longer", "each byte", "empty"])
def test_nobody_makes_a_ticket(routers, change):
    ticket = routers[0].issue("a", PROMPT, "", 10.0)
    forged = {
        "cut": [ticket[:at] for at in range(len(ticket))],
        "longer": [ticket + b"\0"],
        "each byte": [
            ticket[:at] + bytes([ticket[at] ^ 1]) + ticket[at + 1 :] for at in range(len(ticket))
        ],
        "empty": [b""],
    }
    for one in forged[change]:
        with routers[1].use(one, "a") as good:
            assert not good
