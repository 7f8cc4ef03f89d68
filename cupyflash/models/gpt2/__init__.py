"""GPT-2 on the kernels of this library and CuPy arrays; on NumPy where there is no GPU.

    model = Gpt2.from_folder("gpt2")
    tokenizer = load_tokenizer("gpt2")
    (tokens,) = model.generate([tokenizer.encode("Attention is")], max_new_tokens=20)
    print(tokenizer.decode(tokens))

Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from ...ops.decode.sampling import Sampling
from .config import Gpt2Config
from .model import Gpt2
from .tokenizer import load_tokenizer

__all__ = ["Gpt2", "Gpt2Config", "Sampling", "load_tokenizer"]
