"""Tiny random models of every architecture of transformers, from their default configurations."""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY, WINDOW = 64, 4, 2, 16, 2, 128, 7
LENGTHS = (24, 17, 5)  # of the sequences of a batch of text
TOO_LARGE = 36_000_000
Tensors = dict[str, torch.Tensor]
# The most complete model of a type comes first.
MAPPINGS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
# The names that configurations give to a size.
SIZES = (
    (HIDDEN, (
        "hidden_size d_model n_embd embed_dim dim hidden_dim width n_embed embedding_size "
        "embedding_dim word_embed_proj_dim out_hidden_size lm_hidden_size emb_dim "
        "decoder_hidden_size output_dim hidden_channels encoder_hidden_size out_dim "
        "projector_hidden_size adapter_hidden_size kv_dim text_hidden_size proj_dim "
        "projection_dim emb_size pooler_output_size vision_hidden_size vision_output_dim "
        "n_state encoder_dim decoder_dim decoder_embed_dim attention_hidden_size "
        "vision_embed_dim lru_width linear_num_value_heads_dim"
    )),
    (2 * HIDDEN, (
        "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner "
        "moe_intermediate_size shared_expert_intermediate_size mlp_dim ff_dim ffn_hidden_size "
        "intermediate_size_mlp expert_ffn_hidden_size expert_intermediate_size "
        "shared_intermediate_size feed_forward_size encoder_intermediate_size "
        "moe_shared_expert_intermediate_size dense_intermediate_size filter_size inner_dim "
        "decoder_intermediate_size vision_intermediate_size block_ff_dim mlp_hidden_size "
        "moe_ffn_hidden_size"
    )),
    (HEADS, (
        "num_attention_heads n_head num_heads encoder_attention_heads n_heads "
        "decoder_attention_heads attention_heads num_query_heads swa_num_attention_heads "
        "decoder_num_attention_heads encoder_num_attention_heads num_local_attention_heads "
        "encoder_heads index_n_heads"
    )),
    (KV_HEADS, (
        "num_key_value_heads n_head_kv num_kv_heads swa_num_key_value_heads "
        "encoder_num_key_value_heads decoder_num_key_value_heads num_global_key_value_heads"
    )),
    (HEAD_DIM, (
        "head_dim d_kv attention_head_dim kv_channels attention_key_size v_head_dim "
        "qk_nope_head_dim global_head_dim linear_key_head_dim linear_value_head_dim "
        "swa_head_dim swa_v_head_dim attention_head_size per_head_dim index_head_dim "
        "kv_lora_rank q_lora_rank hidden_size_per_layer_input head_size"
    )),
    (8, (
        "qk_rope_head_dim rotary_dim mamba_n_heads mamba_num_heads chunk_size "
        "mamba_chunk_size index_topk"
    )),
    (16, (
        "mamba_d_head mamba_head_dim mamba_d_state ssm_state_size state_size"
    )),
    (2 * HIDDEN, (
        "mamba_d_ssm"
    )),
    (1, (
        "mamba_n_groups n_groups attn_layer_offset expert_layer_offset"
    )),
    (LAYERS, (
        "num_hidden_layers n_layer encoder_layers decoder_layers num_layers depth n_layers "
        "num_encoder_layers num_decoder_layers num_attention_layers decoder_num_hidden_layers "
        "encoder_num_hidden_layers"
    )),
    (VOCABULARY, (
        "vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size audio_vocab_size "
        "text_vocab_size decoder_vocab_size encoder_vocab_size input_vocab_size"
    )),
    (256, (
        "max_position_embeddings n_positions max_seq_len max_sequence_length "
        "max_target_positions original_max_position_embeddings"
    )),
    (32, (
        "image_size img_size"
    )),
    (8, (
        "patch_size"
    )),
    (4, (
        "num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts "
        "n_experts index_block_size index_kpool"
    )),
    (2, (
        "attn_layer_period expert_layer_period num_experts_per_tok moe_topk moe_top_k "
        "num_experts_per_token moe_k topk_group n_group top_k_experts n_activated_experts "
        "index_topk_blocks"
    )),
)  # fmt: skip
VALUE = {name: size for size, names in SIZES for name in names.split()}
LEFT_OUT = (
    "transformers_version", "architectures", "dtype", "torch_dtype",
    "out_features", "out_indices", "stage_names", "_attn_implementation",
)  # fmt: skip
KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types")
NO_DROPOUT = ("dropout", "layerdrop", "drop_path", "_pdrop", "drop_rate", "dropout_prob", "jitter")


def architectures(only: Iterable[str] | None = None) -> Iterator[tuple[str, type, type]]:
    """(type, class of the configuration, class of the model) of each module of transformers.

    Args:
        only: some types; to import the modules of all takes 20 seconds.
    """
    modules = set()
    for kind in sorted(transformers.CONFIG_MAPPING if only is None else only):
        for mapping in MAPPINGS:
            names = getattr(modeling_auto, mapping, {}).get(kind)
            if names:
                name = names if isinstance(names, str) else names[0]
                model_class = getattr(transformers, name, None)
                if model_class is not None and model_class.__module__ not in modules:
                    modules.add(model_class.__module__)
                    try:
                        own = model_class.config_class
                    except ImportError:  # it stands for a model that needs another library
                        own = None
                    yield kind, own or transformers.CONFIG_MAPPING[kind], model_class
                if model_class is not None:
                    break


def small_config(config_class: type, **changes: Any) -> Any:
    """The default configuration with every size small and no dropout."""
    return config_class(**{**shrunk(config_class().to_dict()), **changes})


def shrunk(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a configuration and its parts, with small sizes."""
    small = {}
    for name, value in settings.items():
        if name in LEFT_OUT:
            continue
        small[name] = _shrunk_value(name, value, settings)
    _fit_layers(small)
    _fit_rotary(small)
    return small


def _shrunk_value(name: str, value: Any, settings: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return shrunk(value) if "model_type" in value else value
    if isinstance(value, float) and any(x in name for x in NO_DROPOUT):
        return 0.0
    if name == "head_dim" and "qk_rope_head_dim" in settings:
        return VALUE["qk_rope_head_dim"]  # latent attention: what the rotary embedding turns
    if name == "head_dim" and value is None:
        return HEAD_DIM
    if name == "num_experts_per_tok" and value is None:
        return VALUE[name]
    if name == "per_layer_config":
        return {}
    if name == "attn_layer_indices":
        return [1]
    if isinstance(value, bool) or value is None:
        return value
    if name in ("sliding_window", "local_attention"):
        return WINDOW
    if name.endswith("token_id") or name.endswith("token_index"):
        return value % VOCABULARY if isinstance(value, int) else value
    if isinstance(value, int) and name in VALUE:
        size = VALUE[name]
        heads = settings.get("num_attention_heads") or settings.get("n_head")
        if size == KV_HEADS and "head" in name and value == heads:
            return HEADS  # no groups
        return min(value, size) if value > 0 else value
    if name == "attention_chunk_size":
        return WINDOW
    return value


def _fit_layers(small: dict[str, Any]) -> None:
    """Gives each list of kinds of layers one entry a layer, and keeps every kind that it had."""
    for name, value in small.items():
        if name in KINDS_OF_LAYERS and value:
            kinds = list(dict.fromkeys(value))
            wanted = max(LAYERS, len(kinds))
            kinds = (kinds + [value[-1]] * wanted)[:wanted]
            small[name] = kinds
    lists = [small[name] for name in KINDS_OF_LAYERS if small.get(name)]
    if lists:
        small["num_hidden_layers"] = longest = max(map(len, lists))
        for kinds in lists:
            kinds += [kinds[-1]] * (longest - len(kinds))


def _fit_rotary(small: dict[str, Any]) -> None:
    """Sections of a rotary embedding in three dimensions; these models have them by default."""
    three = any(x in small.get("model_type", "") for x in ("qwen2_vl", "qwen2_5_vl", "glm4v"))
    for name in ("rope_parameters", "rope_scaling"):
        rope = small.get(name)
        if isinstance(rope, dict) and (three or "mrope_section" in rope):
            small[name] = {**rope, "mrope_section": [4, 2, 2]}


def small_model(model_class: type, config: Any, implementation: str) -> torch.nn.Module:
    """A model in evaluation; equal configurations give equal weights, large enough to attend."""
    with torch.device("meta"):
        numbers = sum(x.numel() for x in model_class._from_config(config).parameters())
    if numbers > TOO_LARGE:
        raise ValueError(f"{numbers} parameters")
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            noise = torch.randn(x.shape, generator=generator)
            if x.dim() > 1:
                x.copy_(noise * (x.numel() / x.shape[0]) ** -0.5)
            else:  # weights of norms are about 1, biases and sinks about 0
                x.copy_(x.float().mean().round() + 0.2 * noise)
    return model.float().eval()


def takes(model: torch.nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def text_inputs(model: torch.nn.Module, side: str | None = None) -> tuple[Tensors, torch.Tensor]:
    """Inputs of a model of text, and which rows are no padding."""
    generator = torch.Generator().manual_seed(1)
    longest = LENGTHS[0]
    ids = torch.randint(3, VOCABULARY - 8, (len(LENGTHS), longest), generator=generator)
    place = torch.arange(longest).expand(len(LENGTHS), -1)
    place = place.flip(1) if side == "left" else place
    tokens = place < torch.tensor(LENGTHS)[:, None] if side else place >= 0
    inputs = {"input_ids": ids}
    if side is not None:
        inputs["attention_mask"] = tokens.long()
    if takes(model, "decoder_input_ids"):
        inputs["decoder_input_ids"] = ids[:, :11].flip(0).contiguous()
    if takes(model, "use_cache"):
        inputs["use_cache"] = False
    elif takes(model, "pixel_values") and takes(model, "return_loss"):  # as in CLIP: one of each
        inputs |= media_inputs(model, "pixel_values", len(LENGTHS)) | {"input_ids": ids}
    return inputs, tokens


def media_inputs(model: torch.nn.Module, main: str, batch: int = 2) -> Tensors:
    """Random images or sounds, of the size that the configuration names."""
    config = getattr(model.config, "vision_config", None) or model.config
    size = getattr(config, "image_size", 32)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", 80)
    shapes = {
        "pixel_values": (batch, getattr(config, "num_channels", 3), height, width),
        "input_features": (2, bins, 2 * getattr(config, "max_source_positions", 20)),
        "input_values": (2, 4000),
    }
    generator = torch.Generator().manual_seed(1)
    if main not in shapes:
        raise NotImplementedError(f"inputs of the name {main}")
    inputs = {main: torch.randn(shapes[main], generator=generator)}
    if takes(model, "decoder_input_ids"):
        inputs["decoder_input_ids"] = torch.arange(3, 25).view(2, 11)
    if takes(model, "input_ids"):
        inputs["input_ids"] = torch.arange(3, 25).view(2, 11)
    return inputs
