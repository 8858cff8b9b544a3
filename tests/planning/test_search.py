"""The fastest size of micro-batches and the largest batch, by a plan."""

from dataclasses import replace

import pytest

from megabatch.config.settings import TrainConfig
from megabatch.planning.machine import Machine, other_machine
from megabatch.planning.plan import Planner, fastest, largest_of_fastest

pytestmark = pytest.mark.usefixtures("counted_once")

CONFIG = TrainConfig(global_batch_size=2048, micro_batch_size=256, torchcompile=False)


def test_sizes_that_fit_are_compared_and_the_largest_of_the_fastest_is_taken(glyph):
    roomy = Planner(CONFIG, glyph, other_machine(1, 80 << 30, "NVIDIA H200"))
    plans = roomy.search()
    assert [plan.config.micro_batch_size for plan in plans] == [128, 256, 512, 1024, 2048]
    assert all(plan.fits for plan in plans)
    best = fastest(plans)
    least = min(plan.seconds for plan in plans)
    assert best.seconds <= 1.02 * least
    assert all(plan.seconds > 1.02 * least for plan in plans[plans.index(best) + 1 :])
    exact = Planner(replace(CONFIG, micro_batch_size=512), glyph, roomy.machine).plan()
    found = plans[2]
    assert found.peak == pytest.approx(exact.peak, rel=0.03)
    assert found.seconds == pytest.approx(exact.seconds, rel=0.03)
    none = replace(CONFIG, activation_memory="0")
    peaks = [plan.peak for plan in Planner(none, glyph, roomy.machine).search()]
    limit = Machine("cuda", 1, (peaks[0] + peaks[-1]) // 2, name="NVIDIA H200")
    tight = Planner(none, glyph, limit).search()
    assert tight[0].fits
    assert not tight[-1].fits
    assert fastest(tight).fits
    assert fastest(tight[-1:]) is None


def test_equally_fast_is_within_two_percent():
    assert largest_of_fastest({128: 1.5, 256: 1.0, 512: 1.019, 1024: 1.03}) == 512


def test_a_gpu_without_figures_has_no_times(glyph):
    plans = Planner(CONFIG, glyph, other_machine(1, 80 << 30, "T4")).search()
    assert {plan.seconds for plan in plans} == {None}
    assert fastest(plans) is None


def test_the_largest_batch_fits_and_one_that_is_larger_does_not(glyph):
    planner = Planner(CONFIG, glyph, other_machine(2, 4 << 30))
    most = planner.largest_batch()
    assert most > 1 << 18
    assert planner.plan(global_batch_size=most).fits
    assert not planner.plan(global_batch_size=int(1.1 * most)).fits
