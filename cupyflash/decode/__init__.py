"""What a decoding step needs beside its blocks: ``cuda_src/decode``."""
