"""The speeds of a device, measured for a moment."""

from dataclasses import replace

import pytest
import torch

from megabatch.config.settings import TrainConfig
from megabatch.models import create
from megabatch.planning.machine import Machine
from megabatch.planning.plan import Planner
from megabatch.planning.probe import probe
from tests.models.tiny import TINY


@pytest.mark.parametrize("name", [TINY, "glyph-small"])  # with and without blocks
def test_a_device_is_measured_with_a_micro_batch_of_the_model(name):
    config = replace(TrainConfig(), global_batch_size=2, precision="fp32", torchcompile=False)
    towers = create(name)
    planner = Planner(config, towers, Machine("cpu", 1, 1 << 40))
    before = {key: value.clone() for key, value in towers.module.state_dict().items()}
    speeds = probe(planner, torch.device("cpu"), seconds=0.01, side=64, nbytes=1 << 16)
    assert 1e6 < speeds.products < 1e15
    assert 1e6 < speeds.memory < 1e14
    assert 0 < speeds.encoders <= 1
    after = towers.module.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
