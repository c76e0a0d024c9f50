"""The test transport spoils what it says, and the receiver's checksum tells."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.errors import TransferFailed
from kvtransfer.interface import Transport
from tests.chaos.kv import Control, SufferingTransport
from tests.contract.kvtransfer_parts import TRANSPORTS, Pair, slots

LOCAL, REMOTE = slots(12, 3, 4, 5), slots(12, 9, 2, 7)


@pytest.fixture
def control(tmp_path: Path) -> Path:
    return tmp_path / "kv.json"


@pytest.fixture(params=["shm", "gloo"])
def pair(request: pytest.FixtureRequest, control: Path) -> Pair:
    """A pair of pools over a transport that suffers."""
    make: Callable[[], Transport] = TRANSPORTS[request.param]
    pair = Pair(SufferingTransport(make(), Control(control)))
    request.addfinalizer(pair.close)
    return pair


def test_without_a_control_file_nothing_suffers(pair: Pair, control: Path) -> None:
    _, sent, arrived = pair.move(LOCAL, REMOTE)
    assert (sent.value, sent.num_bytes) == (arrived.value, arrived.num_bytes)
    assert torch.equal(pair.target.tensor[9], pair.source.tensor[3])
    assert not control.with_suffix(".done").exists()


@pytest.mark.parametrize("fault", ["corrupt", "lose"])
def test_spoilt_bytes_have_another_checksum(pair: Pair, control: Path, fault: str) -> None:
    before = pair.source.tensor.clone()
    control.write_text(json.dumps({"fault": fault}))
    _, sent, arrived = pair.move(LOCAL, REMOTE)
    assert sent.value == pair.source.digest(LOCAL).value
    assert sent.value != arrived.value
    assert torch.equal(pair.source.tensor, before), "the sender's blocks are as they were"
    assert control.with_suffix(".done").read_text() == f"{fault}\n"


def test_a_broken_link_says_so(pair: Pair, control: Path) -> None:
    control.write_text(json.dumps({"fault": "fail"}))
    with pytest.raises(TransferFailed):
        pair.move(LOCAL, REMOTE)


def test_every_second_put_suffers(control: Path) -> None:
    control.write_text(json.dumps({"fault": "lose", "every": 2}))
    dice = Control(control)
    assert [bool(dice.draw()) for _ in range(4)] == [False, True, False, True]


def test_a_share_of_puts_suffers(control: Path) -> None:
    control.write_text(json.dumps({"fault": "corrupt", "share": 0.5}))
    dice = Control(control)
    hit = sum(bool(dice.draw()) for _ in range(400))
    assert 100 < hit < 300
