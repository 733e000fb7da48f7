"""Memory of a calibration of a model larger than the machine: Llama-3-70B's shapes, as many blocks as there is time.

    python benchmarks/large.py [blocks=2] [windows=8] [length=512] [dtype=bfloat16] [device=cpu] [range=activation]
        [round=nearest] [work=FOLDER] [out=benchmarks/results/large.json]

One block of random weights lies on disk (1.7 GB) and stands for all 80, beside an embedding and a head; each block is
read, calibrated and written as that of a real model. Peaks are of this process: VmHWM, and what torch allocated.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from _options import read
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from calibrate import observe
from qat.checkpoint import SafetensorsFolder
from qat.model import skeleton
from qat.scheme import Scheme
from qat.sections import Calibrate

LLAMA_3_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
DEFAULTS = {
    "blocks": "2", "windows": "8", "length": "512", "dtype": "bfloat16", "device": "cpu", "range": "activation",
    "round": "nearest", "work": "", "out": "benchmarks/results/large.json",
}  # fmt: skip


class Thin:
    """A checkpoint of many blocks that are all the first one."""

    def __init__(self, folder: SafetensorsFolder, blocks: int) -> None:
        self.folder = folder
        first = [name for name in folder.names() if name.startswith("model.layers.0.")]
        rest = [name for name in folder.names() if name not in first]
        self._names = rest + [name.replace(".0.", f".{i}.", 1) for i in range(blocks) for name in first]

    def names(self) -> list[str]:
        return self._names

    def get(self, name: str) -> Tensor:
        return self.folder.get(re.sub(r"^model\.layers\.\d+\.", "model.layers.0.", name))


def write(folder: Path, device: str) -> None:
    """The weights of one block, of the embedding and of the head, a file for each tensor of more than 1 GB."""
    generator = torch.Generator(device).manual_seed(0)
    rest: dict[str, Tensor] = {}
    for name, meta in skeleton(LlamaConfig(num_hidden_layers=1, **LLAMA_3_70B), torch.bfloat16).state_dict().items():
        tensor = torch.empty(meta.shape, dtype=torch.bfloat16, device=device)
        tensor = tensor.normal_(0, 0.02, generator=generator).cpu()
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        if tensor.numel() > 2**28:
            save_file({name: tensor}, folder / f"{name}.safetensors")
        else:
            rest[name] = tensor
    save_file(rest, folder / "rest.safetensors")


def peak_rss_gb() -> float:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return round(int(status.split("VmHWM:")[1].split()[0]) / 2**20, 2)


def main(argv: list[str]) -> None:
    options = read(argv, DEFAULTS)
    blocks, windows, length = (int(options[name]) for name in ("blocks", "windows", "length"))
    with tempfile.TemporaryDirectory(dir=options["work"] or None) as work:
        folder, out = Path(work) / "model", Path(work) / "artifact"
        folder.mkdir()
        if os.fork() == 0:  # in a process of its own, so that its memory is not counted
            write(folder, options["device"])
            os._exit(0)
        os.wait()
        config = LlamaConfig(num_hidden_layers=blocks, **LLAMA_3_70B)
        config.save_pretrained(folder)
        ids = torch.randint(config.vocab_size, (windows, length), generator=torch.Generator().manual_seed(0))
        methods = Calibrate.model_validate({"range": options["range"], "round": options["round"]})
        done: list[dict[str, float]] = []
        start = time.perf_counter()

        def progress(block: int, total: int, error: float) -> None:
            done.append(
                {"block": block, "seconds": round(time.perf_counter() - start, 1), "peak_rss_gb": peak_rss_gb()}
            )
            print(json.dumps(done[-1]), flush=True)

        metrics = observe.run(
            config,
            Thin(SafetensorsFolder(folder), blocks),
            Scheme.model_validate({"weights": {"dtype": "int4", "group_size": 128}}),
            ids,
            {question: getattr(methods, question) for question in observe.QUESTIONS},
            folder,
            out,
            device=options["device"],
            dtype=getattr(torch, options["dtype"]),
            batch=2,
            progress=progress,
        )
        written = sum(file.stat().st_size for file in out.iterdir())
    gpu = round(torch.cuda.max_memory_allocated() / 2**30, 2) if options["device"] != "cpu" else None
    row = {
        "machine": "cpu" if gpu is None else torch.cuda.get_device_name(),
        "model": f"Llama-3-70B-shaped, {blocks} of 80 blocks",
        "scheme": "int4-g128-sym",
        **{name: options[name] for name in ("range", "round", "dtype")},
        "tokens": windows * length,
        "blocks": done,
        "seconds": metrics["seconds"],
        "peak_rss_gb": peak_rss_gb(),
        "peak_gpu_gb": gpu,
        "written_gb": round(written / 2**30, 2),
    }
    path = Path(options["out"])
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*rows, row], indent=1) + "\n", encoding="utf-8")
    print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1:])
