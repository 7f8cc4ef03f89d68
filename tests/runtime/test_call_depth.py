"""How many functions of the package a public call enters on the way to its launch (no GPU needed).

A process of its own counts them, in which `bench.lib.dry_run` makes plans for a Hopper GPU.
"""

import json
import sys
from pathlib import Path

import pytest
from places import run_script

import cupyflash

PACKAGE = str(Path(cupyflash.__file__).parent)
MOST = 6  # of a repeated call: public function, Operation, dispatch, Plan twice, Launch
MOST_AT_FIRST = 10  # to the `Launch` that loads its kernel
MOST_ENTERED = (20, 13)  # functions, and files, that a repeated `attention` enters


def chain(frame):
    """The names of the functions of the package from a frame outwards, the public one first."""
    names = []
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_code.co_filename.startswith(PACKAGE) and name != "<listcomp>":
            names.append(name)
        frame = frame.f_back
    return names[::-1]


def calls():
    """A public function of each topic, with arrays that its first kernel of choice takes."""
    import torch

    q = torch.zeros(2, 128, 4, 64, dtype=torch.float16)
    x, image = q.reshape(256, 256), q.reshape(2, 256, 8, 16)
    cache, positions = q.clone(), torch.zeros(2, dtype=torch.int32)
    sampler = cupyflash.DiffusionSampler.ddpm([0.01, 0.02])
    return {
        "attention": lambda: cupyflash.attention(q, q, q),
        "attention_backward": lambda: cupyflash.attention_backward(
            q, q, q, q, q, torch.zeros(2, 4, 128)
        ),
        "attention_with_cache": lambda: cupyflash.attention_with_cache(
            q[:, :1], q[:, :1], q[:, :1], cache, cache.clone(), positions
        ),
        "rms_norm": lambda: cupyflash.rms_norm(x, x[0]),
        "group_norm": lambda: cupyflash.group_norm(image, 4, x[0], x[1]),
        "linear": lambda: cupyflash.linear(x, x),
        "step": lambda: sampler.step(x, x, 1, seed=0),
    }


def entered(call):
    """The numbers of functions of the package, and of files, that a call enters."""
    found = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.add(frame.f_code)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(found), len({code.co_filename for code in found})


def main():
    """Prints in JSON for each topic the chains of functions, and what a repeated call enters.

    A chain leads to a kernel's load, or to its second launch.
    """
    from bench.lib.dry_run import hopper

    found = {}

    def load(config, device):
        loads.append(chain(sys._getframe()))
        return lambda *arguments: launches.append(chain(sys._getframe()))

    with hopper(load=load):
        for name, call in calls().items():
            loads, launches = [], []
            call()
            launches = []
            call()
            found[name] = loads, launches, entered(call)
    print(json.dumps(found))


def test_depth():
    pytest.importorskip("torch")
    found = json.loads(run_script(__file__))
    assert len(found) == 7
    assert all(x <= most for x, most in zip(found["attention"][2], MOST_ENTERED)), found
    for name, (loads, launches, _) in found.items():
        assert loads and all(len(x) <= MOST_AT_FIRST for x in loads), loads
        assert launches and all(x[0] == name and x[-1] == "start" for x in launches), launches
        assert all(len(x) <= MOST for x in launches), launches


if __name__ == "__main__":
    main()
