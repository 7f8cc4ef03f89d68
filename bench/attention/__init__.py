"""Attention beside its peers: speed, memory, accuracy, and what options cost."""
