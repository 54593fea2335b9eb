import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.costs.calibrations import MAX_TOKENS, interpolate
from cpuchat.speculation.depth.costs import Following

points = st.dictionaries(st.integers(1, MAX_TOKENS), st.floats(0.1, 1e4), min_size=1, max_size=12)


@given(points)
def test_measured_points_stay_and_the_rest_is_between_or_beyond(measured):
    times = interpolate(measured)
    assert len(times) == MAX_TOKENS
    assert all(times[n - 1] == pytest.approx(ms) for n, ms in measured.items())
    assert min(times) >= min(measured.values()) * (1 - 1e-9)
    last = max(measured)
    assert list(times[last - 1 :]) == sorted(times[last - 1 :])


def test_a_dip_is_kept_and_gaps_are_linear():
    times = interpolate({1: 62.0, 4: 115.0, 6: 195.0, 8: 173.0})
    assert times[4] == pytest.approx(155.0)
    assert times[6] == pytest.approx(184.0)
    assert times[7] < times[5]


def test_observed_times_follow_a_common_change_for_all_n():
    times = Following(interpolate({1: 50.0, 8: 100.0, 16: 200.0}))
    for _ in range(30):
        times.observe(120.0, 8)
    assert times.ms[7] == pytest.approx(120.0, rel=0.02)
    assert times.ms[0] == pytest.approx(60.0, rel=0.1), "load slows every pass"


def test_a_pause_hardly_counts_but_a_change_does():
    times = Following(interpolate({1: 50.0, 8: 100.0}))
    for _ in range(20):
        times.observe(50.0)
    times.observe(200.0)
    assert times.ms[0] < 55.0
    for _ in range(6):
        times.observe(200.0)
    assert times.ms[0] > 150.0
    for _ in range(4):
        times.observe(50.0)
    assert times.ms[0] < 85.0
