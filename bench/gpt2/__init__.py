"""GPT-2 from prompt to text, beside transformers."""
