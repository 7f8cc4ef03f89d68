"""Small models of transformers, with weights large enough that attention is not uniform."""

import pytest
import torch
import transformers

VERSION = tuple(int(x) for x in transformers.__version__.split(".")[:2])

SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "max_position_embeddings": 128,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
ENCODER_DECODER = {
    "vocab_size": 100,
    "d_model": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "decoder_start_token_id": 2,
}
# Name of the configuration and of the model, and what the configuration is made of.
MODELS = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", SMALL),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": 7}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **GROUPED,
            "sliding_window": 7,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **GROUPED,
            "sliding_window": 7,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",  # others need bfloat16 on a GPU
        },
    ),
    "glm-moe-dsa": (  # an indexer selects 8 keys for each query
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {
            **SMALL,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "index_topk": 8,
            "index_head_dim": 16,
            "index_n_heads": 4,
            "mlp_layer_types": ["dense", "dense"],
        },
    ),
    "bert": ("BertConfig", "BertForMaskedLM", SMALL),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {**SMALL, "num_hidden_layers": 4, "local_attention": 8, "reference_compile": False},
    ),
    "t5gemma": ("T5GemmaConfig", "T5GemmaForConditionalGeneration", {}),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {**SMALL, "image_size": 32, "patch_size": 8, "num_channels": 3, "num_labels": 10},
    ),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            **ENCODER_DECODER,
            "num_mel_bins": 8,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "max_source_positions": 20,
            "max_target_positions": 64,
            "suppress_tokens": [],
            "begin_suppress_tokens": [],
        },
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            **ENCODER_DECODER,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            # A relu of almost 0 has one gradient or the other, as rounding decides.
            "feed_forward_proj": "gated-gelu",
        },
    ),
}
NO_DROPOUT = (
    "attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "attn_pdrop",
    "resid_pdrop", "embd_pdrop", "dropout", "dropout_rate",
)  # fmt: skip


def small_inputs(name, side="right", lengths=(24, 17, 5)):
    """Inputs with labels, and which logits are of no padding."""
    rows, longest = len(lengths), max(lengths)
    ids = torch.randint(3, 100, (rows, longest))
    place = torch.arange(longest).expand(rows, -1)
    place = place if side == "right" else place.flip(1)
    tokens = place < torch.tensor(lengths)[:, None]
    if name == "vit":
        return {"pixel_values": torch.randn(rows, 3, 32, 32), "labels": ids[:, 0] % 10}, ...
    if name == "whisper":
        return {"input_features": torch.randn(rows, 8, 40), "labels": ids}, ...
    inputs = {"input_ids": ids, "attention_mask": tokens.long()}
    if name in ("t5", "t5gemma"):
        return {**inputs, "labels": torch.randint(3, 100, (rows, 11))}, ...
    first = tokens & (tokens.cumsum(1) == 1)  # in decoders its prediction is made by padding
    return {**inputs, "labels": ids.masked_fill(~tokens | first, -100)}, tokens


def small_model(name, implementation, device="cpu", dtype=torch.float32, **changes):
    """A model of `MODELS`; equal names and changes give equal weights."""
    config_name, model_name, settings = MODELS[name]
    if name == "t5" and implementation != "eager" and VERSION < (5, 17):
        pytest.skip("transformers before 5.17: T5 may compute its attention itself")
    if name == "glm-moe-dsa" and VERSION < (5, 12):
        pytest.skip("transformers before 5.12: GLM-5 adds its Boolean mask to the scores")
    no_dropout = dict.fromkeys(NO_DROPOUT, 0.0)
    if name == "t5gemma":  # two configurations of Gemma 2
        part = {**MODELS["gemma2"][2], **no_dropout}
        settings = {"encoder": part, "decoder": {**part, "cross_attention_hidden_size": 64}}
        settings |= {key: part[key] for key in ("vocab_size", "pad_token_id")}
    config = getattr(transformers, config_name)(**{**settings, **no_dropout, **changes})
    model = getattr(transformers, model_name)._from_config(
        config, attn_implementation=implementation
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:  # weights of norms are about 1, biases and sinks about 0
                parameter.copy_(parameter.mean().round() + 0.2 * noise)
    return model.to(device, dtype).eval()
