"""Reading folders of Llama and its kin, without torch: what is taken, and what is refused."""

import json
import subprocess
import sys

import numpy
import pytest
from fakes import fake_facts

pytest.importorskip("safetensors")

from safetensors.numpy import save_file  # noqa: E402

from cupyflash.models.llama import SIZES, Llama, LlamaConfig, Rope  # noqa: E402
from cupyflash.models.llama.weights import PERIOD, _pieces, all_tensors  # noqa: E402

SHAPE = LlamaConfig(
    layers=2, width=16, heads=4, heads_kv=2, head_dim=4, inner=24, vocab_size=30, max_positions=20
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 30,
    "max_position_embeddings": 20,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def kin(name, model_type, **changes):
    return {"architectures": [name], "model_type": model_type, **changes}


MISTRAL, QWEN2, QWEN3 = (kin(f"{x}ForCausalLM", x.lower()) for x in ("Mistral", "Qwen2", "Qwen3"))


def tensors(config=SHAPE):
    rng = numpy.random.default_rng(0)
    return {
        (x.name if x.name.startswith("lm_head") else f"model.{x.name}"): 0.1
        * rng.standard_normal(x.shape, dtype="float32")
        for x in all_tensors(config)
    }


def write(folder, weights=None, **changes):
    """A folder; fields that are ... are left out."""
    config = {name: x for name, x in (CONFIG | changes).items() if x is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    if weights is not None:
        save_file(weights, folder / "model.safetensors")
    return folder


def read(folder, **changes):
    return LlamaConfig.from_folder(write(folder, **changes))


def load(folder, **options):
    return Llama.from_folder(folder, **{"device": "cpu"} | options)


def test_config(tmp_path):
    rope = Rope(theta=500.0)
    expected = LlamaConfig(
        layers=2, width=16, heads=4, heads_kv=2, head_dim=4, inner=24, vocab_size=30,
        max_positions=20, eps=1e-5, rope=rope, eos_token_ids=(2,), dtype="bfloat16",
    )  # fmt: skip
    assert read(tmp_path) == expected
    assert read(tmp_path, num_key_value_heads=...).heads_kv == 4
    assert read(tmp_path, architectures=None) == expected
    assert LlamaConfig.from_folder(tmp_path, "float16").dtype == "float16"
    found = read(tmp_path, attention_bias=True, mlp_bias=True, head_dim=8, dtype="float16")
    assert found.qkv_bias and found.proj_bias and found.mlp_bias and found.head_dim == 8
    assert found.dtype == "float16"


@pytest.mark.parametrize("given", [7, [7, 9], [], None], ids=str)
def test_ends_of_texts(given, tmp_path):
    """Those of generation_config.json; where it has none, those of config.json."""
    folder = write(tmp_path, eos_token_id=[1, 2])
    assert LlamaConfig.from_folder(folder).eos_token_ids == (1, 2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given, "top_k": 5}))
    expected = tuple(given) if isinstance(given, list) else () if given is None else (given,)
    assert LlamaConfig.from_folder(folder).eos_token_ids == (expected or (1, 2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(
        ValueError, match="eos_token_id in .*generation_config.json must be a token"
    ):
        LlamaConfig.from_folder(folder)


SLIDING = {"use_sliding_window": True, "sliding_window": 5}
WINDOWS = [
    ({}, ()),
    ({"sliding_window": None}, ()),
    (MISTRAL, (4096, 4096)),
    (MISTRAL | {"sliding_window": 9}, (9, 9)),
    (MISTRAL | {"sliding_window": None}, ()),
    (QWEN2, ()),
    (QWEN2 | {"sliding_window": 9}, ()),
    (QWEN2 | SLIDING, ()),
    (QWEN2 | SLIDING | {"sliding_window": None, "max_window_layers": 1}, ()),
    (QWEN2 | SLIDING | {"max_window_layers": 1}, (None, 5)),
    (QWEN3 | SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}, (5, None)),
]


@pytest.mark.parametrize(("changes", "expected"), WINDOWS, ids=str)
def test_windows(changes, expected, tmp_path):
    config = read(tmp_path, **changes)
    assert config.windows == expected
    seen = [None if x is None else (x - 1, 0) for x in expected or (None, None)]
    assert [config.window(layer) for layer in range(2)] == seen


def test_kin(tmp_path):
    assert read(tmp_path, **QWEN2).qkv_bias and not read(tmp_path, **QWEN2).proj_bias
    found = read(tmp_path, **QWEN3, attention_bias=True)
    assert found.head_norms and found.head_dim == 128 and found.qkv_bias and found.proj_bias
    assert not read(tmp_path, **QWEN3).qkv_bias


ROPES = [
    ({}, Rope(500.0)),
    ({"rope_theta": ...}, Rope(10000.0)),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, Rope(7.0)),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, Rope(500.0, "linear", 2)),
    ({"rope_scaling": LLAMA3}, Rope(500.0, "llama3", 8.0)),
    ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
     Rope(500.0, "llama3", 8.0, original=16)),
    ({"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 7.0}}, Rope(7.0)),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), ROPES, ids=str)
def test_ropes(changes, expected, tmp_path):
    assert read(tmp_path, **changes).rope == expected


HARMLESS = {
    "_name_or_path": "somewhere",
    "use_cache": False,
    "pretraining_tp": 2,
    "attention_dropout": 0.1,
    "transformers_version": "4.40.0",
    "quantization_config": None,
    "rope_interleaved": False,
    "some_option": 0,
}


def test_fields_that_change_nothing(tmp_path):
    assert read(tmp_path, **HARMLESS) == read(tmp_path)


VALUES = [
    ({"architectures": ["LlamaModel"]}, "architectures and model_type .*, got .'LlamaModel'"),
    ({"architectures": ["LlamaForCausalLM"] * 2}, "architectures and model_type"),
    ({"architectures": [["LlamaForCausalLM"]]}, "architectures and model_type"),
    ({"is_causal": 0}, "is_causal in .* must be true or false, got 0"),
    ({"model_type": "gemma"}, "architectures and model_type in .* got .* and 'gemma'"),
    ({"architectures": None, "model_type": "gpt2"}, "architectures and model_type .*'gpt2'"),
    ({"hidden_size": ...}, "must have hidden_size, found none"),
    ({"num_hidden_layers": 0}, "num_hidden_layers in .* positive integer of at most 10000, got 0"),
    ({"num_hidden_layers": 10**30}, "num_hidden_layers in .* of at most 10000, got 1000"),
    ({"vocab_size": "30"}, "vocab_size in .* must be a positive integer of .*, got '30'"),
    ({"max_position_embeddings": 2**31}, "max_position_embeddings in .* at most 2147483647, got"),
    ({"num_key_value_heads": 3}, "heads_kv must divide heads, got 3 and 4"),
    ({"head_dim": 5}, "head_dim must be even and at most 256, got 5"),
    ({"head_dim": 512}, "head_dim must be even and at most 256, got 512"),
    ({"attention_bias": "no"}, "attention_bias in .* must be true or false, got 'no'"),
    ({"rms_norm_eps": -1}, "rms_norm_eps in .* must be a positive number"),
    ({"rope_theta": 0}, "rope_theta in .* must be a positive number, got 0"),
    ({"rope_theta": 10**400}, "rope_theta in .* must be a positive number, got 1000"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor in .* must be a positive number, got None"),
    ({"rope_scaling": "llama3"}, "rope_scaling in .* must be an object, got 'llama3'"),
    ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}, "high_freq_factor .* above low_freq"),
    ({"torch_dtype": "float8"}, "dtype in .* must be float16, bfloat16, float32, got 'float8'"),
    ({**MISTRAL, "num_key_value_heads": ...}, "must have num_key_value_heads, found none"),
    ({**MISTRAL, "sliding_window": -1}, "sliding_window in .* must be a positive integer"),
    ({**QWEN2, **SLIDING, "max_window_layers": "1"}, "max_window_layers in .* an integer, got '1'"),
]
OPTIONS = [
    ({"is_causal": False}, "is_causal in .* must be true, got False"),
    ({**QWEN3, **SLIDING, "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
     "layer_types in .* must be full_att"),
    ({"hidden_act": "gelu"}, "hidden_act in .* must be silu, got 'gelu'"),
    ({"rope_scaling": {"type": ["linear"]}}, "kind of rope .*, got .'linear'."),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "kind of rope .*, got 'dynamic'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "default, linear, llama3, got 'yarn'"),
    ({"rope_scaling": LLAMA3 | {"attention_factor": 2.0}}, "rope of kind .*, got attention_factor"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 7.0}}}, "got full_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor in .* must be 1"),
    ({"sliding_window": 5}, "sliding_window in .* is not known and may change .* got 5"),
    ({"quantization_config": {"bits": 4}}, "quantization_config in .* is not known"),
    ({"auto_map": {"AutoModel": "x.Model"}}, "auto_map in .* is not known"),
    ({"rope_interleaved": True}, "rope_interleaved in .* is not known"),
    ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping in .* is not known"),
    ({**MISTRAL, "attention_bias": True}, "attention_bias in .* is not known"),
    ({**MISTRAL, "layer_types": ["full_attention"] * 2}, "layer_types in .* is not known"),
    ({**QWEN2, "layer_types": ["sliding_attention"] * 2}, "layer_types in .* must be full_att"),
    ({**QWEN3, **SLIDING, "layer_types": ["chunked"] * 2}, "layer_types in .* must be full_att"),
    ({**QWEN3, **SLIDING, "layer_types": [["full_attention"]] * 2}, "layer_types in .* full_att"),
    ({**QWEN3, **SLIDING, "layer_types": ["full_attention"]}, "of each of 2 layers"),
]  # fmt: skip
REFUSED = [*((ValueError, *x) for x in VALUES), *((NotImplementedError, *x) for x in OPTIONS)]


@pytest.mark.parametrize(("error", "changes", "match"), REFUSED, ids=str)
def test_refused_fields(error, changes, match, tmp_path):
    with pytest.raises(error, match=f"^Llama(Config)?: .*{match}"):
        read(tmp_path, **changes)


def test_no_config(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="^Llama: a checkpoint must be a folder.*hf download"
    ):
        load("somebody/some-model")
    with pytest.raises(FileNotFoundError, match="^Llama: .* must have .*config.json, found none"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ValueError, match="^Llama: .*config.json must be JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="^Llama: .*config.json must hold an object, got list"):
        load(tmp_path)


def test_load(tmp_path):
    weights = tensors()
    llama = load(write(tmp_path, weights))
    assert llama.config.dtype == "float32" and llama.library.name == "numpy"
    layer = llama.weights.layers[1]
    parts = [weights[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert (layer.qkv_weight == numpy.concatenate(parts)).all() and layer.qkv_bias is None
    assert (llama.weights.head_weight == weights["lm_head.weight"]).all()
    assert llama.weights.cos.shape == (20, 2) and llama.like is llama.weights.token_embedding
    for dtype in ("float16", "bfloat16"):
        pytest.importorskip("ml_dtypes")
        assert load(tmp_path, dtype=dtype).weights.layers[0].up_weight.dtype.name == dtype


def test_load_in_parts(tmp_path):
    """Two files with an index give the weights of one; a part that is not there is named."""
    weights = tensors()
    whole = load(write(tmp_path, weights))
    (tmp_path / "model.safetensors").unlink()
    places = {}
    for part in (0, 1):
        name = f"model-{part}.safetensors"
        some = {x: y for x, y in weights.items() if hash_of(x) % 2 == part}
        save_file(some, tmp_path / name)
        places |= dict.fromkeys(some, name)
    assert len(set(places.values())) == 2
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    found = load(tmp_path)
    for x, y in zip(found.weights.layers[1], whole.weights.layers[1]):
        assert (x is None and y is None) or (x == y).all()
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="index.json names model-1.safetensors, found none"):
        load(tmp_path)


def hash_of(name):
    return sum(name.encode())


def test_tied_heads(tmp_path):
    """The head is the embedding, whether the file has it again or not; another is refused."""
    weights = tensors()
    head = weights.pop("lm_head.weight")
    folder = write(tmp_path, weights, tie_word_embeddings=True)
    llama = load(folder)
    assert llama.weights.head_weight is llama.weights.token_embedding
    again = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    assert load(write(tmp_path, again, tie_word_embeddings=True)).weights.head_weight.shape
    with pytest.raises(ValueError, match="^Llama: lm_head.weight must equal embed_tokens.weight"):
        load(write(tmp_path, {**weights, "lm_head.weight": head}, tie_word_embeddings=True))
    with pytest.raises(ValueError, match="must have lm_head.weight, found none"):
        load(write(tmp_path, weights))


def test_wrong_tensors(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    for change, match in (
        ({name: numpy.zeros((16, 24), "float32")}, r"must be \(24, 16\), got \(16, 24\)"),
        ({name: numpy.zeros((24, 16), "int32")}, "must be one of F16.*, got I32"),
        ({name: numpy.full((24, 16), numpy.nan, "float32")}, "must be finite, got NaN"),
        ({"model.layers.1.self_attn.q_proj.bias": numpy.zeros(16, "float32")},
         "must have no tensor that the model lacks, got model.layers.1.self_attn.q_proj.bias and"),
        ({"model.layers.1.mlp.up_proj.scales": numpy.zeros(16, "float32")}, "must have no tensor"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^Llama: .*{match}"):
            load(write(tmp_path, tensors() | change))
    large = {name: numpy.full((24, 16), 1e6, "float32")}
    with pytest.raises(ValueError, match="must fit into float16, got 1e.06; take bfloat16"):
        load(write(tmp_path, tensors() | large), dtype="float16")
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": numpy.zeros(2, "float32")}
    assert load(write(tmp_path, tensors() | frequencies)).weights.layers


def test_arguments(tmp_path):
    folder = write(tmp_path, tensors())
    for options, match in (
        ({"dtype": "float64"}, "dtype must be 'float16' or 'bfloat16' or 'float32', got 'float64'"),
        ({"device": "cuda"}, "device must be 'gpu' or 'cpu', got 'cuda'"),
        ({"library": "jax"}, "library must be 'numpy' or 'cupy' or 'torch', got 'jax'"),
        ({"library": "cupy"}, "CuPy arrays on a GPU, got library='cupy' and device='cpu'"),
        ({"library": "numpy", "device": "gpu"}, "NumPy arrays are on the CPU"),
    ):
        with pytest.raises(ValueError, match=f"^Llama: .*{match}"):
            load(folder, **options)
    with pytest.raises(ValueError, match="^Llama: size must be one of llama-3.2-1b, .*, got '7b'"):
        Llama.random("7b")
    for windows in ((3,), (0, 3)):
        with pytest.raises(ValueError, match="^LlamaConfig: (windows|a window) must be"):
            LlamaConfig(**vars(SHAPE) | {"windows": windows})
    for name, value in (("eps", -1e-5), ("eps", float("nan")), ("eos_token_ids", (1.5,))):
        with pytest.raises(ValueError, match=f"^LlamaConfig: {name} must be"):
            LlamaConfig(**vars(SHAPE) | {name: value})


WITHOUT_TORCH = """
import sys
from cupyflash.models.llama import Llama

assert "ml_dtypes" not in sys.modules
(logits,) = Llama.from_folder(sys.argv[1], dtype=sys.argv[2], device="cpu")([[3, 1, 4]])
assert logits.shape == (3, 30) and logits.dtype == "float32"
assert not {"torch", "transformers", "cupy"} & sys.modules.keys()
"""


def test_bfloat16_without_torch(tmp_path):
    """A file in bfloat16 is read, computed with and widened where torch is not imported."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    weights = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors().items()}
    folder = write(tmp_path, weights)
    for dtype in ("bfloat16", "float32"):
        command = [sys.executable, "-c", WITHOUT_TORCH, str(folder), dtype]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    weights["model.norm.weight"] = weights["model.norm.weight"] * numpy.float32("inf")
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(ml_dtypes.bfloat16)
    with pytest.raises(ValueError, match="norm.weight must be finite, got NaN or infinity"):
        load(write(tmp_path, weights), dtype="bfloat16")


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ("llama-3.1-8b", 8030),
        ("llama-3.2-1b", 1236),
        ("mistral-7b", 7242),
        ("qwen2.5-0.5b", 494),
        ("qwen3-0.6b", 596),
    ],
)
def test_published_sizes(size, millions):
    assert round(SIZES[size].parameters / 1e6) == millions


@pytest.mark.parametrize("changes", [{}, {"tied": True, "qkv_bias": True, "head_norms": True}])
def test_parameters(changes):
    config = LlamaConfig(**vars(SHAPE) | changes | {"proj_bias": True, "mlp_bias": True})
    counted = sum(int(numpy.prod(x.shape)) for x in all_tensors(config))
    assert config.parameters == counted


def test_random_weights():
    """Equal seeds give equal weights; matrices are normal, and no two rows are equal."""
    a, b, c = (Llama.random(SHAPE, seed=x, device="cpu").weights for x in (1, 1, 2))
    assert (a.layers[1].up_weight == b.layers[1].up_weight).all()
    assert (a.layers[1].up_weight != c.layers[1].up_weight).any()
    assert (a.layers[0].up_weight != a.layers[1].up_weight).any()
    assert abs(a.layers[1].qkv_weight.std() / 0.02 - 1) < 0.1
    assert (a.layers[1].mlp_norm == 1).all() and (a.final_norm == 1).all()


def test_a_period_of_random_weights():
    """Parts cover an array, each within one copy of what repeats; the period is a prime."""
    assert all(PERIOD % x for x in range(2, int(PERIOD**0.5) + 1))
    for size, first in ((1, 0), (10, PERIOD - 3), (2 * PERIOD + 5, 7)):
        pieces = list(_pieces(size, first))
        assert [a for a, _, _ in pieces] == [0, *(b for _, b, _ in pieces[:-1])]
        assert pieces[-1][1] == size
        for start, end, place in pieces:
            assert place == (first + start) % PERIOD and place + end - start <= PERIOD


@pytest.mark.parametrize("library", [None, "cupy", "torch"])
def test_no_gpu(library, tmp_path, monkeypatch):
    """Who asks for one is told why there is none; others get the CPU, unless CuPy is asked for."""
    from cupyflash import machine

    fake_facts(monkeypatch, machine, gpu_problem="it is broken")
    folder = write(tmp_path, tensors())
    with pytest.raises(RuntimeError, match="^Llama: a GPU cannot be used: it is broken"):
        load(folder, library=library, device="gpu")
    if library == "cupy":
        with pytest.raises(RuntimeError, match="^Llama: a GPU cannot be used: it is broken"):
            load(folder, library=library, device=None)
        return
    if library == "torch":
        pytest.importorskip("torch")
    assert load(folder, library=library, device=None).library.device == "cpu"
