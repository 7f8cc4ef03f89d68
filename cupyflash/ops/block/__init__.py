"""GPT-2 transformer blocks for one new token: a whole stack of them in one persistent launch."""
