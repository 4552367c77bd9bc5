"""Uses the cores of a CPU for `calibrate`: several threads, each with a batch, a block or a router of its own.

PyTorch's own threads share every operation and wait for each other at its end. Calibration is made of operations of a
millisecond and less, so on two cores that leaves a third of the time unused, and more beside another busy program;
threads that share nothing need not wait. The results are those of one such thread, whatever their number.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from tide_export.model.source import SourceModel

MOST = 8  # threads; each holds the intermediate results of a pass
Item = TypeVar("Item")
Result = TypeVar("Result")
_here = threading.local()


def in_parallel(source: SourceModel, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`work` on each of `items`, the results in their order; PyTorch's threads are divided among the workers.

    One after the other, with all of PyTorch's threads, where the model is not on the CPU, where accelerate moves its
    weights while it runs, and inside `work` itself. What `work` raises is raised here, when its turn has come.
    """
    cores = torch.get_num_threads()
    count = min(cores, MOST)
    if count == 1 or not _may_share(source) or getattr(_here, "working", False):
        yield from map(work, items)
        return

    def prepare() -> None:
        _here.working = True
        torch.set_num_threads(cores // count)

    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(count, thread_name_prefix="calibrate", initializer=prepare)
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * count:  # results that nobody has taken yet are not piled up
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)  # the number that threads of others start with was changed as well


def _may_share(source: SourceModel) -> bool:
    return source.device.type == "cpu" and getattr(source.model, "hf_device_map", None) is None
