"""Small models on the operations of this library; torch for what it does not have."""
