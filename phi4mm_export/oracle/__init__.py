"""The PyTorch reference: the only folder that imports torch or transformers."""
