"""The benchmark of the engine's thread drives what it is about."""

from benchmarks.scenarios import engine_thread


def test_its_engine_decodes_and_its_worker_tells_of_every_token(monkeypatch):
    reports = []
    engine = engine_thread.decoding(8, engine_thread._SETTINGS["top-p"], reports.append)
    for _ in range(5):
        engine._step()
    assert [report.num_sampled for report in reports] == [8] * 4
    assert all(report.others == [] for report in reports)
    events, sent = [], engine_thread._Router.sent
    monkeypatch.setattr(
        engine_thread._Router,
        "sent",
        lambda one: (events.append(len(one.outgoing.events)), sent(one)),
    )
    assert engine_thread.worker_ms(8) > 0
    assert set(events) == {8}
