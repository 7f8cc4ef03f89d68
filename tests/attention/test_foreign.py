"""What users of other libraries write: keywords, names, layouts and values get a helpful text."""

import inspect
import subprocess
import sys

import numpy
import pytest
from matrix import each
from places import ROOT
from targets import has

import cupyflash
from cupyflash.ops.attention.foreign import ELSEWHERE, KEYWORDS

X = numpy.ones((2, 5, 4, 8), "float32")
ENDS = numpy.array([0, 5, 10], "int32")
PACKED = X.reshape(10, 4, 8)
CALLS = {  # the required arguments of each function
    "attention": (X, X, X),
    "attention_backward": (X, X, X, X, X, X[..., 0].swapaxes(1, 2).copy()),
    "attention_with_cache": (X, X, X, X.copy(), X.copy(), numpy.zeros(2, "int32")),
    "flash_attn_func": (X, X, X),
    "flash_attn_kvpacked_func": (X, numpy.stack([X, X], 2)),
    "flash_attn_qkvpacked_func": (numpy.stack([X] * 3, 2),),
    "flash_attn_varlen_func": (PACKED, PACKED, PACKED, ENDS, ENDS, 5, 5),
    "flash_attn_varlen_kvpacked_func": (PACKED, numpy.stack([PACKED] * 2, 1), ENDS, ENDS, 5, 5),
    "flash_attn_varlen_qkvpacked_func": (numpy.stack([PACKED] * 3, 1), ENDS, 5),
    "scaled_dot_product_attention": (X, X, X),
    "triangle_attention": (X, X, X, numpy.ones((1, 5, 4, 4), "float32")),
}


def refused(name, **keywords):
    with pytest.raises(TypeError) as error:
        getattr(cupyflash, name)(*CALLS[name], **keywords)
    return str(error.value)


@pytest.mark.parametrize("name", CALLS)
def test_keywords_of_other_libraries(name):
    function = getattr(cupyflash, name)
    function(*CALLS[name])
    own = inspect.signature(function).parameters
    for keyword in KEYWORDS.keys() - own.keys():
        text = refused(name, **{keyword: True})
        assert text.startswith(f"{name}: there is no keyword {keyword}, ")
        assert text.endswith(f", got {keyword}=True") and "allowed are" not in text


@pytest.mark.parametrize("name", CALLS)
def test_keywords_of_attention_in_other_signatures(name):
    """Whatever `attention` takes: the other function's own word for it, or where it can be had."""
    own = inspect.signature(getattr(cupyflash, name)).parameters
    for keyword in list(inspect.signature(cupyflash.attention).parameters)[3:]:
        if keyword not in own:
            text = refused(name, **{keyword: 3})
            written = text.partition("write ")[2].partition(",")[0].partition(" ")[0]
            assert written in own or f"cupyflash.attention has {keyword}" in text


def test_what_to_write():
    for name, keyword, hint in (
        ("attention", "is_causal", "write causal (True ends at the last key, 'top-left' is what"),
        ("attention", "attn_mask", "write bias (a bool one is True where"),
        ("attention", "softmax_scale", "write scale,"),
        ("attention", "window_size", "write window (as (left, right))"),
        ("attention", "dropout", "write dropout_p,"),
        ("attention", "cu_seqlens_q", "flash_attn_varlen_func takes packed sequences,"),
        ("flash_attn_func", "scale", "write softmax_scale,"),
        ("flash_attn_func", "return_lse", "write return_attn_probs,"),
        ("flash_attn_func", "attn_mask", "cupyflash.attention has bias"),
        ("scaled_dot_product_attention", "causal", "write is_causal,"),
        ("scaled_dot_product_attention", "window_size", "cupyflash.attention has window"),
        ("attention_with_cache", "cache_seqlens", "write positions"),
        ("attention", "colour", "allowed are q, k, v, causal, "),
    ):
        assert hint in refused(name, **{keyword: 1}), (name, keyword)


@pytest.mark.parametrize("name", CALLS)
def test_signatures_do_not_show_it(name):
    kinds = {x.kind for x in inspect.signature(getattr(cupyflash, name)).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_of_other_libraries(name):
    assert not hasattr(cupyflash, name)
    assert any(ours in ELSEWHERE[name] for ours in cupyflash.__all__)
    with pytest.raises(AttributeError, match="'cupyflash' has no attribute .*, write ") as error:
        getattr(cupyflash, name)
    with pytest.raises(ImportError) as of_import:
        exec(f"from cupyflash import {name}")
    assert str(of_import.value) == str(error.value)


@each()
def test_lists_and_numbers_where_arrays_belong(target):
    inputs = target.inputs(target.dtypes[0], seqlen_q=5)
    q, k, v = inputs.q, inputs.k, inputs.v
    make = {"torch": "torch.tensor", "cupy": "cupy.asarray", "numpy": "numpy.asarray"}
    make = make[target.library]
    for options, name in (
        ({"seqused_k": 5}, "seqused_k"),
        ({"seqused_k": [5, 5]}, "seqused_k"),
        ({"alibi_slopes": (0.5, 0.5)}, "alibi_slopes"),
    ):
        with pytest.raises(TypeError, match=rf"^attention: {name} .*\(write {make}\({name}") as e:
            cupyflash.attention(q, k, v, **options)
        assert ("int32" in str(e.value)) == (name == "seqused_k")
    with pytest.raises(TypeError, match=rf"^attention: k must .*got list \(write {make}\(k"):
        cupyflash.attention(q, [1.0], v)
    with pytest.raises(TypeError, match=r"^attention: q must .*got list \(write numpy.asarray, "):
        cupyflash.attention([1.0], k, v)
    with pytest.raises(TypeError, match=rf"weight must .*got tuple \(write {make}\(weight"):
        cupyflash.layer_norm(q, (8,))


@each()
def test_lengths_of_64_bits(target):
    inputs = target.varlen_inputs(target.dtypes[0], [9, 11])
    ends = target.array(numpy.array([0, 9, 20], "int64"), "int64")
    with pytest.raises(TypeError, match=r"got int64 \(write cu_seqlens_q.to\(torch.int32\), or"):
        cupyflash.flash_attn_varlen_func(inputs.q, inputs.k, inputs.v, ends, ends, 11, 11)


def test_errors_about_shapes_name_the_layout():
    q, k = X[:, :4, :1], X  # heads first: 4 heads, one query
    with pytest.raises(ValueError, match="multiple of .* got 1 and 4 in layout 'bshd', q .*heads"):
        cupyflash.attention(q, k[:, :4], k[:, :4])
    assert cupyflash.attention(q, k[:, :4], k[:, :4], layout="bhsd").shape == q.shape
    with pytest.raises(ValueError, match=r"head_dim\) in layout 'bshd', got \(1, 5, 4, 8\)"):
        cupyflash.flash_attn_func(X, X[:1], X)
    with pytest.raises(ValueError, match=r"head_dim\) in layout 'bhsd', got \(1, 5, 4, 8\)"):
        cupyflash.attention(X, X[:1], X, layout="bhsd")


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_one_warning_where_heads_come_first(library):
    """In a process with Python's own filters: it names the line of the caller, once."""
    if not has(library):
        pytest.skip(f"{library} not installed")
    make = {
        "numpy": "numpy.ones((1, 2, 300, 8), 'float32')",
        "torch": "torch.ones(1, 2, 300, 8, requires_grad=True)",
    }
    code = f"""
import cupyflash, {library}

x = {make[library]}
for _ in range(3):
    out = cupyflash.attention(x, x, x)  # heads first
if {library == "torch"}:
    out.sum().backward()
cupyflash.attention(x, x, x, layout="bhsd")
x = x.swapaxes(1, 2)
cupyflash.attention(x, x, x)  # 2 heads
x = x[:, :232].swapaxes(1, 2)[:, :1]  # 232 heads, as the largest model has, and one token
cupyflash.attention(x, x, x)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stderr.count("Warning") == 1, done.stderr
    assert "<string>:6: UserWarning: attention: q (1, 2, 300, 8) is read as" in done.stderr
    assert "layout='bhsd'" in done.stderr
