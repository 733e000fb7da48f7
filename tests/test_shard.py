"""Two processes that share the frozen weights train what two whole ones train; launch files are accelerate's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig

from qat.plugins import ROOT
from qat.shard import rows_of
from tests.artifacts import config_of, make

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from qat import loop
from qat.artifact import Artifact
from qat.model import Model
from qat.ranks import leave
from qat.sections import Train
from qat.shard import Shard
from qat.student import Student
from qat.teacher import HiddenCache, Resident

root, sharded, checkpointed, cached = Path(sys.argv[1]), sys.argv[2] == "sharded", int(sys.argv[3]), sys.argv[4] == "1"
accelerator = Accelerator(cpu=True, mixed_precision="no")
config = AutoConfig.from_pretrained(root / "student")
mesh = init_device_mesh("cpu", (2,)) if sharded else None
learn = Train(learn={"bias": {"start": "mean"}, "gain": {}, "norm": {}, "scale": {}}).learn
model = Model(config, Artifact(root / "teacher"), resident=True, prepare=Shard(mesh) if sharded else None)
windows = torch.randint(128, (23, 16), generator=torch.Generator().manual_seed(1))
path = root / f"teacher-{accelerator.process_index}-of-2"
teacher = HiddenCache(model, windows, torch.arange(23), path, 2) if cached else Resident(model)
student = Student(model, Artifact(root / "student"), learn, ["mlp.up_proj", "self_attn.v_proj"],
                  Shard(mesh, True) if sharded else None)
weight = student.linears["model.layers.1.mlp.up_proj"].weight
assert isinstance(weight, DTensor) == sharded
held = weight.to_local().numel() if sharded else weight.numel()
out = root / sys.argv[5]
out.mkdir(exist_ok=True)
last = int(sys.argv[6])


def progress(step, loss):
    if step > last:  # as if killed in the step after
        os._exit(0)


how = Train(steps=4, batch=4, warmup=1, seed=5, save_every=2)
history = loop.train(accelerator, teacher, student, windows, out, how, micro_batch=1,
                     checkpointed=checkpointed, progress=progress)
if accelerator.is_main_process:
    deltas = {kind: p.tolist() for kind, p in student.delta.items()}
    print("SAID", json.dumps({"held": held, "history": history, "deltas": deltas}))
leave()
"""

SHORT = [
    "calibrate.round=nearest", "data.calibration.sequences=2", "data.evaluation=null", "export.formats=[dense]",
    "train.steps=3", "train.batch=2", "train.length=32",
]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_are_split_as_torch_splits_them(rows: int, world: int) -> None:
    chunks = list(torch.arange(rows).chunk(world))
    for rank in range(world):
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(rows))[rows_of(rows, rank, world)] == expected


@pytest.mark.slow
def test_split_weights_train_what_whole_ones_train(tmp_path: Path) -> None:
    config = config_of("llama")
    make(tmp_path / "student", config)
    make(tmp_path / "teacher", config, seed=1)

    def said(*arguments: str) -> dict:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        (tmp_path / "script.py").write_text(SCRIPT)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [*launch, str(tmp_path / "script.py"), str(tmp_path), *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(next((s for s in done.stdout.splitlines() if s.startswith("SAID")), "SAID {}")[5:])

    whole = said("whole", "0", "0", "whole", "4")
    assert said("whole", "0", "0", "stopped", "2") == {}  # its last save is that of step 2
    assert said("whole", "0", "0", "stopped", "4") == whole  # two steps and two more, on two ranks: the same bits
    for number, arguments in enumerate([("sharded", "1", "0"), ("sharded", "0", "1")]):
        split = said(*arguments, f"split{number}", "4")
        assert split["held"] * 2 == whole["held"]
        assert split["history"]["loss"] == pytest.approx(whole["history"]["loss"], rel=2e-3)
        assert split["history"]["validation_end"] == pytest.approx(whole["history"]["validation_end"], rel=5e-3)
        for kind, numbers in whole["deltas"].items():
            ours, theirs = torch.tensor(split["deltas"][kind]), torch.tensor(numbers)
            assert (ours - theirs).norm() <= 0.05 * theirs.norm(), kind  # Adam follows signs of next to nothing


@pytest.mark.slow
def test_the_command_shares_weights_when_the_launch_file_says_so(tmp_path: Path) -> None:
    def trained(file: str) -> dict:
        config = (ROOT / "recipes/accelerate" / file).read_text().replace("use_cpu: false", "use_cpu: true")
        (tmp_path / file).write_text(config)
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / file)]
        recipe = ["recipe=demo.yaml", f"output={tmp_path / file}.runs", "variants={}", "gate=null", *SHORT]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*launch, "--num_processes=2", "qat/train.py", *recipe],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((tmp_path / f"{file}.runs/demo/summary.json").read_text())
        return next(stage["metrics"] for stage in summary["stages"] if stage["name"] == "train")

    whole, split = trained("2gpus.yaml"), trained("8gpus_sharded.yaml")
    assert (whole["sharded"], split["sharded"]) == (False, True) and whole["ranks"] == split["ranks"] == 2
    assert split["loss"] == pytest.approx(whole["loss"], rel=2e-3)
    assert split["checkpointed_blocks"] == whole["checkpointed_blocks"] == 0


@pytest.mark.parametrize("path", sorted((ROOT / "recipes/accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_files_are_read_by_accelerate(path: Path) -> None:
    config = ClusterConfig.from_yaml_file(yaml_file=str(path))
    assert config.mixed_precision == "no" and config.num_processes % config.num_machines == 0
    assert (config.distributed_type.value == "FSDP") == ("sharded" in path.stem)
