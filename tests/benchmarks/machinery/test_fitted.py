"""The simulation's parameters."""

import pytest

from machinery import fitted
from machinery.cluster.hardware import Cluster, Gpu
from tests.benchmarks.test_scripts import SCRIPTS


def test_the_packages_parameters_are_those_that_the_records_give():
    has = {**vars(Cluster(8)), **vars(Gpu()), **vars(Gpu().spread)}
    for name, value in fitted.fit(SCRIPTS / "results").items():
        assert has[name] == pytest.approx(value, rel=0.03), name
