"""Llama, Mistral, Qwen2 and Qwen3 on the kernels of this library, from Hugging Face folders.

    model = Llama.from_folder("SmolLM2-135M-Instruct")
    (logits,) = model([[1, 4093, 198]])  # float32 (3, vocab_size)

Sources: LLaMA, arXiv:2302.13971; Mistral 7B, arXiv:2310.06825; Qwen2, arXiv:2407.10671; Qwen3,
arXiv:2505.09388.
"""

from .config import LlamaConfig
from .model import Llama
from .rope import Rope
from .sizes import SIZES

__all__ = ["SIZES", "Llama", "LlamaConfig", "Rope"]
