"""Whole runs of several GPUs under torchrun, over NCCL.

One start of the processes serves all checks. On the CPU: test_run_parallel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megabatch.training import TrainConfig, save_config, train
from tests.similarity.distributed.processes import new_store
from tests.training.runs import losses
from tests.training.synthetic import CONFIG, write_shard

pytest.importorskip("webdataset", reason="whole runs read shards by webdataset")

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
ON_RANKS = {
    "ddp": {},
    "fsdp": {"parallel": "fsdp"},
    "fsdp-checkpointed": {"parallel": "fsdp", "grad_checkpointing": True},
    "ddp-bf16": {"precision": "bf16"},
    "fsdp-fp16": {"parallel": "fsdp", "precision": "fp16"},
    "ddp-compiled": {"torchcompile": True},
    "fsdp-compiled": {
        **{"parallel": "fsdp", "torchcompile": True},
        **{"grad_checkpointing": True, "precision": "bf16"},
    },
}


@dataclass(frozen=True)
class Outcome:
    """Where the runs are, by name, and what the processes ended with."""

    folder: Path
    codes: dict[str, list[int]]
    told: str
    size: int

    def losses(self, name: str) -> list[float]:
        return losses(self.folder / name)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    size = min(4, torch.cuda.device_count())
    if size < 2:
        pytest.skip("needs two CUDA devices or more for NCCL")
    folder = tmp_path_factory.mktemp("ranks")
    data = str(write_shard(folder / "pairs.tar", 160))
    base = replace(CONFIG, device="cuda", train_data=data, checkpoint_every=0)
    tf32, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        alone = replace(base, output=folder / "alone")
        assert train(alone) == 0
        jobs: list[tuple[TrainConfig, int | None]] = [
            (replace(base, output=folder / name, **changes), None)
            for name, changes in ON_RANKS.items()
        ]
        jobs += [
            (replace(base, output=folder / "ddp-stopped"), 3),
            (replace(base, output=folder / "fsdp-stopped", parallel="fsdp"), 3),
            (replace(base, output=folder / "ddp-stopped", parallel="fsdp", resume=True), None),
        ]
        told, codes = _torchrun(size, jobs, folder)
        # What several left one continues.
        assert codes["fsdp-stopped"] == [75] * size, told
        assert train(replace(base, output=folder / "fsdp-stopped", resume=True)) == 0
    finally:
        torch.backends.cudnn.allow_tf32 = tf32
    return Outcome(folder, codes, told, size)


def _torchrun(
    size: int, jobs: list[tuple[TrainConfig, int | None]], folder: Path
) -> tuple[str, dict[str, list[int]]]:
    listed = []
    stores = [new_store() for _ in jobs]  # one keeps what an earlier group said
    for number, (config, stop) in enumerate(jobs):
        path = folder / f"{number}.toml"
        save_config(config, path)
        job = {"config": str(path), "resume": config.resume, "stop": stop}
        listed.append({**job, "port": stores[number].port})
    (folder / "jobs.json").write_text(json.dumps(listed))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(size), "-m", "tests.training.ranks_worker", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    told = f"{done.stdout}\n{done.stderr}"[-6000:]
    files = [folder / f"codes-{rank}.json" for rank in range(size)]
    assert all(file.exists() for file in files), told
    table = zip(*(json.loads(file.read_text()) for file in files), strict=True)
    names = [f"{config.output.name}{'-resumed' * config.resume}" for config, _ in jobs]
    return told, dict(zip(names, map(list, table), strict=False))


@pytest.mark.parametrize("name", ON_RANKS)
def test_several_devices_train_as_one(name: str, outcome: Outcome) -> None:
    assert outcome.codes.get(name) == [0] * outcome.size, outcome.told
    half = "precision" in ON_RANKS[name]
    # Fewer digits of the first steps are the same than of a float32 run's: weights move apart.
    expected = pytest.approx(outcome.losses("alone"), rel=5e-2 if half else 2e-3)
    assert outcome.losses(name) == expected


@pytest.mark.parametrize("name", ["ddp-stopped", "fsdp-stopped"])
def test_a_run_goes_on_with_another_layout_and_number_of_devices(
    name: str, outcome: Outcome
) -> None:
    assert outcome.codes[name] == [75] * outcome.size
    if name == "ddp-stopped":  # under FSDP2
        assert outcome.codes["ddp-stopped-resumed"] == [0] * outcome.size, outcome.told
    assert outcome.losses(name) == pytest.approx(outcome.losses("alone"), rel=2e-3)
    files = [outcome.folder / run / "model.safetensors" for run in ("alone", name)]
    one, two = map(load_file, files)
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=2e-3, rtol=1e-2, msg=key)
