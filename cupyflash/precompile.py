"""Fill the kernel cache ahead of the first call, without a GPU: for container images."""

import itertools
import re
from collections.abc import Iterator, Sequence
from types import ModuleType

from . import environment, jit
from .jit import compiler, messages
from .ops.attention.backends import BACKENDS, in_order
from .ops.attention.kernels import FlashBwdSinks
from .ops.attention.kind import SHORT, Access, Features, Kind
from .ops.attention.simt.backend import MIN_CAPABILITY
from .ops.baselines import baselines
from .ops.block import plan as transformer
from .ops.decode import kernels as decode
from .ops.diffusion import plan as diffusion
from .ops.group_norm import kernels as group_norm
from .ops.linear import launches as linear
from .ops.norm import kernels as norm
from .ops.transfer import kernels as transfer
from .runtime.checks import is_integer
from .runtime.config import ITEM_SIZE, KernelConfig
from .runtime.gpu import Capability

# Kernels beside attention, one module a topic: its ``configurations(capability)`` yields everything
# that its operations can launch.
TOPICS: dict[str, ModuleType] = {
    "norm": norm,
    "group_norm": group_norm,
    "diffusion": diffusion,
    "baselines": baselines,
    "linear": linear,
    "decode": decode,
    "transformer": transformer,
    "transfer": transfer,
}

ALL_HEAD_DIMS = tuple(range(8, 257, 8))
COMMON_HEAD_DIMS = (64, 96, 128, 256)
COMMON_DTYPES = ("float16", "bfloat16")
COMMON_TOPICS = ("norm", "decode")
# The lengths of sequences that kernels of attention are picked by, as fields of `Features`.
LENGTHS = (
    {},
    {"short": len(SHORT)},
    {"short": len(SHORT), "fits_128": True},
    {"short": len(SHORT), "few_keys": True},
    {"short": len(SHORT), "few_keys": True, "one_tile": True, "one_pass": True},
)


def warmup(
    archs: Sequence[str],
    *,
    head_dims: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    topics: Sequence[str] | None = None,
    everything: bool = False,
    jobs: int | None = None,
    progress: bool = True,
) -> list[jit.Built]:
    """Compile the kernels that calls within these limits launch, in parallel processes.

    By default these are what calls with default options pick: attention, forward and backward, full
    or causal, packed or not, in the backend that the architecture is given; LayerNorm and RMSNorm;
    decoding. A kernel that is not among them is compiled at its first use, as without a warm-up.

    Args:
        archs: names such as "sm_80" or "sm_90a".
        head_dims: of attention, multiples of 8 up to 256; default 64, 96, 128 and 256.
        dtypes: of "float16", "bfloat16" and "float32"; default the first two.
        backends: of attention: of "sm90", "sm80", "fp16x3" and "simt"; none for no attention;
            default the fastest one for each problem, or the one that CUPYFLASH_BACKEND forces.
        topics: of the other kernels, keys of `cupyflash.precompile.TOPICS`; none for attention
            alone; default "norm" and "decode".
        everything: what is not given above is no longer limited. Besides, attention with softcap,
            ALiBi, sinks and a deterministic backward, and the other kernels for arrays that are not
            16-byte aligned and for weights of another dtype. Only attention with a bias or dropout
            is left out.
        jobs: processes; default one a core. A script must call this under
            ``if __name__ == "__main__"``.
        progress: say on stderr how many kernels there are and about how long they take, and show
            how far it is.

    Returns:
        What is in the cache now, also what was there before.

    Raises:
        TypeError: a name where a sequence of names belongs, or a head dim that is no integer.
        ValueError: an architecture, head dim, dtype, backend or topic that does not exist, or
            nothing to compile.
        OSError: the cache folder cannot be written.
        jit.CompileError: a kernel does not compile.
    """
    head_dims = _limit(head_dims, COMMON_HEAD_DIMS, ALL_HEAD_DIMS, everything)
    dtypes = _limit(dtypes, COMMON_DTYPES, tuple(ITEM_SIZE), everything)
    topics = _limit(topics, COMMON_TOPICS, tuple(TOPICS), everything)
    forced = environment.current().backend
    backends = _limit(backends, (forced,) if forced else None, tuple(BACKENDS), everything)
    capabilities = check_archs(archs)
    check_head_dims(head_dims)
    check_names("dtypes", dtypes, ITEM_SIZE)
    check_names("backends", backends or (), BACKENDS)
    check_names("topics", topics, TOPICS)
    if jobs is not None and (not is_integer(jobs) or jobs < 1):
        raise ValueError(f"warmup: jobs must be a positive integer or None, got {jobs!r}")
    tasks = []
    for capability in capabilities:
        attention = _attention(capability, head_dims, dtypes, backends, everything)
        beside = _beside_attention(capability, dtypes, topics, everything)
        tasks += [(x, jit.arch_of(capability)) for x in itertools.chain(attention, beside)]
    if not tasks:
        raise ValueError(
            "warmup: some kernel must compute these dtypes on one of the architectures, "
            f"got dtypes {', '.join(dtypes)} on {', '.join(archs)}"
        )
    built = jit.build_all(tasks, jobs, progress)
    for one in built:
        messages.warn_of_slow(one)
    return built


def capability_of(arch: str) -> Capability:
    """Compute capability of an architecture name: "sm_90a" is (9, 0)."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch) if isinstance(arch, str) else None
    if match is None:
        raise ValueError(f"warmup: archs must be names such as sm_80 or sm_90a, got {arch!r}")
    return int(match[1]), int(match[2])


def check_archs(archs: Sequence[str]) -> list[Capability]:
    """Compute capabilities of architectures, each once.

    Raises:
        ImportError: CuPy or NVRTC is missing.
        TypeError, ValueError: not names of architectures that NVRTC and cupyflash know.
    """
    _check_sequence("archs", archs)
    known = [divmod(number, 10) for number in compiler.supported_archs()]
    known = [capability for capability in known if capability >= MIN_CAPABILITY]
    for arch in archs:
        capability = capability_of(arch)
        if capability not in known or (arch[-1] in "af" and capability < (9, 0)):
            allowed = ", ".join(map(jit.arch_of, known))
            raise ValueError(
                "warmup: archs must be of those that cupyflash and NVRTC "
                f"{compiler.version()} know, {allowed}, got {arch}"
            )
    return list(dict.fromkeys(map(capability_of, archs)))


def check_head_dims(head_dims: Sequence[int]) -> None:
    """Raise TypeError or ValueError where these are not head dims of attention."""
    _check_sequence("head_dims", head_dims)
    for head_dim in head_dims:
        if not is_integer(head_dim) or head_dim not in ALL_HEAD_DIMS:
            error = ValueError if is_integer(head_dim) else TypeError
            raise error(f"warmup: head_dims must be multiples of 8 from 8 to 256, got {head_dim!r}")


def check_names(what: str, names: Sequence[str], known: dict[str, object]) -> None:
    """Raise TypeError or ValueError where a name is not of those that are known."""
    _check_sequence(what, names)
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ValueError(f"warmup: {what} must be of {', '.join(known)}, got {name!r}")


def _check_sequence(what: str, values: object) -> None:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"warmup: {what} must be a list or tuple, got {values!r}")


def _limit(given: object, common: object, every: object, everything: bool) -> object:
    return given if given is not None else every if everything else common


def _attention(
    capability: Capability,
    head_dims: Sequence[int],
    dtypes: Sequence[str],
    names: Sequence[str] | None,
    everything: bool,
) -> Iterator[KernelConfig]:
    """The kernels of attention; of the first backend that can compute it if names is None."""
    switches = (False, True) if everything else (False,)
    both = (False, True)
    features = [
        Features(*values, **lengths)
        for *values, lengths in itertools.product(switches, switches, both, LENGTHS)
    ]
    for dtype, head_dim, feature in itertools.product(dtypes, head_dims, features):
        kind = Kind(dtype, head_dim, feature, capability)
        for backward in both:
            found = in_order(kind, backward=backward) if names is None else names
            serving = [
                BACKENDS[name]
                for name in found
                if BACKENDS[name].supports(kind, Access.TENSOR_MAP, backward=backward)
            ]
            for backend in serving[:1] if names is None else serving:
                for kernel in backend.kernels(kind, backward=backward):
                    # Blocks walk up in deterministic calls alone.
                    if everything or not getattr(kernel, "walks_up", False):
                        yield kernel
                if backward and everything:
                    yield FlashBwdSinks()


def _beside_attention(
    capability: Capability, dtypes: Sequence[str], topics: Sequence[str], everything: bool
) -> Iterator[KernelConfig]:
    for config in itertools.chain.from_iterable(
        TOPICS[name].configurations(capability) for name in topics
    ):
        known = getattr(config, "dtype", None) in (None, *dtypes)
        usual = config.is_usual and config.weight_dtype in (None, *dtypes)
        if known and (everything or usual):
            yield config
