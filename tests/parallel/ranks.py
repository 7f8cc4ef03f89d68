"""Processes of a gloo group, which run functions of the tests together."""

import contextlib
import datetime
import multiprocessing
import os
import sys
import tempfile
import traceback
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

# Importing these takes longer than most tests; all ranks have them from one process.
PRELOADED = [
    "torch", "torch._dynamo", "torch.distributed.tensor", "torch.utils.checkpoint",
    "cupyflash.parallel", "cupyflash.testing", "cupyflash.ops.attention.torch_side",
]  # fmt: skip
TIMEOUT = datetime.timedelta(seconds=30)  # of a collective


class Ranks:
    """``size`` processes of one group, forked from one that has imported torch.

    With the backend "nccl" each has a GPU. A call runs a function of a module with the same
    arguments in all of them, and returns what each has returned; an exception is returned, too. A
    context manager.
    """

    def __init__(self, size, timeout=TIMEOUT, backend="gloo"):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            forkserver.ensure_running()
        self.broken = False  # by a test that has failed
        self.folder = tempfile.TemporaryDirectory()
        store = Path(self.folder.name, "store").as_uri()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, store, rank, size, timeout, backend), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, function, *arguments):
        for pipe in self.pipes:
            pipe.send((function, arguments))
        return [self._answer(pipe) for pipe in self.pipes]

    def _answer(self, pipe):
        try:
            self.broken = not pipe.poll(2 * TIMEOUT.seconds)
            assert not self.broken, "a rank hangs"
            return pipe.recv()
        except EOFError:
            return None  # the process has left

    def run(self, function, *arguments):
        """The results of a call in which no rank raises."""
        results = self(function, *arguments)
        for result in results:
            if isinstance(result, Exception):
                self.broken = True
                raise AssertionError(result.trace)
        return results

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            process.kill()
        self.folder.cleanup()


class Groups:
    """Groups by their size; one that a failed test has left within a call is replaced."""

    def __init__(self):
        self.found = {}

    def __call__(self, size):
        if size in self.found and self.found[size].broken:
            self.found.pop(size).__exit__()
        if size not in self.found:
            self.found[size] = Ranks(size)
        return self.found[size]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for ranks in self.found.values():
            ranks.__exit__()


def _serve(pipe, store, rank, size, timeout, backend):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # no NVLink multicast
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timeout)
    while (call := pipe.recv()) is not None:
        function, arguments = call
        try:
            result = function(*arguments)
        except Exception as error:
            result = RuntimeError(f"{type(error).__name__}: {error}")
            result.kind, result.text = type(error).__name__, str(error)
            result.trace = traceback.format_exc()
        pipe.send(result)
    dist.destroy_process_group()
