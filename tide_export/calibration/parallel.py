"""Runs several threads on the cores of a CPU, each with another batch, block or router.

PyTorch's own threads share every operation and wait for each other at its end. Calibration's operations take a
millisecond or less, so on two cores a third of the time is lost, and more beside another busy program; independent
threads do not wait. The results do not depend on the number of threads.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from tide_export.model.source import SourceModel

MAX_THREADS = 8  # each holds the intermediate results of a pass
Item = TypeVar("Item")
Result = TypeVar("Result")
_thread = threading.local()


def in_parallel(source: SourceModel, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields `work(item)` for `items` in order, dividing PyTorch's threads among the workers.

    Runs sequentially, with all of PyTorch's threads, if the model is not on the CPU, if accelerate moves its weights
    while it runs, and inside `work` itself. An exception of `work` is raised in place of its result.
    """
    cores = torch.get_num_threads()
    count = min(cores, MAX_THREADS)
    if count == 1 or not _may_share(source) or getattr(_thread, "working", False):
        yield from map(work, items)
        return

    def prepare() -> None:
        _thread.working = True
        torch.set_num_threads(cores // count)

    pending: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(count, thread_name_prefix="calibrate", initializer=prepare)
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > 2 * count:  # bounds the results in memory
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)  # the workers changed the process-wide default, too


def _may_share(source: SourceModel) -> bool:
    return source.device.type == "cpu" and getattr(source.model, "hf_device_map", None) is None
