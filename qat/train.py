"""Quantize, train, export, judge, release:  accelerate launch qat/train.py recipe=int4_awq.yaml [dotted.key=value ...]

Every stage runs once per content; the same command again reuses what is finished and goes on where it was stopped.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
if Path(sys.path[0]).resolve() == HERE:  # run as a script: import from the repository, not from qat/
    sys.path[0] = str(HERE.parent)
# read when torch loads: threads that wait sleep instead of spinning; on shared cores that is several times faster
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from qat import manifest, pipeline, plan, report, serving
from qat.job import Job
from qat.ranks import RunError, leave
from qat.recipe import Recipe, RecipeError, load
from qat.stages import INTERRUPTED, STOPPED, Run
from qat.unjudged import disown

STAGES = {
    "calibrate": pipeline.calibrate_,  # parent -> integer codes, scales, zero points
    "train": pipeline.train_,  # codes frozen: biases and scales by the KL to the parent; on all ranks
    "export": pipeline.export_,  # one complete directory per format
    "gate": pipeline.gate_,  # every directory read back and measured against the parent
}


def run(recipe: Recipe) -> int:
    """All stages of a recipe; returns the exit code. summary.json in the run's folder says what came of it."""
    with Run(recipe) as folder:
        if folder.rank == 0:  # which is the one that serves
            serving.check(recipe)
        job = Job(folder, pipeline.task_texts)
        plan.check_disk(plan.make(recipe), recipe)  # now that the parent is here and was found good
        pipeline.check(job)
        for index, step in enumerate(job.steps):
            job.stage(index, partial(STAGES[step.kind], job, index), everyone=step.kind in ("calibrate", "train"))
        verdict = pipeline.judge(job)
        released = pipeline.release(job, verdict)
        return pipeline.finish(job, verdict, released)


def main(argv: list[str]) -> int:
    """Run a recipe from a command line; returns the exit code."""
    try:
        report.log_format()
    except ValueError as error:  # before the run's folder is touched
        report.complain(str(error))
        return 2
    try:
        return run(load(argv))
    except RecipeError as error:
        report.complain(str(error))
        disown(argv, str(error))
        return 2
    except KeyboardInterrupt:
        report.complain(STOPPED)
        return INTERRUPTED
    except (ValueError, RunError, FloatingPointError, OSError) as error:
        report.complain(manifest.told(error))
        return 1
    except (MemoryError, RuntimeError) as error:
        if not manifest.way_out(error):
            raise
        report.complain(manifest.told(error))
        return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code not in (1, 2):  # all ranks came to the end; a process that calls `main` again needs its group
        leave()
    sys.exit(code)
