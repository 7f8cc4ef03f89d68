"""Streams of a GPU, work that takes its time there, and memory in use."""

import gc


def new_stream(target):
    """A stream that does not wait for the default stream, and a context that makes it current."""
    if target.library == "torch":
        import torch

        stream = torch.cuda.Stream()
        return stream, torch.cuda.stream(stream)
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    return stream, stream


def delay(target):
    """Queue some milliseconds of work on the current stream."""
    if target.library == "torch":
        import torch

        torch.cuda._sleep(20_000_000)
    else:
        import cupy

        x = cupy.ones(50_000_000, "float32")
        for _ in range(50):
            cupy.sin(x, out=x)


def memory(target):
    """Bytes of a GPU in use."""
    gc.collect()
    if not target.gpu:
        return 0
    if target.library == "torch":
        import torch

        return torch.cuda.memory_allocated()
    import cupy

    return cupy.get_default_memory_pool().used_bytes()
