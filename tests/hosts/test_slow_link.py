"""The link for kernels without netem: what it does to frames. Needs no lab."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hosts.link import netem_options
from tests.hosts.slow_link import QUEUED, SlowLink

gaps = st.lists(st.floats(0.0, 0.01), max_size=50)


def through(link: SlowLink, gaps: list[float], bits: int = 8000) -> list[tuple[int, float, float]]:
    """Frames that come out: (number, when it went in, when it came out)."""
    now, entered = 0.0, []
    for number, gap in enumerate(gaps):
        now += gap
        entered.append(now)
        link.push(number.to_bytes(4, "big"), bits, now)
    out = []
    while (at := link.next_at) != float("inf"):
        for frame in link.pop(at):
            number = int.from_bytes(frame, "big")
            out.append((number, entered[number], at))
    return out


@given(gaps, st.floats(0.0, 1.0), st.sampled_from([0.0, 1e6]))
def test_every_frame_arrives_in_order_and_not_before_its_delay(
    gaps: list[float], delay_s: float, bits_per_s: float
) -> None:
    out = through(SlowLink(delay_s, 0.0, bits_per_s, random.Random(1)), gaps)
    assert [number for number, _, _ in out] == list(range(len(gaps)))
    assert all(at - entered >= delay_s - 1e-9 for _, entered, at in out)


@given(st.integers(2, QUEUED))
def test_a_burst_leaves_at_the_bandwidth(frames: int) -> None:
    out = through(SlowLink(0.0, 0.0, 1e6, random.Random(1)), [0.0] * frames, bits=8000)
    assert out[-1][2] == pytest.approx(frames * 8000 / 1e6)


def test_frames_beyond_the_queue_are_lost() -> None:
    assert len(through(SlowLink(1.0, 0.0, 0.0, random.Random(1)), [0.0] * (QUEUED + 5))) == QUEUED


@given(st.floats(0.0, 1.0), st.integers(0, 1000))
def test_the_share_that_is_lost_is_the_one_asked_for(loss: float, seed: int) -> None:
    arrived = len(through(SlowLink(0.0, loss, 0.0, random.Random(seed)), [0.0] * QUEUED))
    # Six standard deviations.
    assert abs(arrived / QUEUED - (1.0 - loss)) <= 6 * (loss * (1.0 - loss) / QUEUED) ** 0.5 + 1e-9


def test_netem_is_told_in_its_own_units() -> None:
    assert netem_options(2.5, 0.01, 100) == ["netem", "delay", "2.5ms", "loss", "1%", "rate", "100mbit"]
    assert netem_options(0, 0, 0) == ["netem", "delay", "0ms"]
