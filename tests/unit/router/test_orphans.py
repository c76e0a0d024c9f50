"""Which sequences count as left behind by a lost Cancel."""

from router.fleet.member import CANCEL_BATCH, MOST_ORPHANS, Orphans


def see(orphans, *handoff_ids):
    for handoff_id in handoff_ids:
        orphans.saw(handoff_id)
    return orphans.end_round()


def test_an_event_that_a_cancel_crossed_is_no_stray():
    orphans = Orphans()
    assert see(orphans, "h1") == []
    assert see(orphans) == []
    assert see(orphans, "h1") == []


def test_events_that_go_on_are():
    orphans = Orphans()
    assert see(orphans, "h1", "h2") == []
    assert see(orphans, "h2", "h3") == ["h2"]
    assert see(orphans, "h2") == ["h2"]  # that Cancel was lost too
    assert see(orphans) == []


def test_what_is_remembered_and_what_is_told_is_bounded():
    orphans, names = Orphans(), [f"h{i}" for i in range(2 * MOST_ORPHANS)]
    see(orphans, *names)
    assert len(orphans._before) == MOST_ORPHANS
    assert len(see(orphans, *names)) == CANCEL_BATCH
