"""What the fakes of operators promise about results is true: shapes, dtypes, and strides.

Compiled graphs rely on these: inductor asserts the strides of an operator, or indexes by them.
"""

import functools

import pytest
from targets import compute_capability

torch = pytest.importorskip("torch")

import compiled_calls  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_map_only  # noqa: E402

NO_GPU = pytest.mark.skipif(
    not (torch.cuda.is_available() and compute_capability()[0]), reason="no GPU"
)
DEVICES = ["cpu", pytest.param("cuda", marks=NO_GPU)]
OPERATORS = {
    "attention", "attention_backward", "attention_plain", "attention_plain_backward",
    "attention_text", "attention_text_backward", "attention_with_cache", "dropout_add",
    "group_norm", "group_norm_backward", "linear", "norm", "norm_backward", "rotate",
}  # fmt: skip
WITH_OPERATORS = {
    "attention": {"attention_plain", "attention_plain_backward"},
    "attention_backward": {"attention_backward"},
    "attention_with_cache": {"attention_with_cache"},
    "flash_attn_varlen_func": {"attention", "attention_backward"},
    "flex_attention": {"attention_text", "attention_text_backward"},
    "group_norm": {"group_norm", "group_norm_backward"},
    "layer_norm": {"norm", "norm_backward", "dropout_add"},
    "layer_norm_backward": {"norm_backward", "dropout_add"},
    "linear": {"linear"},
    "mlp": {"linear", "norm", "norm_backward"},
    "qkv_projection": {"linear", "rotate"},
    "scaled_dot_product_attention": {"attention_plain", "attention_plain_backward"},
    "triangle_attention": {"attention", "attention_backward"},
}


def in_order(x, *axes):
    """A copy of x whose axes lie in memory in this order."""
    back = sorted(range(x.dim()), key=lambda axis: axes[axis] % x.dim())
    return x.permute(axes).contiguous().permute(back)


def expanded(x, axis):
    return x.narrow(axis, 0, 1).expand(x.shape)


LAYOUTS = {
    "contiguous": torch.clone,
    "axes swapped": lambda x: in_order(x, *range(x.dim() - 3), -2, -3, -1),
    "axes turned": lambda x: in_order(x, *range(1, x.dim() - 1), 0, -1),
    "last axis first": lambda x: in_order(x, -1, *range(x.dim() - 1)),
    "channels last": lambda x: in_order(x, 0, *range(2, x.dim()), 1),
    "part of a row": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "part of an axis": lambda x: torch.cat((x, x), -2)[..., : x.shape[-2], :],
    "first axis expanded": lambda x: expanded(x, 0),
    "second axis expanded": lambda x: expanded(x, 1),
    "heads expanded": lambda x: expanded(x, -2),
}


class Compares(TorchDispatchMode):
    """Runs each operator of cupyflash with fake tensors too, and compares the results."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        if function.namespace == "cupyflash":
            name = function.__name__.partition(".")[0]
            self.seen.add(name)
            with FakeTensorMode() as mode:
                fakes = tree_map_only(torch.Tensor, mode.from_tensor, (arguments, options or {}))
                promised = function(*fakes[0], **fakes[1])
            pairs = zip(tree_flatten(promised)[0], tree_flatten(found)[0], strict=True)
            for place, (fake, real) in enumerate(pairs):
                assert described(fake) == described(real), f"{name}, result {place}"
        return found


def described(x):
    """All that a graph may rely on; the stride of an axis that has no second element says nothing.

    Nor do the strides of a tensor without elements.
    """
    steps = [step for size, step in zip(x.shape, x.stride()) if size > 1 and x.numel()]
    return tuple(x.shape), steps, x.dtype, x.device


def calls(name, device):
    """(layout, function, arguments): each tensor of two axes or more in it, and all of them."""
    function, arguments = compiled_calls.CALLS[name](compiled_calls.Problem(device, 12))
    places = [i for i, x in enumerate(arguments) if x.dim() > 1 and x.is_floating_point()]
    for layout, lay in LAYOUTS.items():
        for chosen in ([i] for i in places) if len(places) > 1 else ():
            yield layout, function, laid(arguments, chosen, lay)
        yield layout, function, laid(arguments, places, lay)


def laid(arguments, chosen, lay):
    laid = []
    for i, x in enumerate(arguments):
        try:
            y = lay(x.detach()) if i in chosen else x.detach()
        except (IndexError, RuntimeError):  # it has too few axes
            y = x.detach()
        laid.append(y.requires_grad_(x.requires_grad))
    return laid


def refused(function, arguments):
    """Whether the plain call takes no such strides."""
    try:
        function(*arguments)
    except ValueError as error:
        assert "strides" in str(error) or "contiguous" in str(error)
        return True
    return False


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WITH_OPERATORS)
def test_fakes_promise_what_operators_return(name, device):
    compares, taken = Compares(), set()
    for layout, function, arguments in calls(name, device):
        if not refused(function, arguments):
            taken.add(layout)
            with compares:
                compiled_calls.results(function, arguments)
    assert compares.seen >= WITH_OPERATORS[name]
    assert len(taken) >= len(LAYOUTS) - 2  # a last axis that is not contiguous is refused by some


def test_all_operators_are_compared():
    names = {
        x.partition("::")[2] for x in torch._C._dispatch_get_all_op_names() if "cupyflash" in x
    }
    names.discard("cache_append")  # it returns nothing
    assert functools.reduce(set.union, WITH_OPERATORS.values()) == OPERATORS >= names
