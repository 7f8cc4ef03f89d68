"""How often a process that has run a backward aborts when it ends, beside controls of torch alone.

``python tests/support/exit_stress.py --processes 60 --at-once 15`` on a GPU, and more at once than
cores.

What is looked for is "terminate called without an active exception" (SIGABRT) after the last line
of a script. cupyflash starts no threads and frees nothing by itself at exit. torch's autograd
engine has a thread for each GPU, which never ends by itself; a backward written in Python makes it
take Python's lock. If the interpreter finalizes while the thread waits for the lock, CPython before
3.14 ends the thread (pthread_exit), whose stack then unwinds through C++ that must not throw:
github.com/pytorch/pytorch/issues/38228. Each kind below shares one more thing with cupyflash:

=========  ======================================================================================
none       forward only
native     torch's own attention: the engine's thread runs, no Python on it
function   a `torch.autograd.Function` in Python, of torch operations: the control that decides
ours       `cupyflash.attention`
drained    the same, and at exit a small backward of torch's own, behind which the engine's thread
           has let go of everything: what cupyflash could do if "function" aborts as well
=========  ======================================================================================

If "function" aborts about as often as "ours", it is not ours.
"""

import argparse
import collections
import concurrent.futures
import os
import subprocess
import sys

from places import ROOT

SETUP = """
import sys, torch
device = sys.argv[1]
dtype = torch.float32 if device == "cpu" else torch.float16
q, k, v = (torch.randn(2, 4, 256, 64, device=device, dtype=dtype).requires_grad_() for _ in "qkv")

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k):
        ctx.save_for_backward(q, k)
        return q * k

    @staticmethod
    def backward(ctx, dout):
        q, k = ctx.saved_tensors
        return dout * k, dout * q

def drain():
    x = torch.ones(1, device=device, requires_grad=True)
    (x * x).sum().backward()
"""
NATIVE = "torch.nn.functional.scaled_dot_product_attention(q, k, v).sum()"
OURS = "import cupyflash\ncupyflash.attention(q, k, v, layout='bhsd').sum()"
KINDS = {
    "none": OURS,
    "native": f"{NATIVE}.backward()",
    "function": "Product.apply(q, k).sum().backward()",
    "ours": f"{OURS}.backward()",
    "drained": f"import atexit\natexit.register(drain)\n{OURS}.backward()",
}


def end_of(kind, device):
    """Exit status of a process of this kind, and the last line of its errors."""
    done = subprocess.run(
        [sys.executable, "-c", SETUP + KINDS[kind] + "\nprint('done')", device],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    error = done.stderr.strip().splitlines()[-1:] or [""]
    return done.returncode, error[0] if done.stdout == "done\n" else f"before its end: {error[0]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--processes", type=int, default=60, help="of each kind")
    parser.add_argument("--at-once", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    # In turn, so that all kinds meet the same load.
    work = arguments.processes * arguments.kinds
    with concurrent.futures.ThreadPoolExecutor(arguments.at_once) as pool:
        ends = list(pool.map(lambda kind: end_of(kind, arguments.device), work))
    print(f"Python {sys.version.split()[0]}, {arguments.at_once} processes at once")
    print("| kind | processes | failed | how |\n|---|---|---|---|")
    for kind in arguments.kinds:
        bad = collections.Counter(end for name, end in zip(work, ends) if name == kind and end[0])
        how = "; ".join(
            f"{count} x status {status}: {text}" for (status, text), count in bad.items()
        )
        print(f"| {kind} | {arguments.processes} | {sum(bad.values())} | {how} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
