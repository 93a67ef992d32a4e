"""One rank of a DDP run over gloo: does jobs one after the other and writes down what they left.

    python tests/ddp_worker.py RANK WORLD FOLDER (patched | stock | uncaught) [JOB ...]

A job is the id of a case, which is trained on this rank's share of each batch, or the name of a scenario of
``ddp_scenarios.py``. Each job has a process group of its own: if one rank fails in it, the connection ends, the others
fail, too, and all go on with the next job (``uncaught``: the process ends, as a script would). Started by ``ddp_runs.py``.
"""

from __future__ import annotations

import datetime
import functools
import gc
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Iterable, List, Tuple

import ddp_scenarios
from conftest import CASES
from torch import distributed

import nni_dataparallel

RANK, WORLD, FOLDER, WAY = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
CASE = {case.id: case for case in CASES}
LIMIT = datetime.timedelta(seconds=30)
"""Of a collective: less than that of the launch, so that a hang ends as an error of the job."""


def do(job: str) -> Any:
    if job in CASE:
        return ddp_scenarios.train(CASE[job], WAY)
    return getattr(ddp_scenarios, job)(FOLDER)


def main(jobs: Iterable[Tuple[str, Callable[[], Any]]]) -> None:
    """Do the jobs, and write down what each left, or the error in words."""
    warnings.simplefilter("ignore")
    if WAY != "stock":
        nni_dataparallel.patch()
    found: List[Tuple[str, Any]] = []
    gc.freeze()  # a collection looks at what the jobs made only
    for number, (job, run) in enumerate(jobs):
        store = distributed.FileStore(str(FOLDER / f"store{number}"), WORLD)
        distributed.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD, timeout=LIMIT)
        failed = False
        try:
            found.append((job, run()))
            distributed.barrier()
        except Exception as error:
            if WAY == "uncaught":
                raise
            found.append((job, f"{type(error).__name__}: {error}"))
            failed = True
        if failed:
            gc.collect()  # a DDP of the job would keep the connection open, and the others waiting
        distributed.destroy_process_group()
    (FOLDER / f"{RANK}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main((job, functools.partial(do, job)) for job in sys.argv[5:] or CASE)
