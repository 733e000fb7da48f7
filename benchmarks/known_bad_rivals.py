"""The rivals' side of benchmarks/known_bad.py; runs in their environments, with none of Tare's code.

    ENV/bin/python benchmarks/known_bad_rivals.py llm-compressor|model-optimizer JOBS.json

Each job is one model folder and one text, quantized to INT4 as the tool's own examples do it (transformers loads the
model, `datasets` the text), in a process of its own. What comes out is looked through: values that are not finite,
scales of zero, and the logits of the saved checkpoint when it is loaded again.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTH, WINDOWS, SECONDS = 32, 4, 180
WARNED = ("UNEXPECTED", "MISSING", "MISMATCH", "newly initialized", "were not used", "size mismatch")


def main(tool: str, jobs: list[dict[str, Any]]) -> None:
    """Every job in a fork; the outcome of each goes to its `result` file."""
    work = {"llm-compressor": llm_compressor, "model-optimizer": model_optimizer}[tool]
    if tool == "llm-compressor":
        import llmcompressor  # noqa: F401, before the forks, so that it is read once
    else:
        import modelopt.torch.quantization  # noqa: F401
    for job in jobs:
        pid = os.fork()
        if pid == 0:
            one(work, job)
        signal.signal(signal.SIGALRM, lambda *_, pid=pid: os.kill(pid, signal.SIGKILL))
        signal.alarm(SECONDS)
        _, status = os.waitpid(pid, 0)
        signal.alarm(0)
        result = Path(job["result"])
        if not result.is_file():
            said = f"the process died ({os.waitstatus_to_exitcode(status)})"
            result.write_text(json.dumps({"outcome": "died", "said": said}), encoding="utf-8")
        print(job["fault"], result.read_text(encoding="utf-8"), flush=True)


def one(work: Any, job: dict[str, Any]) -> None:
    """In the fork: run, write what happened, end."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    try:
        work(job)
        found = {"outcome": "finished", "said": inspected(job)}
        warned = [word for word in WARNED if word in Path(job["log"]).read_text(encoding="utf-8", errors="replace")]
        if warned:
            found["said"] += "; the log has a warning of transformers"
    except BaseException as error:
        traceback.print_exc()
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        where = traceback.extract_tb(error.__traceback__)[-1]
        found = {"outcome": "error", "said": f"{type(error).__name__}: {' '.join(lines)[:220]}", "in": where.name}
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if os.geteuid() != os.getuid():
        os.seteuid(os.getuid())
    Path(job["result"]).write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)


def loaded(job: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """The model and the token windows."""
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    path = job["text"]
    kind = {".jsonl": "json", ".parquet": "parquet"}.get(Path(path).suffix, "text")
    rows = load_dataset(kind, data_files=path, split="train", cache_dir=job["cache"])
    ids = [token for row in rows for token in tokenizer(row["text"], add_special_tokens=False)["input_ids"]]
    windows = [ids[start : start + LENGTH] for start in range(0, LENGTH * WINDOWS, LENGTH)]
    return model, [{"input_ids": w, "attention_mask": [1] * len(w)} for w in windows if w]


def llm_compressor(job: dict[str, Any]) -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    model, windows = loaded(job)
    size = job["group_size"]
    strategy: dict[str, Any] = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, **strategy)
    scheme = {"all": QuantizationScheme(targets=["Linear"], weights=weights)}
    oneshot(
        model=model,
        dataset=Dataset.from_list(windows),
        recipe=GPTQModifier(config_groups=scheme, ignore=["lm_head", "re:.*gate$"]),
        num_calibration_samples=len(windows),
        max_seq_length=LENGTH,
        shuffle_calibration_samples=False,
    )
    save(job, lambda: model.save_pretrained(job["out"], save_compressed=True))


def model_optimizer(job: dict[str, Any]) -> None:
    import copy

    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model, windows = loaded(job)
    config = copy.deepcopy(mtq.INT4_AWQ_CFG)
    for rule in rules(config["quant_cfg"]):
        if rule.get("num_bits") == 4 and "block_sizes" in rule:
            rule["block_sizes"][-1] = job["group_size"] or -1

    def forward(m: Any) -> None:
        for window in windows:
            m(torch.tensor([window["input_ids"]]))

    quantized = mtq.quantize(model, config, forward)
    save(job, lambda: export_hf_checkpoint(quantized, export_dir=job["out"]))


def rules(config: Any) -> list[dict[str, Any]]:
    """Every mapping of a config, however deep."""
    if isinstance(config, list):
        return [inner for one in config for inner in rules(one)]
    return [config, *(inner for one in config.values() for inner in rules(one))] if isinstance(config, dict) else []


def save(job: dict[str, Any], write: Any) -> None:
    """Write the checkpoint, on a disk that is full or into a folder that may not be written where the job says so."""
    if job.get("file_bytes"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_bytes"], resource.RLIM_INFINITY))
    if job.get("read_only"):
        Path(job["out"]).mkdir()
        Path(job["out"]).chmod(0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)
    write()


def inspected(job: dict[str, Any]) -> str:
    """What is wrong with the checkpoint that the tool wrote."""
    out = Path(job["out"])
    bad, linears = [], set()
    for file in sorted(out.glob("*.safetensors")):
        with safe_open(file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 - not a dict
                value = f.get_tensor(name)
                if name.endswith(("scale", "scales")):
                    linears.add(name.rpartition(".")[0])
                if value.is_floating_point() and value.element_size() > 1:
                    count = int((~torch.isfinite(value)).sum())
                    if count:
                        bad.append(f"{count} values of {name} are not finite")
                    elif "scale" in name and (value == 0).any():
                        bad.append(f"{int((value == 0).sum())} scales of {name} are 0")
    said = f"finishes, {len(linears)} linears quantized"
    if bad:
        return f"{said}; {bad[0]}" + (f", and {len(bad) - 1} more such tensors" if len(bad) > 1 else "")
    if job["tool"] == "model-optimizer":  # its INT4 is read by TensorRT-LLM only
        return f"{said}; all values finite"
    try:
        model = AutoModelForCausalLM.from_pretrained(out, dtype=getattr(torch, job["dtype"]))
        with torch.no_grad():
            logits = model(torch.arange(1, LENGTH + 1)[None]).logits
    except Exception as error:  # whatever a reader of the file says
        return f"{said}; the result does not load: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    finite = bool(torch.isfinite(logits).all())
    return f"{said}; all values finite, logits " + ("finite" if finite else "NOT finite")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
