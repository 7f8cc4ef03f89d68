"""Streams, threads and CUDA graphs (GPU only)."""

import concurrent.futures
import contextlib

import pytest
from arrays import normal, stored
from devices import delay, new_stream
from matrix import each
from passes import forward_backward
from targets import boolean_texts

import cupyflash
from cupyflash.runtime.scratch import no_garbage_collected
from cupyflash.testing import expected, make_inputs


def forward_and_backward(inputs):
    qkv = inputs.q, inputs.k, inputs.v
    out, lse = cupyflash.attention(*qkv, causal=True, return_lse=True)
    gradients = cupyflash.attention_backward(
        inputs.dout, *qkv, out, lse, causal=True, deterministic=True
    )
    return (out, lse, *gradients)


def copy_inputs(to, source):
    to.q[...], to.k[...], to.v[...], to.dout[...] = source.q, source.k, source.v, source.dout


def equal(first, second):
    return all((a == b).all() for a, b in zip(first, second, strict=True))


@each(device="cuda")
def test_runs_on_the_current_stream(target):
    """The inputs are written late on another stream; on any other stream they would still be 0."""
    inputs = target.inputs("float16", seqlen_q=300)
    right = forward_and_backward(inputs)
    late = target.inputs("float16", seqlen_q=300)
    for x in (late.q, late.k, late.v, late.dout):
        x[...] = 0
    target.synchronize()
    stream, current = new_stream(target)
    with current:
        delay(target)
        copy_inputs(late, inputs)
        results = forward_and_backward(late)
    stream.synchronize()
    assert equal(results, right)


@each(device="cuda")
def test_two_host_threads(target):
    """Each on its own stream with its own inputs, many calls at once; head dims not seen before."""
    problems = [target.inputs("float16", seqlen_q=200, head_dim=d, seed=d) for d in (24, 48)]

    def repeat(inputs):
        stream, current = new_stream(target)
        with current:
            results = [forward_and_backward(inputs) for _ in range(20)]
        stream.synchronize()
        return results

    target.synchronize()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(repeat, problems))
    for inputs, results in zip(problems, found):
        right = forward_and_backward(inputs)
        assert all(equal(result, right) for result in results)


@each(library="torch", device="cuda")
@pytest.mark.parametrize("varlen", [False, True], ids=["batch", "varlen"])
def test_torch_cuda_graph(target, varlen):
    import torch

    dtype = target.dtypes[0]
    packed, padded = target.varlen_inputs(dtype, [100, 200]), target.inputs(dtype, seqlen_q=200)
    inputs = packed if varlen else padded
    qkv = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]

    def step():
        if varlen:
            cu_seqlens = inputs.cu_seqlens_q
            out = cupyflash.flash_attn_varlen_func(
                *qkv, cu_seqlens, cu_seqlens, 200, 200, causal=True, deterministic=True
            )
        else:
            out = cupyflash.flash_attn_func(*qkv, causal=True, deterministic=True)
        return (out, *torch.autograd.grad(out, qkv, inputs.dout))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with no_garbage_collected(), torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (*qkv, inputs.dout):
            x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = [x.detach().clone() for x in captured]
    assert equal(replayed, step())


@each(library="torch", device="cuda")
def test_a_replay_reads_a_boolean_bias_anew(target):
    """Where the bias is a text, the graph also finds the tiles that are empty or full."""
    import torch

    inputs = target.inputs(target.dtypes[0], seqlen_q=200, seqlen_k=330)
    masks = [torch.rand(200, 330, device="cuda") < 0.5 for _ in range(3)]
    masks[0][:, :130], masks[1][:, 130:], masks[2][:130] = False, False, True
    mask, side = masks[0].clone(), torch.cuda.Stream()
    with boolean_texts():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forward_backward(inputs, bias=mask)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with no_garbage_collected(), torch.cuda.graph(graph):
            captured = forward_backward(inputs, bias=mask)
        for values in masks:
            mask.copy_(values)
            graph.replay()
            expected(inputs, bias=values).check(**captured)


def group_norm_problem(target, seed):
    """(dout, x, weight, bias), for a backward whose blocks count themselves."""
    shapes = (64, 64, 16), (64, 64, 16), (64,), (64,)
    return [stored(target, normal(shape, (seed, i)), "float16") for i, shape in enumerate(shapes)]


def group_norm_gradients(dout, x, weight, bias):
    _, stats = cupyflash.group_norm(x, 8, weight, bias, activation="silu", return_stats=True)
    return cupyflash.group_norm_backward(dout, x, weight, bias, stats, activation="silu")


@each(device="cuda")
def test_two_streams_count_at_once(target):
    """Many small launches that wait in two streams, and then run side by side."""
    problems = [group_norm_problem(target, seed) for seed in (0, 1)]
    right = [group_norm_gradients(*problem) for problem in problems]
    streams = [new_stream(target) for _ in problems]
    target.synchronize()
    for _, current in streams:
        with current:
            delay(target)
    found = [], []
    for _ in range(20):
        for problem, results, (_, current) in zip(problems, found, streams):
            with current:
                results.append(group_norm_gradients(*problem))
    for stream, _ in streams:
        stream.synchronize()
    for gradients, results in zip(right, found):
        assert all(equal(result, gradients) for result in results)


@each(library="torch", device="cuda")
def test_captured_blocks_count(target):
    """A graph has counters of its own, 0 again at the end: it runs twice, beside other launches."""
    import torch

    problem, other = (group_norm_problem(target, seed) for seed in (0, 1))
    right = group_norm_gradients(*other)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_garbage_collected(), torch.cuda.graph(graph):
        captured = group_norm_gradients(*problem)
    for given, new in zip(problem, other):
        given.copy_(new)
    beside = torch.cuda.Stream()
    for _ in range(2):
        for x in captured:
            x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(beside):
            results = [group_norm_gradients(*other) for _ in range(5)]
        graph.replay()
        torch.cuda.synchronize()
        assert all(equal(result, right) for result in (captured, *results))


@each(library="cupy")
def test_cupy_stream_capture(target):
    import cupy

    inputs = target.inputs(target.dtypes[0], seqlen_q=200)
    other = target.inputs(target.dtypes[0], seqlen_q=200, seed=1)
    right = forward_and_backward(other)
    target.synchronize()
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(cupy.cuda.Stream(non_blocking=True))
        forward_and_backward(inputs)  # compiles, and fills this stream's arena of the memory pool
        stack.enter_context(no_garbage_collected())
        stream.begin_capture()
        captured = forward_and_backward(inputs)
        graph = stream.end_capture()
        copy_inputs(inputs, other)
        graph.launch(stream)
        stream.synchronize()
    assert equal(captured, right)


@each(device="cuda")
def test_another_device_than_the_current_one(target):
    """Arrays of the last device, called while the first is current; both in turn."""
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    last = cupy.cuda.runtime.getDeviceCount() - 1
    with cupy.cuda.Device(last):
        device = f"cuda:{last}" if target.library == "torch" else "cuda"
        there = make_inputs(
            target.library, target.dtypes[0], seqlen_q=300, head_dim=128, device=device
        )
    here = target.inputs(target.dtypes[0], seqlen_q=300, head_dim=128)
    for inputs, index in ((there, last), (here, 0), (there, last)):
        qkv = inputs.q, inputs.k, inputs.v
        out, lse = cupyflash.attention(*qkv, causal=True, return_lse=True)
        dq, dk, dv = cupyflash.attention_backward(inputs.dout, *qkv, out, lse, causal=True)
        for x in (out, lse, dq, dk, dv):
            assert (x.device.index if target.library == "torch" else x.device.id) == index
        assert cupy.cuda.runtime.getDevice() == 0
        with cupy.cuda.Device(index):
            cupy.cuda.Device().synchronize()
            expected(inputs, causal=True).check(out=out, lse=lse, dq=dq, dk=dk, dv=dv)
