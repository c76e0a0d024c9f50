"""Which sequences count as left behind by a lost Cancel."""

from router.dispatch.orphans import BATCH, MOST, Strays


def see(strays, *handoff_ids):
    for handoff_id in handoff_ids:
        strays.saw(handoff_id)
    return strays.turn()


def test_an_event_that_a_cancel_crossed_is_no_stray():
    strays = Strays()
    assert see(strays, "h1") == []
    assert see(strays) == []
    assert see(strays, "h1") == []


def test_events_that_go_on_are():
    strays = Strays()
    assert see(strays, "h1", "h2") == []
    assert see(strays, "h2", "h3") == ["h2"]
    assert see(strays, "h2") == ["h2"]  # that Cancel was lost too
    assert see(strays) == []


def test_what_is_remembered_and_what_is_told_is_bounded():
    strays, names = Strays(), [f"h{i}" for i in range(2 * MOST)]
    see(strays, *names)
    assert len(strays._before) == MOST
    assert len(see(strays, *names)) == BATCH
